"""What a server's metrics page says about its requests so far: how many, how long, how much of them was cached.

One reader for the agent on a node, which keeps a line of these every few minutes, and for Corral, which compares two.
Only counters and lengths: no text of anybody is in them.

Standard library only: the file is part of what travels to nodes.
"""

from __future__ import annotations

from typing import Any, Dict

from .exposition import samples

COUNTERS = {
    "vllm:request_success_total": "finished",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
}
HISTOGRAMS = {
    "vllm:request_prompt_tokens_bucket": "prompts",
    "vllm:request_generation_tokens_bucket": "outputs",
}


def load_figures(page: bytes) -> Dict[str, Any]:
    """Counters, added up over the engines; histograms `{bound: requests up to it}`; what the page lacks is absent."""
    seen = {(one.name, one.label_text): one for one in samples(page, (*COUNTERS, *HISTOGRAMS)) if one.value >= 0}
    found: Dict[str, Any] = {}
    for one in seen.values():
        if one.name in COUNTERS:
            name = COUNTERS[one.name]
            found[name] = found.get(name, 0.0) + one.value
        else:
            bound = one.labels.get("le", "")
            buckets = found.setdefault(HISTOGRAMS[one.name], {})
            buckets[bound] = buckets.get(bound, 0.0) + one.value
    return found
