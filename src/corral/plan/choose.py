"""The decision: try the ways to run a model, keep the best for the goal, say why, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping

from corral.hardware import Inventory
from corral.model import ModelFacts
from corral.plan.candidate import Candidate, Tuning, work_out
from corral.plan.constraints import broken_layout
from corral.plan.contract import VERSION, Cost, Goal, Parallel, Plan, Rejected
from corral.plan.cpu import work_out_cpu
from corral.plan.engine import cpu_environment, engine_args
from corral.plan.fixed import Fixed, read_fixed
from corral.plan.layouts import layouts, place
from corral.plan.precisions import Form, forms

__all__ = ["candidates", "make_plan"]


def make_plan(
    facts: ModelFacts,
    inventory: Inventory,
    goal: Goal | None = None,
    fixed: Mapping[str, object] | None = None,
    tuning: Tuning | None = None,
) -> Plan:
    """The best plan for the goal; `fits` is false, with reason and nearest, when there is none."""
    goal, tuning, pinned = goal or Goal(), tuning or Tuning(), read_fixed(fixed or {})
    if inventory.gpu is None:
        form = forms(facts, inventory, pinned)[0]
        chosen = work_out_cpu(form.facts, inventory, goal, pinned)
        return _plan(form, chosen, inventory, goal, ())
    tried: list[tuple[Form, Candidate]] = []
    for form in forms(facts, inventory, pinned):
        tried += candidates(form, inventory, goal, pinned, tuning)
        fitting = [(f, c) for f, c in tried if not c.problem]
        if fitting:
            best = max(fitting, key=lambda pair: (pair[1].max_model_len, pair[1].score(goal.goal)))
            return _plan(*best, inventory, goal, tuple(tried))
    if not tried:
        parallel = Parallel(pinned.tensor or 1, pinned.pipeline or 1, pinned.data or 1)
        form = forms(facts, inventory, pinned)[0]
        candidate = work_out(form.facts, inventory, parallel, form.precision, goal, pinned, tuning)
        why = broken_layout(form.facts, parallel) or _unplaceable(inventory, parallel)
        from corral.plan.candidate import with_problem

        return _plan(form, with_problem(candidate, why), inventory, goal, ())
    return _plan(*max(tried, key=lambda pair: pair[1].memory.kv_cache_tokens_per_replica), inventory, goal, ())


def _unplaceable(inventory: Inventory, parallel: Parallel) -> str:
    if place(inventory, parallel.tensor, parallel.pipeline):
        return f"{inventory.label} holds fewer than {parallel.data} replicas of {parallel}"
    return f"{parallel} cannot be placed on {inventory.label}"


def candidates(
    form: Form, inventory: Inventory, goal: Goal, fixed: Fixed, tuning: Tuning
) -> list[tuple[Form, Candidate]]:
    """Every layout of one form, worked out."""
    return [
        (form, work_out(form.facts, inventory, parallel, form.precision, goal, fixed, tuning))
        for parallel in layouts(form.facts, inventory, fixed)
    ]


def _plan(
    form: Form, chosen: Candidate, inventory: Inventory, goal: Goal, tried: tuple[tuple[Form, Candidate], ...]
) -> Plan:
    cpu = inventory.gpu is None
    return Plan(
        version=VERSION,
        fits=not chosen.problem,
        reason=chosen.problem or "fits",
        model=form.facts,
        checkpoint=form.facts.location,
        inventory=inventory,
        goal=goal,
        precision=chosen.precision,
        parallel=chosen.parallel,
        max_model_len=chosen.max_model_len,
        settings=chosen.settings,
        memory=chosen.memory,
        speed=chosen.speed,
        cost=Cost(),
        engine_args=engine_args(
            form.facts, chosen.parallel, chosen.precision, chosen.settings, chosen.max_model_len, cpu
        ),
        engine_env=cpu_environment(chosen.memory.kv_cache_bytes_per_gpu) if cpu else {},
        rejected=tuple(Rejected(str(c.parallel), c.problem) for _, c in tried if c.problem),
    )
