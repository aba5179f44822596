"""The load generator: sends requests at their times, records the answers, and measures its own lateness.

Bodies are encoded before the start, send times computed ahead, and nothing is decoded or written while the load runs
beyond what the client does for each answer. A heartbeat (every 5 ms) measures how late this process reacts: that
lateness is part of every time stamp, so the gate judges it. Send times come from a seed, before the first request. As
in `vllm bench serve`, gaps are gamma-distributed (shape `burstiness`; 1 is a Poisson process, large is even), and the
whole is scaled so that n requests take n / rate seconds: two seeds then offer the same load.

The generator stops early when going on would measure nothing: the key is refused, the model is unknown, or the server
is gone (20 failures to connect in a row). What was measured until then is kept.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from corral.base.errors import UsageError
from corral.base.timer import PreciseTimer
from corral.client.client import Client
from corral.client.errors import (
    KeyRefusedError,
    RequestError,
    ServerGoneError,
    StrangerError,
    UnknownModelError,
    UnknownPathError,
)
from corral.client.pool import Page
from corral.client.pooling import prompt_tokens
from corral.client.reply import Reply, Usage
from corral.lab.bench.datasets import Prompt, body_of, path_of
from corral.lab.bench.metrics import RequestRow
from corral.lab.bench.spec import LoadShape, Workload

_now = time.monotonic_ns
_BEAT_NS = 5_000_000
_GONE = 20
_HOPELESS = (KeyRefusedError, StrangerError, UnknownModelError, UnknownPathError)


@dataclass
class RequestOutcome:
    """The rows of a load, and how it ended."""

    rows: list[RequestRow]
    duration_s: float
    start_ns: int
    heartbeat_s: list[float] = field(default_factory=list)
    stopped_by: RequestError | None = None
    interrupted: bool = False


class _Generator:
    def __init__(
        self,
        client: Client,
        prompts: Sequence[Prompt],
        workload: Workload,
        load: LoadShape,
        times_ns: Sequence[int],
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._client, self._prompts, self._workload, self._load = client, prompts, workload, load
        self._times, self._progress = times_ns, on_progress
        model = client.endpoint.model
        self._bodies = [body_of(p, workload, model, n) for n, p in enumerate(prompts)]
        self._paths = [path_of(p, workload) for p in prompts]
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._next = self._under_way = self._done = self._gone = 0
        self._held: list[int] = []  # due, but past the cap on concurrency
        self._raw: list[tuple[Any, ...]] = []
        self._beats: list[float] = []
        self._stop: RequestError | None = None
        self._start = self._until = 0
        self._interrupted = False

    async def run(self) -> RequestOutcome:
        alarm = PreciseTimer(self._loop, self._send_due)
        beat = PreciseTimer(self._loop, lambda: self._beat(beat))
        self._alarm = alarm
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            self._start = _now() + 2_000_000  # open loop: time until the first send
            self._until = self._start + int(self._load.seconds * 1e9) if self._load.seconds else 0
            self._beat_due = self._start
            beat.set(self._beat_due)
            if self._load.open or not self._load.concurrency:
                alarm.set(self._start + self._times[0])
            else:
                self._start = _now()
                for _ in range(min(self._load.concurrency, len(self._prompts))):
                    self._send_next(_now())
            await self._finished
        except asyncio.CancelledError:  # Ctrl-C: keep what was measured
            self._interrupted = True
        finally:
            alarm.close()
            beat.close()
            gc.enable()
            gc.unfreeze()
        end = max((raw[5] for raw in self._raw), default=_now())
        rows = sorted((self._row(*raw) for raw in self._raw), key=lambda row: (row.n, row.turn))
        return RequestOutcome(
            rows, (end - self._start) / 1e9, self._start, self._beats, self._stop, self._interrupted
        )

    # Sending

    def _send_due(self) -> None:
        """Open loop: send all that is due, then sleep until the next."""
        times, start = self._times, self._start
        while self._next < len(times) and not self._closed():
            due = start + times[self._next]
            if due > _now() + 20_000:
                self._alarm.set(due)
                return
            if self._load.concurrency and self._under_way >= self._load.concurrency:
                self._held.append(due)
                self._next += 1
                continue
            self._send(self._next, due if self._load.open else _now())  # all at once: each as soon as possible
            self._next += 1
        self._settle()

    def _closed(self) -> bool:
        return self._stop is not None or self._interrupted or bool(self._until and _now() > self._until)

    def _send_next(self, free_ns: int) -> None:
        """Closed loop: another request may be sent from `free_ns` on."""
        if self._next < len(self._prompts) and not self._closed():
            self._next += 1
            self._send(self._next - 1, free_ns)

    def _send(self, n: int, intended_ns: int, turn: int = 0, history: list[dict[str, Any]] | None = None) -> None:
        body = (
            self._bodies[n]
            if history is None
            else body_of(self._prompts[n], self._workload, self._client.endpoint.model, n, history)
        )
        self._under_way += 1
        given_ns = _now()
        send: Any = self._client.send if self._workload.writes else self._client.post
        future = send(self._paths[n], body)
        future.add_done_callback(lambda f: self._arrived(f, n, turn, intended_ns, given_ns, history))

    # Receiving

    def _arrived(
        self,
        future: asyncio.Future[Reply | Page],
        n: int,
        turn: int,
        intended: int,
        given_ns: int,
        history: list[dict[str, Any]] | None,
    ) -> None:
        self._under_way -= 1
        error = future.exception()
        if error is None:
            reply = future.result()
            if isinstance(reply, Page):
                self._pooled(reply, n, intended, given_ns)
                return
            timing, free = reply.timing, reply.timing.done_ns
            self._raw.append((n, turn, intended, given_ns, timing.sent_ns, free, timing.chunk_ns, reply.usage,
                              reply.choices[0].finish_reason, None))  # fmt: skip
            self._gone = 0
            if turn < len(self._prompts[n].turns) and not self._closed():
                self._send_next_turn(n, turn, reply, history)
                return
        else:
            free = _now()
            self._raw.append((n, turn, intended, given_ns, 0, free, (), None, "", error))
            self._count_failure(error)
        self._ended(free)

    def _pooled(self, page: Page, n: int, intended: int, given_ns: int) -> None:
        """An answer without tokens: its end is all there is to time."""
        try:
            usage = Usage(prompt_tokens=prompt_tokens(page) or 0)
        except RequestError as error:
            self._raw.append((n, 0, intended, given_ns, 0, page.done_ns, (), None, "", error))
        else:
            row = (n, 0, intended, given_ns, page.sent_ns, page.done_ns, (page.done_ns,), usage, "", None)
            self._raw.append(row)
            self._gone = 0
        self._ended(page.done_ns)

    def _ended(self, free: int) -> None:
        """A request has ended: the next one may go."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done)
        if self._held and not self._closed():
            index = self._next - len(self._held)
            self._send(index, self._held.pop(0))
        elif not self._load.open and self._load.concurrency:
            self._send_next(free)
        self._settle()

    def _send_next_turn(self, n: int, turn: int, reply: Reply, history: list[dict[str, Any]] | None) -> None:
        prompt = self._prompts[n]
        messages = history or [{"role": "user", "content": prompt.content}]
        messages = [
            *messages,
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": prompt.turns[turn]},
        ]
        self._send(n, reply.timing.done_ns, turn + 1, messages)

    def _count_failure(self, error: BaseException) -> None:
        if not isinstance(error, RequestError):
            self._finished.set_exception(error) if not self._finished.done() else None
            return
        self._gone = self._gone + 1 if isinstance(error, ServerGoneError) else 0
        if isinstance(error, _HOPELESS) or self._gone >= min(_GONE, len(self._prompts)):
            self._stop = self._stop or error

    def _settle(self) -> None:
        over = self._next >= len(self._prompts) and not self._held
        if not self._under_way and (over or self._closed()) and not self._finished.done():
            self._finished.set_result(None)

    def _beat(self, alarm: PreciseTimer) -> None:
        now = _now()
        self._beats.append(max(0, now - self._beat_due) / 1e9)
        self._beat_due = max(self._beat_due + _BEAT_NS, now)
        alarm.set(self._beat_due)
        if self._until and now > self._until:
            self._settle()

    def _row(
        self, n: int, turn: int, intended: int, given_ns: int, sent: int, done: int, chunks: Any, usage: Any,
        finish: str, error: RequestError | None,
    ) -> RequestRow:  # fmt: skip
        start, prompt = self._start, self._prompts[n]
        times = [t - start for t in chunks]
        return RequestRow(
            n=n,
            intended_ns=intended - start,
            asked_ns=given_ns - start,
            sent_ns=(sent or given_ns) - start,
            done_ns=done - start,
            chunk_ns=times,
            input_tokens=usage.prompt_tokens if usage else 0,
            output_tokens=(usage.completion_tokens or 0) if usage else len(times),
            asked_input=prompt.input_tokens,
            asked_output=prompt.output_tokens * self._workload.writes,
            writes=self._workload.writes,
            cached_tokens=usage.cached_tokens if usage else None,
            finish=finish,
            turn=turn,
            error="" if error is None else type(error).__name__.removesuffix("Error"),
            message="" if error is None else error.message,
        )


async def drive(
    client: Client,
    prompts: Sequence[Prompt],
    workload: Workload,
    load: LoadShape,
    times_ns: Sequence[int],
    on_progress: Callable[[int], None] | None = None,
) -> RequestOutcome:
    """Send `prompts` at their times (open loop) or as others are answered (closed loop); wait for every answer."""
    return await _Generator(client, prompts, workload, load, times_ns, on_progress).run()


def send_times(load: LoadShape, count: int, seed: int, stamps_s: Sequence[float | None] = ()) -> list[int]:
    """When each of `count` requests is due; `stamps_s` are a trace's own times."""
    if load.arrival == "trace":
        return _trace(load, count, stamps_s)
    if load.rate is None:
        return [0] * count
    gaps = _ramp(load, count) if load.arrival == "ramp" else _gaps(load, count, seed)
    return [int(t * 1e9) for t in itertools.accumulate(gaps)]


def drawn_gaps(load: LoadShape, seed: int) -> Iterator[float]:
    """Seconds from one request to the next, without end: even, Poisson, or gamma."""
    rate = load.rate or 1.0
    if load.arrival == "constant":
        yield from itertools.repeat(1 / rate)
    shape = load.burstiness if load.arrival == "gamma" else 1.0
    draw = random.Random(seed ^ 0x5EED)  # noqa: S311 - not for secrets
    while True:
        yield draw.gammavariate(shape, 1 / (rate * shape))


def _gaps(load: LoadShape, count: int, seed: int) -> list[float]:
    gaps = list(itertools.islice(drawn_gaps(load, seed), count))
    scale = count / (load.rate or 1.0) / sum(gaps) if load.arrival != "constant" else 1.0
    return [gap * scale for gap in gaps]


def _ramp(load: LoadShape, count: int) -> list[float]:
    first, last = load.rate or 1.0, load.ramp_to or 1.0
    return [1 / (first + (last - first) * n / max(1, count - 1)) for n in range(count)]


def _trace(load: LoadShape, count: int, stamps_s: Sequence[float | None]) -> list[int]:
    stamps = [s for s in stamps_s if s is not None]
    if len(stamps) < count:
        raise UsageError(
            "--arrival trace needs a time for every request.", 'Use a JSONL file whose lines have "timestamp".'
        )
    begin = min(stamps[:count])
    times = [round((s - begin) / load.speed * 1e9) for s in stamps[:count]]
    if times != sorted(times):
        raise UsageError("the times of the trace go backwards.", "Sort its lines by timestamp.")
    return times
