"""Where a fit starts that no plan for a known GPU tells: a regression of the requests' own times.

The time between a request's first and last token, by its steps, the sequences beside it, their context, and the prompts
computed meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from corral.simulate.measured import MeasuredRun
from corral.simulate.solver import nonnegative
from corral.simulate.steptime import FittedSteps

__all__ = ["regress"]


def regress(runs: Sequence[MeasuredRun]) -> FittedSteps:
    """Where the fit starts."""
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


def _spans(measured: MeasuredRun) -> list[tuple[float, tuple[float, float, float], float]]:
    """Of each request: its decode steps; sequences, context and prompt tokens beside it, by step; and its seconds."""
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
