"""How long starts took here, phase by phase: kept in `<home>/starts.json`, so that the next one knows what is usual.

A small file: the last few lengths of each phase of the last few hundred kinds of start. A kind is a model, what of
its plan a start's length depends on, and the machine. Whoever writes last wins; a lost line costs nothing.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

from corral.base.errors import CorralError
from corral.base.files import write_atomic
from corral.base.home import home_dir
from corral.base.record import dump_json, load_json, to_json
from corral.deploy.deployment.expectation import Expected
from corral.plan.contract import Plan
from corral.plan.start import planned_start

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
