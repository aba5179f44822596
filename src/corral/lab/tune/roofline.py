"""How far a setup is from what the hardware could do at the very load that was measured.

Two bounds, both of the planner's, in the unit of the goal. *Hardware*: memory bandwidth and arithmetic at the
vendor's rates, with nothing else in the way; no server reaches it. *Planned*: the same with the efficiencies and
costs that were measured on such hardware; a setup near it leaves nothing to tuning. Of a CPU only the second is
known, because its rates are measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from corral.lab.bench.limit import roof
from corral.lab.bench.metrics import Summary
from corral.lab.tune.objective import Objective, ObjectiveKind
from corral.lab.tune.race import RaceResult
from corral.lab.tune.trials import Roofline, Trial
from corral.plan.contract import Plan
from corral.plan.speed import Efficiency, rounded

IDEAL = Efficiency(
    bandwidth=1.0, matrix=1.0, matrix_fp8=1.0, layer_s=0.0, fp8_layer_s=0.0, step_s=0.0, sequence_s=0.0, floor_s=0.0,
    floor_sequence_s=0.0, frontend_s=0.0, frontend_tokens_s=math.inf, frontend_chunk_s=0.0, eager_layer_s=0.0,
    eager_sequence_s=0.0, reduce_s=0.0, reduce_pcie_s=0.0, reduce_bandwidth=1.0, hop_s=0.0,
)  # fmt: skip


def roofline(plan: Plan | None, goal: Objective, summary: Summary) -> Roofline | None:
    """The bounds at the load of a measurement; None where the plan knows no speed of this hardware."""
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
    """Where the best setup stands below its bounds, as shares of them."""

    score: float
    unit: str
    hardware: float | None
    planned: float
    of_hardware: float | None
    of_planned: float

    @property
    def words(self) -> str:
        near = f"{self.of_planned:.0%} of what the plan predicts for it ({rounded(self.planned)} {self.unit})"
        if self.hardware is None or self.of_hardware is None:
            return near
        far = f"{self.of_hardware:.0%} of the hardware's roofline ({rounded(self.hardware)} {self.unit})"
        return f"{far}, {near}"


def distance(goal: Objective, found: RaceResult, trials: Sequence[Trial]) -> Distance | None:
    """Of the setup that is to be used; None where nothing is known of the hardware."""
    made = [one for one in trials if one.setup == found.best and one.score and one.roofline]
    if not made:
        return None
    score = fmean(one.score for one in made if one.score)
    hardware = [one.roofline.hardware for one in made if one.roofline and one.roofline.hardware]
    planned = median(one.roofline.planned for one in made if one.roofline)
    above = median(hardware) if hardware else None
    return Distance(score, goal.unit, above, planned, score / above if above else None, score / planned)
