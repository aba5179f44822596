"""vLLM's `/metrics`, parsed and typed: requests running and waiting, KV cache, tokens, times, percentiles.

Counters and histograms only grow, so rates come from two readings: `Load.between(before, after)`, `percentile`. A
server without these metrics gives None fields. A server with several engines (data parallel) has one series for each:
counts, tokens and the sizes of the KV caches are added up; `kv_use` is the mean over the engines, `kv_use_fullest`
that of the fullest engine, which preempts requests first. A series that is listed twice counts once.

A percentile is interpolated inside its bucket, as Prometheus does; in the last, open bucket it is that bucket's lower
bound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from corral.client.client import Client
from corral.client.errors import error_from_status
from corral.node.exposition import Sample, samples


@dataclass(frozen=True)
class Reading:
    """A server's metrics at one moment."""

    at_s: float  # monotonic
    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None  # 0 to 1
    kv_use_fullest: float | None = None
    kv_tokens: int | None = None  # capacity of the caches
    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    ttft_sum_s: float | None = None
    ttft_count: float | None = None
    itl_sum_s: float | None = None  # times between the tokens of one sequence
    itl_count: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    preemptions: float | None = None
    finished: float | None = None  # requests, whatever their end

    @property
    def known(self) -> bool:
        """Whether the page had any of these metrics: it came from a vLLM."""
        return self != Reading(self.at_s)


@dataclass(frozen=True)
class Load:
    """Rates between two readings; None where nothing happened, or the server does not tell."""

    prompt_tokens_per_s: float | None = None
    generated_tokens_per_s: float | None = None
    ttft_s: float | None = None  # mean over the requests that got their first token
    prefix_hit_share: float | None = None

    @classmethod
    def between(cls, before: Reading, after: Reading) -> Load:
        span_s = after.at_s - before.at_s

        def grown(name: str) -> float | None:
            old, new = getattr(before, name), getattr(after, name)
            return None if old is None or new is None or new < old else new - old  # smaller: it was restarted

        def rate(name: str) -> float | None:
            amount = grown(name)
            return None if amount is None or span_s <= 0 else amount / span_s

        def share(part: str, whole: str) -> float | None:
            a, b = grown(part), grown(whole)
            return None if a is None or not b else a / b

        return cls(
            rate("prompt_tokens"),
            rate("generated_tokens"),
            share("ttft_sum_s", "ttft_count"),
            share("prefix_hits", "prefix_queries"),
        )


_SUMS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:time_to_first_token_seconds_sum": "ttft_sum_s",
    "vllm:time_to_first_token_seconds_count": "ttft_count",
    "vllm:inter_token_latency_seconds_sum": "itl_sum_s",
    "vllm:inter_token_latency_seconds_count": "itl_count",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:request_success_total": "finished",
}
_KV_USE, _KV_USE_ONCE = "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"  # the second: before 0.10
_CACHE = "vllm:cache_config_info"
_WANTED = frozenset((*_SUMS, _KV_USE, _KV_USE_ONCE, _CACHE))


def parse(page: bytes, at_s: float) -> Reading:
    """A reading from the page's text; lines it does not know are skipped."""
    found = {(one.name, one.label_text): one for one in samples(page, _WANTED) if one.value >= 0}
    sums: dict[str, float] = {}
    for one in found.values():
        if field := _SUMS.get(one.name):
            sums[field] = sums.get(field, 0.0) + one.value
    counts = {name: int(sums.pop(name)) for name in ("running", "waiting") if name in sums}
    uses = _values(found, _KV_USE) or _values(found, _KV_USE_ONCE)
    sizes = [_cache_tokens(one.labels) for one in found.values() if one.name == _CACHE]
    return Reading(
        at_s,
        counts.get("running"),
        counts.get("waiting"),
        kv_use=sum(uses) / len(uses) if uses else None,
        kv_use_fullest=max(uses, default=None),
        kv_tokens=sum(size for size in sizes if size) or None,
        **sums,
    )


def _values(found: dict[tuple[str, str], Sample], name: str) -> list[float]:
    return [one.value for one in found.values() if one.name == name]


def _cache_tokens(labels: dict[str, str]) -> int | None:
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if not (blocks.isdecimal() and size.isdecimal() and len(blocks) <= 12 and len(size) <= 6):
        return None
    return int(blocks) * int(size)


def cache_config(page: bytes) -> dict[str, str]:
    """The labels of the first engine's cache."""
    return next((one.labels for one in samples(page, (_CACHE,))), {})


async def read(client: Client) -> Reading:
    """Ask a server for its metrics now."""
    return parse(await read_page(client), time.monotonic())


async def read_page(client: Client) -> bytes:
    """The text of a server's metrics now."""
    page = await client.page("/metrics", timeout_s=10)
    if page.status != 200:
        raise error_from_status(page.status, page.body, None, client.endpoint.root)
    return page.body


TTFT = "vllm:time_to_first_token_seconds_bucket"
TPOT = ("vllm:inter_token_latency_seconds_bucket", "vllm:time_per_output_token_seconds_bucket")  # newer, older
Buckets = Mapping[float, float]  # upper bound -> how many were at most that


@dataclass(frozen=True)
class Latencies:
    """Counts by upper bound, of all engines together."""

    ttft: Buckets = field(default_factory=dict)
    tpot: Buckets = field(default_factory=dict)


def read_latencies(page: bytes) -> Latencies:
    """The histograms of a metrics page; a series that stands twice counts once."""
    found: dict[str, dict[float, float]] = {}
    for one in {(one.name, one.label_text): one for one in samples(page, (TTFT, *TPOT))}.values():
        bound = _bound(one.labels.get("le", ""))
        if bound is not None and one.value >= 0:
            sums = found.setdefault(one.name, {})
            sums[bound] = sums.get(bound, 0.0) + one.value
    return Latencies(found.get(TTFT, {}), next((found[name] for name in TPOT if name in found), {}))


def _bound(text: str) -> float | None:
    if text == "+Inf":
        return float("inf")
    try:
        bound = float(text) if len(text) <= 40 else -1.0
    except ValueError:
        return None
    return bound if 0 <= bound < 1e18 else None


def percentile(before: Buckets, after: Buckets, share: float) -> float | None:
    """The value below which that share of the growth between two readings lies; None without growth."""
    grown = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    total = grown[-1][1] if grown else 0.0
    if total <= 0 or any(count < 0 for _, count in grown):  # smaller: it was restarted
        return None
    low, below = 0.0, 0.0
    for bound, count in grown:
        if count >= share * total:
            inside = count - below
            part = (share * total - below) / inside if inside > 0 else 1.0
            return low if bound == float("inf") else low + (bound - low) * part
        low, below = bound, count
    return low
