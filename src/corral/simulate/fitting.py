"""Coefficients of a server from its measured runs.

The simulation itself is fitted: its quantiles of TTFT, TPOT and E2EL on the same loads are brought to the measured
ones (least squares of the logarithms). It sees queues, chunks and the API server, which no regression of rows does,
and needs only the first and the last time of each request. It starts from the plan's roofline, and holds on to it a
little where the runs decide nothing; without a plan for a known GPU, from a regression: the time between a request's
first and last token, by its steps, the sequences beside it, their context, and the prompts computed meanwhile.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from corral.errors import UsageError
from corral.simulate.measured import ExactRecorder, MeasuredRun, RunFigures
from corral.simulate.solver import least_squares, nonnegative
from corral.simulate.steptime import FittedSteps, linearised
from corral.simulate.world import MemberModel, simulate_load

__all__ = ["Fit", "MeasuredRange", "RunError", "error_of", "fit_runs", "fitted_member", "replay"]

QUANTILES = (25.0, 50.0, 75.0, 95.0)
WEIGHTS = {"ttft": 1.0, "tpot": 1.0, "e2el": 1.5}
PRIOR = 0.4  # how much a coefficient that nothing decides is held at its start
LEAST = 1e-10


@dataclass(frozen=True)
class RunError:
    """Predicted against measured, of one run; shares, positive where the prediction is too high."""

    name: str
    e2el_mean: float
    ttft_p50: float
    tpot_p50: float
    throughput: float


@dataclass(frozen=True)
class MeasuredRange:
    """Between what values a fit was measured."""

    concurrency: tuple[float, float]  # requests at once, on average
    input_len: tuple[float, float]
    output_len: tuple[float, float]
    members: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class Fit:
    """Coefficients, the error on the runs that they come from, and where those lie."""

    steps: FittedSteps
    errors: tuple[RunError, ...]
    span: MeasuredRange
    runs: tuple[str, ...]

    def worst(self, metric: str) -> float:
        return max(abs(float(getattr(one, metric))) for one in self.errors)

    def typical(self, metric: str) -> float:
        return median(abs(float(getattr(one, metric))) for one in self.errors)


def fitted_member(measured: MeasuredRun, steps: FittedSteps) -> MemberModel:
    """The server of a run with such coefficients."""
    shape = replace(
        measured.shape, lookahead=steps.lookahead, wake_s=steps.wake_s, request_s=steps.request_s,
        stream_s=steps.stream_s,
    )  # fmt: skip
    return MemberModel(shape, steps, measured.data)


def replay(measured: MeasuredRun, model: MemberModel) -> RunFigures:
    """The load of a run, simulated."""
    recorder = ExactRecorder()
    simulate_load(measured.source(), model, recorder=recorder)
    return recorder.figures()


def error_of(measured: MeasuredRun, found: RunFigures) -> RunError:
    seen = measured.figures

    def off(a: float, b: float) -> float:
        return a / b - 1 if b else 0.0

    return RunError(
        measured.name,
        off(found.mean("e2el"), seen.mean("e2el")),
        off(found.percentile("ttft", 50), seen.percentile("ttft", 50)),
        off(found.percentile("tpot", 50), seen.percentile("tpot", 50)),
        off(found.output_throughput, seen.output_throughput),
    )


def fit_runs(runs: Sequence[MeasuredRun]) -> Fit:
    """The coefficients under which the simulation comes nearest to the runs."""
    if not runs:
        raise UsageError("there is no run to fit to.", "Name runs of `corral bench`; three of different load do.")
    plan = runs[0].plan
    start = linearised(plan) if plan is not None and plan.inventory.kind else regress(runs)
    found = [_refined(runs, replace(start, lookahead=ahead)) for ahead in (False, True)]
    steps, _ = min(found, key=lambda pair: pair[1])
    errors = tuple(error_of(one, replay(one, fitted_member(one, steps))) for one in runs)
    return Fit(steps, errors, _span(runs), tuple(one.name for one in runs))


def _refined(runs: Sequence[MeasuredRun], start: FittedSteps) -> tuple[FittedSteps, float]:
    names = list(start.coefficients())
    begin = [math.log(max(LEAST, value)) for value in start.coefficients().values()]

    def steps_at(point: Sequence[float]) -> FittedSteps:
        return start.with_coefficients({name: math.exp(value) for name, value in zip(names, point, strict=True)})

    def residuals(point: list[float]) -> list[float]:
        steps = steps_at(point)
        found = [PRIOR * (a - b) for a, b in zip(point, begin, strict=True)]
        for one in runs:
            found += _differences(one, replay(one, fitted_member(one, steps)))
        return found

    point, cost = least_squares(residuals, begin)
    return steps_at(point), cost


def _differences(measured: MeasuredRun, found: RunFigures) -> list[float]:
    """Logarithms of predicted over measured quantiles, those of few requests with less weight."""
    trust = 1 / math.sqrt(1 + 10 / len(measured.rows))
    out = []
    for metric, weight in WEIGHTS.items():
        for p in QUANTILES:
            a, b = found.percentile(metric, p), measured.figures.percentile(metric, p)
            out.append(weight * trust * math.log(a / b) if a > 0 and b > 0 else 0.0)
    return out


# the regression


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


def _span(runs: Sequence[MeasuredRun]) -> MeasuredRange:
    def around(values: Sequence[float]) -> tuple[float, float]:
        return min(values), max(values)

    lengths = [(row.input_tokens, row.output_tokens) for one in runs for row in one.rows]
    at_once = [sum(one.figures.e2el) / 1000 / max(1e-9, one.figures.duration_s) for one in runs]
    return MeasuredRange(
        around(at_once), around([a for a, _ in lengths]), around([b for _, b in lengths])
    )  # fmt: skip
