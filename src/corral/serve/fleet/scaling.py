"""How many members a fleet needs, from what its gateways have to do. Pure; `corral fleet simulate` runs it too.

A further member comes after L seconds: the wait in the queue and the load time, both as measured. It is worth having
where requests would otherwise wait longer than that. With n members of C tokens/s, B tokens to do and λ tokens/s
arriving, a request that arrives in H seconds waits (B + (λ - nC) H) / (nC); the fewest members for which that is at
most L are

    needed = (B + λ H) / (C (H + L))

H is how long a member is kept once it came, a multiple of L: what takes long to come is asked for sooner, and kept
for longer. Members go when fewer were needed all the time for two L; the most that were needed in that time stay. A
load that changes faster than members can follow therefore changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from corral.base.wording import counted

BIN_S = 5.0  # of the arrivals that gateways count
SHORTEST_RATE_S, LONGEST_RATE_S = 10.0, 60.0  # over which they are averaged: as long as a member takes to come
HORIZON_LEADS = 8.0
IDLE_LEADS = 2.0
LEAST_IDLE_S = 15.0  # a load that pauses for less is one load
LEAST_LEAD_S = 1.0
ROOM = 0.85  # of their capacity, when members are to be handed back


@dataclass(frozen=True)
class Demand:
    """A fleet's load, and what is known of its members."""

    now_s: float
    rate: float  # tokens/s that arrive
    backlog_tokens: float  # that were asked for and are not made yet
    waiting: int  # requests that no member has yet
    capacity: float  # tokens/s of one member with all the work that it can take; 0: not known yet
    lead_s: float  # queue wait and load time of one more member
    least: int
    most: int
    wanted: int


@dataclass(frozen=True)
class Course:
    """What was seen before, as far as the next decision depends on it."""

    below_s: float | None = None  # since when fewer are needed than are wanted
    peak: int = 0  # the most that were needed since then
    grown_s: float = -math.inf  # when it last grew


@dataclass(frozen=True)
class SizeDecision:
    """Another number of members, and why."""

    wanted: int
    why: str


def rate(tokens: Sequence[int], lead_s: float = LONGEST_RATE_S) -> float:
    """Tokens per second in the last bins, newest last. Peaks are remembered by the course, not here.

    What comes quickly is asked for on less evidence: it is as quickly handed back.
    """
    window_s = min(LONGEST_RATE_S, max(SHORTEST_RATE_S, lead_s))
    recent = tokens[-round(window_s / BIN_S) :]
    return sum(recent) / (BIN_S * len(recent)) if recent else 0.0


def needed(demand: Demand, room: float = 1.0) -> int:
    """The fewest members with which no request waits for longer than a further member takes to come."""
    if demand.capacity <= 0:  # nobody has been at its limit yet: those that there are do
        return demand.wanted if demand.backlog_tokens or demand.rate else demand.least
    lead_s = max(LEAST_LEAD_S, demand.lead_s)
    horizon_s = HORIZON_LEADS * lead_s
    work = demand.backlog_tokens + demand.rate * horizon_s
    count = work / (demand.capacity * room * (horizon_s + lead_s))
    return max(demand.least, math.ceil(min(float(demand.most), count)))


def next_size(course: Course, demand: Demand) -> tuple[Course, SizeDecision | None]:
    """What is decided now, if anything, and what to remember."""
    if not demand.least <= demand.wanted <= demand.most:
        bounded = max(demand.least, min(demand.most, demand.wanted))
        return Course(), SizeDecision(bounded, f"{demand.least} to {demand.most} members are allowed")
    count = needed(demand)
    if count > demand.wanted:
        return _grow(demand, count)
    return _shrink(course, demand)


def _grow(demand: Demand, count: int) -> tuple[Course, SizeDecision]:
    wait_s = _forecast_s(demand)
    why = (
        f"with {counted(demand.wanted, 'member')} requests would wait {wait_s:.0f} s, and another takes"
        f" {demand.lead_s:.0f} s to start"
        f" ({demand.rate:.0f} tokens/s arriving, {demand.backlog_tokens:.0f} tokens queued,"
        f" {demand.capacity:.0f} tokens/s per member)"
    )
    return Course(grown_s=demand.now_s), SizeDecision(count, why)


def _shrink(course: Course, demand: Demand) -> tuple[Course, SizeDecision | None]:
    enough = needed(demand, ROOM)
    if enough >= demand.wanted or demand.waiting:
        return replace(course, below_s=None, peak=0), None
    since_s = demand.now_s if course.below_s is None else course.below_s
    peak = max(course.peak, enough)
    idle_s = max(LEAST_IDLE_S, IDLE_LEADS * demand.lead_s)
    if demand.now_s - max(since_s, course.grown_s) < idle_s:
        return replace(course, below_s=since_s, peak=peak), None
    past_s = demand.now_s - since_s
    why = f"{peak} would have been enough for the last {past_s:.0f} s ({demand.rate:.0f} tokens/s arriving)"
    return replace(course, below_s=None, peak=0), SizeDecision(peak, why)


def _forecast_s(demand: Demand) -> float:
    """How long a request would wait at the horizon with the members that there are."""
    horizon_s = HORIZON_LEADS * max(LEAST_LEAD_S, demand.lead_s)
    have = max(1, demand.wanted) * demand.capacity
    return max(0.0, demand.backlog_tokens + (demand.rate - have) * horizon_s) / have
