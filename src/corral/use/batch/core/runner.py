"""The loop that keeps endpoints full and turns rows into results: futures and callbacks, no task per row.

Rows come from a feed; a `Work` makes the requests of a row and its result line; finished lines go through a
`WriteBuffer` into the ledger. Only rows under way are in memory. Every lane takes its next row when it has room, so a
fast endpoint does more; when no row is left, idle lanes repeat the oldest rows of slow ones, and the first answer
counts.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from corral.base.errors import CorralError, DataError, EngineError, UnreachableError
from corral.client.client import JSON
from corral.client.endpoint import ModelServer
from corral.client.errors import RequestError
from corral.client.fanout import backoff_s
from corral.client.pool import Page, open_files
from corral.client.reply import Reply
from corral.use.batch.core.lanes import Lane, LanePace, Verdict, judge
from corral.use.batch.core.ledger import LedgerEntry, WriteBuffer
from corral.use.batch.core.records import FAILED, FINE
from corral.use.batch.core.table import RowReader

KEPT = "Everything up to here is kept. When the server is back, run the same command again."
_OTHER_FILES = 64  # that a process has open besides its connections


class RowRequest(NamedTuple):
    """One request of a row; a mapping gets the endpoint's model unless it names one."""

    path: str
    body: Mapping[str, Any] | bytes  # b"" with `page`: GET
    weight: int = 0  # what it takes of `RunnerSettings.most_weight`
    page: bool = False  # the answer is no completion (`/tokenize`)
    content_type: str = JSON


class RowStep(NamedTuple):
    """Requests of a row that are sent at once (all must succeed), and the context that their result needs."""

    requests: Sequence[RowRequest]
    context: Any = None


class Work(Protocol):
    """Turns rows into requests, and replies into result lines."""

    def first_step(self, number: int, raw: bytes) -> RowStep:
        """The first requests of a row; a CorralError sends the row to the error file."""

    def result(self, number: int, context: Any, replies: Sequence[Any]) -> bytes | RowStep:
        """The result line, with a line feed, or the next step; DataError and RequestError are the row's fault."""

    def failure(self, number: int, raw: bytes, error: CorralError) -> bytes:
        """The row's line in the error file, with its line feed."""


class Feed(Protocol):
    """Where the next row comes from."""

    def next_row(self) -> int | None:
        """The number of a row to send now; None when there is none, now or at all."""


class RowsInOrder:
    """All rows that are not done yet, in a given order."""

    def __init__(self, order: Sequence[int], done: bytearray) -> None:
        self._rows = (number for number in order if not done[number])

    def next_row(self) -> int | None:
        return next(self._rows, None)


@dataclass(frozen=True)
class RunnerSettings:
    """Concurrency, retries, and how long to wait for what."""

    concurrency: int | None = None  # fixed, instead of adapted
    start: int = 256
    highest: int = 2048
    attempts: int = 6  # for 5xx, cut answers, aborts, timeouts
    losses: int = 20  # connections that may break under one row
    backoff_s: float = 0.5
    longest_backoff_s: float = 60.0
    patience_s: float = 1800.0  # how long nothing may succeed before the job stops
    drain_s: float = 60.0  # how long rows under way may take when asked to stop
    stall_s: float = 3600.0  # how long a server may be silent about one request
    hang_s: float = 300.0  # how long an engine may have work and make no token
    runaway_rows: int = 100  # of so many finished rows …
    runaway_share: float = 0.8  # … this share may fail; 1 never stops
    refusals_fail: bool = True  # a row that the server refuses (4xx) counts among these
    most_weight: int = 1 << 30  # of requests at one server at once, bytes of pictures; a heavier one goes alone
    wait: bool = False  # also for a server that has ended, and comes back only if somebody starts it again


@dataclass
class Counts:
    """The progress of a run."""

    rows: int = 0
    before: int = 0  # done in earlier runs
    fine: int = 0
    failed: int = 0
    retries: int = 0
    losses: int = 0  # of servers
    stolen: int = 0
    committed: int = 0
    groups: int = 0  # that were committed
    in_flight: int = 0
    peak_in_flight: int = 0
    limit: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    example: str = ""  # the last error, in words
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> int:
        return self.rows - self.before - self.fine - self.failed


class _Flight:
    """One row under way."""

    __slots__ = ("attempts", "began", "doubled", "left", "losses", "number", "raw", "replies", "step")

    def __init__(self, number: int, raw: bytes, step: RowStep) -> None:
        self.number, self.raw = number, raw
        self.attempts = self.losses = 0
        self.began = 0.0
        self.begin(step)

    def begin(self, step: RowStep) -> None:
        """Begin a step; late answers to the one before no longer count."""
        self.step = step
        self.replies: list[Reply | Page | None] = [None] * len(step.requests)
        self.left = len(step.requests)
        self.doubled = False


def _fits(most: int, lane: Lane, flight: _Flight, part: int) -> bool:
    """Whether a lane may take a request beside what it carries; alone, it may take any."""
    return not lane.weight or lane.weight + flight.step.requests[part].weight <= most


class Runner:
    """Sends the rows of one run until they are done, or the run is stopped or failed."""

    def __init__(
        self,
        work: Work,
        reader: RowReader,
        feed: Feed,
        done: bytearray,
        servers: Sequence[ModelServer],
        buffer: WriteBuffer,
        counts: Counts,
        settings: RunnerSettings,
        on_note: Callable[[str, str], None],
    ) -> None:
        self._work, self._reader, self._done, self._buffer = work, reader, done, buffer
        self.counts, self.settings, self._on_note = counts, settings, on_note
        self._feed = feed
        self._retries: list[tuple[float, int, _Flight, int]] = []  # due, tie, flight, part
        self._tie = itertools.count()
        self._held: tuple[_Flight, int] | None = None  # too heavy for what was under way
        self._flights: dict[int, _Flight] = {}
        self._recent: deque[bool] = deque(maxlen=settings.runaway_rows)
        self._trouble_since: float | None = None
        self._stop_by: float | None = None
        self._failure: CorralError | None = None
        self._changed = asyncio.Event()
        self._mean_s = 1.0
        most = max(1, (open_files() - _OTHER_FILES) // max(1, len(servers)))
        self.lanes = [
            Lane(
                server,
                LanePace(settings.start, settings.highest, settings.concurrency, most),
                stall_s=settings.stall_s,
                hang_s=settings.hang_s,
                on_up=self._fill,
                on_note=on_note,
            )
            for server in servers
        ]

    @property
    def stopped(self) -> bool:
        return self._stop_by is not None

    def stop(self) -> None:
        """Send nothing more; rows under way may finish for a while. A second call gives them up."""
        limit = self.settings.drain_s if self._stop_by is None else 0.0
        self._stop_by = time.monotonic() + limit
        self._changed.set()

    async def run(self, on_tick: Callable[[Runner], None]) -> None:
        """Work until every row has a result, or `stop` was called; raises the error that ended the run earlier."""
        for lane in self.lanes:
            lane.start()
        try:
            while not self._ended():
                self._changed.clear()
                with_timeout = asyncio.get_running_loop().call_later(0.1, self._changed.set)
                await self._changed.wait()
                with_timeout.cancel()
                self._tick()
                on_tick(self)
        finally:
            closing = [lane.close() for lane in self.lanes]
            self._done = bytearray(b"\1") * len(self._done)  # replies that arrive from now on no longer count
            await asyncio.gather(*closing)
            await self._buffer.drain()
        if self._failure:
            raise self._failure

    # Sending

    def _fill(self, lane: Lane) -> None:
        """Give a lane as much as it has room for."""
        most = self.settings.most_weight
        while lane.room > 0 and not self._buffer.full and not self._ending:
            part, self._held = self._held or self._next_request(), None
            if part is None:
                break
            if not _fits(most, lane, *part):
                self._held = part
                break
            self._send(lane, *part)

    @property
    def _ending(self) -> bool:
        """Whether nothing more is sent: results could not be kept, or the run was stopped."""
        return self._stop_by is not None or self._failure is not None or self._buffer.failure is not None

    def _next_request(self) -> tuple[_Flight, int] | None:
        """The next request: one whose pause is over, another one of a row under way, or that of a new row."""
        if self._retries and self._retries[0][0] <= time.monotonic():
            _, _, flight, part = heapq.heappop(self._retries)
            return flight, part
        while (number := self._feed.next_row()) is not None:
            try:
                raw = self._reader.raw(number)
            except CorralError as error:
                self._fail(error)
                return None
            try:
                step = self._work.first_step(number, raw)
            except CorralError as error:
                self._settle(number, FAILED, self._work.failure(number, raw, error), error)
                continue
            flight = self._flights[number] = _Flight(number, raw, step)
            flight.began = time.monotonic()
            for part in range(1, len(step.requests)):
                heapq.heappush(self._retries, (0.0, next(self._tie), flight, part))
            return flight, 0
        return None

    def _send(self, lane: Lane, flight: _Flight, part: int) -> None:
        assert lane.client is not None
        request = flight.step.requests[part]
        try:
            future: asyncio.Future[Any]
            if request.page:
                future = lane.client.post(request.path, request.body, request.content_type)
            else:
                future = lane.client.send(request.path, request.body)
        except CorralError as error:  # the key file is gone
            self._fail(error)
            return
        lane.in_flight += 1
        lane.weight += request.weight
        future.add_done_callback(partial(self._on_reply, lane, flight, flight.step, part))

    # Receiving

    def _on_reply(self, lane: Lane, flight: _Flight, step: RowStep, part: int, future: asyncio.Future[Any]) -> None:
        lane.in_flight -= 1
        lane.weight -= step.requests[part].weight
        if future.cancelled():
            return
        error = future.exception()
        if self._done[flight.number] or flight.step is not step:
            if self._done[flight.number]:
                self._flights.pop(flight.number, None)
            self._fill(lane)
            return
        if error is None:
            lane.finished += 1
            self._trouble_since = None
            self._answered(flight, part, future.result())
        elif isinstance(error, RequestError):
            self._failed(lane, flight, part, error)
        else:
            self._fail(error if isinstance(error, CorralError) else CorralError(f"an unexpected error: {error!r}"))
        self._fill(lane)
        if not self.counts.left or self._failure:
            self._changed.set()

    def _answered(self, flight: _Flight, part: int, reply: Reply | Page) -> None:
        if flight.replies[part] is None:
            flight.replies[part] = reply
            flight.left -= 1
        counts = self.counts
        if isinstance(reply, Reply) and (usage := reply.usage) is not None:
            counts.prompt_tokens += usage.prompt_tokens
            counts.output_tokens += usage.completion_tokens or 0
            counts.cached_tokens += usage.cached_tokens or 0
        if flight.left:
            return
        self._mean_s += 0.02 * (time.monotonic() - flight.began - self._mean_s)
        replies = [reply for reply in flight.replies if reply is not None]
        try:
            line = self._work.result(flight.number, flight.step.context, replies)
        except (DataError, RequestError) as error:
            self._settle(flight.number, FAILED, self._work.failure(flight.number, flight.raw, error), error)
        except CorralError as error:
            self._fail(error)
        else:
            if isinstance(line, RowStep):
                flight.begin(line)
                for number in range(len(line.requests)):
                    heapq.heappush(self._retries, (0.0, next(self._tie), flight, number))
            else:
                self._settle(flight.number, FINE, line)

    def _failed(self, lane: Lane, flight: _Flight, part: int, error: RequestError) -> None:
        verdict, settings, now = judge(error), self.settings, time.monotonic()
        if self._stop_by is not None and verdict not in (Verdict.ROW, Verdict.FATAL):
            self._flights.pop(flight.number, None)  # the run ends: the row stays undone
            return
        if verdict is Verdict.FATAL and lane.losses and not flight.losses:
            flight.losses = 1  # after a restart the key may be a new one: find the server again first
            verdict = Verdict.AWAY
        self.counts.example = error.message
        retry_after_s: float | None = None
        if verdict is Verdict.FATAL:
            self._fail(error)
            return
        if verdict is Verdict.LATER:
            lane.pace.overloaded(now)
            lane.check_moved()
            retry_after_s = getattr(error, "retry_after_s", None)
            flight.attempts = min(flight.attempts + 1, settings.attempts - 1)
        elif verdict is Verdict.AGAIN:
            flight.attempts += 1
        elif verdict in (Verdict.GONE, Verdict.AWAY):
            flight.losses += verdict is Verdict.GONE
            lane.lose(error.message)
        gave_up = flight.attempts >= settings.attempts or flight.losses >= settings.losses
        if verdict is Verdict.ROW or gave_up:
            self._settle(flight.number, FAILED, self._work.failure(flight.number, flight.raw, error), error)
            return
        self.counts.retries += 1
        self.counts.errors[f"retried: {type(error).__name__}"] += 1
        self._trouble_since = self._trouble_since or now
        pause = 0.0
        if verdict in (Verdict.AGAIN, Verdict.LATER):
            pause = backoff_s(flight.attempts - 1, settings.backoff_s, settings.longest_backoff_s, retry_after_s)
        elif verdict is Verdict.GONE:
            pause = backoff_s(min(flight.losses, 3), settings.backoff_s / 8, 1.0)
        heapq.heappush(self._retries, (now + pause, next(self._tie), flight, part))

    def _settle(self, number: int, kind: int, line: bytes, error: CorralError | None = None) -> None:
        """The row has its one result."""
        if self._done[number]:
            return
        self._done[number] = 1
        self._flights.pop(number, None)
        self._buffer.add(LedgerEntry(number, kind, line))
        if kind == FINE:
            self.counts.fine += 1
        else:
            self.counts.failed += 1
            self.counts.errors[type(error).__name__] += 1
        refused = isinstance(error, RequestError) and 400 <= (error.status or 0) < 500
        self._recent.append(kind == FINE or (refused and not self.settings.refusals_fail))
        if error is not None:
            self._check_runaway(error)

    # Watching the run

    def _fail(self, error: CorralError) -> None:
        self._failure = self._failure or error
        self._changed.set()

    def _ended(self) -> bool:
        if self._failure or self._buffer.failure or not self.counts.left:
            return True
        if self._stop_by is None:
            return False
        return not any(lane.in_flight for lane in self.lanes) or time.monotonic() >= self._stop_by

    def _tick(self) -> None:
        now = time.monotonic()
        for lane in self.lanes:
            self._fill(lane)
        self._steal(now)
        self.counts.in_flight = sum(lane.in_flight for lane in self.lanes)
        self.counts.limit = sum(lane.pace.limit for lane in self.lanes if lane.up)
        if not any(lane.up for lane in self.lanes):
            self._trouble_since = self._trouble_since or now
        elif not self._flights:  # nothing is under way here: other runners have what is left
            self._trouble_since = None
        if self._stop_by is None:
            self._check_hope(now)

    @property
    def waiting_for(self) -> str:
        """Why nothing is sent: the state of the servers; empty while one of them is up."""
        if any(lane.up for lane in self.lanes):
            return ""
        return "; ".join(lane.absence.text for lane in self.lanes if lane.absence)

    def _check_hope(self, now: float) -> None:
        """End when no server comes back by itself, or when nothing has succeeded for too long."""
        endings = [lane.ending for lane in self.lanes]
        first = endings[0] if endings and all(endings) and not self.settings.wait else None
        if first:
            remedy = f"{first.remedy} {KEPT} With --wait, it waits until then."
            self._fail(type(first)(first.message, remedy.strip(), **first.details))
        elif self._trouble_since and now - self._trouble_since > self.settings.patience_s:
            why = self.waiting_for or self.counts.example
            self._fail(
                UnreachableError(f"Nothing has succeeded for {self.settings.patience_s:g} s. {why}".strip(), KEPT)
            )

    def _steal(self, now: float) -> None:
        """When nothing is left to send, send the oldest rows of busy lanes to idle ones, too."""
        if len(self.lanes) < 2 or self._stop_by is not None or len(self._flights) > 256:
            return
        idle = [lane for lane in self.lanes if lane.up and not lane.in_flight]
        waiting = {flight.number for _, _, flight, _ in self._retries}
        late = [f for f in self._flights.values() if not f.doubled and f.number not in waiting]
        late = [f for f in late if now - f.began > max(1.0, 2 * self._mean_s)]
        for flight, lane in zip(sorted(late, key=lambda f: f.began), itertools.cycle(idle), strict=False):
            if lane.room <= 0:
                return
            flight.doubled = True
            self.counts.stolen += 1
            for part, reply in enumerate(flight.replies):
                if reply is None:
                    self._send(lane, flight, part)

    def _check_runaway(self, error: CorralError) -> None:
        recent, settings = self._recent, self.settings
        if len(recent) < settings.runaway_rows or settings.runaway_share >= 1:
            return
        bad = recent.count(False)
        if bad >= settings.runaway_share * len(recent):
            self._fail(
                EngineError(
                    f"{bad} of the last {len(recent)} rows failed; the last: {error.message}",
                    "Correct the cause, then `corral batch resume` with --retry-failed; or go on regardless with "
                    "--keep-going.",
                )
            )
