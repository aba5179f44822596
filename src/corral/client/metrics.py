"""What vLLM's `/metrics` says about itself: requests running and waiting, KV cache, tokens, times. Parsed, typed.

Counters and histograms only grow, so speeds come from two readings: `Load.between(before, after)`. Values of several
engines (data parallel) are added up; the KV use is their mean. A server without these metrics gives None fields.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from corral.client.client import Client
from corral.client.errors import error_from_status

__all__ = ["Load", "Reading", "parse", "read"]

_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Reading:
    """One look at a server's metrics."""

    at_s: float  # monotonic
    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None  # 0 to 1
    kv_tokens: int | None = None  # how many the cache holds
    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    ttft_sum_s: float | None = None
    ttft_count: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    preemptions: float | None = None


@dataclass(frozen=True)
class Load:
    """What happened between two readings; None where nothing did, or the server does not tell."""

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
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:num_preemptions_total": "preemptions",
}
_KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the second: before 0.10


def parse(text: str, at_s: float) -> Reading:
    """A reading from the page's text; lines it does not know are skipped."""
    sums: dict[str, float] = {}
    uses: list[float] = []
    kv_tokens: int | None = None
    for line in text.splitlines():
        found = None if line.startswith("#") else _LINE.match(line)
        if found is None:
            continue
        name = found["name"]
        if name == "vllm:cache_config_info":
            kv_tokens = _cache_tokens(dict(_LABEL.findall(found["labels"] or ""))) or kv_tokens
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if name in _KV_USE:
            uses.append(value)
        elif name in _SUMS:
            sums[_SUMS[name]] = sums.get(_SUMS[name], 0.0) + value
    counts = {name: int(sums.pop(name)) for name in ("running", "waiting") if name in sums}
    use = sum(uses) / len(uses) if uses else None
    return Reading(
        at_s, counts.get("running"), counts.get("waiting"), use, kv_tokens, **{str(k): v for k, v in sums.items()}
    )


def _cache_tokens(labels: dict[str, str]) -> int | None:
    blocks = labels.get("num_gpu_blocks", "")
    size = labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None


async def read(client: Client) -> Reading:
    """Ask a server for its metrics now."""
    page = await client.page("/metrics", timeout_s=10)
    if page.status != 200:
        raise error_from_status(page.status, page.body, None, client.endpoint.root)
    return parse(page.body.decode("utf-8", "replace"), time.monotonic())
