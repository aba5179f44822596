"""The endpoints of a run: each a lane with its own connections, pace and health; and what a failed request means.

A lane that loses its server stops sending, finds it again (a deployment may come back on another port with another
key), asks `/health` until it is served, and goes on. It reads `/metrics` once a second, more often while the pace
still seeks its level: for the pace, for the progress shown to people, and to notice an engine that answers `/health`
but computes nothing.

The pace is how many requests a lane keeps under way: enough to keep the engine full, and no more. It starts high,
because a vLLM engine is only full when something waits for it: at what the deployment's plan lets run at once and a
queue behind it, or at 256 without a plan. Then it follows the server's metrics:

- a queue longer than a quarter of the running requests (and 8), and no more of them than at the last reading: down to
  the running ones plus that; more would only wait. (An engine takes in a burst over seconds: a rising one is not
  full.)
- nothing waits, the KV cache has room, and the limit is reached: up by half. Until the server was full for the first
  time it is read four times a second, and the limit doubled whenever all that was sent is running. (Once a second
  when everything there is to do is running; and less often, until a step ends, when none ended between two readings.)
- preemptions since the last reading: down by a fifth, because work is being thrown away;
- 429 or 503: down by three tenths, at most once per second.

Without metrics (servers that are not vLLM) the pace follows throughput: up by half while it grows by 5% or more, back
down when the rise brought nothing and answers only became slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable

from corral.base.errors import CorralError
from corral.client import metrics
from corral.client.client import Client
from corral.client.endpoint import Absence, ModelServer
from corral.client.errors import (
    KeyRefusedError,
    OverloadedError,
    RequestError,
    ServerGoneError,
    StrangerError,
    TimedOutError,
    UnknownModelError,
    UnknownPathError,
)
from corral.client.metrics import Reading
from corral.client.row_socket import open_client

POLL_FIRST_S, POLL_S = 0.25, 1.0


def _with_queue(running: float) -> float:
    """The running requests and a queue behind them, so that a free seat is filled at once."""
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
        self._level = fixed is not None  # the server was full once: from now on the number only follows it
        self._poll_s = POLL_FIRST_S
        self._shown: tuple[float | None, ...] = ()
        self._rate = 0.0
        self._rose = False

    @property
    def poll_s(self) -> float:
        """How long to wait before the server's metrics are read again."""
        return POLL_S if self._level else self._poll_s

    def set_seats(self, seats: int | None) -> None:
        """Begin with the number of requests that run at once by the deployment's plan."""
        if seats and self._fixed is None and not self._level:
            self._highest = max(self._highest, round(_with_queue(seats)))
            self._set(_with_queue(seats))

    def overloaded(self, now: float) -> None:
        """The server said 429 or 503."""
        if self._fixed is None and now - self._shrunk_at >= 1.0:
            self._shrunk_at, self._level = now, True
            self._set(self.limit * 0.7)

    def reset(self) -> None:
        """The server was lost and has to fill again: keep the limit, and learn its level anew."""
        self._preemptions, self._running, self._rate, self._rose = None, None, 0.0, False
        self._poll_s, self._shown = POLL_FIRST_S, ()

    def follow_metrics(self, reading: Reading, in_flight: int, now: float) -> None:
        """Follow the server's own numbers."""
        if self._fixed is not None:
            return
        running, waiting, preemptions = reading.running or 0, reading.waiting or 0, reading.preemptions or 0.0
        before, self._preemptions = self._preemptions, preemptions
        self._grown_at = now if self._grown_at is None else self._grown_at
        full = _with_queue(running)
        self._poll_s = self._next_poll(reading, in_flight)
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

    def _next_poll(self, reading: Reading, in_flight: int) -> float:
        """How long to wait before the next poll: each one costs the server time."""
        shown = reading.running, reading.waiting, reading.generated_tokens, reading.prompt_tokens
        before, self._shown = self._shown, shown
        if not reading.waiting and (reading.running or 0) >= in_flight and in_flight < self.limit:
            return POLL_S
        return min(POLL_S, 2 * self._poll_s) if shown == before else POLL_FIRST_S

    def follow_throughput(self, per_s: float, in_flight: int, now: float) -> None:
        """Follow throughput, for servers without metrics; called about once a second."""
        self._level = True  # nothing says when it is full
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


PROBE_FIRST_S, PROBE_LONGEST_S = 0.05, 5.0
MOVED_CHECK_S = 2.0
WAITING_NOTE_S = 60.0  # while a server is away, what it does meanwhile


class Lane:
    """One endpoint in use."""

    def __init__(
        self,
        server: ModelServer,
        pace: LanePace,
        *,
        stall_s: float,
        hang_s: float,
        on_up: Callable[[Lane], None],
        on_note: Callable[[str, str], None],
    ) -> None:
        self.server, self.pace = server, pace
        self._stall_s, self._hang_s = stall_s, hang_s
        self._on_up, self._on_note = on_up, on_note
        self.client: Client | None = None
        self.up = self.was_up = False
        self.absence: Absence | None = None  # why it is away, once that was asked
        self.in_flight = 0
        self.weight = 0  # of what is in flight
        self.finished = 0
        self.losses = 0
        self.reading: Reading | None = None
        self._progress: tuple[float, float] = (0.0, 0.0)  # (sum of counters, when it last grew)
        self._finished = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._retired: list[Client] = []
        self._probing = False
        self._moved_check = 0.0
        self._stranger = ""  # who answers in its place

    @property
    def room(self) -> int:
        return self.pace.limit - self.in_flight if self.up else 0

    def start(self) -> None:
        self._spawn(self._watch())
        self._start_probe(first=True)

    def lose(self, why: str) -> None:
        """The server is away: stop sending until it is found again."""
        if self.up:
            self.up = False
            self.losses += 1
            self.pace.reset()
            self._start_probe(first=False, why=why)

    def check_moved(self) -> None:
        """The server refuses requests: it may be draining while a successor serves."""
        now = time.monotonic()
        if self.up and now - self._moved_check > MOVED_CHECK_S:
            self._moved_check = now
            self._spawn(self._leave_if_moved())

    async def _leave_if_moved(self) -> None:
        with contextlib.suppress(CorralError, OSError):
            endpoint = await asyncio.to_thread(self.server.find)
            if self.client is not None and endpoint != self.client.endpoint:
                self.lose("It accepts no more requests.")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in [*self._retired, *([self.client] if self.client else [])]:
            await client.close()

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_probe(self, first: bool, why: str = "") -> None:
        if not self._probing:
            self._probing = True
            self._spawn(self._probe(first, why))

    async def _probe(self, first: bool, why: str) -> None:
        """Look for the server until it is healthy; note why it is away, at first and every minute."""
        pause, noted, began = PROBE_FIRST_S, 0.0, time.monotonic()
        try:
            while not await self._is_healthy():
                now = time.monotonic()
                self.absence = await asyncio.to_thread(self._why_away)
                if now - noted > WAITING_NOTE_S if noted else first or now - began > 1.0:
                    self._on_note("waiting", _waiting_text(self.absence, self._stranger or ("" if noted else why)))
                    noted = now
                await asyncio.sleep(pause)
                pause = min(PROBE_LONGEST_S, pause * 1.5)
        finally:
            self._probing = False
        if noted:
            self._on_note("back", f"{self.server.name} answers after {time.monotonic() - began:.1f} s")
        self.up, self.was_up, self.absence = True, True, None
        self.pace.set_seats(self._seats())
        self._progress = (0.0, time.monotonic())
        self._on_up(self)

    def _seats(self) -> int | None:
        with contextlib.suppress(CorralError, OSError):  # what its files say of it cannot be read: it answers
            return self.server.seats()
        return None

    def _why_away(self) -> Absence:
        try:
            return self.server.absence()
        except (CorralError, OSError) as error:
            return Absence(f"{self.server.name} cannot be asked: {error}")

    @property
    def ending(self) -> CorralError | None:
        """How the server ended, if it will not come back by itself; one stopped while in use may be started again."""
        absence = self.absence
        return absence.ending if absence and not (absence.stopped and self.was_up) else None

    async def _is_healthy(self) -> bool:
        try:
            endpoint = await asyncio.to_thread(self.server.find)  # may ask a scheduler, or open a tunnel
            if endpoint is None:
                return False
            if self.client is None or self.client.endpoint != endpoint:
                if self.client is not None:
                    self._retired.append(self.client)
                self.client = open_client(endpoint, connections=4096, stall_s=self._stall_s)
            self.client.forget_key()
            self._stranger = ""
            return (await self.client.page("/health", timeout_s=5)).status in (200, 404)
        except StrangerError as error:
            self._stranger = error.message
            return False
        except (RequestError, OSError):
            return False
        except CorralError as error:
            self._on_note("waiting", error.message)
            return False

    async def _watch(self) -> None:
        """Follow the server's metrics, or its throughput where it has none."""
        before, then = 0, time.monotonic()
        while True:
            await asyncio.sleep(self.pace.poll_s)
            if not self.up or self.client is None:
                continue
            reading: Reading | None = None
            answers = True
            try:
                page = await self.client.page("/metrics", timeout_s=min(10.0, self._hang_s))
                if page.status == 200 and (read := metrics.parse(page.body, time.monotonic())).known:
                    reading = read
            except CorralError:
                answers = False
            now = time.monotonic()
            if reading is not None:
                self.reading = reading
                self.pace.follow_metrics(reading, self.in_flight, now)
            elif answers:
                self.pace.follow_throughput((self.finished - before) / (now - then), self.in_flight, now)
            if reading or not answers:
                self._check_hang(reading, now)
            before, then = self.finished, now
            self._on_up(self)

    def _check_hang(self, reading: Reading | None, now: float) -> None:
        """Give up a server that has work and counts no token for long, whatever /health says."""
        tokens = (reading.generated_tokens or 0) + (reading.prompt_tokens or 0) if reading else 0
        done = self.finished + tokens
        moved = done != self._progress[0] if reading else self.finished != self._finished
        self._finished = self.finished
        if not self.in_flight or moved:
            self._progress = (done, now)
        elif now - self._progress[1] > self._hang_s and self.client is not None:
            what = "has work but made no token" if reading else "answered nothing"
            self._on_note("hung", f"{self.server.name} {what} for {self._hang_s:g} s")
            self._retired.append(self.client)
            stuck, self.client = self.client, None
            self._spawn(stuck.close())
            self.lose("It made no progress.")


def _waiting_text(absence: Absence, why: str) -> str:
    return " ".join(filter(None, (f"{absence.text}; waiting for it.", absence.remedy, why)))


class Verdict(enum.Enum):
    """What a failed request means: for the row, for the endpoint, for the whole run."""

    ROW = "row"  # the row is at fault (HTTP 400): error file, at once
    AGAIN = "again"  # 5xx, abort, cut answer, timeout: try again later, a bounded number of times
    LATER = "later"  # the server asks for patience (429, 503): try again, with fewer at once; not the row's fault
    GONE = "gone"  # the connection broke: try again when the server is back; counted, as the row may kill the engine
    AWAY = "away"  # the server cannot be reached, or its port is another user's: wait for it; not counted
    FATAL = "fatal"  # nothing will ever work (key refused, model unknown): stop


def judge(error: RequestError) -> Verdict:
    """What this error means (the errors themselves: `corral.client.errors`)."""
    if isinstance(error, (ServerGoneError, TimedOutError)) and not error.reached:
        return Verdict.AWAY
    if isinstance(error, StrangerError):
        return Verdict.AWAY
    if isinstance(error, ServerGoneError):
        return Verdict.GONE
    if isinstance(error, OverloadedError):
        return Verdict.LATER
    if isinstance(error, (KeyRefusedError, UnknownModelError, UnknownPathError)):
        return Verdict.FATAL
    return Verdict.AGAIN if error.retryable else Verdict.ROW
