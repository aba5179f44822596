"""Where a fit starts that no plan for a known GPU tells: a regression of the requests' own times.

The time between a request's first and last token, by its steps, the sequences beside it, their context, and the
prompts computed meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from corral.lab.simulate.measured import MeasuredRun
from corral.lab.simulate.solver import nonnegative
from corral.lab.simulate.steptime import FittedSteps, cpu_steps
from corral.plan.contract import Plan

ALONE = 1.2  # sequences at once, on average, up to which a request is alone


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


def regress_cpu(runs: Sequence[MeasuredRun], plan: Plan) -> FittedSteps:
    """Of a server on a CPU: products and what is between them apart, as the planner has them.

    Lone requests' first tokens tell what a row of a product takes, their later ones what reading the weights does,
    which is as long as that of some rows.
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
    """How much longer lone requests wait for their first token with each token of their prompts, and in any case."""
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
