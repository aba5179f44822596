"""What is due for the members of a fleet: start, replace, let go, stop. Pure: facts in, steps with reasons out.

A member that leaves gets no new requests from any gateway, and is stopped once its running ones have ended. One whose
job nears its time limit is replaced before, where the fleet is kept; one that ended without being asked to is started
again, after pauses that grow while it fails. Not covered: how many members are wanted (`scaling`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from corral.base.wording import counted
from corral.deploy.deployment.fleet import Fleet
from corral.deploy.deployment.state import ENDED, Reason, State

SEEN_S = 3.0  # within which every gateway knows that a member leaves
DRAIN_MOST_S = 900.0  # for requests that run on a member that leaves
COMING = (State.STAGING, State.QUEUED, State.STARTING, State.LOADING)


@dataclass(frozen=True)
class MemberFacts:
    """One member as it stands now."""

    name: str
    state: State | None = None  # None: nothing of it was made yet
    reason: Reason | None = None
    text: str = ""
    since_s: float = 0.0  # wall-clock time of the last change of its state
    running: int | None = None  # requests that gateways have on it; None: no gateway has said so yet
    last_request_s: float | None = None  # when its job begins to drain
    retry_s: float = 0.0  # one that failed is not started again before this time
    busy: bool = False  # it is being started or stopped right now
    created_s: float = 0.0  # wall-clock time of its launch: another one under its name has another


class Act(enum.StrEnum):
    """What can be due."""

    START = "start"  # the member, for the first time or again
    LEAVE = "leave"  # no new requests
    STOP = "stop"
    FORGET = "forget"  # it has ended, and nothing takes its place
    ADD = "add"  # one more member, by that name


@dataclass(frozen=True)
class FleetStep:
    """One thing to do, and why."""

    act: Act
    member: str
    why: str


def next_steps(
    fleet: Fleet, facts: Mapping[str, MemberFacts], now_s: float, lead_s: float, strangers: Collection[str] = ()
) -> list[FleetStep]:
    """All that is due now; `lead_s` is how long before its end a job has to be replaced.

    `strangers` are names that others have: no member is called so.
    """
    found: list[FleetStep] = []
    expiring, staying = set(), []
    for member in fleet.members:
        one = facts[member.name]
        if member.leaving:
            found += _leaving(one, member.leaving_s, now_s)
        elif one.state in ENDED and one.reason is Reason.WALLTIME:
            found.append(FleetStep(Act.FORGET, one.name, "its job reached its time limit"))
            if not fleet.keep:  # nothing takes its place
                staying.append(one)
        elif fleet.keep and _nears_its_end(one, now_s, lead_s):
            expiring.add(one.name)
        else:
            staying.append(one)
            found += _starting(one, now_s)
    ready = sum(one.state is State.READY for one in staying)
    for name in sorted(expiring):
        last_s = facts[name].last_request_s or now_s
        if now_s >= last_s - SEEN_S or ready >= fleet.wanted:
            found.append(FleetStep(Act.LEAVE, name, f"its job begins to drain in {max(0.0, last_s - now_s):.0f} s"))
    return found + _counted(fleet, staying, expiring, strangers)


def _leaving(one: MemberFacts, since_s: float, now_s: float) -> list[FleetStep]:
    if one.busy:
        return []
    if one.state is None or one.state in ENDED:
        return [FleetStep(Act.FORGET, one.name, "it has left")]
    waited_s = now_s - since_s
    if one.state in COMING:
        return [FleetStep(Act.STOP, one.name, f"it is no longer wanted, and was {one.state}")]
    if waited_s >= SEEN_S and one.running == 0:
        return [
            FleetStep(Act.STOP, one.name, f"its last request has ended, {waited_s:.0f} s after it was told to leave")
        ]
    if waited_s >= DRAIN_MOST_S:
        left = "an unknown number of requests" if one.running is None else f"{one.running} requests"
        return [FleetStep(Act.STOP, one.name, f"it still had {left} {waited_s:.0f} s after it was told to leave")]
    return []


def _starting(one: MemberFacts, now_s: float) -> list[FleetStep]:
    if one.busy or now_s < one.retry_s:
        return []
    if one.state is None:
        return [FleetStep(Act.START, one.name, "it is wanted")]
    return [FleetStep(Act.START, one.name, f"it has ended: {ending(one)}")] if one.state in ENDED else []


def ending(one: MemberFacts) -> str:
    """How a member ended, in words."""
    reason = one.reason.value.replace("_", " ") if one.reason else "for an unknown reason"
    return f"{reason} ({one.text})" if one.text else reason


def _nears_its_end(one: MemberFacts, now_s: float, lead_s: float) -> bool:
    return one.state in (State.READY, State.DRAINING) and (
        one.last_request_s is not None and one.last_request_s - now_s <= lead_s
    )


def _counted(
    fleet: Fleet, staying: Sequence[MemberFacts], expiring: set[str], strangers: Collection[str]
) -> list[FleetStep]:
    """One more, or one less, until as many stay as are wanted."""
    lacking = fleet.wanted - len(staying)
    if lacking > 0:
        instead = f"; {len(expiring)} near the end of their jobs" if expiring else ""
        why = f"{counted(fleet.wanted, 'member is', 'members are')} wanted; there are {len(staying)}{instead}"
        return [FleetStep(Act.ADD, name, why) for name in free_names(fleet, lacking, strangers)]
    first_to_go = sorted(staying, key=lambda one: (one.state is State.READY, one.running or 0, -_number(one.name)))
    why = f"{counted(fleet.wanted, 'member is', 'members are')} wanted; there are {len(staying)}"
    return [FleetStep(Act.LEAVE, one.name, why) for one in first_to_go[: max(0, -lacking)]]


def free_names(fleet: Fleet, count: int, strangers: Collection[str] = ()) -> list[str]:
    """The lowest numbers that nobody has, as names."""
    taken = {*strangers, *(member.name for member in fleet.members)}
    names = (f"{fleet.name}-{number}" for number in range(1, len(taken) + count + 1))
    return [name for name in names if name not in taken][:count]


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0
