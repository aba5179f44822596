"""Several replicas of a model: one engine with data parallelism, or as many servers, and why. Pure.

Replicas of a dense model exchange nothing, so servers of their own lose nothing against one engine, and one that
fails takes no other with it; vLLM's external load balancer refuses dense models: they are to be started apart. Of a
mixture of experts, one engine spreads the experts over all its ranks instead of holding them once in each replica.
Several servers on one GPU are never advised: two on an H200 made 0.78 and 0.95 of the tokens of one (docs/log.md).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from corral.base.errors import UsageError
from corral.plan.candidate import Tuning
from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Plan
from corral.plan.hardware.inventory import Inventory
from corral.plan.models.facts import ModelFacts


class ReplicaForm(enum.StrEnum):
    """How several replicas run."""

    SERVERS = "servers"  # each by itself, behind a gateway
    ENGINE = "engine"  # in one engine, with data parallelism


@dataclass(frozen=True)
class ReplicaAdvice:
    """Which of the two is taken, and the plan of a server, or of the engine."""

    replicas: int
    form: ReplicaForm
    because: str
    plan: Plan


def divided(inventory: Inventory, replicas: int) -> Inventory:
    """What one of several servers has of the hardware: whole nodes, or some GPUs or cores of one."""
    if replicas <= inventory.nodes:
        return replace(inventory, nodes=inventory.nodes // replicas)
    parts = -(-replicas // inventory.nodes)
    if inventory.gpu is None:
        return replace(
            inventory,
            nodes=1,
            cpu_cores=max(1, inventory.cpu_cores // parts),
            host_memory_bytes=inventory.host_memory_bytes // parts,
            host_available_bytes=inventory.host_available_bytes // parts,
        )
    if inventory.gpus_per_node < parts:
        raise UsageError(
            f"{inventory.label} cannot be divided among {replicas} replicas: a GPU belongs to one server.",
            f"Ask for at most {inventory.gpus}.",
        )
    return replace(inventory, nodes=1, gpus_per_node=inventory.gpus_per_node // parts)


def advise(
    model: ModelFacts,
    inventory: Inventory,
    goal: Goal,
    fixed: Mapping[str, object],
    tuning: Tuning | None,
    replicas: int,
) -> ReplicaAdvice:
    """One engine or several servers, with the plan of what would run."""
    each_goal = replace(goal, concurrency=-(-goal.concurrency // replicas)) if goal.concurrency else goal
    each = make_plan(model, divided(inventory, replicas), each_goal, {**fixed, "data": 1}, tuning)
    if model.experts and inventory.gpu is not None:
        whole = make_plan(model, inventory, goal, {**fixed, "data": replicas}, tuning)
        if whole.fits:
            return ReplicaAdvice(replicas, ReplicaForm.ENGINE, _why_engine(model, each), whole)
    return ReplicaAdvice(replicas, ReplicaForm.SERVERS, _why_servers(model, replicas), each)


def _why_engine(model: ModelFacts, each: Plan) -> str:
    alone = "" if each.fits else "; a server of its own would not fit"
    return (
        f"it has {model.experts} experts in a layer, which one engine spreads over all its GPUs instead of holding"
        f" all of them in each replica{alone}. One failure ends all replicas, though"
    )


def _why_servers(model: ModelFacts, replicas: int) -> str:
    if model.experts:
        return "one engine with data parallelism does not fit"
    return (
        "it is a dense model: its replicas exchange nothing, so servers of their own lose nothing against one engine"
        f" with DP {replicas}, and one that fails takes no other with it; vLLM's external load balancer refuses"
        " dense models"
    )
