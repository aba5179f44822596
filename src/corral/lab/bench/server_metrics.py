"""The server's own metrics during a measurement: queue, KV use, preemptions, prefix hits, from `/metrics`.

`client.metrics` adds up several engines. Of a server without these metrics nothing is known, and the report says so.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from corral.client.client import Client
from corral.client.errors import RequestError
from corral.client.metrics import Reading, parse


@dataclass(frozen=True)
class ServerSample:
    """One reading; `at_s` after the start of the run."""

    at_s: float
    running: float = 0.0
    waiting: float = 0.0
    kv_use: float = 0.0
    preemptions: float = 0.0
    prefix_hits: float = 0.0
    prefix_queries: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    finished: float = 0.0


@dataclass(frozen=True)
class ServerDelta:
    """The changes on the server between the start and the end of a run."""

    preemptions: float
    prefix_hit_share: float
    prompt_tokens: float
    generation_tokens: float
    finished: float
    peak_waiting: float
    peak_running: float
    peak_kv_use: float
    running_before: float


def sample_of(reading: Reading) -> ServerSample | None:
    """The part of a reading that is saved; None when the server reported nothing."""
    if not reading.known:
        return None
    return ServerSample(
        reading.at_s,
        reading.running or 0.0,
        reading.waiting or 0.0,
        reading.kv_use or 0.0,
        reading.preemptions or 0.0,
        reading.prefix_hits or 0.0,
        reading.prefix_queries or 0.0,
        reading.prompt_tokens or 0.0,
        reading.generated_tokens or 0.0,
        reading.finished or 0.0,
    )


def delta(samples: list[ServerSample]) -> ServerDelta | None:
    if len(samples) < 2:
        return None
    first, last = samples[0], samples[-1]
    queries = last.prefix_queries - first.prefix_queries
    return ServerDelta(
        preemptions=last.preemptions - first.preemptions,
        prefix_hit_share=(last.prefix_hits - first.prefix_hits) / queries if queries > 0 else 0.0,
        prompt_tokens=last.prompt_tokens - first.prompt_tokens,
        generation_tokens=last.generation_tokens - first.generation_tokens,
        finished=last.finished - first.finished,
        peak_waiting=max(s.waiting for s in samples),
        peak_running=max(s.running for s in samples),
        peak_kv_use=max(s.kv_use for s in samples),
        running_before=first.running,
    )


class MetricsWatcher:
    """Reads `/metrics` before, during (every `every_s`) and after a run, over a connection of its own."""

    def __init__(self, client: Client, every_s: float = 1.0) -> None:
        self._client, self._every = client, every_s
        self._began = time.monotonic()
        self.samples: list[ServerSample] = []
        self._task: asyncio.Task[None] | None = None

    async def read(self) -> bool:
        at = time.monotonic() - self._began
        try:
            page = await self._client.page("/metrics", timeout_s=10)
        except RequestError:
            return False
        sample = sample_of(parse(page.body, at)) if page.status == 200 else None
        if sample is not None:
            self.samples.append(sample)
        return sample is not None

    async def start(self) -> None:
        """Take the first reading, once the warm-up has left the gauges (they follow within a second)."""
        for _ in range(15):
            self.samples.clear()
            self._began = time.monotonic()
            if not await self.read() or not self.samples[-1].running:
                break
            await asyncio.sleep(0.1)
        if self.samples:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            await self.read()

    async def stop(self, settled: float | None = None) -> None:
        """Take the last reading; `settled` is the number of finished requests to wait for, for at most a second."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for _ in range(10):
            if not await self.read() or settled is None:
                return
            if self.samples[-1].finished - self.samples[0].finished >= settled and not self.samples[-1].running:
                return
            self.samples.pop() if len(self.samples) > 2 else None
            await asyncio.sleep(0.1)
        await self.read()
