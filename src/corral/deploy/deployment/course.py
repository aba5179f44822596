"""The phases of a start, as a deployment's journal tells them: which came when, and how long each took."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from corral.deploy.deployment.events import Event
from corral.deploy.deployment.expectation import left_s
from corral.deploy.deployment.state import State


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
