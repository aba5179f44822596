"""How many requests to keep under way at one endpoint: enough to keep the engine full, and no more.

The number starts high, because a vLLM engine is only full when something waits for it: at what the deployment's plan
lets run at once and a queue behind it, or at 256 where no plan tells. Then it follows what the server shows, once a
second:

- a queue longer than a quarter of what runs (and 8), and no more of it running than at the last look: down to what
  runs plus that; more would only sit there. (An engine takes in a burst over seconds: what still rises is not full.)
- nothing waits, the KV cache has room, and we were at our limit: up by half; until the server was full for the first
  time it is asked four times a second, and the number doubled whenever all that was sent is running;
- preemptions since the last look: down by a fifth: work is being thrown away;
- 429 or 503: down by three tenths, at most once per second.

Without metrics (servers that are not vLLM), throughput is the guide: up by half while it grows by 5% or more, back
down when the rise brought nothing and answers only became slower.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Gauges", "Pace", "read_gauges"]

_LINE = re.compile(rb"^vllm:(\w+?)(?:_total)?(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.M)
_NAMES = {
    b"num_requests_running": "running",
    b"num_requests_waiting": "waiting",
    b"kv_cache_usage_perc": "kv_use",
    b"num_preemptions": "preemptions",
    b"generation_tokens": "generated",
    b"prompt_tokens": "prompted",
    b"prefix_cache_hits": "hits",
    b"prefix_cache_queries": "queries",
}


@dataclass
class Gauges:
    """What `/metrics` shows; counters since the server started, summed over its engines."""

    running: float = 0.0
    waiting: float = 0.0
    kv_use: float = 0.0
    preemptions: float = 0.0
    generated: float = 0.0
    prompted: float = 0.0
    hits: float = 0.0
    queries: float = 0.0


def read_gauges(page: bytes) -> Gauges | None:
    """The gauges in a Prometheus page of vLLM; None when it is not one."""
    gauges, found = Gauges(), False
    for name, value in _LINE.findall(page):
        field = _NAMES.get(name)
        if field == "kv_use":
            gauges.kv_use = max(gauges.kv_use, float(value))
            found = True
        elif field:
            setattr(gauges, field, getattr(gauges, field) + float(value))
            found = True
    return gauges if found else None


def _with_queue(running: float) -> float:
    """What runs, and a queue that is never empty when a place becomes free."""
    return running + max(8.0, running / 4)


class Pace:
    """The limit of one endpoint; fixed when `fixed` is given."""

    def __init__(self, start: int = 256, highest: int = 1024, fixed: int | None = None, most: int = 1 << 20) -> None:
        self._fixed, self._most = fixed, most  # `most`: connections that this process may open
        self._highest = max(highest, start)
        self.limit = min(fixed or start, most)
        self._running: float | None = None
        self._preemptions: float | None = None
        self._shrunk_at = -10.0
        self._grown_at: float | None = None
        self._level = fixed is not None  # the server was full once: from here on the number only follows it
        self._rate = 0.0
        self._rose = False

    @property
    def look_s(self) -> float:
        """How long to wait before the next look at the server."""
        return 1.0 if self._level else 0.25

    def told(self, seats: int | None) -> None:
        """The deployment's plan says how many requests run at once there."""
        if seats and self._fixed is None and not self._level:
            self._highest = max(self._highest, round(_with_queue(seats)))
            self._set(_with_queue(seats))

    def overloaded(self, now: float) -> None:
        """The server said 429 or 503."""
        if self._fixed is None and now - self._shrunk_at >= 1.0:
            self._shrunk_at, self._level = now, True
            self._set(self.limit * 0.7)

    def gone(self) -> None:
        """The server was lost and has to fill again: start where it was, it will say when that is too much."""
        self._preemptions, self._running, self._rate, self._rose = None, None, 0.0, False

    def seen(self, gauges: Gauges, in_flight: int, now: float) -> None:
        """Follow the server's own numbers."""
        if self._fixed is not None:
            return
        before, self._preemptions = self._preemptions, gauges.preemptions
        self._grown_at = now if self._grown_at is None else self._grown_at
        full = _with_queue(gauges.running)
        rising = self._running is None or gauges.running > 1.05 * self._running
        self._running = gauges.running
        self._level |= bool(gauges.waiting) and not rising
        if before is not None and gauges.preemptions > before:
            self._level = True
            self._set(min(self.limit, gauges.running + gauges.waiting) * 0.8)
        elif gauges.running + gauges.waiting > full and not rising:
            self._set(min(self.limit, full))
        elif not gauges.waiting and in_flight >= self.limit and gauges.kv_use < 0.9 and now - self._shrunk_at > 5.0:
            if not self._level and gauges.running >= 0.9 * in_flight:
                self._grow(2.0, now)
            elif now - self._grown_at > 0.9:
                self._grow(1.5, now)

    def finished(self, per_s: float, in_flight: int, now: float) -> None:
        """Follow throughput, for servers without metrics; called about once a second."""
        self._level = True  # nothing will say when it is
        if self._fixed is not None or now - self._shrunk_at <= 5.0:
            return
        if self._rose and per_s < self._rate * 1.05:
            self._rose = False
            self._set(self.limit / 1.5)
            self._rate = max(self._rate, per_s)
        elif in_flight >= self.limit and per_s > self._rate * 1.05:
            self._rose, self._rate = True, per_s
            self._set(self.limit * 1.5)

    def _grow(self, factor: float, now: float) -> None:
        self._grown_at = now
        self._set(self.limit * factor)

    def _set(self, value: float) -> None:
        self.limit = max(1, min(self._highest, self._most, round(value)))
