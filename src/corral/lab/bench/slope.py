"""A straight line through points: how steep it is, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence


def slope_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope by least squares, and its standard error; both 0 where nothing can be said."""
    n = len(points)
    if n < 3:
        return 0.0, 0.0
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    sxx = sum((x - mean_x) ** 2 for x, _ in points)
    if not sxx:
        return 0.0, 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sxx
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, math.sqrt(rest / (n - 2) / sxx)
