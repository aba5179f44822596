"""Small least-squares problems without a library: coefficients that are not negative, and a damped Gauss-Newton."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Vector = list[float]


def nonnegative(rows: Sequence[Sequence[float]], wanted: Sequence[float], rounds: int = 3000) -> Vector:
    """The x ≥ 0 for which rows · x comes nearest to `wanted`: one coefficient after the other, again and again."""
    width = len(rows[0])
    scale = [math.sqrt(math.fsum(row[i] ** 2 for row in rows)) or 1.0 for i in range(width)]
    gram = [
        [math.fsum(row[i] * row[j] for row in rows) / (scale[i] * scale[j]) for j in range(width)]
        for i in range(width)
    ]
    aim = [math.fsum(row[i] * y for row, y in zip(rows, wanted, strict=True)) / scale[i] for i in range(width)]
    x = [0.0] * width
    for _ in range(rounds):
        moved = 0.0
        for i in range(width):
            if gram[i][i] <= 0:
                continue
            rest = aim[i] - sum(gram[i][j] * x[j] for j in range(width) if j != i)
            value = max(0.0, rest / gram[i][i])
            moved, x[i] = max(moved, abs(value - x[i])), value
        if moved <= 1e-12 * (1e-300 + max(map(abs, x))):
            break
    return [value / size for value, size in zip(x, scale, strict=True)]


def _solve(matrix: list[Vector], right: Vector) -> Vector:
    """Gaussian elimination with pivots."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda n: abs(rows[n][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for n in range(at + 1, size):
            factor = rows[n][at] / rows[at][at]
            rows[n] = [a - factor * b for a, b in zip(rows[n], rows[at], strict=True)]
    found = [0.0] * size
    for at in reversed(range(size)):
        found[at] = (rows[at][-1] - sum(rows[at][n] * found[n] for n in range(at + 1, size))) / rows[at][at]
    return found


def _cost(residuals: Sequence[float]) -> float:
    return math.fsum(value * value for value in residuals)


def least_squares(
    residuals_of: Callable[[Vector], Vector], start: Vector, rounds: int = 12, step: float = 0.05
) -> tuple[Vector, float]:
    """Levenberg-Marquardt from a start, with differences of `step` for derivatives; the point and its cost."""
    x, damping = list(start), 1e-2
    here = residuals_of(x)
    cost = _cost(here)
    for _ in range(rounds):
        columns = []
        for i in range(len(x)):
            moved = residuals_of([value + (step if i == n else 0.0) for n, value in enumerate(x)])
            columns.append([(b - a) / step for a, b in zip(here, moved, strict=True)])
        gram = [[math.fsum(a * b for a, b in zip(p, q, strict=True)) for q in columns] for p in columns]
        slope = [-math.fsum(a * b for a, b in zip(p, here, strict=True)) for p in columns]
        before = cost
        for _ in range(6):
            damped = [
                [v * (1 + damping) + 1e-9 if i == j else v for j, v in enumerate(r)] for i, r in enumerate(gram)
            ]
            change = [max(-1.0, min(1.0, value)) for value in _solve(damped, slope)]
            there = [value + delta for value, delta in zip(x, change, strict=True)]
            found = residuals_of(there)
            if _cost(found) < cost:
                x, here, cost, damping = there, found, _cost(found), damping / 4
                break
            damping *= 5
        if before - cost < 1e-3 * before:
            break
    return x, cost
