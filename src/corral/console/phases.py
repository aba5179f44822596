"""A deployment's start as a line of phases: when each began and ended, how long it usually takes, when it is ready.

Pure. The journal tells the phases since there is an agent; what came before, staging and a queue, is told by when the
deployment was made and when its job was submitted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corral.deployment.course import Phase, course_of
from corral.deployment.events import Event
from corral.deployment.expectation import Expected
from corral.deployment.state import ENDED, State

__all__ = ["ShownPhase", "phases_of", "ready_at_s"]

ORDER = [str(phase.value) for phase in Phase]
STAGING, QUEUE = State.STAGING.value, State.QUEUED.value


@dataclass(frozen=True)
class ShownPhase:
    """One piece of the line; `until_s` is None while it lasts, both times are None of what is still to come."""

    phase: str
    since_s: float | None
    until_s: float | None
    expected_s: float | None = None
    remembered: bool = False
    done: int | None = None
    total: int | None = None


def phases_of(
    state: State,
    events: Sequence[Event],
    expected: Mapping[str, Expected],
    created_s: float,
    submitted_s: float | None = None,
) -> tuple[ShownPhase, ...]:
    """What was, what is, and, while it starts, what is to come."""
    course = [one for one in course_of(events) if one.phase not in (State.QUEUED, State.STAGING)]
    begins = [(STAGING, created_s)]
    if submitted_s is not None:
        begins.append((QUEUE, max(submitted_s, created_s)))
    begins += [(one.phase, one.since_s) for one in course]
    shown = [_shown(name, since, until, expected, events) for (name, since), (_, until) in itertools.pairwise(begins)]
    last, since = begins[-1]
    ended = state in ENDED and last not in [one.value for one in ENDED]
    final = max((event.time_s for event in events), default=since) if ended else None
    shown.append(_shown(last, since, final, expected, events))
    if state not in (State.READY, State.DRAINING, *ENDED) and last != State.READY:
        shown += [_shown(name, None, None, expected, ()) for name in _to_come(last, expected)]
    return tuple(one for one in shown if one.phase != STAGING or one.until_s is None or one.until_s - created_s > 1)


def _shown(
    name: str, since: float | None, until: float | None, expected: Mapping[str, Expected], events: Sequence[Event]
) -> ShownPhase:
    usual = expected.get(name)
    told = [event for event in events if event.kind == "phase" and event.get("phase") == name and event.get("total")]
    done, total = (told[-1].get("done"), told[-1].get("total")) if told and until is None else (None, None)
    return ShownPhase(
        name, since, until, usual.seconds if usual else None, bool(usual and usual.remembered), done, total
    )


def _to_come(now: str, expected: Mapping[str, Expected]) -> list[str]:
    """Phases that are expected after this one, in their order, and ready at the end."""
    at = ORDER.index(now) if now in ORDER else ORDER.index(Phase.FETCHING)
    return [name for name in ORDER[at + 1 :] if name in expected or name == Phase.READY]


def ready_at_s(phases: Sequence[ShownPhase], events: Sequence[Event]) -> float | None:
    """When it should be ready, by what is usual and how far it is; None where nobody knows."""
    now = next((one for one in phases if one.until_s is None and one.since_s is not None), None)
    to_come = [one for one in phases if one.since_s is None and one.phase != Phase.READY]
    if now is None or now.since_s is None or now.phase in (Phase.READY, QUEUE, STAGING):
        return None
    if any(one.expected_s is None for one in to_come):
        return None
    ends = now.since_s + now.expected_s if now.expected_s is not None else None
    if now.done and now.total and (told := [e for e in events if e.kind == "phase" and e.get("done")]):
        ends = now.since_s + (told[-1].time_s - now.since_s) * now.total / now.done
    return None if ends is None else ends + sum(one.expected_s or 0.0 for one in to_come)
