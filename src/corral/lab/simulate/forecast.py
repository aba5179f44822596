"""Forecasts of a load: a simulation, and an interval around each of its figures.

Without a fit there is no interval: the roofline's error is known only where it was measured. With one, two errors go
into it. Step times may be wrong by a share, so the load is simulated again with all of them longer and
shorter by `STEP_ERROR`: far from saturation that moves latencies by as much, near it by several times that, which is
how such forecasts go wrong. And the fit's own error on its runs is added on both sides. What lies beyond the
measurements widens both. `STEP_ERROR` was chosen so that nine of ten figures of the held-out runs in tests/data lie
within; docs/measurements/simulator.md says how many did on which hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from corral.lab.bench.spec import Slo
from corral.lab.simulate.engine import EngineShape
from corral.lab.simulate.fitting import Fit, MeasuredRange, fitted_member
from corral.lab.simulate.measured import LoadPoint, MeasuredRun
from corral.lab.simulate.outcome import SimOutcome
from corral.lab.simulate.requests import FirstOf, RequestSource
from corral.lab.simulate.steptime import linearised, planned_steps
from corral.lab.simulate.world import MemberModel, ScalingModel, simulate_load
from corral.plan.contract import Plan

# what a forecast says of a metric -> the error of a fit that belongs to it
INTERVAL_METRICS = {"ttft": "ttft_p50", "tpot": "tpot_p50", "e2el": "e2el_mean", "throughput": "throughput"}
STEP_ERROR = 0.1
LEAST_ERROR = 0.03
MOST_STEP_ERROR = 0.9

Interval = tuple[float, float]  # shares of a figure, below and above it


def beyond(span: MeasuredRange, point: LoadPoint) -> tuple[tuple[str, ...], float]:
    """What lies outside the measured ranges, as text, and by how many doublings in all."""
    texts, doublings = [], 0.0
    for name, value, (low, high) in (
        ("requests at once", point.at_once, span.concurrency),
        ("prompt tokens", point.prompt, span.input_len),
        ("answer tokens", point.output, span.output_len),
    ):
        one = math.log2(max(value / max(high, 1e-9), low / max(value, 1e-9), 1.0))
        if one > 0.07:
            doublings += one
            texts.append(f"{value:,.0f} {name}; measured {low:,.0f} to {high:,.0f}")
    return tuple(texts), doublings


def step_error(fit: Fit, factor: float = 1.0) -> float:
    """By what share step times may be off."""
    return min(MOST_STEP_ERROR, factor * max(STEP_ERROR, fit.worst("e2el_mean")))


def intervals(
    fit: Fit, figures: dict[str, float], run: Callable[[float], dict[str, float]], factor: float = 1.0
) -> dict[str, Interval]:
    """Around each of `figures`, with what `run` gives when every step takes so many times longer."""
    error = step_error(fit, factor)
    slow, quick = run(1 + error), run(1 / (1 + error))
    bounds = {}
    for name, metric in INTERVAL_METRICS.items():
        own = factor * max(LEAST_ERROR, fit.worst(metric))
        values = [figures[name], slow[name], quick[name]]
        here = figures[name] or 1.0
        bounds[name] = (min(values) / here / (1 + own) - 1, max(values) / here * (1 + own) - 1)
    return bounds


FIRST = 5000  # requests of a longer load with which its interval is found


@dataclass(frozen=True)
class SimServer:
    """One replica, where its step times come from, and what it costs."""

    model: MemberModel
    basis: str
    gpus: int = 0  # of one replica
    fit: Fit | None = None
    changed: tuple[str, ...] = ()  # differences from the server that was measured

    @property
    def fitted(self) -> bool:
        return self.fit is not None


@dataclass(frozen=True)
class Forecast:
    """One simulated load."""

    label: str
    replicas: int
    outcome: SimOutcome
    interval: dict[str, Interval]  # of each metric; empty where nothing was fitted
    beyond: tuple[str, ...]
    meets: bool | None  # None where there is no SLO
    gpu_hours: float
    cost: float | None = None


def planned_server(plan: Plan) -> SimServer:
    """A server as it is planned, without a measurement."""
    steps, request_s, stream_s = planned_steps(plan)
    s, stages = plan.settings, plan.parallel.pipeline
    each = max(1.0, s.api_servers / plan.parallel.data)
    shape = EngineShape(
        s.max_num_batched_tokens * stages,
        s.max_num_seqs,
        s.block_size,
        max(1, plan.memory.kv_cache_tokens_per_replica // s.block_size),
        request_s=request_s,
        stream_s=stream_s / each,
    )
    basis = f"the planner's roofline ({plan.speed.basis}), not fitted to any run"
    return SimServer(MemberModel(shape, steps, plan.parallel.data), basis, plan.gpus or 0)


def fitted_server(measured: MeasuredRun, fit: Fit) -> SimServer:
    plan = measured.plan
    text = f"fitted to {len(fit.runs)} runs: {', '.join(fit.runs)}"
    return SimServer(fitted_member(measured, fit.steps), text, (plan.gpus or 0) if plan else 0, fit)


def what_if(server: SimServer, measured: Plan, other: Plan) -> SimServer:
    """The server under another plan: its coefficients are scaled by the ratio of the two rooflines."""
    assert server.fit is not None
    begun = linearised(other)
    old, new = linearised(measured).coefficients(), begun.coefficients()
    own = replace(server.fit.steps, graph_tokens=begun.graph_tokens, tile_tokens=begun.tile_tokens)
    steps = own.with_coefficients({k: v * new[k] / old[k] if old[k] else v for k, v in own.coefficients().items()})
    planned = planned_server(other).model
    shape = replace(
        planned.shape, lookahead=steps.lookahead, wake_s=steps.wake_s, request_s=steps.request_s,
        stream_s=steps.stream_s,
    )  # fmt: skip
    changed = []
    if other.precision.weights != measured.precision.weights:
        changed.append(f"weights in {other.precision.weights}, measured in {measured.precision.weights}")
    if other.parallel != measured.parallel:
        changed.append(f"{other.parallel}, measured with {measured.parallel}")
    if other.max_model_len != measured.max_model_len:
        changed.append(f"a context of {other.max_model_len:,}, measured with {measured.max_model_len:,}")
    return replace(
        server, model=MemberModel(shape, steps, planned.data), gpus=other.gpus or 0, changed=tuple(changed)
    )


def forecast(
    server: SimServer,
    source: Callable[[], RequestSource],
    label: str,
    replicas: int = 1,
    policy: str = "prefix",
    slos: Sequence[Slo] = (),
    scaling: ScalingModel | None = None,
    price: float | None = None,
) -> Forecast:
    """Simulate one load, and again with other step times."""
    outcome = simulate_load(source(), server.model, replicas, policy, slos, scaling)

    def again(model: MemberModel) -> SimOutcome:
        return simulate_load(FirstOf(source(), FIRST), model, replicas, policy, (), scaling)

    texts, interval = _errors(server, outcome, again)
    hours = outcome.member_s * server.gpus / 3600
    meets = outcome.meets if slos else None
    return Forecast(label, replicas, outcome, interval, texts, meets, hours, hours * price if price else None)


def _errors(
    server: SimServer, outcome: SimOutcome, again: Callable[[MemberModel], SimOutcome]
) -> tuple[tuple[str, ...], dict[str, Interval]]:
    """What lies beyond the measurements, and the interval of each figure."""
    if server.fit is None or not outcome.completed:
        return (), {}
    at_once = outcome.mean_running / max(1, outcome.members)
    point = LoadPoint(at_once, outcome.input_tokens / outcome.completed, outcome.output_tokens / outcome.completed)
    texts, doublings = beyond(server.fit.span, point)
    here = outcome if outcome.sent <= FIRST else again(server.model)

    def other(factor: float) -> dict[str, float]:
        return _figures(again(server.model.slowed(factor)))

    factor = 1.0 + len(server.changed) + doublings
    return (*server.changed, *texts), intervals(server.fit, _figures(here), other, factor)


def _figures(outcome: SimOutcome) -> dict[str, float]:
    t = outcome.latencies
    return {"ttft": t["ttft"]["p50"], "tpot": t["tpot"]["p50"], "e2el": t["e2el"]["mean"],
            "throughput": outcome.output_throughput}  # fmt: skip


def smallest_fleet(run: Callable[[int], Forecast], least: int, most: int) -> tuple[list[Forecast], Forecast | None]:
    """The fewest replicas that meet the SLO, by halving; all that was tried, and the answer if there is one."""
    tried = {most: run(most)}
    if not tried[most].meets:
        return list(tried.values()), None
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        tried[middle] = run(middle)
        if tried[middle].meets:
            high = middle
        else:
            low = middle + 1
    if high not in tried:
        tried[high] = run(high)
    return [tried[count] for count in sorted(tried)], tried[high]


def highest_rate(meets: Callable[[float], bool], least: float, most: float, rounds: int = 6) -> float | None:
    """The highest rate that meets the SLO, to a few percent; None where the least does not."""
    if not meets(least):
        return None
    low, high = least, most
    if meets(most):
        return most
    for _ in range(rounds):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def highest_rates(
    server: SimServer,
    source_at: Callable[[float], RequestSource],
    rates: tuple[float, float],
    slos: Sequence[Slo],
    replicas: int = 1,
    policy: str = "prefix",
) -> tuple[float | None, ...]:
    """The highest rate; with a fit, also with longer and with shorter step times."""
    models = [server.model]
    if server.fit:
        error = step_error(server.fit)
        models += [server.model.slowed(1 + error), server.model.slowed(1 / (1 + error))]

    def limit(model: MemberModel) -> float | None:
        return highest_rate(lambda rate: simulate_load(source_at(rate), model, replicas, policy, slos).meets, *rates)

    return tuple(limit(model) for model in models)
