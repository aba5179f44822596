"""A deployment's start as a line of phases: when each began and ended, how long it usually takes, when it is ready.

Pure. What came before there was an agent is told by the command that made it (`staging.jsonl`): the engine, the
model; then comes a queue, by when its job was submitted; then the agent's journal.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corral.deploy.deployment.events import Event
from corral.deploy.deployment.start_times import Expected, Phase, course_of, ends_at_s
from corral.deploy.deployment.state import ENDED, State

ORDER = [str(phase.value) for phase in Phase]
STAGING, QUEUE = State.STAGING.value, State.QUEUED.value
BEFORE = (STAGING, Phase.INSTALLING, Phase.MEASURING, Phase.FETCHING)
SHORTEST_S = 1.0  # of what is done before: an engine that is there already is no phase


@dataclass(frozen=True)
class Start:
    """What is known of a start."""

    state: State
    events: Sequence[Event]  # of its agent
    expected: Mapping[str, Expected]
    created_s: float
    submitted_s: float | None = None  # to a queue
    staged: Sequence[Event] = ()  # of the command that made it
    queues: bool = False  # whether a queue comes between the two

    @property
    def latest(self) -> Sequence[Event]:
        """The journal that tells what lasts now."""
        return self.events or self.staged


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
    ends_s: float | None = None  # when it should be over, by how far it is
    text: str = ""  # what of it is being done


def phases_of(start: Start) -> tuple[ShownPhase, ...]:
    """What was, what is, and, while it starts, what is to come."""
    begins = _begins(start)
    shown = [_past(start, name, since, until) for (name, since), (_, until) in itertools.pairwise(begins)]
    last, since = begins[-1]
    if start.state in ENDED and last not in [one.value for one in ENDED]:
        final = max((event.time_s for event in start.latest), default=since)
        shown.append(_past(start, last, since, final))
    else:
        shown.append(_now(start, last, since))
    if start.state not in (State.READY, State.DRAINING, *ENDED) and last != State.READY:
        shown += [_past(start, name, None, None) for name in _to_come(last, start)]
    return tuple(one for one in shown if not _is_nothing(one))


def _begins(start: Start) -> list[tuple[str, float]]:
    """Each phase and when it began."""
    begins: list[tuple[str, float]] = [(STAGING, start.created_s)]
    silent = not start.events and start.submitted_s is None  # its agent has not said a word
    before = (*BEFORE, Phase.STARTING) if silent else BEFORE
    begins += [(one.phase, one.since_s) for one in course_of(start.staged) if one.phase in before]
    if start.submitted_s is not None:
        begins.append((QUEUE, max(start.submitted_s, start.created_s)))
    course = [one for one in course_of(start.events) if one.phase not in (State.QUEUED, State.STAGING)]
    return begins + [(one.phase, one.since_s) for one in course]


def _is_nothing(one: ShownPhase) -> bool:
    if one.phase not in BEFORE or one.since_s is None or one.until_s is None:
        return False
    return one.until_s - one.since_s <= SHORTEST_S


def _past(start: Start, name: str, since: float | None, until: float | None) -> ShownPhase:
    usual = start.expected.get(name)
    return ShownPhase(name, since, until, usual.seconds if usual else None, bool(usual and usual.remembered))


def _now(start: Start, name: str, since: float) -> ShownPhase:
    """The phase that lasts, and how far it is."""
    said = [one for one in start.latest if one.kind == "phase" and one.get("phase") == name and one.time_s >= since]
    told = [one for one in said if one.get("total")]
    done, total = (told[-1].get("done"), told[-1].get("total")) if told else (None, None)
    text = str(said[-1].get("text", "")) if said else ""
    past = _past(start, name, since, None)
    ends_s = ends_at_s(start.latest) if told else None
    return ShownPhase(name, since, None, past.expected_s, past.remembered, done, total, ends_s, text)


def _to_come(now: str, start: Start) -> list[str]:
    """Phases that are expected after this one, in their order, and ready at the end."""
    at = ORDER.index(now) if now in ORDER else ORDER.index(Phase.FETCHING)
    queue = [QUEUE] if start.queues and now in BEFORE else []
    return [*queue, *(name for name in ORDER[at + 1 :] if name in start.expected or name == Phase.READY)]


def ready_at_s(phases: Sequence[ShownPhase]) -> float | None:
    """When it should be ready, by what is usual and how far it is; None where nobody knows.

    Nobody knows how long a queue is, nor, before the engine is there, whether the model has to be fetched.
    """
    now = next((one for one in phases if one.until_s is None and one.since_s is not None), None)
    to_come = [one for one in phases if one.since_s is None and one.phase != Phase.READY]
    unknown = (Phase.READY, QUEUE, STAGING, Phase.INSTALLING, Phase.MEASURING)
    if now is None or now.since_s is None or now.phase in unknown:
        return None
    if any(one.expected_s is None for one in to_come):
        return None
    usual_s = now.since_s + now.expected_s if now.expected_s is not None else None
    ends_s = now.ends_s if now.ends_s is not None else usual_s
    return None if ends_s is None else ends_s + sum(one.expected_s or 0.0 for one in to_come)
