"""A trace replayed on a fleet that follows its load: what is decided, how long requests wait, what it costs.

Members are described by one number, the tokens per second that they make: each serves one request after the other.
They start serving after the queue wait and the load time that are given. The result is compared with a clairvoyant
schedule: one that knows the whole trace, has in every load time just the members that make the tokens asked for in
it, and pays the load time of each start.

Not covered: batches that slow down with their size, prefixes, failures (`corral simulate` has the first two).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from corral.base.errors import DataError
from corral.client.trace import TracedRequest
from corral.lab.simulate.engine import EngineShape
from corral.lab.simulate.outcome import Recorder, SizeChange
from corral.lab.simulate.requests import OpenLoop, SimRequest
from corral.lab.simulate.steptime import FittedSteps
from corral.lab.simulate.world import MemberModel, ScalingModel, simulate_load

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
class Replay:
    """The figures of a replay."""

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


class _Waits(Recorder):
    """Records how long requests wait until a member begins with them."""

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self._capacity = capacity
        self.waits_s: list[float] = []
        self.next_moment_s = math.inf

    def finished(self, at_s: float, sent_s: float, first_s: float, prompt: int, output: int) -> None:
        self.completed += 1
        self.waits_s.append(max(0.0, at_s - sent_s - prompt / self._capacity))
        self.first_s, self.last_s = min(self.first_s, sent_s), max(self.last_s, at_s)


def simulate(trace: Sequence[TracedRequest], setting: ReplaySetting) -> Replay:
    """Replay a trace from the first request until the last one is answered."""
    if not trace:
        raise DataError("the trace has no requests.", "Give one request per line.")
    rows = sorted(trace, key=lambda one: one.time_s)
    first_s = rows[0].time_s
    if (span_s := rows[-1].time_s - first_s) > LONGEST_S:
        raise DataError(
            f"the trace lasts {span_s / 86400:,.0f} days; at most {LONGEST_S / 86400:,.0f} are replayed.",
            "Its times are seconds (time_s) or milliseconds (timestamp): check them, or give a part of it.",
        )
    recorder = _Waits(setting.capacity)
    requests = (SimRequest(n, row.time_s - first_s, max(1, row.tokens), 1) for n, row in enumerate(rows))
    scaling = ScalingModel(setting.least, setting.most, setting.capacity, setting.lead_s, setting.load_s)
    member = _member(setting.capacity)
    outcome = simulate_load(OpenLoop(requests), member, setting.least, "least-work", (), scaling, recorder)
    waits = sorted(recorder.waits_s)
    return Replay(
        requests=len(rows),
        tokens=sum(one.tokens for one in rows),
        span_s=outcome.duration_s,
        changes=tuple(recorder.changes),
        mean_wait_s=mean(waits),
        p99_wait_s=waits[int(0.99 * (len(waits) - 1))],
        longest_wait_s=waits[-1],
        member_s=outcome.member_s,
        clairvoyant_s=clairvoyant_s(rows, setting),
    )


def _member(capacity: float) -> MemberModel:
    """A server that makes so many tokens per second, for one request after the other; a second one waits there."""
    steps = FittedSteps(step_s=0.0, sequence_s=0.0, kv_s=0.0, prompt_s=1 / capacity)
    return MemberModel(EngineShape(token_budget=1 << 60, max_seqs=2, prefix_cache=False), steps)


def clairvoyant_s(rows: Sequence[TracedRequest], setting: ReplaySetting) -> float:
    """The job time of a schedule that knows the trace."""
    width = max(1.0, setting.load_s)
    first, last = rows[0].time_s, rows[-1].time_s
    tokens_by_step = [0.0] * (int((last - first) // width) + 1)
    for row in rows:
        tokens_by_step[int((row.time_s - first) // width)] += row.tokens
    total, before, left = 0.0, 0, 0.0
    for tokens in tokens_by_step:
        left += tokens
        count = max(setting.least, min(setting.most, math.ceil(left / (setting.capacity * width) - 1e-9)))
        left = max(0.0, left - count * setting.capacity * width)
        total += count * width + max(0, count - max(before, setting.least)) * setting.load_s
        before = count
    return total + left / setting.capacity
