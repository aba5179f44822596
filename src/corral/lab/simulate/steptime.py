"""How long one step of an engine takes: from coefficients that were fitted, or from the planner's roofline.

A step of `running` decoding sequences with `kv` tokens of context takes `max(fixed + per_kv · kv, floor)`, which can
be summed over many steps at once; the time of a step that also computes prompt tokens is computed as a whole. On a
GPU, a step with more tokens than the largest CUDA graph is launched kernel by kernel, and takes at least that long:
8B on an H200 24 ms for any prompt up to 800 tokens, where a step within a graph takes 6
(docs/measurements/simulator.md). On a CPU a step's products take as long as reading the weights while they have few
rows, and grow with the rows from some on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Protocol

from corral.plan.contract import Plan
from corral.plan.cpu import CpuCosts, products
from corral.plan.measured import speed_at
from corral.plan.models.facts import ModelFacts
from corral.plan.settings import largest_graph
from corral.plan.speed import Efficiency, Roof, roof_of, tiled

LONE_TOKENS = 64  # of the prompt and the answer by which the planner is asked for a lone request on a CPU


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """The time of a decode step with a known number of sequences, by the tokens of their context."""

    fixed_s: float
    per_kv_s: float
    floor_s: float = 0.0

    def one(self, kv: float) -> float:
        return max(self.fixed_s + self.per_kv_s * kv, self.floor_s)

    def span(self, kv: float, growth: float, steps: int) -> float:
        """Seconds of `steps` steps that begin with `kv` tokens, each adding `growth`."""
        low = self._below(kv, growth, steps)
        rest, begin = steps - low, kv + low * growth
        linear = self.fixed_s + self.per_kv_s * (begin + growth * (rest - 1) / 2)
        return low * self.floor_s + rest * linear

    def _below(self, kv: float, growth: float, steps: int) -> int:
        """How many of the first steps are as short as the floor allows."""
        short = self.floor_s - self.fixed_s - self.per_kv_s * kv
        if short <= 0:
            return 0
        grows = self.per_kv_s * growth
        return steps if grows <= 0 else min(steps, math.ceil(short / grows))

    def steps_within(self, kv: float, growth: float, seconds: float, most: int) -> int:
        """How many of `most` steps have begun before `seconds` are over; one at least."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.span(kv, growth, middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low


class StepTime(Protocol):
    """The step times that an engine needs."""

    def decode(self, running: int) -> DecodeCost: ...

    def mixed(self, running: int, kv_tokens: float, prompt_tokens: int, attended: float) -> float:
        """Seconds of a step that also computes prompt tokens; `attended`: the sum of the contexts of each of them."""


# Reading weights and multiplying: 1 is one after the other, a large value is both at once. A Xeon is near 1, a
# Neoverse-N1 near 2; with 1.5 both are predicted equally well (docs/measurements/simulator.md).
OVERLAP = 1.5

KNOWN = {"lookahead", "graph_tokens", "tile_tokens", "row_tokens"}  # of the fields below, what is not fitted


@dataclass(frozen=True)
class FittedSteps:
    """Coefficients in seconds; `request_s` and `stream_s` are the API server's, not a step's."""

    step_s: float
    sequence_s: float
    kv_s: float  # per token of context
    prompt_s: float  # per prompt token
    attend_s: float = 0.0  # per prompt token and token of its context
    read_s: float = 0.0  # of products with hardly any row, where rows are counted: a CPU reads the weights
    launch_s: float = 0.0  # that a step takes at least which no CUDA graph covers
    wake_s: float = 0.0  # by which the first step is longer when nothing ran before
    request_s: float = 0.0  # from a request's arrival until the engine has it, and back
    stream_s: float = 0.0  # of an API server's time for each token that it streams
    lookahead: bool = False  # steps are decided one ahead (vLLM's asynchronous scheduling)
    graph_tokens: int = 0  # of the largest step that a CUDA graph covers
    tile_tokens: int = 1  # that matrix products beyond it take together
    row_tokens: float = 0.0  # so many prompt tokens' products take as long as a sequence's; 0: `sequence_s` has them

    def decode(self, running: int) -> DecodeCost:
        fixed = self.step_s + self.sequence_s * running + self._products(running, 0)
        return DecodeCost(fixed, self.kv_s, self.launch_s if running > self.graph_tokens else 0.0)

    def mixed(self, running: int, kv_tokens: float, prompt_tokens: int, attended: float) -> float:
        own = self.step_s + self.sequence_s * running + self.kv_s * kv_tokens + self.attend_s * attended
        tokens = running + prompt_tokens
        if tokens <= self.graph_tokens:
            return own + self._products(running, prompt_tokens)
        return max(own + self._products(running, tiled(tokens, self.tile_tokens) - running), self.launch_s)

    def _products(self, running: int, prompt_tokens: float) -> float:
        if not self.row_tokens:
            return self.prompt_s * prompt_tokens
        rows_s = self.prompt_s * (prompt_tokens + self.row_tokens * running)
        return float((rows_s**OVERLAP + self.read_s**OVERLAP) ** (1 / OVERLAP))

    def coefficients(self) -> dict[str, float]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in KNOWN}

    def slowed(self, factor: float) -> FittedSteps:
        """All times so many times longer."""
        return self.with_coefficients({name: factor * value for name, value in self.coefficients().items()})

    def with_coefficients(self, values: dict[str, float]) -> FittedSteps:
        return replace(self, **values)  # type: ignore[arg-type]


FAR = 1e6  # tokens of context at which only keys and values count


class RooflineSteps:
    """The planner's roofline, step by step."""

    def __init__(self, roof: Roof) -> None:
        self._roof, self._graphed = roof, largest_graph(roof.settings, roof.gpu)
        self.decode = lru_cache(4096)(self._decode)

    def _decode(self, running: int) -> DecodeCost:
        far, farther = self._roof.step(running, FAR), self._roof.step(running, 2 * FAR)
        per_kv = (farther - far) / (running * FAR)
        return DecodeCost(far - per_kv * running * FAR, per_kv, self._roof.step(running, 1.0))

    def mixed(self, running: int, kv_tokens: float, prompt_tokens: int, attended: float) -> float:
        e, cost = self._roof.e, self.decode(max(1, running))
        reading = cost.per_kv_s * kv_tokens if running else 0.0
        stages = self._roof.parallel.pipeline
        passed = self._roof.chunk((prompt_tokens + running) / stages, 2 * attended / prompt_tokens)
        whole = passed + e.step_s + self._roof.sequences_s(running) + reading
        return whole if running + prompt_tokens <= self._graphed else max(whole, self._roof.launch_s(running))


def linearised(plan: Plan) -> FittedSteps:
    """A plan's roofline as coefficients: the start of a fit, which keeps those that its runs do not determine."""
    roof = roof_of(plan.model, plan.inventory, plan.parallel, plan.precision, plan.settings, Efficiency())
    steps, e, many = RooflineSteps(roof), Efficiency(), min(128, plan.settings.max_num_seqs)
    one, all_ = steps.decode(1), steps.decode(many)
    tokens = float(plan.settings.max_num_batched_tokens)
    short, long = roof.chunk(tokens, 1.0), roof.chunk(tokens, 1.0 + tokens)
    return FittedSteps(
        step_s=one.one(0),
        sequence_s=max(e.sequence_s, (all_.one(0) - one.one(0)) / max(1, many - 1)),
        kv_s=one.per_kv_s,
        prompt_s=short / tokens,
        attend_s=(long - short) / (tokens * tokens / 2),
        launch_s=roof.launch_s(0),
        wake_s=e.frontend_s,
        request_s=e.frontend_s,
        stream_s=1 / (e.frontend_tokens_s * max(1.0, plan.settings.api_servers / plan.parallel.data)),
        graph_tokens=largest_graph(plan.settings, plan.inventory.kind),
        tile_tokens=roof.tile_tokens,
    )


def planned_steps(plan: Plan) -> tuple[StepTime, float, float]:
    """The steps of a plan, the API server's seconds for a request, and for each token that it streams."""
    e = Efficiency()
    if plan.inventory.gpu is not None:
        found = roof_of(plan.model, plan.inventory, plan.parallel, plan.precision, plan.settings, Efficiency())
        return RooflineSteps(found), e.frontend_s, 1 / e.frontend_tokens_s
    steps = _cpu_steps(plan)
    return steps, steps.request_s, steps.stream_s


def _cpu_steps(plan: Plan) -> FittedSteps:
    """From the planner's figures for one request alone."""
    speed = speed_at(plan, LONE_TOKENS, LONE_TOKENS, 1)
    prompt_s = 1 / (speed.prefill_tokens_per_s or 1.0)
    alone_s = 1 / (speed.decode_tokens_per_s or 1.0)
    return cpu_steps(plan.model, alone_s, prompt_s, max(0.0, (speed.ttft_s or 0.0) - LONE_TOKENS * prompt_s))


def cpu_steps(model: ModelFacts, alone_s: float, prompt_s: float, first_s: float) -> FittedSteps:
    """The steps of a server on a CPU, from the times of a lone request: a decode step, a prompt token, and the rest
    of
    its first token. The work between the products is the planner's estimate."""
    *layers, head = (one.parameters for one in products(model))
    costs = CpuCosts()
    between = min(costs.step_s + model.layers * costs.layer_s, alone_s / 2)
    around = max((first_s - between) / 2, alone_s / 50)
    return FittedSteps(
        step_s=between,
        sequence_s=min(costs.sequence_s, between),
        kv_s=0.0,
        prompt_s=prompt_s,
        attend_s=prompt_s * 2 * model.heads * model.head_dim * model.layers / sum(layers),
        read_s=alone_s - between,
        wake_s=around,
        request_s=around,
        row_tokens=1 + head / sum(layers),
    )
