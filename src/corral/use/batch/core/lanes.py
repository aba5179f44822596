"""The endpoints of a job: each a lane with its own connections, pace and health.

A lane that loses its server stops sending, finds it again (a deployment may come back on another port with
another key), asks `/health` until it is served, and goes on. It reads `/metrics` once a second, more often while the
pace still seeks its level: for that, for the progress shown to people, and to notice an engine that answers `/health`
but computes nothing.

What a failed request means: for the row, for the endpoint, for the whole job.

    ROW       the row is at fault (HTTP 400): error file, at once
    AGAIN     bad luck (5xx, abort, cut answer, timeout): try again later, a bounded number of times
    LATER     the server asks for patience (429, 503): try again, with less at once; not the row's fault
    GONE      the connection broke while the row was under way: try again when the server is back; counts a little,
              so that a row that kills the engine does not do so for ever
    AWAY      the server cannot be reached, or somebody else has its port: wait for it; counts nothing
    FATAL     nothing will ever work (key refused, model unknown): stop

The table of errors themselves is in `corral.client.errors`.
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
from corral.use.batch.core.pace import LanePace

PROBE_FIRST_S, PROBE_LONGEST_S = 0.05, 5.0
LOOK_AGAIN_S = 2.0
REPORT_AGAIN_S = 60.0  # while a server is away, what it does meanwhile


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
        self.absence: Absence | None = None  # while it is away, as far as it was asked
        self.in_flight = 0
        self.weight = 0  # of what is in flight
        self.finished = 0
        self.losses = 0
        self.reading: Reading | None = None
        self._progress: tuple[float, float] = (0.0, 0.0)  # (sum of counters, when it last grew)
        self._finished = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._old: list[Client] = []
        self._probing = False
        self._looked = 0.0
        self._stranger = ""  # who answers in its place

    @property
    def room(self) -> int:
        return self.pace.limit - self.in_flight if self.up else 0

    def start(self) -> None:
        self._spawn(self._watch())
        self._seek(first=True)

    def lose(self, why: str) -> None:
        """The server is away: stop sending until it is found again."""
        if self.up:
            self.up = False
            self.losses += 1
            self.pace.gone()
            self._seek(first=False, why=why)

    def decline(self) -> None:
        """The server takes nothing now: it may be draining while a successor serves."""
        now = time.monotonic()
        if self.up and now - self._looked > LOOK_AGAIN_S:
            self._looked = now
            self._spawn(self._look_again())

    async def _look_again(self) -> None:
        with contextlib.suppress(CorralError, OSError):
            endpoint = await asyncio.to_thread(self.server.find)
            if self.client is not None and endpoint != self.client.endpoint:
                self.lose("It takes no more requests.")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in [*self._old, *([self.client] if self.client else [])]:
            await client.close()

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _seek(self, first: bool, why: str = "") -> None:
        if not self._probing:
            self._probing = True
            self._spawn(self._probe(first, why))

    async def _probe(self, first: bool, why: str) -> None:
        """Look for the server until it is healthy; whoever waits for it is told why, at first and every minute."""
        pause, told, began = PROBE_FIRST_S, 0.0, time.monotonic()
        try:
            while not await self._is_healthy():
                now = time.monotonic()
                self.absence = await asyncio.to_thread(self._ask_why)
                if now - told > REPORT_AGAIN_S if told else first or now - began > 1.0:
                    self._on_note("waiting", _words(self.absence, self._stranger or ("" if told else why)))
                    told = now
                await asyncio.sleep(pause)
                pause = min(PROBE_LONGEST_S, pause * 1.5)
        finally:
            self._probing = False
        if told:
            self._on_note("back", f"{self.server.name} answers after {time.monotonic() - began:.1f} s")
        self.up, self.was_up, self.absence = True, True, None
        self.pace.told(self.server.seats())
        self._progress = (0.0, time.monotonic())
        self._on_up(self)

    def _ask_why(self) -> Absence:
        try:
            return self.server.absence()
        except (CorralError, OSError) as error:
            return Absence(f"{self.server.name} cannot be looked at: {error}")

    @property
    def ending(self) -> CorralError | None:
        """How the server ended, when nothing speaks for its return; one stopped while in use may be started again."""
        away = self.absence
        return away.ending if away and not (away.stopped and self.was_up) else None

    async def _is_healthy(self) -> bool:
        try:
            endpoint = await asyncio.to_thread(self.server.find)  # may ask a scheduler, or open a tunnel
            if endpoint is None:
                return False
            if self.client is None or self.client.endpoint != endpoint:
                if self.client is not None:
                    self._old.append(self.client)
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
            await asyncio.sleep(self.pace.look_s)
            if not self.up or self.client is None:
                continue
            reading: Reading | None = None
            answers = True
            try:
                page = await self.client.page("/metrics", timeout_s=min(10.0, self._hang_s))
                if page.status == 200 and (found := metrics.parse(page.body, time.monotonic())).known:
                    reading = found
            except CorralError:
                answers = False
            now = time.monotonic()
            if reading is not None:
                self.reading = reading
                self.pace.seen(reading, self.in_flight, now)
            elif answers:
                self.pace.finished((self.finished - before) / (now - then), self.in_flight, now)
            if reading or not answers:
                self._check_hang(reading, now)
            before, then = self.finished, now
            self._on_up(self)

    def _check_hang(self, reading: Reading | None, now: float) -> None:
        """A server with work that counts no token for long, or says nothing, is dead, whatever /health says."""
        tokens = (reading.generated_tokens or 0) + (reading.prompt_tokens or 0) if reading else 0
        done = self.finished + tokens
        moved = done != self._progress[0] if reading else self.finished != self._finished
        self._finished = self.finished
        if not self.in_flight or moved:
            self._progress = (done, now)
        elif now - self._progress[1] > self._hang_s and self.client is not None:
            what = "has work but made no token" if reading else "answered nothing"
            self._on_note("hung", f"{self.server.name} {what} for {self._hang_s:g} s")
            self._old.append(self.client)
            stuck, self.client = self.client, None
            self._spawn(stuck.close())
            self.lose("It made no progress.")


def _words(absence: Absence, why: str) -> str:
    return " ".join(word for word in (f"{absence.text}; waiting for it.", absence.remedy, why) if word)


class Verdict(enum.Enum):
    ROW = "row"
    AGAIN = "again"
    LATER = "later"
    GONE = "gone"
    AWAY = "away"
    FATAL = "fatal"


def judge(error: RequestError) -> Verdict:
    """What to do after this error."""
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
