"""The fault table: what breaks, how soon `corral status` says so, what is left behind. As root, on simulated hosts.

    python -m tests.cluster.faults [ssh] [slurm] [--only WORD]... [--json FILE]

Each half (`faults_ssh.py`, `faults_slurm.py`) brings hosts with a stand-in engine (`bed`) and its faults (`FAULTS`).
A fault gets a deployment of its own: it is brought up, struck, watched until the fault is seen, then looked over for
what it left, and once more after `corral down`. What is measured ends when a `corral status` has answered, so its
own half second (several on a busy machine) is in every figure; beside it stands when the agents wrote it down, where
they did. Where a host stays cut off or without power, `corral down` is tried before it
comes back, too. The exit code is 1 when a fault missed its goal or left something.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

HALVES = {"ssh": "tests.cluster.faults_ssh", "slurm": "tests.cluster.faults_slurm"}
PROCESS_S = 3.0  # the goal where a process dies
LINK_S = 12.0  # the goal where a link is cut, or a host is gone without a word
PATIENCE_S = 150.0  # after which a fault counts as never noticed
CLEARED_S = 20.0  # what is still there so long after the fault was seen is left behind


class Bed(Protocol):
    """Hosts, and `corral` where its user sits."""

    def up(self, name: str, options: Sequence[str]) -> None:
        """Bring a deployment up and wait until it is ready; raises what stood in the way."""
        ...

    def status(self, name: str) -> dict[str, Any]:
        """What `corral status NAME --json` says."""
        ...

    def down(self, name: str) -> str:
        """Run `corral down`; what it said when it failed, or nothing."""
        ...

    def left(self, name: str) -> list[str]:
        """Processes, jobs, temporary files and keys of a deployment on the nodes, each in a few words."""
        ...


def is_failed(now: dict[str, Any]) -> bool:
    return now.get("state") in ("failed", "stopped")


@dataclass(frozen=True)
class Fault:
    """Something that breaks under a ready deployment."""

    name: str
    strike: Callable[[Any, str], str | None]  # the bed, and the deployment's name; what was said meanwhile
    goal_s: float | None = PROCESS_S  # None: there is nothing to notice, or the scheduler's own time limits say when
    noticed: Callable[[dict[str, Any]], bool] = is_failed  # of what `corral status` says
    heal: Callable[[Any, str], None] | None = None  # before `corral down`
    options: tuple[str, ...] = ()  # of `corral up`
    why_no_goal: str = ""
    on: Callable[[Any], Any] = lambda bed: bed  # where it is brought up, if not on the half's own bed
    down_meanwhile: bool = False  # `corral down` also before `heal`
    cleared_s: float = CLEARED_S
    out_of_reach: bool = False  # until `heal`, only the scheduler can end its own there: looked at afterwards


@dataclass(frozen=True)
class Seen:
    """A row of the table."""

    target: str
    fault: str
    goal_s: float | None
    noticed_s: float | None
    said: str
    left: tuple[str, ...]
    left_after_down: tuple[str, ...]
    note: str = ""
    status_s: float = 0.0  # the longest `corral status` until it was noticed
    down_s: float = 0.0
    down_meanwhile_s: float | None = None  # with the fault still there
    load: float = 0.0  # the machine's, over the last minute
    written_s: float | None = None  # when the agents wrote it into their journal; None: they did not

    @property
    def good(self) -> bool:
        late = self.noticed_s is None or (self.goal_s is not None and self.noticed_s > self.goal_s)
        return not (late or self.left or self.left_after_down)


class Half(Protocol):
    """A module of faults."""

    FAULTS: tuple[Fault, ...]

    def bed(self, folder: Path) -> AbstractContextManager[Bed]: ...


def run_fault(target: str, bed: Bed, fault: Fault, number: int) -> Seen:
    name = f"fault{number}"
    bed = fault.on(bed)
    bed.up(name, fault.options)
    struck_s, began = time.time(), time.monotonic()
    said = fault.strike(bed, name)
    watched = _watch(bed, name, fault, began)
    load = os.getloadavg()[0]
    left = _left(bed, name, fault.cleared_s) if is_failed(watched.now) and not fault.out_of_reach else ()
    meanwhile_s = _down(bed, name)[0] if fault.down_meanwhile else None
    if fault.heal:
        fault.heal(bed, name)
    down_s, refused = _down(bed, name)
    after = _left(bed, name, fault.cleared_s)
    note = "; ".join(filter(None, (said, fault.why_no_goal, f"`down`: {refused}" if refused else "")))
    return Seen(target, fault.name, fault.goal_s, watched.noticed_s, _said(watched.now), left, after, note,
                watched.longest_s, down_s, meanwhile_s, load, _written(watched.now, struck_s))  # fmt: skip


@dataclass
class Watched:
    """What `corral status` said until it had noticed."""

    noticed_s: float | None = None  # None: never
    now: dict[str, Any] = field(default_factory=dict)
    longest_s: float = 0.0


def _watch(bed: Bed, name: str, fault: Fault, began: float) -> Watched:
    found = Watched()
    while (asked := time.monotonic()) - began < PATIENCE_S:
        found.now = bed.status(name)
        found.longest_s = max(found.longest_s, time.monotonic() - asked)
        if fault.noticed(found.now):
            found.noticed_s = time.monotonic() - began
            break
        time.sleep(0.1)
    return found


def _written(now: dict[str, Any], struck_s: float) -> float | None:
    after_s = float(now.get("since_s") or 0.0) - struck_s
    return after_s if is_failed(now) and after_s > 0 else None


def _down(bed: Bed, name: str) -> tuple[float, str]:
    began = time.monotonic()
    refused = bed.down(name)
    return time.monotonic() - began, refused


def _left(bed: Bed, name: str, cleared_s: float) -> tuple[str, ...]:
    until = time.monotonic() + cleared_s
    while (found := bed.left(name)) and time.monotonic() < until:
        time.sleep(0.5)
    return tuple(found)


def _said(now: dict[str, Any]) -> str:
    reason = f" ({now['reason']})" if now.get("reason") else ""
    return f"{now.get('state')}{reason}: {now.get('text', '')}".rstrip(": ")


def markdown(rows: Sequence[Seen]) -> str:
    """The table, as it stands in docs/measurements/faults.md."""
    heads = ("target", "fault", "noticed after", "goal", "in the journal after", "longest `status`", "`down`", "load",
             "said", "left behind")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        noticed = "never" if row.noticed_s is None else f"{row.noticed_s:.1f} s"
        goal = "–" if row.goal_s is None else f"{row.goal_s:g} s"
        left = [*row.left, *(f"after `down`: {one}" for one in row.left_after_down)]
        said = f"{row.said}; {row.note}" if row.note else row.said
        meanwhile = "" if row.down_meanwhile_s is None else f"{row.down_meanwhile_s:.1f} s, then "
        written = "–" if row.written_s is None else f"{row.written_s:.1f} s"
        times = (written, f"{row.status_s:.1f} s", f"{meanwhile}{row.down_s:.1f} s", f"{row.load:.1f}")
        cells = (row.target, row.fault, noticed, goal, *times, said, "; ".join(left) or "nothing")
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def run_half(target: str, only: Sequence[str]) -> list[Seen]:
    half: Any = importlib.import_module(HALVES[target])
    chosen = [fault for fault in half.FAULTS if not only or any(word in fault.name for word in only)]
    rows: list[Seen] = []
    with TemporaryDirectory(prefix="faults-") as folder:
        Path(folder).chmod(0o755)
        with half.bed(Path(folder)) as bed:
            for number, fault in enumerate(chosen):
                print(f"{target}: {fault.name} …", file=sys.stderr, flush=True)
                rows.append(run_fault(target, bed, fault, number))
                print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Strike deployments on simulated hosts, and print the fault table.")
    parser.add_argument("targets", nargs="*", metavar="ssh|slurm", help="which half (default: both)")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="faults with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    said = parser.parse_args(words)
    for target in said.targets:
        if target not in HALVES:
            parser.error(f"there is no half {target!r}; there are {', '.join(HALVES)}")
    rows = [row for target in said.targets or HALVES for row in run_half(target, said.only)]
    print(markdown(rows))
    if said.json:
        said.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
