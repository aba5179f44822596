"""How many requests to keep under way at one endpoint: enough to keep the engine full, and no more.

The number starts high, because a vLLM engine is only full when something waits for it: at what the deployment's plan
lets run at once and a queue behind it, or at 256 where no plan tells. Then it follows what the server shows, once a
second:

- a queue longer than a quarter of what runs (and 8), and no more of it running than at the last look: down to what
  runs plus that; more would only sit there. (An engine takes in a burst over seconds: what still rises is not full.)
- nothing waits, the KV cache has room, and we were at our limit: up by half; until the server was full for the first
  time it is asked four times a second, and the number doubled whenever all that was sent is running. (Once a second,
  where all that there is to do is running; and less often, until a step ends, where none ended between two looks.)
- preemptions since the last look: down by a fifth: work is being thrown away;
- 429 or 503: down by three tenths, at most once per second.

Without metrics (servers that are not vLLM), throughput is the guide: up by half while it grows by 5% or more, back
down when the rise brought nothing and answers only became slower.
"""

from __future__ import annotations

from corral.client.metrics import Reading

LOOK_FIRST_S, LOOK_S = 0.25, 1.0


def _with_queue(running: float) -> float:
    """What runs, and a queue that is never empty when a place becomes free."""
    return running + max(8.0, running / 4)


class LanePace:
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
        self._look_s = LOOK_FIRST_S
        self._shown: tuple[float | None, ...] = ()
        self._rate = 0.0
        self._rose = False

    @property
    def look_s(self) -> float:
        """How long to wait before the next look at the server."""
        return LOOK_S if self._level else self._look_s

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
        self._look_s, self._shown = LOOK_FIRST_S, ()

    def seen(self, reading: Reading, in_flight: int, now: float) -> None:
        """Follow the server's own numbers."""
        if self._fixed is not None:
            return
        running, waiting, preemptions = reading.running or 0, reading.waiting or 0, reading.preemptions or 0.0
        before, self._preemptions = self._preemptions, preemptions
        self._grown_at = now if self._grown_at is None else self._grown_at
        full = _with_queue(running)
        self._look_s = self._next_look(reading, in_flight)
        rising = self._running is None or running > 1.05 * self._running
        self._running = running
        self._level |= bool(waiting) and not rising
        room = (reading.kv_use_fullest or 0.0) < 0.9
        if before is not None and preemptions > before:
            self._level = True
            self._set(min(self.limit, running + waiting) * 0.8)
        elif running + waiting > full and not rising:
            self._set(min(self.limit, full))
        elif not waiting and in_flight >= self.limit and room and now - self._shrunk_at > 5.0:
            if not self._level and running >= 0.9 * in_flight:
                self._grow(2.0, now)
            elif now - self._grown_at > 0.9:
                self._grow(1.5, now)

    def _next_look(self, reading: Reading, in_flight: int) -> float:
        """When the server may show something that lets more go: each look takes time from it."""
        shown = reading.running, reading.waiting, reading.generated_tokens, reading.prompt_tokens
        before, self._shown = self._shown, shown
        if not reading.waiting and (reading.running or 0) >= in_flight and in_flight < self.limit:
            return LOOK_S
        return min(LOOK_S, 2 * self._look_s) if shown == before else LOOK_FIRST_S

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
