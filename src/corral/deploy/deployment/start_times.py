"""How long a start takes: as earlier ones took here, else as the plan lets expect; and how far one is.

A start is a row of phases (`Phase`). A deployment's journal tells which came when (`course_of`), how long each took
(`durations`), and when the one that lasts should be over (`ends_at_s`). What starts took is kept in
`<home>/starts.json`: the last few lengths of each phase of the last few hundred kinds of start. A kind is a model,
what of its plan a start's length depends on, and the machine. Whoever writes last wins; a lost line costs nothing.

Where no earlier start of a kind is remembered, the plan alone answers (`planned_start`): roughly, and rather too long
than too short, because a first start compiles, and imports what no disk cache holds. Measured on two cores with
SmolLM2 and on one H200 with an 8B model (docs/measurements/starts.md).
"""

from __future__ import annotations

import contextlib
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
from typing import TYPE_CHECKING, Any

from corral.base.errors import CorralError
from corral.base.files import make_dir, write_atomic
from corral.base.home import home_dir
from corral.base.record import dump_json, from_json, load_json, to_json
from corral.base.untrusted import parse_json
from corral.base.wording import duration
from corral.deploy.deployment.events import Event, read_events
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import State

if TYPE_CHECKING:
    from corral.plan.contract import Plan

OVERDUE = 2.0  # times what is usual; then it is said
OVERDUE_LEAST_S = 5.0  # beyond what is usual; shorter delays are nobody's concern


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


# seconds by phase of an engine that is there, beside loading
_CPU_S = {Phase.STARTING: 40.0, Phase.INITIALISING: 30.0, Phase.COMPILING: 100.0, Phase.WARMING: 20.0}
_GPU_S = {Phase.STARTING: 30.0, Phase.INITIALISING: 30.0, Phase.COMPILING: 60.0, Phase.WARMING: 45.0}
_INSTALL_CPU_S, _INSTALL_GPU_S = 150.0, 300.0
_MEASURE_S = 5.0
_FETCH_BYTES_S = 1e8
_CONVERT_S = 20.0
_LOAD_LEAST_S = 5.0
_STORAGE_GB_S = 2.0  # where the plan does not say how fast weights are read


def planned_start(plan: Plan) -> dict[str, Expected]:
    """What to expect of a start by the plan alone, by phase."""
    engine_s = dict(_GPU_S if plan.inventory.gpu else _CPU_S)
    if plan.settings.eager:
        engine_s.pop(Phase.COMPILING)
    storage_gb_s = plan.goal.storage_gb_s or _STORAGE_GB_S
    loading_s = round(plan.memory.weights_bytes / (storage_gb_s * 1e9) + _LOAD_LEAST_S, 1)
    seconds = {**_first_start_s(plan), **engine_s, Phase.LOADING: loading_s}
    return {phase.value: Expected(length_s) for phase, length_s in seconds.items()}


def planned_restart_s(plan: Plan) -> float:
    """Seconds of a start for which engine and model are there: what every further one costs."""
    first = _first_start_s(plan)
    return sum(one.seconds for phase, one in planned_start(plan).items() if phase not in first)


def _first_start_s(plan: Plan) -> dict[Phase, float]:
    """What only the first start here does."""
    return {
        Phase.INSTALLING: _INSTALL_GPU_S if plan.inventory.gpu else _INSTALL_CPU_S,
        Phase.MEASURING: _MEASURE_S,
        Phase.FETCHING: round(plan.memory.weights_bytes / _FETCH_BYTES_S + _CONVERT_S, 1),
    }


def expectation(kind: str, plan: Plan) -> dict[str, Expected]:
    """What to expect of a start, by phase: as remembered, else as planned."""
    return {**planned_start(plan), **usual(kind)}


def expected_of(folder: DeploymentFolder, staged: Sequence[Event] | None = None) -> dict[str, Expected]:
    """What was expected of a deployment's start when it was launched, by phase.

    What was known before that is in the journal of its staging, which a caller that has read it passes as `staged`.
    """
    found: dict[str, Expected] = {}
    for event in read_events(folder.staging) if staged is None else staged:
        found |= _expectations(event.get("expected"))
    with contextlib.suppress(OSError, CorralError, KeyError, TypeError):
        found |= _expectations(parse_json(folder.launch.read_bytes(), str(folder.launch))["expected"])
    return found


def _expectations(recorded: Any) -> dict[str, Expected]:
    with contextlib.suppress(CorralError, TypeError, AttributeError):
        return {str(phase): from_json(Expected, one, strict=False) for phase, one in recorded.items()}
    return {}


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
        make_dir(starts_path().parent)
        write_atomic(starts_path(), dump_json(_Starts(kinds=dict(newest))))
    except OSError:
        return


def _read() -> _Starts:
    try:
        found = load_json(_Starts, starts_path())
    except (CorralError, OSError):  # none yet, damaged, or of another version: begin anew
        return _Starts()
    return found if found.version == 1 else _Starts()
