"""What the agent needs of the engine's metrics page, by the rules of Corral's own `client/metrics`."""

from __future__ import annotations

from typing import Dict

from ..exposition import samples

SUMS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
}
KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the second: before 0.10


def figures(page: bytes) -> Dict[str, float]:
    """Counts and tokens added up over the engines, the mean of their KV use; what the page lacks is absent."""
    found = {(one.name, one.label_text): one.value for one in samples(page, (*SUMS, *KV_USE)) if one.value >= 0}
    sums: Dict[str, float] = {}
    for (series, _), value in found.items():
        if series in SUMS:
            sums[SUMS[series]] = sums.get(SUMS[series], 0.0) + value
    for wanted in KV_USE:
        uses = [value for (series, _), value in found.items() if series == wanted]
        if uses and "kv_use" not in sums:
            sums["kv_use"] = sum(uses) / len(uses)
    return sums
