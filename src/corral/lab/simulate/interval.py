"""How far a forecast may be off: the interval around each of its figures.

Two errors go into it. Step times may be wrong by a share, so the load is simulated again with all of them longer and
shorter by `STEP_ERROR`: far from saturation that moves latencies by as much, near it by several times that, which is
how such forecasts go wrong. And the fit's own error on its runs is added on both sides. What lies beyond the
measurements widens both. `STEP_ERROR` was chosen so that nine of ten figures of the held-out runs in tests/data lie
within; docs/simulate.md says how many did on which hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from corral.lab.simulate.fitting import Fit, MeasuredRange
from corral.lab.simulate.measured import LoadPoint

# what a forecast says of a metric -> the error of a fit that belongs to it
INTERVAL_METRICS = {"ttft": "ttft_p50", "tpot": "tpot_p50", "e2el": "e2el_mean", "throughput": "throughput"}
STEP_ERROR = 0.1
LEAST_ERROR = 0.03
MOST_STEP_ERROR = 0.9

Interval = tuple[float, float]  # shares of a figure, below and above it


def beyond(span: MeasuredRange, point: LoadPoint) -> tuple[tuple[str, ...], float]:
    """What lies outside of what was measured, in words, and by how many doublings in all."""
    words, doublings = [], 0.0
    for name, value, (low, high) in (
        ("requests at once", point.at_once, span.concurrency),
        ("prompt tokens", point.prompt, span.input_len),
        ("answer tokens", point.output, span.output_len),
    ):
        one = math.log2(max(value / max(high, 1e-9), low / max(value, 1e-9), 1.0))
        if one > 0.07:
            doublings += one
            words.append(f"{value:,.0f} {name}; measured {low:,.0f} to {high:,.0f}")
    return tuple(words), doublings


def step_error(fit: Fit, factor: float = 1.0) -> float:
    """By what share step times may be off."""
    return min(MOST_STEP_ERROR, factor * max(STEP_ERROR, fit.worst("e2el_mean")))


def intervals(
    fit: Fit, figures: dict[str, float], run: Callable[[float], dict[str, float]], factor: float = 1.0
) -> dict[str, Interval]:
    """Around each of `figures`, with what `run` gives when every step takes so many times longer."""
    wrong = step_error(fit, factor)
    slow, quick = run(1 + wrong), run(1 / (1 + wrong))
    found = {}
    for name, error in INTERVAL_METRICS.items():
        own = factor * max(LEAST_ERROR, fit.worst(error))
        values = [figures[name], slow[name], quick[name]]
        here = figures[name] or 1.0
        found[name] = (min(values) / here / (1 + own) - 1, max(values) / here * (1 + own) - 1)
    return found
