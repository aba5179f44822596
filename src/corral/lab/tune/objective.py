"""What is to be best: a score that is higher where it is better, from measurements of one server."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.errors import CorralError, UsageError
from corral.lab.bench.measure import Bench
from corral.lab.bench.metrics import Summary
from corral.lab.bench.series import reseeded, search_limit
from corral.lab.bench.spec import LoadShape, Slo, Spec

MOST_PROMPTS = 20_000
PROBES = 7  # of one search for the highest rate


class ObjectiveKind(enum.StrEnum):
    """What comes first."""

    THROUGHPUT = "throughput"  # output tokens a second, at so many requests at once
    COST = "cost"  # the same for each GPU: the fewest GPU-hours for a million tokens
    LATENCY = "latency"  # the shortest end-to-end time, at a rate
    RATE = "rate"  # the most requests a second that keep a service level


@dataclass(frozen=True)
class Objective:
    """One goal, with what it needs."""

    kind: ObjectiveKind = ObjectiveKind.THROUGHPUT
    concurrency: int | None = None
    rate: float | None = None
    slos: tuple[Slo, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is ObjectiveKind.RATE and not self.slos:
            raise UsageError("--goal rate needs a service level.", "Add --slo ttft_p99=1s,tpot_p99=50ms.")
        if self.kind is ObjectiveKind.LATENCY and not self.rate:
            raise UsageError("--goal latency needs a request rate.", "Add --request-rate PER_S.")
        if self.slos and self.kind is not ObjectiveKind.RATE:
            raise UsageError(
                f"--slo cannot be used with --goal {self.kind}.", "Leave out --goal: --slo implies --goal rate."
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
    """One measurement's."""

    value: float
    summary: Summary  # of a run at the load that the value is about


async def measure_score(
    bench: Bench, spec: Spec, goal: Objective, seconds: float, folder: Path, turn: int
) -> Measured:
    """Measure a server for about so long; each turn sends prompts that no earlier one left in a cache."""
    folder.mkdir(mode=0o700, parents=True)
    spec = reseeded(spec, turn)
    if goal.kind is ObjectiveKind.RATE:
        saturate = goal.concurrency or 64
        found, done = await search_limit(
            bench, spec, goal.slos, folder, seconds=seconds / 2, most=PROBES, saturate=saturate
        )
        if found.best is None:
            raise CorralError(f"none of the loads tried meets {', '.join(map(str, goal.slos))}.", "Relax --slo.")
        return Measured(found.best, done[0].run.summary)
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
