"""Small plots of block characters for the terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A row of blocks from 0 to the highest value; more values than places are averaged."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
    top = max(values) or 1.0
    return "".join(_BLOCKS[max(0, min(8, math.ceil(v / top * 8)))] for v in values)


def histogram(values: Sequence[float], width: int = 24) -> str:
    """How values are distributed between their least and their P99, as a row of blocks."""
    ordered = sorted(values)
    if not ordered:
        return ""
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    if high <= low:
        return _BLOCKS[8]
    counts = [0] * width
    for value in ordered:
        if value <= high:
            counts[min(width - 1, int((value - low) / (high - low) * width))] += 1
    top = max(counts)
    return "".join(_BLOCKS[max(1 if count else 0, round(count / top * 8))] for count in counts)


def bar(value: float, top: float, width: int = 20) -> str:
    """A horizontal bar, good to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, value / top if top else 0.0)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
