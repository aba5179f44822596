"""Following the load: from the files that gateways write to a decision how many members are wanted.

The load of all gateways is put together. Work is counted in the tokens that gateways expect of a request when it
arrives, prompt and answer: a member's capacity is how many requests were finished while others waited, times their
usual tokens. So it does not matter how well gateways guess, as long as they guess alike. The time until a further
member serves is measured on the members that there are: the wait of their jobs and the time they took to be ready. A
job's replacement is submitted that long before its end, plus a margin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mean, median

from corral.base.errors import CorralError
from corral.base.files import write_atomic
from corral.base.record import dump_json, load_json
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import deployments
from corral.deploy.targets.base import Queue
from corral.serve.fleet.record import Fleet, FleetFolder, GatewayLoad, Judgement, read_fleet, read_loads
from corral.serve.fleet.scaling import Course, Demand, SizeDecision, next_size, rate
from corral.serve.fleet.status import load_of
from corral.serve.fleet.steps import MemberFacts

PLANNED_LOAD_S = 600.0  # where nothing was measured and no plan says how long loading takes
LEAST_MARGIN_S = 60.0
FULL_S = 10.0  # for so long requests must have waited before what members finish counts as all they can
WINDOW_S = 30.0  # over which that is counted
LAST_LAUNCHES = 16  # whose times to become ready are remembered
LAST_QUEUES = 4  # whose waits in the queue count: a queue changes within hours
NEW = 0.2  # the weight of a new measurement


@dataclass(frozen=True)
class MeasuredMembers:
    """What is known of a fleet's members, as kept in its folder."""

    capacity: float
    queue_s: float
    load_s: float


@dataclass
class Pacer:
    """Remembers what was measured of one fleet."""

    folder: FleetFolder
    margin_s: float | None = None  # as the user asked for it; None: half the load time
    capacity: float = 0.0
    course: Course = field(default_factory=Course)
    leads: dict[str, tuple[float | None, float]] = field(default_factory=dict)  # queue wait, load time; by launch
    full: list[tuple[float, dict[str, int], int]] = field(default_factory=list)  # when, finished by gateway, members
    _saved: float | None = None

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError, CorralError):  # nothing was measured yet
            known = load_json(MeasuredMembers, self.folder.measured)
            self.capacity, self.leads = known.capacity, {"before": (known.queue_s, known.load_s)}

    @property
    def lead_s(self) -> float:
        """How long a further member takes until it serves."""
        return sum(self.parts())

    def parts(self) -> tuple[float, float]:
        """The longest of the last waits in the queue, and the middle of the load times.

        A median of the waits would be 0 s for a fleet whose first members started at once.
        """
        if not self.leads:
            return 0.0, _planned_load_s(self.folder)
        queues = [queue for queue, _ in self.leads.values() if queue is not None]
        return max(queues[-LAST_QUEUES:], default=0.0), median(load for _, load in self.leads.values())

    @property
    def replacement_s(self) -> float:
        """How long before the end of a job its replacement has to be submitted."""
        queue_s, load_s = self.parts()
        return queue_s + load_s + (max(LEAST_MARGIN_S, load_s / 2) if self.margin_s is None else self.margin_s)

    def decide(self, fleet: Fleet, facts: Mapping[str, MemberFacts], now_s: float) -> SizeDecision | None:
        """Another number of members, where the load asks for it."""
        self._measure(facts)
        loads = read_loads(self.folder)
        if fleet.least == fleet.most == fleet.wanted or not loads:
            return None
        load = summed(loads)
        self._watch_capacity(loads, load, now_s)
        arriving, lead_s = rate(load.arrived_tokens[:-1], self.lead_s), self.lead_s
        demand = Demand(
            now_s, arriving, backlog_of(load), load.waiting, self.capacity, lead_s,
            fleet.least, fleet.most, fleet.wanted,
        )  # fmt: skip
        self.course, decision = next_size(self.course, demand)
        return decision

    def _watch_capacity(self, loads: Mapping[str, GatewayLoad], load: GatewayLoad, now_s: float) -> None:
        """What members finish while requests wait is what they can do."""
        busy = sum(bool(one.running) and one.judged is Judgement.OK for one in load.members.values())
        if not load.waiting or not busy:
            self.full = []
            return
        done = {id: one.finished for id, one in loads.items()}
        self.full = [*(seen for seen in self.full if now_s - seen[0] <= WINDOW_S), (now_s, done, busy)]
        first_s, before, _ = self.full[0]
        made = sum(done[id] - before[id] for id in done if done[id] >= before.get(id, done[id] + 1))
        if now_s - first_s >= FULL_S and made:
            each = made / (now_s - first_s) / mean(seen[2] for seen in self.full) * usual_tokens(load)
            self.capacity = each if not self.capacity else (1 - NEW) * self.capacity + NEW * each
            self._save()

    def _save(self) -> None:
        """Keep what was measured for the next keeper, where it has changed by more than a little."""
        queue_s, load_s = self.parts()
        before = self._saved
        if before is None or abs(self.capacity - before) > before / 10:
            self._saved = self.capacity
            with contextlib.suppress(OSError):
                write_atomic(self.folder.measured, dump_json(MeasuredMembers(self.capacity, queue_s, load_s)))

    def _measure(self, facts: Mapping[str, MemberFacts]) -> None:
        """Once for each launch that became ready: how long that took; the last ones count."""
        for name, one in facts.items():
            launch = f"{name} {one.created_s}"
            if one.state is not State.READY or launch in self.leads:
                continue
            folder = DeploymentFolder.of(name)
            with contextlib.suppress(CorralError, OSError):
                status = deployments.status(folder)
                if status.timings.ready_s is not None:
                    self.leads[launch] = (_queue_s(folder), status.timings.ready_s)
        ready = sum(one.state is State.READY for one in facts.values())
        for launch in list(self.leads)[: -max(LAST_LAUNCHES, ready)]:
            del self.leads[launch]


def _planned_load_s(folder: FleetFolder) -> float:
    """As the plan of a member has it."""
    plans = (deployments.plan_of(DeploymentFolder.of(one.name)) for one in read_fleet(folder).members)
    return next((plan.speed.load_s for plan in plans if plan and plan.speed.load_s), PLANNED_LOAD_S)


def _queue_s(folder: DeploymentFolder) -> float | None:
    """How long it waited for its nodes; None where that is not known."""
    target = deployments.target_of(load_json(deployments.Record, folder.record))
    if not isinstance(target, Queue):
        return 0.0
    lease = target.lease(folder)
    return lease.queue_s if lease else None


def usual_tokens(load: GatewayLoad) -> float:
    """What a gateway expects of a request that arrives, on the average of the last minute."""
    arrived = sum(load.arrivals)
    return sum(load.arrived_tokens) / arrived if arrived else 0.0


def backlog_of(load: GatewayLoad) -> float:
    """The tokens to be made: of what runs, half is done."""
    return (load.running / 2 + load.waiting) * usual_tokens(load)


def summed(loads: Mapping[str, GatewayLoad]) -> GatewayLoad:
    """The loads of all gateways as one; a member's speed is what all of them see of it together."""
    bins = max(len(one) for load in loads.values() for one in (load.arrivals, load.arrived_tokens))
    padded = [[0] * (bins - len(load.arrived_tokens)) + list(load.arrived_tokens) for load in loads.values()]
    counts = [[0] * (bins - len(load.arrivals)) + list(load.arrivals) for load in loads.values()]
    names = {name for load in loads.values() for name in load.members}
    members = {name: one for name in names if (one := load_of(loads, name)) is not None}
    return GatewayLoad(
        time_s=max(load.time_s for load in loads.values()),
        running=sum(load.running for load in loads.values()),
        waiting=sum(load.waiting for load in loads.values()),
        outstanding_tokens=sum(load.outstanding_tokens for load in loads.values()),
        arrivals=tuple(map(sum, zip(*counts, strict=True))),
        arrived_tokens=tuple(map(sum, zip(*padded, strict=True))),
        oldest_wait_s=max(load.oldest_wait_s for load in loads.values()),
        members=members,
        finished=sum(load.finished for load in loads.values()),
    )
