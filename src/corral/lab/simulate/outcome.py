"""The result of a simulation, in memory that does not grow with the number of requests.

Latencies go into buckets 0.4% apart, so a percentile is good to 0.2%; what happened over time is kept at no more than
a few hundred moments, which lie further apart the longer it takes. From them also comes whether the servers keep up:
where more requests arrive than are answered, latencies of a short load do not predict those of a longer one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from corral.lab.bench.metrics import slope_of
from corral.lab.bench.spec import Slo

_WIDTH = math.log(1.004)
_LEAST_S = 1e-7


class LatencySketch:
    """Counts of values by their logarithm."""

    __slots__ = ("_counts", "count", "largest", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count, self.total, self.largest = 0, 0.0, 0.0

    def add(self, value_s: float) -> None:
        bucket = math.floor(math.log(value_s if value_s > _LEAST_S else _LEAST_S) / _WIDTH)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.count += 1
        self.total += value_s
        if value_s > self.largest:
            self.largest = value_s

    @property
    def mean_s(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, p: float) -> float:
        """In seconds; 0 where there is nothing."""
        wanted, seen = (self.count - 1) * p / 100, 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen > wanted:
                return min(self.largest, math.exp((bucket + 0.5) * _WIDTH))
        return 0.0

    def share_within(self, limit_s: float) -> float:
        """The share of values at or below a limit."""
        edge = math.floor(math.log(max(limit_s, _LEAST_S)) / _WIDTH)
        return sum(n for bucket, n in self._counts.items() if bucket <= edge) / self.count if self.count else 0.0


@dataclass(frozen=True)
class Moment:
    """The fleet at one time."""

    at_s: float
    kv_use: float  # of the fullest member's engines, on average
    running: int
    waiting: int
    preemptions: int
    members: int


@dataclass(frozen=True)
class SizeChange:
    """A decision to have another number of members."""

    time_s: float
    wanted: int
    why: str


@dataclass(frozen=True)
class SloResult:
    """Whether a service level was met, and the share of requests within its limit."""

    slo: Slo
    value_ms: float  # of its statistic
    met: bool
    within: float  # the share of the requests whose own figure is at or below the limit


@dataclass(frozen=True)
class SimOutcome:
    """The figures of one simulation."""

    sent: int
    completed: int
    refused: int  # longer than the KV cache
    duration_s: float
    input_tokens: int
    output_tokens: int
    computed_tokens: int
    cached_tokens: int
    preemptions: int
    peak_kv_use: float
    peak_running: int
    mean_running: float
    members: int  # the most at once
    member_s: float
    arrival_rate: float  # requests per second, while they were sent
    gained: float  # the share of these by which the servers fall behind; 0: they keep up
    latencies: dict[str, dict[str, float]]  # metric -> statistic -> ms
    slos: tuple[SloResult, ...] = ()
    moments: tuple[Moment, ...] = ()

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration_s if self.duration_s else 0.0

    @property
    def meets(self) -> bool:
        """Whether every service level is met, also if the load lasts, and no request was refused."""
        return self.completed > 0 and not self.refused and not self.gained and all(one.met for one in self.slos)


_MOMENTS = 240
_GAINED = 0.05  # of the requests that come; less is chance
_CERTAIN = 4.0  # times what chance alone does


def _gained(moments: Sequence[Moment], begin_s: float, end_s: float, rate: float) -> float:
    """The share of arriving requests by which the servers fell behind, where that is more than chance."""
    points = [(one.at_s, one.running + one.waiting) for one in moments if begin_s <= one.at_s <= end_s]
    if len(points) < 20 or rate <= 0:
        return 0.0
    slope, _ = slope_of(points)
    chance = math.sqrt(sum(count for _, count in points) / len(points))  # of a number of independent requests
    grown = slope * (points[-1][0] - points[0][0])
    return slope / rate if slope > _GAINED * rate and grown > _CERTAIN * chance else 0.0


class Recorder:
    """Counts what happens, one request after the other."""

    def __init__(self, slos: Sequence[Slo] = ()) -> None:
        self._slos = tuple(slos)
        self.sketches = {name: LatencySketch() for name in ("ttft", "tpot", "e2el")}
        self.sent = self.completed = self.refused = self.input_tokens = self.output_tokens = 0
        self.first_s, self.last_s, self.busy_s = math.inf, 0.0, 0.0
        self._last_sent_s = 0.0  # the last one
        self.peak_kv, self.peak_running = 0.0, 0
        self._moments: list[Moment] = []
        self.next_moment_s, self._every_s = 0.0, 0.05
        self.changes: list[SizeChange] = []

    def finished(self, at_s: float, sent_s: float, first_s: float, prompt: int, output: int) -> None:
        self.completed += 1
        self.input_tokens += prompt
        self.output_tokens += output
        self.sketches["ttft"].add(first_s - sent_s)
        self.sketches["e2el"].add(at_s - sent_s)
        self.busy_s += at_s - sent_s
        if output > 1:
            self.sketches["tpot"].add((at_s - first_s) / (output - 1))
        self.first_s, self._last_sent_s = min(self.first_s, sent_s), max(self._last_sent_s, sent_s)
        self.last_s = max(self.last_s, at_s)

    def moment(self, one: Moment) -> None:
        self.peak_kv = max(self.peak_kv, one.kv_use)
        self.peak_running = max(self.peak_running, one.running)
        self._moments.append(one)
        if len(self._moments) > 2 * _MOMENTS:
            self._moments, self._every_s = self._moments[::2], self._every_s * 2
        self.next_moment_s = one.at_s + self._every_s

    def latencies(self) -> dict[str, dict[str, float]]:
        points = {50.0, 90.0, 95.0, 99.0, *(one.percentile for one in self._slos)}
        statistics = {}
        for name, sketch in self.sketches.items():
            cuts = {f"p{p:g}": sketch.percentile(p) * 1000 for p in sorted(points)}
            statistics[name] = {"mean": sketch.mean_s * 1000, "median": cuts["p50"], **cuts}
        return statistics

    def outcome(self, computed: int, cached: int, preemptions: int, members: int, member_s: float) -> SimOutcome:
        duration_s = max(0.0, self.last_s - self.first_s) if self.completed else 0.0
        latencies, sending_s = self.latencies(), self._last_sent_s - self.first_s
        rate = (self.completed - 1) / sending_s if sending_s > 0 else 0.0
        return SimOutcome(
            sent=self.sent,
            completed=self.completed,
            refused=self.refused,
            duration_s=duration_s,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            computed_tokens=computed,
            cached_tokens=cached,
            preemptions=preemptions,
            peak_kv_use=self.peak_kv,
            peak_running=self.peak_running,
            mean_running=self.busy_s / duration_s if duration_s else 0.0,
            members=members,
            member_s=member_s,
            arrival_rate=rate,
            gained=_gained(self._moments, self.first_s + self._filled_s(sending_s), self._last_sent_s, rate),
            latencies=latencies,
            slos=tuple(self._result(one, latencies[one.metric][one.statistic]) for one in self._slos),
            moments=tuple(self._moments),
        )

    def _filled_s(self, sending_s: float) -> float:
        """How long empty servers take to fill up: half of the sending time, or the time of an answer."""
        return max(sending_s / 2, 1.5 * self.sketches["e2el"].percentile(25))

    def _result(self, slo: Slo, value_ms: float) -> SloResult:
        within = self.sketches[slo.metric].share_within(slo.limit_ms / 1000)
        return SloResult(slo, value_ms, value_ms <= slo.limit_ms, within)
