"""Coefficients of a server from its measured runs.

The simulation itself is fitted: its quantiles of TTFT, TPOT and E2EL on the same loads are brought to the measured
ones (least squares of the logarithms). It covers queues, chunks and the API server, which a regression of rows does
not, and needs only the first and the last time of each request. It starts from the plan's roofline, and holds on to
it a little where the runs determine nothing; without a plan for a known GPU, from a regression (`regression`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from corral.base.errors import UsageError
from corral.lab.simulate.measured import ExactRecorder, MeasuredRun, RunFigures
from corral.lab.simulate.regression import least_squares, regress, regress_cpu
from corral.lab.simulate.steptime import FittedSteps, linearised
from corral.lab.simulate.world import MemberModel, simulate_load

QUANTILES = (25.0, 50.0, 75.0, 95.0)
APART = 0.25  # of fits to runs of quiet machines, the errors were at most 0.14 apart (docs/measurements/simulator.md)
WEIGHTS = {"ttft": 1.0, "tpot": 1.0, "e2el": 1.5}
PRIOR = 0.4  # how strongly a coefficient is held at its start, where the runs do not determine it
FAR = 0.7  # how far a quantile may be off, as a logarithm, until more of it no longer counts


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
    """The ranges in which a fit was measured."""

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

    @property
    def doubt(self) -> str:
        """A warning where the runs contradict each other, so that no coefficients suit them all; else empty."""
        low, high = (choose(self.errors, key=lambda one: one.e2el_mean) for choose in (min, max))
        if high.e2el_mean - low.e2el_mean < APART:
            return ""
        return (
            f"The runs it is fitted to contradict each other: mean E2EL is {high.e2el_mean:+.0%} off in {high.name}"
            f" and {low.e2el_mean:+.0%} in {low.name}. One was probably disturbed; measure them again, on a quiet"
            " machine."
        )


def fitted_member(measured: MeasuredRun, steps: FittedSteps) -> MemberModel:
    """The server of a run, with these coefficients."""
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


def error_of(measured: MeasuredRun, simulated: RunFigures) -> RunError:
    measured_figures = measured.figures

    def share_off(a: float, b: float) -> float:
        return a / b - 1 if b else 0.0

    return RunError(
        measured.name,
        share_off(simulated.mean("e2el"), measured_figures.mean("e2el")),
        share_off(simulated.percentile("ttft", 50), measured_figures.percentile("ttft", 50)),
        share_off(simulated.percentile("tpot", 50), measured_figures.percentile("tpot", 50)),
        share_off(simulated.output_throughput, measured_figures.output_throughput),
    )


def fit_runs(runs: Sequence[MeasuredRun]) -> Fit:
    """The coefficients under which the simulation comes nearest to the runs."""
    if not runs:
        raise UsageError("there is no run to fit to.", "Name runs of `corral bench`; three of different load do.")
    plan = runs[0].plan
    if plan is None or (plan.inventory.gpu is not None and plan.inventory.kind is None):
        start = regress(runs)
    else:
        start = linearised(plan) if plan.inventory.kind else regress_cpu(runs, plan)
    simulated = [_refined(runs, replace(start, lookahead=ahead)) for ahead in (False, True)]
    steps, _ = min(simulated, key=lambda pair: pair[1])
    errors = tuple(error_of(one, replay(one, fitted_member(one, steps))) for one in runs)
    return Fit(steps, errors, _span(runs), tuple(one.name for one in runs))


def _refined(runs: Sequence[MeasuredRun], start: FittedSteps) -> tuple[FittedSteps, float]:
    fitted = {name: value for name, value in start.coefficients().items() if value}  # a coefficient of 0 stays 0
    names, begin = list(fitted), [math.log(value) for value in fitted.values()]

    def steps_at(point: Sequence[float]) -> FittedSteps:
        return start.with_coefficients({name: math.exp(value) for name, value in zip(names, point, strict=True)})

    def residuals(point: list[float]) -> list[float]:
        steps = steps_at(point)
        simulated = [PRIOR * (a - b) for a, b in zip(point, begin, strict=True)]
        for one in runs:
            simulated += _differences(one, replay(one, fitted_member(one, steps)))
        return simulated

    point, cost = least_squares(residuals, begin)
    return steps_at(point), cost


def _differences(measured: MeasuredRun, simulated: RunFigures) -> list[float]:
    """Logarithms of predicted over measured quantiles, those of few requests with less weight."""
    trust = 1 / math.sqrt(1 + 10 / len(measured.rows))
    out = []
    for metric, weight in WEIGHTS.items():
        for p in QUANTILES:
            a, b = simulated.percentile(metric, p), measured.figures.percentile(metric, p)
            out.append(weight * trust * _bounded(math.log(a / b)) if a > 0 and b > 0 else 0.0)
    return out


def _bounded(share_off: float) -> float:
    """A difference bounded by `FAR`: a quantile at the edge between two kinds of requests may belong to either."""
    return share_off / math.sqrt(1 + (share_off / FAR) ** 2)


def _span(runs: Sequence[MeasuredRun]) -> MeasuredRange:
    def around(values: Sequence[float]) -> tuple[float, float]:
        return min(values), max(values)

    lengths = [(row.input_tokens, row.output_tokens) for one in runs for row in one.rows]
    at_once = [sum(one.figures.e2el) / 1000 / max(1e-9, one.figures.duration_s) for one in runs]
    return MeasuredRange(
        around(at_once), around([a for a, _ in lengths]), around([b for _, b in lengths])
    )  # fmt: skip
