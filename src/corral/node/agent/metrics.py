"""What the agent needs of the engine's metrics page. The same rules as Corral's own reader, and the same tests."""

from __future__ import annotations

import re
from typing import Dict, Tuple

LONGEST_LINE = 1 << 16
LARGEST_VALUE = 1e18
SUMS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
}
KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the second: before 0.10

NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
PAIR = r'[A-Za-z_][A-Za-z0-9_]*[ \t]*=[ \t]*"[^"\\]*(?:\\.[^"\\]*)*"'
REST = re.compile(
    r"(?:[ \t]*\{[ \t]*(?P<labels>(?:" + PAIR + r"[ \t]*(?:,[ \t]*|(?=\})))*)\}[ \t]*|[ \t]+)"
    r"(?P<value>[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)"
    r"(?:[ \t]+[-+]?[0-9][0-9.eE+-]*)?"  # a timestamp
    r"(?:[ \t]+#.*)?"  # an exemplar
    r"[ \t\r]*"
)


def figures(text: str) -> Dict[str, float]:
    """Counts and tokens added up over the engines, the mean of their KV use; what the page lacks is absent."""
    found: Dict[Tuple[str, str], float] = {}
    for line in text.split("\n"):
        name = NAME.match(line)
        if name is None or len(line) > LONGEST_LINE or (name.group() not in SUMS and name.group() not in KV_USE):
            continue
        rest = REST.fullmatch(line, name.end())
        try:
            value = float(rest.group("value")) if rest else -1.0
        except ValueError:
            continue
        if rest and 0 <= value <= LARGEST_VALUE:
            found[name.group(), rest.group("labels") or ""] = value
    sums: Dict[str, float] = {}
    for (series, _), value in found.items():
        if series in SUMS:
            sums[SUMS[series]] = sums.get(SUMS[series], 0.0) + value
    for series in KV_USE:
        uses = [value for (name_of, _), value in found.items() if name_of == series]
        if uses and "kv_use" not in sums:
            sums["kv_use"] = sum(uses) / len(uses)
    return sums
