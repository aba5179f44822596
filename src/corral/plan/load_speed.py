"""What a plan predicts for a load that is not the one it was made for.

On a CPU by what was measured of it, as the planner did. Where that is not remembered (the plan comes from another
machine) the plan's own two rates have to do: a step is a lone one's, or the arithmetic of all that run.
"""

from __future__ import annotations

from dataclasses import replace

from corral.plan.contract import Goal, Plan, Speed
from corral.plan.cpu_speed import predict_cpu, products, rates_for
from corral.plan.hardware.cpu import recall_cpu_speed
from corral.plan.measured import cpu_kind
from corral.plan.speed import Efficiency, predict


def speed_at(
    plan: Plan,
    prompt: int,
    output: int,
    running: int,
    api_servers: int | None = None,
    rates: Efficiency | None = None,
) -> Speed:
    """Speeds with `running` requests of these lengths at once; with the plan's own API servers, or so many."""
    goal = replace(plan.goal, prompt_tokens=prompt, output_tokens=output, concurrency=running)
    if plan.inventory.gpu is None:
        return _on_cpu(plan, goal)
    settings = replace(plan.settings, api_servers=api_servers or plan.settings.api_servers)
    parts = (plan.model, plan.inventory, plan.parallel, plan.precision, settings, plan.memory)
    return predict(*parts, goal, running, rates)


def _on_cpu(plan: Plan, goal: Goal) -> Speed:
    kind, format_ = cpu_kind(plan.inventory), plan.precision.compute
    measured = recall_cpu_speed(kind, products(plan.model)) if kind else None
    if measured is None or measured.of(format_) is None:
        return _by_two_rates(plan.speed, goal)
    rates = rates_for(format_, plan.model, plan.inventory, measured, 1.0)
    return predict_cpu(plan.model, rates, plan.settings, goal, plan.memory.weights_bytes)


def _by_two_rates(speed: Speed, goal: Goal) -> Speed:
    decode, prefill, running = speed.decode_tokens_per_s, speed.prefill_tokens_per_s, goal.concurrency or 1
    if not decode or not prefill:
        return speed
    first_s = goal.prompt_tokens / prefill
    step_s = max(1 / decode, running / prefill)
    cycle_s = running * first_s + goal.output_tokens * step_s
    return replace(
        speed,
        throughput_tokens_per_s=running * goal.output_tokens / cycle_s,
        ttft_s=first_s,
        tpot_s=cycle_s / goal.output_tokens,
        concurrency=running,
        prompt_tokens=goal.prompt_tokens,
        output_tokens=goal.output_tokens,
    )
