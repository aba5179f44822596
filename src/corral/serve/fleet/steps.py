"""What is due for the members of a fleet: start, replace, let go, stop. Pure: facts in, steps with reasons out.

A member that leaves gets no new requests from any gateway, and is stopped once its running ones have ended. One whose
job nears its time limit is replaced before, where the fleet is kept; one that ended without being asked to is started
again, after pauses that grow while it fails. One that its gateways have judged hung, out of reach or slow for a while
is replaced: one at a time, and the next one only once as many serve as are wanted.

In a chain the newest job counts: older ones have their replacement and end with their time limit. A job that ended is
followed by another under a new name, unless the next one would end in the same way; then the chain is closed.

Not covered: how many members are wanted (`scaling`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from corral.base.wording import counted
from corral.deploy.deployment.state import ENDED, Reason, State
from corral.serve.fleet.chain import successor_name
from corral.serve.fleet.record import Fleet, Judgement

SEEN_S = 3.0  # within which every gateway knows that a member leaves
DRAIN_MOST_S = 900.0  # for requests that run on a member that leaves
MOST_FAILURES = 5  # jobs of a chain in a row that were never ready
PATIENCE_S = {Judgement.HUNG: 30.0, Judgement.GONE: 60.0, Judgement.SLOW: 300.0}  # before it is replaced
COMING = (State.STAGING, State.QUEUED, State.STARTING, State.LOADING)

# ends that nobody asked for and that are not the model's fault: the same job may well work the next time
BAD_LUCK = frozenset(
    {Reason.WALLTIME, Reason.NODE_LOST, Reason.PREEMPTED, Reason.BOOT_FAILED, Reason.INTERRUPTED,
     Reason.JOB_FORGOTTEN, Reason.MACHINE_RESTARTED, Reason.PORT_TAKEN, Reason.AGENT_KILLED}
)  # fmt: skip


@dataclass(frozen=True)
class MemberFacts:
    """What is known of one member now."""

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
    served: bool = False  # it was ready once
    judged: Judgement = Judgement.OK  # by the gateways that have it
    judged_for_s: float = 0.0  # without a break


class Act(enum.StrEnum):
    """What can be due."""

    START = "start"  # the member, for the first time or again
    EXPIRE = "expire"  # another one takes its place before its job ends
    LEAVE = "leave"  # no new requests
    REPLACE = "replace"  # the same, because it is hung or slow
    STOP = "stop"
    FORGET = "forget"  # it has ended, and is not started again
    ADD = "add"  # one more member, by that name
    CLOSE = "close"  # the chain: nothing more follows


@dataclass(frozen=True)
class FleetStep:
    """One thing to do, and why."""

    act: Act
    member: str
    why: str


def next_steps(
    fleet: Fleet,
    facts: Mapping[str, MemberFacts],
    now_s: float,
    lead_s: float,
    strangers: Collection[str] = (),
    rests: bool = False,
) -> list[FleetStep]:
    """All that is due now; `lead_s` is how long before its end a job has to be replaced.

    `strangers` are names that others have: no member is called so. `rests`: a hung or slow member was replaced a
    short while ago.
    """
    if fleet.chain and (hopeless := _hopeless(fleet, facts)):
        return [hopeless]
    steps: list[FleetStep] = []
    expiring, staying = [], []
    for member in (one for one in fleet.members if not one.ended):
        one = facts[member.name]
        if member.leaving:
            steps += _leaving(fleet, one, member.leaving_s, now_s)
        elif one.state in ENDED and _is_over(fleet, one):
            at_limit = one.reason is Reason.WALLTIME
            why = "its job reached its time limit" if at_limit else f"it has ended: {ending(one)}"
            steps.append(FleetStep(Act.FORGET, one.name, why))
            if not fleet.keep:  # nothing takes its place
                staying.append(one)
        elif fleet.keep and (member.expiring or _is_expiring(fleet, one, now_s, lead_s)):
            expiring.append(one)
            if not member.expiring and not fleet.chain:
                steps.append(FleetStep(Act.EXPIRE, one.name, _near_end(one, now_s, lead_s)))
        else:
            staying.append(one)
            steps += _starting(one, now_s)
    ready = sum(one.state is State.READY for one in staying)
    steps += [step for one in expiring for step in _expiring(fleet, one, ready, now_s)]
    if not rests and not expiring and (unwell := _unwell(fleet, staying)):
        return [*steps, unwell]
    soon = f"; {counted(len(expiring), 'job nears its end', 'jobs near their end')}" if expiring else ""
    return steps + _counted(
        fleet, staying, f"{soon}, and a replacement takes {lead_s:.0f} s" if soon else "", strangers
    )


def _unwell(fleet: Fleet, staying: Sequence[MemberFacts]) -> FleetStep | None:
    """The member that has been hung, out of reach or slow for longest, once no other one is missing or on its way."""
    if fleet.chain or len(staying) != fleet.wanted:
        return None
    if any(one.busy or one.state is None or one.state in COMING for one in staying):
        return None
    overdue = [(one.judged_for_s / PATIENCE_S[one.judged], one) for one in staying
               if one.state is State.READY and one.judged is not Judgement.OK]  # fmt: skip
    ratio, one = max(overdue, key=lambda pair: pair[0], default=(0.0, None))
    if one is None or ratio < 1:
        return None
    judged = f"its gateways have judged it {one.judged} for {one.judged_for_s:.0f} s"
    return FleetStep(Act.REPLACE, one.name, f"{judged}; another one takes its place")


def _hopeless(fleet: Fleet, facts: Mapping[str, MemberFacts]) -> FleetStep | None:
    """Why no job can follow the newest one of a chain."""
    newest = fleet.members[-1]
    one = facts.get(newest.name)
    if one is None or one.busy:
        return None
    if why := _why_nothing_follows(fleet, one):
        return FleetStep(Act.CLOSE, one.name, why)
    return None


def _why_nothing_follows(fleet: Fleet, one: MemberFacts) -> str:
    if one.state not in ENDED:
        return f"{one.name} cannot start: {one.text}" if one.reason is Reason.CANNOT_START else ""
    if one.reason in (Reason.REQUESTED, Reason.CANCELLED):
        return f"{one.name} was ended: {ending(one)}"
    if one.reason is Reason.INTERRUPTED:  # it is submitted again, but the first one's folder holds the chain
        return "" if len(fleet.members) > 1 else f"{one.name} was never submitted: {ending(one)}"
    if not one.served and one.reason not in BAD_LUCK:
        return f"{one.name} was never ready: {ending(one)}"
    if fleet.has_had_its_last_job():
        return f"{one.name} was the last of {fleet.max_jobs}"
    failures = 0 if one.served else 1 + _never_ready(fleet)
    return f"the last {failures} were never ready: {ending(one)}" if failures >= MOST_FAILURES else ""


def _never_ready(fleet: Fleet) -> int:
    """How many jobs before the newest one were never ready, in a row."""
    before = [member.never_ready for member in reversed(fleet.members[:-1])]
    return before.index(False) if False in before else len(before)


def _leaving(fleet: Fleet, one: MemberFacts, since_s: float, now_s: float) -> list[FleetStep]:
    if one.busy:
        return []
    if one.state is None or one.state in ENDED:
        return [FleetStep(Act.FORGET, one.name, "it has left")]
    if one.state is State.UNKNOWN:  # it may be serving
        return []
    if fleet.chain:  # clients may use its own address: it ends with its job
        return []
    waited_s = now_s - since_s
    if one.state in COMING:
        return [FleetStep(Act.STOP, one.name, f"it is no longer wanted, and was {one.state}")]
    if waited_s >= SEEN_S and one.running == 0:
        return [
            FleetStep(Act.STOP, one.name, f"its last request has ended, {waited_s:.0f} s after it was told to leave")
        ]
    if waited_s >= DRAIN_MOST_S:
        left = "an unknown number of requests" if one.running is None else counted(one.running, "request")
        return [FleetStep(Act.STOP, one.name, f"it still had {left} {waited_s:.0f} s after it was told to leave")]
    return []


def _is_over(fleet: Fleet, one: MemberFacts) -> bool:
    """Whether an ended member is not started again under its name."""
    if fleet.chain:
        return one.reason is not Reason.INTERRUPTED
    return one.reason is Reason.WALLTIME


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


def _is_expiring(fleet: Fleet, one: MemberFacts, now_s: float, lead_s: float) -> bool:
    """Whether another member has to take its place before its job ends."""
    if fleet.chain and one.name != fleet.members[-1].name:  # its successor was submitted
        return True
    if fleet.has_had_its_last_job() or one.last_request_s is None:
        return False
    return one.state in (State.READY, State.DRAINING) and one.last_request_s - now_s <= lead_s


def _near_end(one: MemberFacts, now_s: float, lead_s: float) -> str:
    left_s = max(0.0, (one.last_request_s or now_s) - now_s)
    return f"its job begins to drain in {left_s:.0f} s, and a replacement takes {lead_s:.0f} s"


def _expiring(fleet: Fleet, one: MemberFacts, ready: int, now_s: float) -> list[FleetStep]:
    """It leaves once its replacement serves, or its job is about to drain and others serve."""
    last_s = one.last_request_s
    if last_s is not None and now_s >= last_s - SEEN_S and not fleet.chain:
        return [FleetStep(Act.LEAVE, one.name, f"its job begins to drain in {max(0.0, last_s - now_s):.0f} s")]
    if ready < fleet.wanted:
        return []
    left = f"; its job begins to drain in {last_s - now_s:.0f} s" if last_s is not None else ""
    return [FleetStep(Act.LEAVE, one.name, f"its replacement is ready{left}")]


def _counted(
    fleet: Fleet, staying: Sequence[MemberFacts], expiring: str, strangers: Collection[str]
) -> list[FleetStep]:
    """One more, or one less, until as many stay as are wanted; `expiring` says who does not stay."""
    lacking = fleet.wanted - len(staying)
    if any(node.gpus for node in fleet.nodes):  # who leaves still has GPUs
        lacking = min(lacking, max(0, lacking - sum(one.leaving for one in fleet.members)))
    why = f"{counted(fleet.wanted, 'member is', 'members are')} wanted; there are {len(staying)}{expiring}"
    if lacking > 0:
        return [FleetStep(Act.ADD, name, why) for name in free_names(fleet, lacking, strangers)]
    first_to_go = sorted(
        staying,
        key=lambda one: (
            one.state is State.READY, one.judged is Judgement.OK, one.running or 0, -_number(one.name)
        ),
    )  # fmt: skip
    return [FleetStep(Act.LEAVE, one.name, why) for one in first_to_go[: max(0, -lacking)]]


def free_names(fleet: Fleet, count: int, strangers: Collection[str] = ()) -> list[str]:
    """The lowest numbers that nobody has, as names."""
    taken = {*strangers, *(member.name for member in fleet.members)}
    numbers = range(1, len(taken) + count + 1)
    names = (successor_name(fleet.name, n) if fleet.chain else f"{fleet.name}-{n}" for n in numbers)
    return [name for name in names if name not in taken][:count]


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0
