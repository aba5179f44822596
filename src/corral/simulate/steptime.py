"""How long one step of an engine takes: from coefficients that were fitted, or from the planner's roofline.

A step of `running` decoding sequences with `kv` tokens of context takes `max(fixed + per_kv · kv, floor)`, which can
be summed over many steps without making them; a step that also computes prompt tokens is asked for as a whole. On a
GPU one with more tokens than the largest CUDA graph is launched kernel by kernel, and takes at least as long as that
does: 8B on an H200 24 ms for any prompt up to 800 tokens, where a step within a graph takes 6 (docs/log.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Protocol

from corral.plan import Plan, make_plan
from corral.plan.memory import largest_graph
from corral.plan.speed import Efficiency, Roof, roof_of, tiled
from corral.plan.tuning import tuning_for

__all__ = ["DecodeCost", "FittedSteps", "RooflineSteps", "StepTime", "linearised", "planned_steps"]


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
    """What an engine asks."""

    def decode(self, running: int) -> DecodeCost: ...

    def mixed(self, running: int, kv_tokens: float, prompt_tokens: int, attended: float) -> float:
        """Seconds of a step that also computes prompt tokens; `attended`: the sum of the contexts of each of them."""


KNOWN = {"lookahead", "graph_tokens", "tile_tokens"}  # of the fields below, what is not fitted


@dataclass(frozen=True)
class FittedSteps:
    """Coefficients in seconds; `request_s` and `stream_s` are the API server's, not a step's."""

    step_s: float
    sequence_s: float
    kv_s: float  # per token of context
    prompt_s: float  # per prompt token
    attend_s: float = 0.0  # per prompt token and token of its context
    launch_s: float = 0.0  # that a step takes at least which no CUDA graph covers
    wake_s: float = 0.0  # that the first step takes longer after nothing ran
    request_s: float = 0.0  # from a request's arrival until the engine has it, and back
    stream_s: float = 0.0  # of an API server's time for each token that it streams
    lookahead: bool = False  # steps are decided one ahead (vLLM's asynchronous scheduling)
    graph_tokens: int = 0  # of the largest step that a CUDA graph covers
    tile_tokens: int = 1  # that matrix products beyond it take together

    def decode(self, running: int) -> DecodeCost:
        return DecodeCost(self.step_s + self.sequence_s * running, self.kv_s)

    def mixed(self, running: int, kv_tokens: float, prompt_tokens: int, attended: float) -> float:
        own = self.step_s + self.sequence_s * running + self.kv_s * kv_tokens + self.attend_s * attended
        tokens = running + prompt_tokens
        if tokens <= self.graph_tokens:
            return own + self.prompt_s * prompt_tokens
        return max(own + self.prompt_s * (tiled(tokens, self.tile_tokens) - running), self.launch_s)

    def coefficients(self) -> dict[str, float]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in KNOWN}

    def slowed(self, factor: float) -> FittedSteps:
        """All times so many times longer."""
        return self.with_coefficients({name: factor * value for name, value in self.coefficients().items()})

    def with_coefficients(self, values: dict[str, float]) -> FittedSteps:
        return replace(self, **values)  # type: ignore[arg-type]


FAR = 1e6  # tokens of context at which only keys and values count


class RooflineSteps:
    """The planner's roofline, asked step by step."""

    def __init__(self, roof: Roof) -> None:
        self._roof, self._graphed = roof, largest_graph(roof.settings)
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
        whole = passed + e.step_s + e.sequence_s * running + reading
        return whole if running + prompt_tokens <= self._graphed else max(whole, self._roof.launch_s(running))


def linearised(plan: Plan) -> FittedSteps:
    """A plan's roofline as coefficients: where a fit starts, and what it keeps where its runs say nothing."""
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
        graph_tokens=largest_graph(plan.settings),
        tile_tokens=roof.tile_tokens,
    )


def planned_steps(plan: Plan) -> tuple[StepTime, float, float]:
    """The steps of a plan, the API server's seconds for a request, and for each token that it streams."""
    e = Efficiency()
    if plan.inventory.gpu is not None:
        found = roof_of(plan.model, plan.inventory, plan.parallel, plan.precision, plan.settings, Efficiency())
        return RooflineSteps(found), e.frontend_s, 1 / e.frontend_tokens_s
    return _cpu_steps(plan), 0.0, 0.0


def _cpu_steps(plan: Plan) -> FittedSteps:
    """A line through what the planner says of one and of eight requests at once."""
    tuning = tuning_for(plan.model, plan.inventory)
    fixed = {"weights": plan.precision.weights} if plan.precision.weights else {}

    def asked(running: int) -> Plan:
        goal = replace(plan.goal, concurrency=running, prompt_tokens=64, output_tokens=64)
        return make_plan(plan.model, plan.inventory, goal, fixed, tuning)

    alone, eight = asked(1).speed, asked(8).speed
    one = 1 / (alone.decode_tokens_per_s or 1.0)
    prompt = 1 / (alone.prefill_tokens_per_s or 1.0)
    together = (eight.tpot_s or one) - 8 * prompt  # of a cycle, its share of prompts taken out
    each = max(0.0, (together - one) / 7)
    first = max(0.0, (alone.ttft_s or 0.0) - 64 * prompt - one)
    return FittedSteps(max(one - each, 1e-6), each, 0.0, prompt, request_s=first)
