"""Runs on disk: `<home>/bench/<run>/`, one folder each, recomputable from raw rows.

    run.json       the spec, the circumstances, the figures, the verdict
    result.json    the same figures under the keys of `vllm bench serve`
    rows.jsonl     one line per request
    server.jsonl   the server's own metrics, once a second
    series.json    instead of those, for sweeps, searches and repeats: which runs (subfolders) belong together

A run is named by its folder's name, any unique beginning of it, `last`, `last~1`, or a path.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.base.errors import DataError, NotFoundError, UsageError
from corral.base.files import make_private_dir, write_atomic
from corral.base.home import home_dir
from corral.base.record import dump_json, from_json, load_json, nearest, to_json
from corral.base.untrusted import parse_json
from corral.lab.bench.fingerprint import Fingerprint
from corral.lab.bench.gate import Problem
from corral.lab.bench.limit import Limit, TokenCost
from corral.lab.bench.metrics import RequestRow, Summary, details, read_rows, vllm_keys, write_rows
from corral.lab.bench.server_metrics import ServerDelta, ServerSample
from corral.lab.bench.spec import Spec
from corral.plan.contract import Plan

VERSION = 1


@dataclass(frozen=True)
class Run:
    """One measurement with everything that is known about it; rows are in a file of their own."""

    version: int
    created_s: float
    spec: Spec
    fingerprint: Fingerprint
    summary: Summary
    verdict: str
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    server: ServerDelta | None = None
    limit: Limit | None = None
    cost: TokenCost | None = None
    plan: Plan | None = None
    heartbeat_ms: tuple[float, ...] = ()  # how late the generator's own clock came, sorted, thinned to 1000

    @property
    def label(self) -> str:
        return self.spec.label or self.spec.load.label


@dataclass(frozen=True)
class Series:
    """Runs that belong together."""

    version: int
    kind: str  # quick | sweep | search | repeat
    created_s: float
    runs: tuple[str, ...] = ()  # names of subfolders, in order
    findings: dict[str, Any] = field(default_factory=dict)


LATEST_S = 1e11  # of a time: year 5138


def runs_dir() -> Path:
    return home_dir() / "bench"


def new_folder(label: str, parent: Path | None = None, name: str = "") -> Path:
    """A fresh folder for a run or a series."""
    base = parent or runs_dir()
    make_private_dir(base)
    if name and not re.fullmatch(r"[\w.+=@-][\w.+=@ -]*", name):
        raise UsageError(f"{name!r} cannot name a run.", "Use letters, digits and . _ - + = @.")
    stem = name or f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9.]+', '-', label).strip('-') or 'run'}"
    for number in range(1, 10_000):
        path = base / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise UsageError(f"{stem!r} is taken.", "Choose another --name.")


def save_run(
    folder: Path, run: Run, rows: Sequence[RequestRow], samples: Sequence[ServerSample], detailed: bool
) -> None:
    """Save raw rows first: everything else can be made from them again."""
    write_rows(folder / "rows.jsonl", rows)
    lines = "".join(json.dumps(to_json(sample)) + "\n" for sample in samples)
    write_atomic(folder / "server.jsonl", lines)
    write_atomic(folder / "result.json", json.dumps(_result(run, rows, detailed), indent=2) + "\n")
    write_atomic(folder / "run.json", dump_json(run))


def _result(run: Run, rows: Sequence[RequestRow], detailed: bool) -> dict[str, Any]:
    load, work = run.spec.load, run.spec.workload
    head: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S", time.localtime(run.created_s)),
        "backend": "openai-chat" if work.chat else "openai",
        "endpoint_type": "openai-chat" if work.chat else "openai",
        "label": run.spec.label or None,
        "model_id": run.fingerprint.server.get("model", ""),
        "tokenizer_id": run.fingerprint.server.get("model_root", ""),
        "num_prompts": work.num_prompts,
        "request_rate": load.rate if load.rate is not None else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.concurrency,
    }
    head |= vllm_keys(run.summary)
    head |= {"verdict": run.verdict, "problems": to_json(run.problems)}
    return head | (details(rows) if detailed else {})


def load_run(folder: Path) -> Run:
    path = folder / "run.json"
    try:
        run = load_json(Run, path)
    except DataError as error:
        named = str(path) in error.message
        raise DataError(error.message if named else f"{path} is not a run: {error.message}", error.remedy) from None
    if not 0 <= run.created_s <= LATEST_S:
        raise DataError(f"{path} is not a run: it was made at {run.created_s:g} s.", "Restore the file.")
    return run


def is_series(folder: Path) -> bool:
    return (folder / "series.json").is_file()


def load_runs(folder: Path) -> list[Run]:
    """The run of a folder, or all runs of a series."""
    parts = load_series(folder).runs if is_series(folder) else ("",)
    return [load_run(folder / part) for part in parts]


def load_rows(folder: Path) -> list[RequestRow]:
    return read_rows(folder / "rows.jsonl")


def load_samples(folder: Path) -> list[ServerSample]:
    path = folder / "server.jsonl"
    if not path.is_file():
        return []
    places = ((f"line {number} of {path}", line) for number, line in enumerate(path.read_bytes().splitlines(), 1))
    return [from_json(ServerSample, parse_json(line, where), where, strict=False) for where, line in places]


def save_series(folder: Path, series: Series) -> None:
    write_atomic(folder / "series.json", dump_json(series))


def load_series(folder: Path) -> Series:
    return load_json(Series, folder / "series.json")


def find(reference: str) -> Path:
    """The folder of a run or series by its name."""
    as_path = Path(reference).expanduser()
    if as_path.is_dir() and _is_run(as_path):
        return as_path
    known = sorted((p for p in runs_dir().glob("*") if _is_run(p)), key=lambda p: p.stat().st_mtime)
    if match := re.fullmatch(r"last(?:~(\d+))?", reference):
        back = int(match.group(1) or 0)
        if back < len(known):
            return known[-1 - back]
        if not known:
            raise NotFoundError("there is no run yet.", "`corral bench` makes one.")
        raise NotFoundError(f"there are only {len(known)} runs.", "`corral bench list` shows them.")
    exact = runs_dir() / reference
    if "/" in reference and _is_run(exact):
        return exact  # a run inside a series: SERIES/p01
    matching = [p for p in known if p.name == reference] or [p for p in known if p.name.startswith(reference)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(f"{reference!r} matches the beginning of {len(matching)} runs.", "Give more of the name.")
    guesses = nearest(reference, [p.name for p in known]) or [p.name for p in known[-3:]]
    hint = f"Known: {', '.join(guesses)}." if guesses else "There are none yet: `corral bench` makes one."
    raise NotFoundError(f"no run is called {reference!r}.", hint)


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file() or is_series(path)
