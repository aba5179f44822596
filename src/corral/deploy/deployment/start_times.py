"""How long the phases of a start usually take here, how far one is, and time in words.

The phases of a start, as a deployment's journal tells them: which came when, and how long each took.

How long starts took here, phase by phase: kept in `<home>/starts.json`, so that the next one knows what is usual.

A small file: the last few lengths of each phase of the last few hundred kinds of start. A kind is a model, what of
its plan a start's length depends on, and the machine. Whoever writes last wins; a lost line costs nothing.
"""

from __future__ import annotations

import enum
import itertools
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

from corral.base.errors import CorralError
from corral.base.files import write_atomic
from corral.base.home import home_dir
from corral.base.record import dump_json, load_json, to_json
from corral.deploy.deployment.events import Event
from corral.deploy.deployment.state import State
from corral.plan.contract import Plan
from corral.plan.measured import planned_start

OVERDUE = 2.0  # times what is usual; then it is said
OVERDUE_LEAST_S = 5.0  # beyond what is usual; shorter delays are nobody's concern


def duration(seconds: float) -> str:
    """Seconds as a person says them: 4.2 s, 3 min 10 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def amount(done: int, total: int) -> str:
    """Progress as `k/N (p%)`, in bytes where the numbers are bytes."""
    if total > 1_000_000:
        return f"{done / 1e9:.2f}/{total / 1e9:.2f} GB ({100 * done / total:.0f}%)"
    return f"{done}/{total} ({100 * done / total:.0f}%)"


def left_s(took_s: float, first: int, done: int, total: int) -> float | None:
    """Seconds that are left, where the way from `first` to `done` took so many; None: it cannot be told."""
    return took_s * (total - done) / (done - first) if first < done < total else None


@dataclass(frozen=True)
class Expected:
    """How long one phase is expected to take."""

    seconds: float
    remembered: bool = False  # from earlier starts here; otherwise by the plan, which is rougher

    @property
    def text(self) -> str:
        length = duration(self.seconds)
        return f"usually {length} here" if self.remembered else f"about {length} expected"

    def is_overdue(self, elapsed_s: float) -> bool:
        return elapsed_s > max(OVERDUE * self.seconds, self.seconds + OVERDUE_LEAST_S)


class Phase(enum.StrEnum):
    """What a start is doing: before there is an agent, and then as the agent reads it from the engine's log."""

    INSTALLING = "installing engine"
    MEASURING = "measuring CPU"
    FETCHING = "fetching model"
    STARTING = "starting"  # the process starts and imports vLLM
    PULLING = "pulling image"
    INITIALISING = "initialising"  # configuration, processes, and the ranks finding each other
    LOADING = "loading"
    COMPILING = "compiling"
    WARMING = "warming"
    READY = "ready"


@dataclass(frozen=True)
class Stretch:
    """One phase of a start."""

    phase: str  # a `Phase`, or what the agent of another version calls it
    since_s: float  # wall clock
    elapsed_s: float  # the agent's own clock, which never jumps


def course_of(events: Sequence[Event]) -> list[Stretch]:
    """The phases of the last attempt, in the order they came."""
    course: list[Stretch] = []
    for event in events:
        if event.kind not in ("state", "phase"):
            continue
        name = str(event.get("phase") or event.get("state"))
        if event.kind == "state" and name == State.STARTING:
            course = []  # a new attempt
        if not course or course[-1].phase != name:
            course.append(Stretch(name, event.time_s, event.elapsed_s))
    return course


def ends_at_s(events: Sequence[Event]) -> float | None:
    """When the phase that lasts should be over, by how far it is and how quickly it got there; None: nothing tells.

    From its first report to its last: what a download finds on disk already says nothing of its speed.
    """
    course = course_of(events)
    name, since_s = (course[-1].phase, course[-1].since_s) if course else ("", 0.0)
    told = [one for one in events if one.get("phase") == name and one.time_s >= since_s and one.get("total")]
    if not told:
        return None
    last, first = told[-1], told[0] if len(told) > 1 else None
    began_s, done = (first.time_s, first.get("done", 0)) if first else (since_s, 0)
    left = left_s(last.time_s - began_s, done, last.get("done", 0), last.get("total"))
    return None if left is None else last.time_s + left


def durations(events: Sequence[Event]) -> dict[str, float]:
    """Seconds of every phase of a start that became ready; of any other nothing: its last phase had no end."""
    course = course_of(events)
    names = [stretch.phase for stretch in course]
    if Phase.READY not in names:
        return {}
    took: dict[str, float] = {}
    for stretch, following in itertools.pairwise(course[: names.index(Phase.READY) + 1]):
        took[stretch.phase] = took.get(stretch.phase, 0.0) + following.elapsed_s - stretch.elapsed_s
    return took


MOST_KINDS = 300
MOST_LENGTHS = 5
WORTH_KEEPING_S = 1.0  # of what is only done when it is missing: finding that an engine is there says nothing


@dataclass(frozen=True)
class _Kind:
    at_s: float
    phases: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class _Starts:
    version: int = 1
    kinds: dict[str, _Kind] = field(default_factory=dict)


def starts_path() -> Path:
    return home_dir() / "starts.json"


def kind_of(what: str, *matters: Any) -> str:
    """A name for starts of one kind, seen from this machine: a model, and a digest of what else matters."""
    text = json.dumps([to_json(one) for one in (*matters, socket.gethostname())], sort_keys=True)
    return f"{what} {blake2b(text.encode(), digest_size=6).hexdigest()}"


def expectation(kind: str, plan: Plan) -> dict[str, Expected]:
    """What to expect of a start, by phase: as remembered, else as planned."""
    return {**{name: Expected(seconds) for name, seconds in planned_start(plan).items()}, **usual(kind)}


def usual(kind: str) -> dict[str, Expected]:
    """What earlier starts of a kind took: the middle one of the last few."""
    known = _read().kinds.get(kind)
    if known is None:
        return {}
    return {name: Expected(round(median(times), 2), True) for name, times in known.phases.items() if times}


def remember_start(kind: str, took: Mapping[str, float]) -> None:
    """Keep how long the phases of one start took; a disk that is full forgets it."""
    kinds = _read().kinds
    phases = dict(kinds[kind].phases) if kind in kinds else {}
    for name, seconds in took.items():
        phases[name] = (*phases.get(name, ()), round(seconds, 2))[-MOST_LENGTHS:]
    kinds[kind] = _Kind(time.time(), phases)
    newest = sorted(kinds.items(), key=lambda entry: entry[1].at_s)[-MOST_KINDS:]
    try:
        starts_path().parent.mkdir(parents=True, exist_ok=True)
        write_atomic(starts_path(), dump_json(_Starts(kinds=dict(newest))))
    except OSError:
        return


def _read() -> _Starts:
    try:
        found = load_json(_Starts, starts_path())
    except (CorralError, OSError):  # none yet, damaged, or of another version: begin anew
        return _Starts()
    return found if found.version == 1 else _Starts()
