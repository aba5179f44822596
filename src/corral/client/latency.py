"""Percentiles from a server's histograms: how long first tokens and following ones took between two looks.

Histograms only grow, so what happened lately is the difference of two pages. A percentile is read off inside its
bucket in proportion, as Prometheus does; what lies in the last, open bucket is told as that bucket's lower end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from corral.node.exposition import samples

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
    """Where that share of what came between the two lies; None where nothing came."""
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
