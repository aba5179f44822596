"""A run over time: tokens, requests under way, and what the server said, in equal steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.lab.bench.rows import RequestRow


@dataclass(frozen=True)
class Timeline:
    step_s: float
    tokens_per_s: tuple[float, ...]
    concurrency: tuple[float, ...]  # mean of each step


def timeline(rows: Sequence[RequestRow], duration_s: float, steps: int = 60) -> Timeline:
    """Output chunks per second and mean requests under way, in at most `steps` steps of at least 0.1 s."""
    good = [row for row in rows if row.ok and row.chunk_ns]
    if not good or duration_s <= 0:
        return Timeline(1.0, (), ())
    count = max(1, min(steps, int(duration_s / 0.1)))
    width = duration_s * 1e9 / count
    tokens, busy = [0.0] * count, [0.0] * count
    for row in good:
        scale = row.output_tokens / len(row.chunk_ns)  # several tokens may share a chunk
        for t in row.chunk_ns:
            tokens[min(count - 1, max(0, int(t / width)))] += scale
        first, last = max(0.0, row.asked_ns / width), min(float(count), row.chunk_ns[-1] / width)
        for step in range(int(first), min(count, int(last) + 1)):
            busy[step] += max(0.0, min(last, step + 1) - max(first, step))
    return Timeline(width / 1e9, tuple(n / (width / 1e9) for n in tokens), tuple(busy))
