"""The error of a fit on runs that it was not fitted to, beside the error of the planner alone.

The planner knows no queues: by Little's law, a rate becomes a number of requests at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from corral.base.errors import UsageError
from corral.lab.bench.spec import Slo
from corral.lab.simulate.fitting import Fit, RunError, error_of, fit_runs, fitted_member, replay
from corral.lab.simulate.forecast import Interval, beyond, intervals
from corral.lab.simulate.measured import MeasuredRun, RunFigures
from corral.plan.measured import speed_at

FITTED = 3


@dataclass(frozen=True)
class HeldOut:
    """One run that the fit was not made from."""

    name: str
    requests: int
    e2el_mean_ms: float
    ttft_p50_ms: float
    output_throughput: float
    simulated: RunError
    planned: RunError | None  # None where the run has no plan
    interval: dict[str, Interval]  # of a forecast of this run
    within: dict[str, bool]  # whether the measured figure lies in it


@dataclass(frozen=True)
class RateLimit:
    """The highest rate under an SLO, between the rates that were measured."""

    slo: str
    measured: float | None  # None: it lies outside them
    simulated: float | None

    @property
    def error(self) -> float | None:
        return self.simulated / self.measured - 1 if self.measured and self.simulated else None


@dataclass(frozen=True)
class Validation:
    """All errors."""

    fit: Fit
    held_out: tuple[HeldOut, ...]
    limits: tuple[RateLimit, ...] = ()
    assumed: tuple[str, ...] = ()

    def median_error(self, metric: str, planned: bool = False) -> float | None:
        replayed = [one.planned if planned else one.simulated for one in self.held_out]
        values = [abs(float(getattr(one, metric))) for one in replayed if one is not None]
        return median(values) if values else None

    def covered(self, metric: str) -> int:
        """Held-out runs whose measured figure lies within the interval of its forecast."""
        return sum(one.within[metric] for one in self.held_out)


def validate(runs: Sequence[MeasuredRun], fitted: Sequence[str] = (), slos: Sequence[Slo] = ()) -> Validation:
    """Fit to the named runs, or the first three, and predict the others."""
    chosen = [one for one in runs if one.name in fitted] if fitted else list(runs[:FITTED])
    held_out = [one for one in runs if one not in chosen]
    if not held_out:
        raise UsageError(
            f"of {len(runs)} runs, none is left to hold out.", f"Name more than the {len(chosen)} to fit to."
        )
    fit = fit_runs(chosen)
    replayed = {one.name: replay(one, fitted_member(one, fit.steps)) for one in held_out}
    rows = tuple(_held_out(fit, one, replayed[one.name]) for one in held_out)
    limits = tuple(limit for slo in slos if (limit := _limit(held_out, replayed, slo)) is not None)
    return Validation(fit, rows, limits, tuple(sorted({text for one in runs for text in one.assumed})))


def _held_out(fit: Fit, measured: MeasuredRun, replayed: RunFigures) -> HeldOut:
    figures, model = measured.figures, fitted_member(measured, fit.steps)
    around = intervals(
        fit,
        _by_metric(replayed),
        lambda factor: _by_metric(replay(measured, model.slowed(factor))),
        1 + beyond(fit.span, measured.point)[1],
    )
    real, simulated = _by_metric(figures), _by_metric(replayed)
    within = {
        name: simulated[name] * (1 + low) <= real[name] <= simulated[name] * (1 + high)
        for name, (low, high) in around.items()
    }
    return HeldOut(
        measured.name,
        len(measured.rows),
        figures.mean("e2el"),
        figures.percentile("ttft", 50),
        figures.output_throughput,
        error_of(measured, replayed),
        _planned(measured),
        around,
        within,
    )


def _by_metric(replayed: RunFigures) -> dict[str, float]:
    return {"ttft": replayed.percentile("ttft", 50), "tpot": replayed.percentile("tpot", 50), "e2el":
    replayed.mean("e2el"),
            "throughput": replayed.output_throughput}  # fmt: skip


def _planned(measured: MeasuredRun) -> RunError | None:
    plan = measured.plan
    if plan is None:
        return None
    rows, load = measured.rows, measured.run.spec.load
    prompt = max(1, round(sum(row.input_tokens for row in rows) / len(rows)))
    output = max(1, round(sum(row.output_tokens for row in rows) / len(rows)))
    at_once, e2el, speed = float(load.concurrency or 1), 0.0, plan.speed
    for _ in range(40):  # Little's law, until it holds
        speed = speed_at(plan, prompt, output, max(1, round(at_once)))
        if not speed.ttft_s or not speed.tpot_s:
            return None
        e2el = speed.ttft_s + (output - 1) * speed.tpot_s
        if not load.rate:
            break
        wanted = min(load.rate * e2el, 4.0 * plan.seats)
        if abs(wanted - at_once) < 0.5:
            break
        at_once += (wanted - at_once) / 2
    if not load.rate and at_once > plan.seats:  # the others wait for a seat
        e2el *= at_once / plan.seats
    rate = load.rate if load.rate and load.rate * e2el <= plan.seats else min(at_once, plan.seats) / e2el
    figures = measured.figures
    return RunError(
        measured.name,
        1000 * e2el / figures.mean("e2el") - 1,
        1000 * (speed.ttft_s or 0.0) / figures.percentile("ttft", 50) - 1,
        1000 * (speed.tpot_s or 0.0) / (figures.percentile("tpot", 50) or math.inf) - 1,
        rate * output / figures.output_throughput - 1,
    )


def _limit(held_out: Sequence[MeasuredRun], replayed: dict[str, RunFigures], slo: Slo) -> RateLimit | None:
    """Where a statistic crosses its limit between runs that differ in their rate alone; the largest such family.

    Of several runs at one rate the median counts: close to saturation one run says little.
    """
    families: dict[object, list[MeasuredRun]] = {}
    for one in held_out:
        load, work = one.run.spec.load, one.run.spec.workload
        if load.rate and load.arrival == "poisson" and load.concurrency is None:
            key = replace(work, seed=0, num_prompts=1)
            families.setdefault(key, []).append(one)
    family = max(families.values(), key=len, default=[])
    if len(family) < 2:
        return None
    rates = [float(one.run.spec.load.rate or 0.0) for one in family]

    def crossing(figures: Sequence[RunFigures]) -> float | None:
        values: dict[float, list[float]] = {}
        for rate, one in zip(rates, figures, strict=True):
            values.setdefault(rate, []).append(max(1e-9, _statistic(one, slo)))
        points = sorted((rate, median(figures)) for rate, figures in values.items())
        for (low, a), (high, b) in itertools.pairwise(points):
            if a <= slo.limit_ms < b:
                return low + (high - low) * math.log(slo.limit_ms / a) / math.log(b / a)
        return None

    measured, simulated = crossing([one.figures for one in family]), crossing([replayed[one.name] for one in family])
    return RateLimit(str(slo), measured, simulated)


def _statistic(figures: RunFigures, slo: Slo) -> float:
    return figures.mean(slo.metric) if slo.statistic == "mean" else figures.percentile(slo.metric, slo.percentile)
