"""What the server says of itself while it is measured: queue, KV use, preemptions, prefix hits, from `/metrics`.

Counters are summed over engines, shares averaged. A server without these names gives nothing, and the report says so.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from corral.client.client import Client
from corral.client.errors import RequestError

__all__ = ["ServerDelta", "ServerSample", "Watcher", "cache_config", "delta", "read_sample"]

_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_use",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:request_success_total": "finished",
}


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
    """What changed on the server between the start and the end of a run."""

    preemptions: float
    prefix_hit_share: float
    prompt_tokens: float
    generation_tokens: float
    finished: float
    peak_waiting: float
    peak_running: float
    peak_kv_use: float
    running_before: float


def read_sample(page: str, at_s: float) -> ServerSample | None:
    """The values of interest in a Prometheus page, or None when it has none of them."""
    sums: dict[str, float] = {}
    engines = 0
    for line in page.splitlines():
        if not line.startswith("vllm:"):
            continue
        name = line[: line.find("{")] if "{" in line else line.split(" ", 1)[0]
        field = _NAMES.get(name)
        if field is None:
            continue
        try:
            value = float(line.rsplit(" ", 1)[1])
        except ValueError:
            continue
        engines += field == "kv_use"
        sums[field] = sums.get(field, 0.0) + value
    if not sums:
        return None
    if engines > 1:
        sums["kv_use"] /= engines
    return ServerSample(at_s, **sums)


def cache_config(page: str) -> dict[str, str]:
    """The labels of `vllm:cache_config_info`."""
    for line in page.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            inside = line[line.find("{") + 1 : line.rfind("}")]
            pairs = (part.partition("=") for part in inside.split('",'))
            return {key.strip(): value.strip('"') for key, _, value in pairs}
    return {}


def delta(samples: list[ServerSample]) -> ServerDelta | None:
    if len(samples) < 2:
        return None
    first, last = samples[0], samples[-1]
    asked = last.prefix_queries - first.prefix_queries
    return ServerDelta(
        preemptions=last.preemptions - first.preemptions,
        prefix_hit_share=(last.prefix_hits - first.prefix_hits) / asked if asked > 0 else 0.0,
        prompt_tokens=last.prompt_tokens - first.prompt_tokens,
        generation_tokens=last.generation_tokens - first.generation_tokens,
        finished=last.finished - first.finished,
        peak_waiting=max(s.waiting for s in samples),
        peak_running=max(s.running for s in samples),
        peak_kv_use=max(s.kv_use for s in samples),
        running_before=first.running,
    )


class Watcher:
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
        sample = read_sample(page.body.decode("utf-8", "replace"), at) if page.status == 200 else None
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
