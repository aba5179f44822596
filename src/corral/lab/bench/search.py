"""The highest load that still meets its service levels, in few probes.

A saturating probe (closed loop, many at once) tells the most the server can finish; the answer lies below. From there
the search narrows geometrically: each probe offers a rate in the open loop, and passes when every promise holds and
the server keeps up: when first-token times do not grow with time (a queue that grows breaks any promise sooner or
later, however short the probe). It ends when the bracket is narrower than the tolerance, or after `most` probes.

`Searching` is pure: it says what to offer next and takes whether it passed; the world is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from corral.lab.bench.metrics import Summary, statistic
from corral.lab.bench.rows import RequestRow
from corral.lab.bench.slope import slope_of
from corral.lab.bench.spec import Slo

_GROWTH = 0.015  # seconds of waiting gained per second: the queue grows


@dataclass(frozen=True)
class Probe:
    """One load that was tried."""

    load: float
    passed: bool
    why: str = ""
    run: str = ""


@dataclass
class Searching:
    """Narrows the bracket between the highest load that passed and the lowest that did not."""

    ceiling: float  # the most the server finishes
    tolerance: float = 0.03
    most: int = 12
    whole: bool = False  # loads are whole numbers (concurrency)
    probes: list[Probe] = field(default_factory=list)

    @property
    def best(self) -> float | None:
        return max((probe.load for probe in self.probes if probe.passed), default=None)

    @property
    def worst(self) -> float | None:
        """The lowest load that failed above the best that passed."""
        best = self.best or 0.0
        return min((probe.load for probe in self.probes if not probe.passed and probe.load > best), default=None)

    def next(self) -> float | None:
        """The load to try, or None when the answer is known well enough."""
        if len(self.probes) >= self.most:
            return None
        best, worst = self.best, self.worst
        if not self.probes:
            return self._round(self.ceiling * 0.95)
        if best is None:
            lowest = min(probe.load for probe in self.probes)
            if lowest <= self.ceiling / 4096 or (self.whole and lowest <= 1):
                return None
            return self._round(lowest / (1.25 if len(self.probes) == 1 else 2.0))
        if worst is None:
            return self._round(best * 1.08)
        if worst / best <= 1 + self.tolerance or (self.whole and worst - best <= 1):
            return None
        return self._round(math.sqrt(best * worst))

    def add(self, probe: Probe) -> None:
        self.probes.append(probe)

    def _round(self, load: float) -> float:
        if not self.whole:
            return float(f"{load:.4g}")
        tried = {probe.load for probe in self.probes}
        load = max(1, round(load))
        return float(load if load not in tried else load + 1)


def probe_requests(slos: Sequence[Slo], rate: float, seconds: float, most: int = 5000) -> int:
    """Requests of one probe: long enough in time, and enough for the highest percentile promised."""
    from corral.lab.bench.gate import needed

    least = max((needed(slo.percentile) for slo in slos), default=50)
    return min(most, max(math.ceil(rate * seconds), min(least, 1000)))


def backlog_slope(rows: Sequence[RequestRow]) -> float:
    """Seconds of first-token time gained per second of sending, 0 unless that is more than chance (t over 4)."""
    points = [(row.intended_ns / 1e9, row.ttft_s) for row in rows if row.ok and row.chunk_ns]
    if len(points) < 20:
        return 0.0
    slope, error = slope_of(points)
    return slope if slope > 4 * error else 0.0


def passes(slos: Sequence[Slo], summary: Summary, rows: Sequence[RequestRow], open_loop: bool) -> tuple[bool, str]:
    """Whether a probe met every promise, and the first that it broke."""
    if summary.failed:
        return False, f"{summary.failed} requests failed"
    for slo in slos:
        value = statistic(summary, slo)
        if value > slo.limit_ms:
            return False, f"{slo.metric} {slo.statistic} was {value:,.1f} ms"
    if open_loop and (slope := backlog_slope(rows)) > _GROWTH:
        return False, f"the queue grew: {slope * 1000:.0f} ms of waiting more every second"
    return True, ""
