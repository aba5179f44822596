"""The start of a fit where there is no plan for a known GPU: a regression of the requests' own times.

The time between a request's first and last token depends on its steps, the sequences beside it, their context, and
the prompts computed meanwhile. The two small solvers (coefficients that are not negative, and a damped Gauss-Newton)
need no library.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median

from corral.lab.simulate.measured import MeasuredRun
from corral.lab.simulate.steptime import FittedSteps, cpu_steps
from corral.plan.contract import Plan

Vector = list[float]


def nonnegative(rows: Sequence[Sequence[float]], wanted: Sequence[float], rounds: int = 3000) -> Vector:
    """The x ≥ 0 for which rows · x comes nearest to `wanted`: by coordinate descent."""
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


ALONE = 1.2  # sequences at once, on average, up to which a request is alone


def regress(runs: Sequence[MeasuredRun]) -> FittedSteps:
    """Coefficients from which a fit starts."""
    rows, wanted = [], []
    for one in runs:
        for steps, features, seconds in _spans(one):
            weight = 1 / seconds  # relative errors
            rows.append([weight * value for value in (steps, *features)])
            wanted.append(1.0)
    step, sequence, context, prompt = nonnegative(rows, wanted) if rows else (1e-3, 0.0, 0.0, 1e-5)
    step = max(step, 1e-5)
    prompt = prompt or step / 500
    alone = [
        row.ttft_s - step - prompt * row.input_tokens for one in runs for row in one.rows
    ]  # fmt: skip
    request = max(step / 10, sorted(alone)[len(alone) // 10])
    return FittedSteps(
        step_s=step,
        sequence_s=max(sequence, step / 1000),
        kv_s=max(context, step * 1e-7),
        prompt_s=prompt,
        attend_s=prompt * 1e-5,
        wake_s=request,
        request_s=request,
        stream_s=step / 1000,
    )


def regress_cpu(runs: Sequence[MeasuredRun], plan: Plan) -> FittedSteps:
    """The same for a server on a CPU, where matrix products and the work between them are counted apart.

    The first tokens of lone requests show the time of one row of a product, the later ones the time to read the
    weights, which is that of some rows.
    """
    start, spans = regress(runs), [span for one in runs for span in _spans(one)]
    lone = [seconds / steps for steps, (count, _, beside), seconds in spans if count < ALONE * steps and not beside]
    if not lone:
        return start
    alone_s = median(lone)
    prompt_s, first_s = _first_tokens(runs) or (start.prompt_s, start.request_s + alone_s / 2)
    steps = cpu_steps(plan.model, alone_s, prompt_s, first_s)
    return replace(steps, kv_s=start.kv_s, stream_s=start.stream_s)


def _first_tokens(runs: Sequence[MeasuredRun]) -> tuple[float, float] | None:
    """Seconds until the first token of a lone request: per token of its prompt, and fixed."""
    pairs = []
    for one in runs:
        busy_until = 0
        for row in sorted(one.rows, key=lambda row: row.asked_ns):
            if row.asked_ns >= busy_until and not row.cached_tokens:
                pairs.append((float(row.input_tokens), row.ttft_s))
            busy_until = max(busy_until, row.chunk_ns[-1])
    if len({tokens for tokens, _ in pairs}) < 5:
        return None
    middle, mean = fmean(tokens for tokens, _ in pairs), fmean(seconds for _, seconds in pairs)
    spread = sum((tokens - middle) ** 2 for tokens, _ in pairs)
    slope = sum((tokens - middle) * (seconds - mean) for tokens, seconds in pairs) / spread
    return (slope, mean - slope * middle) if slope > 0 else None


def _spans(measured: MeasuredRun) -> list[tuple[float, tuple[float, float, float], float]]:
    """Each request's decode steps; sequences, context and prompt tokens beside it, by step; and its seconds."""
    rows = measured.rows
    changes: list[tuple[int, float, float]] = []
    for row in rows:
        context = row.input_tokens + row.output_tokens / 2
        changes += [(row.chunk_ns[0], 1.0, context), (row.chunk_ns[-1], -1.0, -context)]
    integral = _Integral(sorted(changes))
    prompts = sorted((row.chunk_ns[0], row.input_tokens) for row in rows)
    found = []
    for row in rows:
        first, last = row.chunk_ns[0], row.chunk_ns[-1]
        if row.output_tokens < 3 or last <= first:
            continue
        steps = row.output_tokens - 1.0
        count, context = integral.between(first, last)
        beside = sum(tokens for at, tokens in prompts if first < at <= last)
        share = steps / (last - first)
        found.append((steps, (count * share, context * share, float(beside)), (last - first) / 1e9))
    return found


class _Integral:
    """Sequences and their context, summed over time."""

    def __init__(self, changes: Sequence[tuple[int, float, float]]) -> None:
        self._at: list[int] = []
        self._sums: list[tuple[float, float, float, float]] = []  # both sums until then, both levels from then on
        count = context = whole = depth = 0.0
        before = changes[0][0] if changes else 0
        for at, more, tokens in changes:
            whole, depth = whole + count * (at - before), depth + context * (at - before)
            count, context, before = count + more, context + tokens, at
            self._at.append(at)
            self._sums.append((whole, depth, count, context))

    def _until(self, at: int) -> tuple[float, float]:
        place = bisect_right(self._at, at) - 1
        if place < 0:
            return 0.0, 0.0
        whole, depth, count, context = self._sums[place]
        return whole + count * (at - self._at[place]), depth + context * (at - self._at[place])

    def between(self, begin: int, end: int) -> tuple[float, float]:
        a, b = self._until(begin), self._until(end)
        return b[0] - a[0], b[1] - a[1]
