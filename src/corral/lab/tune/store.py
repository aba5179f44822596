"""A tuning run on disk: `<home>/tune/<run>/`.

    tune.json      what is tuned, the goal, and the budget
    trials.jsonl   one line for each trial, written when it is over
    trials/N/      its measurements, as `corral bench` keeps them

The next trial follows from the trials made, so a run can be killed at any moment and continued.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from corral.base.errors import CorralError, DataError, NotFoundError, UsageError
from corral.base.files import make_private_dir, write_atomic
from corral.base.home import home_dir
from corral.base.record import dump_json, from_json, load_json, nearest, renamed_from, to_json
from corral.deploy.lifecycle.decision import DeployRequest
from corral.lab.bench.spec import Spec
from corral.lab.tune.objective import Objective
from corral.lab.tune.race import Race
from corral.lab.tune.trials import Trial
from corral.plan.hardware.inventory import NodeSlice


@dataclass(frozen=True)
class TuneSpec:
    """What is tuned, and how."""

    model: str
    request: DeployRequest = field(metadata=renamed_from("wish"))  # the base
    race: Race
    objective: Objective
    bench: Spec
    created_s: float
    random: bool = False  # of earlier versions, which could search at random as well; not used
    shares: tuple[NodeSlice, ...] = ()  # of machines, one for each trial that may run at once; empty: one at a time
    in_turns: bool = False  # they share GPUs: servers start together, and are measured one by one

    @property
    def slots(self) -> int:
        """How many trials may run at once."""
        return max(1, len(self.shares))


@dataclass(frozen=True)
class TuneRun:
    """One run's folder."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def spec(self) -> TuneSpec:
        return load_json(TuneSpec, self.folder / "tune.json")

    def trials(self) -> list[Trial]:
        """The trials of the race; lines that were cut off, and other trials of earlier versions, are skipped."""
        try:
            lines = (self.folder / "trials.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(from_json(Trial, json.loads(line), strict=False))
            except (ValueError, CorralError):
                continue
        return found

    def add(self, trial: Trial) -> None:
        """Append a trial, and flush it to the disk."""
        path = self.folder / "trials.jsonl"
        line = json.dumps(to_json(trial), ensure_ascii=False) + "\n"
        try:
            with path.open("ab") as file:
                if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
                    file.write(b"\n")  # a crash cut the last line
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(
                f"{path} cannot be written: {error.strerror}.",
                f"Free some space, then run `corral tune {self.name}`.",
            ) from error

    def trial_folder(self, number: int) -> Path:
        """A new folder for a trial's measurements; one that was cut off keeps its own."""
        folder = self.folder / "trials" / str(number)
        at = 0
        while folder.exists():
            at += 1
            folder = folder.with_name(f"{number}-{at}")
        return folder


def runs_dir() -> Path:
    return home_dir() / "tune"


def new_run(spec: TuneSpec, name: str = "") -> TuneRun:
    """A folder for a new run, with its spec."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(spec.model).name).strip("-.")[:80]
    wanted = name or f"{model or 'model'}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", wanted):
        raise UsageError(f"{wanted!r} cannot name a run.", "Use up to 100 letters, digits, and -._ for --name.")
    make_private_dir(runs_dir())
    folder, number = runs_dir() / wanted, 1
    while folder.exists():
        number += 1
        folder = runs_dir() / f"{wanted}-{number}"
    folder.mkdir(mode=0o700)
    write_atomic(folder / "tune.json", dump_json(spec))
    return TuneRun(folder)


def all_runs() -> list[TuneRun]:
    """Every run of this home."""
    return [TuneRun(path.parent) for path in runs_dir().glob("*/tune.json")]


def find_run(name: str) -> TuneRun:
    """A run by its name, a unique beginning of it, `last`, or its path."""
    known = {path.parent.name: path.parent for path in runs_dir().glob("*/tune.json")}
    if name == "last" and known:
        return TuneRun(max(known.values(), key=lambda path: (path / "tune.json").stat().st_mtime))
    if (Path(name) / "tune.json").is_file():
        return TuneRun(Path(name).absolute())
    matching = [one for one in known if one == name] or [one for one in known if one.startswith(name)]
    if len(matching) == 1:
        return TuneRun(known[matching[0]])
    guesses = matching or nearest(name, list(known)) or list(known)
    remedy = f"Known: {', '.join(sorted(guesses)[:8])}." if guesses else "`corral tune MODEL` starts one."
    raise NotFoundError(f"there is no tuning run called {name!r}.", remedy)
