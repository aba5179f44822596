"""The goal of a tuning run: a score of a server, higher is better, and its distance from what the hardware could do.

The distance is to two bounds of the planner at the load that was measured, in the unit of the goal. *Hardware*:
memory bandwidth and arithmetic at the vendor's rates, with nothing else in the way; no server reaches it. *Planned*:
the same with the efficiencies and costs that were measured on such hardware; a setup near it leaves nothing to
tuning. Of a CPU only the second is known, because its rates are measured ones.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from corral.base.errors import CorralError, UsageError
from corral.lab.bench.limit import roof
from corral.lab.bench.measure import Bench
from corral.lab.bench.metrics import Summary
from corral.lab.bench.series import reseeded, search_limit
from corral.lab.bench.spec import LoadShape, Slo, Spec
from corral.lab.tune.race import RaceResult
from corral.lab.tune.trials import Roofline, Trial
from corral.plan.contract import Plan
from corral.plan.speed import Efficiency, rounded

MOST_PROMPTS = 20_000
PROBES = 7  # of one search for the highest rate


class ObjectiveKind(enum.StrEnum):
    """What a tuning run optimises."""

    THROUGHPUT = "throughput"  # output tokens a second, at so many requests at once
    COST = "cost"  # the same for each GPU: the fewest GPU-hours for a million tokens
    LATENCY = "latency"  # the shortest end-to-end time, at a rate
    RATE = "rate"  # the most requests a second that keep a service level


@dataclass(frozen=True)
class Objective:
    """One goal with its parameters."""

    kind: ObjectiveKind = ObjectiveKind.THROUGHPUT
    concurrency: int | None = None
    rate: float | None = None
    slos: tuple[Slo, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is ObjectiveKind.RATE and not self.slos:
            raise UsageError("--objective rate needs a service level.", "Add --slo ttft_p99=1s,tpot_p99=50ms.")
        if self.kind is ObjectiveKind.LATENCY and not self.rate:
            raise UsageError("--objective latency needs a request rate.", "Add --request-rate PER_S.")
        if self.slos and self.kind is not ObjectiveKind.RATE:
            raise UsageError(
                f"--slo cannot be used with --objective {self.kind}.",
                "Leave out --objective: --slo implies --objective rate.",
            )

    @property
    def unit(self) -> str:
        return {"throughput": "tok/s", "cost": "tok/s per GPU", "latency": "1/s", "rate": "req/s"}[self.kind]

    @property
    def words(self) -> str:
        match self.kind:
            case ObjectiveKind.RATE:
                return f"the highest request rate that meets {', '.join(map(str, self.slos))}"
            case ObjectiveKind.LATENCY:
                return f"the lowest median latency at {self.rate:g} req/s"
            case ObjectiveKind.COST:
                return f"the fewest GPU-hours per token with {self.concurrency} requests at once"
        return f"the most output tokens per second with {self.concurrency} requests at once"


@dataclass(frozen=True)
class Measured:
    """The score of one measurement."""

    value: float
    summary: Summary  # of a run at the load that the value is about


async def measure_score(
    bench: Bench, spec: Spec, goal: Objective, seconds: float, folder: Path, turn: int
) -> Measured:
    """Measure a server for about so long; each turn sends prompts that are in no cache yet."""
    folder.mkdir(mode=0o700, parents=True)
    spec = reseeded(spec, turn)
    if goal.kind is ObjectiveKind.RATE:
        saturate = goal.concurrency or 64
        result, done = await search_limit(
            bench, spec, goal.slos, folder, seconds=seconds / 2, most=PROBES, saturate=saturate
        )
        if result.best is None:
            raise CorralError(f"none of the loads tried meets {', '.join(map(str, goal.slos))}.", "Relax --slo.")
        return Measured(result.best, done[0].run.summary)
    if goal.kind is ObjectiveKind.LATENCY:
        load = LoadShape(rate=goal.rate, seconds=seconds)
        count = max(20, round((goal.rate or 1.0) * seconds))
    else:
        load = LoadShape(concurrency=goal.concurrency, seconds=seconds)
        count = MOST_PROMPTS
    finished = await bench.run(replace(spec, load=load, workload=replace(spec.workload, num_prompts=count)), folder)
    summary = finished.run.summary
    if not summary.completed or not summary.e2el.median:
        raise CorralError("no request was answered.", f"See the measurement in {folder}.")
    if goal.kind is ObjectiveKind.LATENCY:
        return Measured(1000 / summary.e2el.median, summary)
    plan = bench.plan
    gpus = (plan.gpus or 1) if plan and goal.kind is ObjectiveKind.COST else 1
    return Measured(summary.output_throughput / gpus, summary)


IDEAL = Efficiency(
    bandwidth=1.0, matrix=1.0, matrix_fp8=1.0, layer_s=0.0, fp8_layer_s=0.0, step_s=0.0, sequence_s=0.0, floor_s=0.0,
    floor_sequence_s=0.0, frontend_s=0.0, frontend_tokens_s=math.inf, frontend_chunk_s=0.0, eager_layer_s=0.0,
    eager_sequence_s=0.0, reduce_s=0.0, reduce_pcie_s=0.0, reduce_bandwidth=1.0, hop_s=0.0,
)  # fmt: skip


def roofline(plan: Plan | None, goal: Objective, summary: Summary) -> Roofline | None:
    """The bounds at the load of a measurement; None where the plan has no speed for this hardware."""
    if plan is None or not summary.completed or not summary.output_tokens:
        return None
    prompt, answer = (total / summary.completed for total in (summary.input_tokens, summary.output_tokens))
    planned = _bound(plan, goal, prompt, answer, None)
    if planned is None:
        return None
    return Roofline(_bound(plan, goal, prompt, answer, IDEAL) if plan.inventory.kind else None, planned)


def _bound(plan: Plan, goal: Objective, prompt: float, answer: float, rates: Efficiency | None) -> float | None:
    at_once = {ObjectiveKind.RATE: plan.seats, ObjectiveKind.LATENCY: 1}.get(goal.kind) or goal.concurrency or 1
    tokens_s = roof(plan, at_once, prompt, answer, rates=rates)
    if tokens_s is None:
        return None
    if goal.kind in (ObjectiveKind.RATE, ObjectiveKind.LATENCY):
        return tokens_s / answer
    return tokens_s / (plan.gpus or 1) if goal.kind is ObjectiveKind.COST else tokens_s


@dataclass(frozen=True)
class Distance:
    """The score of the best setup, and its shares of the two bounds."""

    score: float
    unit: str
    hardware: float | None
    planned: float
    of_hardware: float | None
    of_planned: float

    @property
    def words(self) -> str:
        of_plan = f"{self.of_planned:.0%} of what the plan predicts for it ({rounded(self.planned)} {self.unit})"
        if self.hardware is None or self.of_hardware is None:
            return of_plan
        of_roofline = f"{self.of_hardware:.0%} of the hardware's roofline ({rounded(self.hardware)} {self.unit})"
        return f"{of_roofline}, {of_plan}"


def distance(goal: Objective, result: RaceResult, trials: Sequence[Trial]) -> Distance | None:
    """The distance of the setup to be used; None where the speed of the hardware is not known."""
    trials_of_best = [one for one in trials if one.setup == result.best and one.score and one.roofline]
    if not trials_of_best:
        return None
    score = fmean(one.score for one in trials_of_best if one.score)
    hardware = [one.roofline.hardware for one in trials_of_best if one.roofline and one.roofline.hardware]
    planned = median(one.roofline.planned for one in trials_of_best if one.roofline)
    hardware_bound = median(hardware) if hardware else None
    return Distance(
        score, goal.unit, hardware_bound, planned, score / hardware_bound if hardware_bound else None, score / planned
    )
