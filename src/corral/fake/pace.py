"""When each token is due: a small model of an engine, on a monotonic nanosecond clock.

A job (one request) waits in a queue until it may run, then pays `ttft_s` plus its uncached prompt tokens over
`prefill_tokens_per_s`, then gets one token for each of its sequences every `itl_s`, with an optional relative
jitter drawn from the request's own key. Due times are absolute, so a late wake-up does not add up.

Capacity, each optional:
- `max_seqs`: sequences that run at once; the others wait.
- `kv_tokens`: room for prompt and generated tokens; when it is full the youngest job is preempted (it goes back to
  the head of the queue and pays its prefill again).
- `requests_per_s`: jobs are let in no faster than this: past it, the queue and the first-token time grow.
- `tokens_per_s`: shared equally: with n sequences the time between tokens is max(itl_s, n / tokens_per_s). The
  knee is where n / itl_s reaches it.

Timers: see `corral.base.timer`.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from corral.base.timer import PreciseTimer

_EARLY_NS = 50_000  # due this soon counts as due: one wake-up serves many sequences
_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed and the capacity of the fake engine."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    jitter: float = 0.0
    prefill_tokens_per_s: float = 0.0
    max_seqs: int = 0
    kv_tokens: int = 0
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0

    @property
    def instant(self) -> bool:
        """Whether every answer is due at once."""
        return self == Pace(max_seqs=self.max_seqs, kv_tokens=self.kv_tokens, jitter=self.jitter)

    @property
    def stepwise(self) -> bool:
        """Whether an answer's end depends on what else runs, so that every token must be stepped."""
        return bool(self.tokens_per_s or self.kv_tokens)


class Sink(Protocol):
    """Receives a job's tokens."""

    def emit(self, step: int, now: int) -> None: ...

    def finish(self, now: int) -> None: ...


class FakeJob:
    """One request inside the engine."""

    __slots__ = (
        "due", "epoch", "first_ns", "prompt_tokens", "running", "sink", "slow", "started_ns",
        "state", "step", "steps", "streamed", "uncached", "width",
    )  # fmt: skip

    def __init__(
        self, sink: Sink, width: int, steps: int, prompt_tokens: int, uncached: int, streamed: bool, key: int
    ) -> None:
        self.sink, self.width, self.steps = sink, width, steps
        self.prompt_tokens, self.uncached, self.streamed = prompt_tokens, uncached, streamed
        self.step, self.due, self.epoch, self.first_ns, self.started_ns = 0, 0, 0, 0, 0
        self.slow, self.state, self.running = 1.0, key & 0xFFFFFFFF | 1, False

    @property
    def kv(self) -> int:
        return self.prompt_tokens + self.step * self.width


class FakeEngine:
    """Runs jobs at a set pace; counts what is running, waiting and held in the cache."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pace: Pace) -> None:
        self.pace = pace
        self.running_seqs = 0
        self.running_jobs = 0
        self.kv_used = 0
        self.preemptions = 0
        self._alarm = PreciseTimer(loop, self._tick)
        self._due: list[tuple[int, int, int, FakeJob]] = []
        self._order = 0
        self._gate_ns = 0  # when the next job may pass `requests_per_s`
        self._gated = 0
        self._queue: deque[FakeJob] = deque()
        self._young: list[FakeJob] = []  # running jobs by age, kept only when the cache is limited

    @property
    def waiting_jobs(self) -> int:
        return len(self._queue) + self._gated

    def close(self) -> None:
        self._alarm.close()

    def submit(self, job: FakeJob, now: int) -> None:
        """Begin or queue a job; its sink is called from now on, possibly before this returns."""
        if self.pace.requests_per_s:
            self._gate_ns = max(now, self._gate_ns)
            job.due = self._gate_ns
            self._gate_ns += int(_SECOND / self.pace.requests_per_s)
            if job.due > now:
                self._gated += 1
                self._push(job)
                self._alarm.set(self._due[0][0])
                return
        self._enter(job, now)
        if self._due:
            self._alarm.set(self._due[0][0])

    def cancel(self, job: FakeJob) -> None:
        """Forget a job whose client went away."""
        job.epoch = -1
        if job.running:
            self._leave(job)
            self._admit(time.monotonic_ns())
            if self._due:
                self._alarm.set(self._due[0][0])
        elif job in self._queue:
            self._queue.remove(job)
        elif job.due > 0:
            self._gated -= 1

    def _enter(self, job: FakeJob, now: int) -> None:
        if self._queue or not self._fits(job):
            self._queue.append(job)
        else:
            self._start(job, now, at_once=True)

    def _fits(self, job: FakeJob) -> bool:
        pace = self.pace
        if not self.running_jobs:
            return True
        if pace.max_seqs and self.running_seqs + job.width > pace.max_seqs:
            return False
        return not pace.kv_tokens or self.kv_used + job.kv + job.width <= pace.kv_tokens

    def _start(self, job: FakeJob, now: int, at_once: bool) -> None:
        pace = self.pace
        job.running = True
        job.started_ns = job.started_ns or now
        self.running_seqs += job.width
        self.running_jobs += 1
        whole = not job.streamed and not pace.stepwise  # one wake-up, at the end
        again = job.step * job.width  # what a preempted job had already generated
        if whole:
            job.step = max(0, job.steps - 1)
        self.kv_used += job.kv
        if pace.kv_tokens:
            self._young.append(job)
        wait = pace.ttft_s * job.slow
        if pace.prefill_tokens_per_s:
            wait += (job.uncached + again) / pace.prefill_tokens_per_s * job.slow
        job.due = now + int(wait * _SECOND)
        if whole:
            job.first_ns = job.due
            job.due += int(job.step * pace.itl_s * job.slow * _SECOND)
        if at_once and job.due <= now:
            self._advance(job, now)
        else:
            self._push(job)

    def _push(self, job: FakeJob) -> None:
        self._order += 1
        heapq.heappush(self._due, (job.due, self._order, job.epoch, job))

    def _tick(self) -> None:
        due = self._due
        now = time.monotonic_ns()
        horizon = now + _EARLY_NS
        while due and due[0][0] <= horizon:
            _, _, epoch, job = heapq.heappop(due)
            if epoch != job.epoch:
                continue
            if job.running:
                self._advance(job, time.monotonic_ns())
            else:
                self._gated -= 1
                job.due = 0
                self._enter(job, now)
        if due:
            self._alarm.set(due[0][0])

    def _advance(self, job: FakeJob, now: int) -> None:
        """Give a job its next token, and all the following ones that are already due."""
        pace = self.pace
        while True:
            if job.steps:
                job.step += 1
                self.kv_used += job.width
                job.first_ns = job.first_ns or now
                job.sink.emit(job.step, now)
                if job.epoch < 0:
                    return
            if job.step >= job.steps:
                self._leave(job)
                job.epoch = -1
                job.sink.finish(now)
                self._admit(now)
                return
            if pace.kv_tokens and self._overflows(job):
                return
            job.due += self._gap(job)
            if job.due > now + _EARLY_NS:
                self._push(job)
                return

    def _gap(self, job: FakeJob) -> int:
        pace = self.pace
        gap = pace.itl_s
        if pace.jitter:
            job.state = (job.state * 1664525 + 1013904223) & 0xFFFFFFFF
            gap *= 1 + pace.jitter * (job.state / 0x80000000 - 1)
        if pace.tokens_per_s:
            gap = max(gap, self.running_seqs / pace.tokens_per_s)
        return int(gap * job.slow * _SECOND)

    def _leave(self, job: FakeJob) -> None:
        job.running = False
        self.running_seqs -= job.width
        self.running_jobs -= 1
        self.kv_used = self.kv_used - job.kv if self.running_jobs else 0
        if self.pace.kv_tokens:
            self._young.remove(job)

    def _admit(self, now: int) -> None:
        while self._queue and self._fits(self._queue[0]):
            self._start(self._queue.popleft(), now, at_once=False)

    def _overflows(self, job: FakeJob) -> bool:
        """Preempt the youngest jobs until the cache fits; whether `job` itself was one of them."""
        while self.kv_used > self.pace.kv_tokens and self.running_jobs > 1:
            victim = self._young[-1]
            self._leave(victim)
            victim.epoch += 1
            self.preemptions += 1
            self._queue.appendleft(victim)
            if victim is job:
                return True
        return False
