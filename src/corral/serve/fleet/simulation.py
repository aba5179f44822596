"""A trace of requests replayed through the code that decides how many members a fleet has. Pure.

Members are a fluid: each makes so many tokens per second, first come, first served, and comes after the queue wait
and the load time that are given. Every second the same `next_size` is asked as the keeper asks. The result stands
beside a clairvoyant schedule: one that knows the whole trace, has in every load time just the members that make the
tokens asked for in it, and pays the load time of each start.

Not covered: batches that slow down with their size, prefixes, failures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from corral.base.errors import DataError
from corral.client.trace import TracedRequest
from corral.serve.fleet.scaling import BIN_S, Course, Demand, SizeDecision, next_size, rate

STEP_S = 1.0
BINS = 12
LONGEST_S = 366 * 86400.0  # of a trace: every second of it is replayed


@dataclass(frozen=True)
class ReplaySetting:
    """The fleet that the trace is replayed on."""

    least: int
    most: int
    capacity: float  # tokens/s of one member
    load_s: float
    queue_s: float = 0.0

    @property
    def lead_s(self) -> float:
        return self.queue_s + self.load_s


@dataclass(frozen=True)
class SizeChange:
    """A decision of the replay."""

    time_s: float
    wanted: int
    why: str


@dataclass(frozen=True)
class Replay:
    """What the replay came to."""

    requests: int
    tokens: int
    span_s: float
    changes: tuple[SizeChange, ...]
    mean_wait_s: float
    p99_wait_s: float
    longest_wait_s: float
    member_s: float  # job time of all members, from the start of loading on
    clairvoyant_s: float

    @property
    def ratio(self) -> float:
        return self.member_s / self.clairvoyant_s if self.clairvoyant_s else math.inf


@dataclass
class _World:
    setting: ReplaySetting
    ready: int
    coming: deque[float] = field(default_factory=deque)  # when each serves
    queue: deque[list[float]] = field(default_factory=deque)  # arrival, tokens left, tokens in all
    waits: list[float] = field(default_factory=list)
    backlog: float = 0.0
    member_s: float = 0.0

    @property
    def wanted(self) -> int:
        return self.ready + len(self.coming)

    def serve(self, now_s: float) -> None:
        """One step of work."""
        while self.coming and self.coming[0] <= now_s:
            self.coming.popleft()
            self.ready += 1
        loading = sum(at - now_s <= self.setting.load_s for at in self.coming)
        self.member_s += (self.ready + loading) * STEP_S
        left = self.ready * self.setting.capacity * STEP_S
        while self.queue and left > 0:
            head = self.queue[0]
            if head[1] == head[2]:
                self.waits.append(max(0.0, now_s - head[0]))
            done = min(left, head[1])
            head[1] -= done
            left -= done
            self.backlog -= done
            if head[1] <= 0:
                self.queue.popleft()

    def resize(self, now_s: float, wanted: int) -> None:
        """More come after their lead; fewer: those that are not there yet first, as the keeper does."""
        while self.wanted < wanted:
            self.coming.append(now_s + self.setting.lead_s)
        while self.wanted > wanted:
            if self.coming:
                self.coming.pop()
            else:
                self.ready -= 1


def simulate(trace: Sequence[TracedRequest], setting: ReplaySetting) -> Replay:
    """Replay a trace from the first request until the last one is done."""
    if not trace:
        raise DataError("the trace has no requests.", "Give one request per line.")
    world, course, changes = _World(setting, setting.least), Course(), []
    bins: deque[int] = deque([0] * BINS, BINS)
    rows, at = sorted(trace, key=lambda one: one.time_s), 0
    first_s = bin_s = now_s = rows[0].time_s
    if (span_s := rows[-1].time_s - first_s) > LONGEST_S:
        raise DataError(
            f"the trace lasts {span_s / 86400:,.0f} days; at most {LONGEST_S / 86400:,.0f} are replayed.",
            "Its times are seconds (time_s) or milliseconds (timestamp): check them, or give a part of it.",
        )
    while at < len(rows) or world.queue:
        while at < len(rows) and rows[at].time_s <= now_s:
            world.queue.append([rows[at].time_s, float(rows[at].tokens), float(rows[at].tokens)])
            world.backlog += rows[at].tokens
            bins[-1] += rows[at].tokens
            at += 1
        world.serve(now_s)
        course, decision = _decide(course, world, bins, now_s)
        if decision is not None:
            changes.append(SizeChange(now_s, decision.wanted, decision.why))
            world.resize(now_s, decision.wanted)
        now_s += STEP_S
        if now_s - bin_s >= BIN_S:
            bin_s = now_s
            bins.append(0)
    waits = sorted(world.waits)
    return Replay(
        len(rows), sum(one.tokens for one in rows), now_s - first_s, tuple(changes), mean(waits),
        waits[int(0.99 * (len(waits) - 1))], waits[-1], world.member_s, clairvoyant_s(rows, setting),
    )  # fmt: skip


def _decide(course: Course, world: _World, bins: deque[int], now_s: float) -> tuple[Course, SizeDecision | None]:
    setting = world.setting
    whole = list(bins)[:-1]  # the newest is not full yet
    waiting = max(0, len(world.queue) - world.ready)
    arriving, lead_s = rate(whole, setting.lead_s), setting.lead_s
    demand = Demand(
        now_s, arriving, world.backlog, waiting, setting.capacity, lead_s, setting.least, setting.most, world.wanted
    )  # fmt: skip
    return next_size(course, demand)


def clairvoyant_s(rows: Sequence[TracedRequest], setting: ReplaySetting) -> float:
    """The job time of a schedule that knows the trace."""
    width = max(STEP_S, setting.load_s)
    first, last = rows[0].time_s, rows[-1].time_s
    asked = [0.0] * (int((last - first) // width) + 1)
    for row in rows:
        asked[int((row.time_s - first) // width)] += row.tokens
    total, before, left = 0.0, 0, 0.0
    for tokens in asked:
        left += tokens
        count = max(setting.least, min(setting.most, math.ceil(left / (setting.capacity * width) - 1e-9)))
        left = max(0.0, left - count * setting.capacity * width)
        total += count * width + max(0, count - max(before, setting.least)) * setting.load_s
        before = count
    return total + left / setting.capacity
