"""Which splits an inventory allows: TP inside a node or over whole nodes, PP, replicas with what is left."""

from __future__ import annotations

from collections.abc import Iterator

from corral.plan.constraints import broken_layout
from corral.plan.contract import Parallel, Rejected
from corral.plan.fixed import Fixed
from corral.plan.hardware.inventory import Inventory
from corral.plan.models.facts import ModelFacts


def replicas_on(inventory: Inventory, tensor: int, pipeline: int) -> int:
    """How many replicas of TP × PP the inventory holds; 0 when not one can be placed.

    A replica stays inside one node, or takes whole nodes; its tensor ranks leave a node only by whole nodes too.
    """
    inside, size = inventory.gpus_per_node, tensor * pipeline
    if size <= inside:
        return inside // size * inventory.nodes
    if size % inside or (tensor < inside and inside % tensor) or (tensor > inside and tensor % inside):
        return 0
    return inventory.nodes // (size // inside)


def over_nodes(parallel: Parallel, inventory: Inventory) -> bool:
    """Whether the tensor ranks of one stage sit on several nodes."""
    return parallel.tensor > inventory.gpus_per_node


def layouts(model: ModelFacts, inventory: Inventory, fixed: Fixed) -> Iterator[Parallel]:
    """Splits that vLLM accepts and the inventory can hold, with as many replicas as fit, or as many as were fixed."""
    inside = inventory.gpus_per_node
    tensors = (
        [fixed.tensor] if fixed.tensor else [*range(1, inside + 1), *range(2 * inside, inventory.gpus + 1, inside)]
    )
    for tensor in tensors:
        stages = [fixed.pipeline] if fixed.pipeline else range(1, max(1, inventory.gpus // tensor) + 1)
        for pipeline in stages:
            replicas = replicas_on(inventory, tensor, pipeline)
            wanted = fixed.data or replicas
            if 1 <= wanted <= replicas:
                parallel = Parallel(tensor, pipeline, wanted)
                if broken_layout(model, parallel) is None:
                    yield parallel


def refused_tensor(model: ModelFacts, inventory: Inventory) -> list[Rejected]:
    """The tensor sizes up to one node that vLLM would refuse, and why."""
    reasons: dict[str, list[int]] = {}
    for tensor in range(2, inventory.gpus_per_node + 1):
        why = broken_layout(model, Parallel(tensor))
        if why:
            reasons.setdefault(_of_any(why, tensor), []).append(tensor)
    return [Rejected(", ".join(f"TP{size}" for size in sizes), why) for why, sizes in reasons.items()]


def _of_any(why: str, tensor: int) -> str:
    """The reason without its subject, as it is said of one size or of several."""
    words = why.removeprefix(f"TP{tensor} ").replace("does not divide", "no divisor of")
    return words.replace("neither divides nor is a multiple of", "neither a divisor nor a multiple of")
