"""What close to the question would fit: a shorter context, narrower numbers, more GPUs, another kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from corral.hardware.inventory import GPUS, Inventory
from corral.plan.candidate import Candidate
from corral.plan.contract import Goal, Nearest
from corral.plan.fixed import Fixed

__all__ = ["Question", "nearest_fits", "wider"]

Question = Callable[[Inventory, Goal, Fixed], Candidate | None]
_STEP = 256
_BIGGER_KINDS = ("H100-SXM", "H200", "B200", "MI300X")


def wider(inventory: Inventory, most_nodes: int = 32) -> Iterator[Inventory]:
    """Larger inventories of the same kind, smallest first: up to eight GPUs in a node, then more nodes."""
    for inside in (1, 2, 4, 8):
        if inside > inventory.gpus_per_node and inventory.nodes == 1:
            yield replace(inventory, gpus_per_node=inside)
    inside = max(inventory.gpus_per_node, 8 if inventory.nodes == 1 else 0)
    nodes = inventory.nodes + 1
    while nodes <= most_nodes:
        yield replace(inventory, gpus_per_node=inside, nodes=nodes)
        nodes = nodes + 1 if nodes < 4 else nodes * 2


def _options(inventory: Inventory) -> str:
    words = f"--gpus {inventory.gpus_per_node}x{inventory.gpu}"
    return words if inventory.nodes == 1 else f"{words} --nodes {inventory.nodes}"


def nearest_fits(ask: Question, inventory: Inventory, goal: Goal, fixed: Fixed, room_tokens: int) -> list[Nearest]:
    """The smallest changes that make it fit, each tried with the planner itself."""
    return [found for found in _tries(ask, inventory, goal, fixed, room_tokens) if found is not None]


def _tries(
    ask: Question, inventory: Inventory, goal: Goal, fixed: Fixed, room_tokens: int
) -> Iterator[Nearest | None]:
    asked = fixed.max_model_len or goal.context
    if asked and 2 * _STEP <= room_tokens < asked:
        shorter = room_tokens // _STEP * _STEP
        free = replace(fixed, max_model_len=None)
        yield _found(
            ask(inventory, replace(goal, context=shorter), free),
            f"a context of {shorter:,} on the same hardware",
            f"--context {shorter}",
        )
    if inventory.gpu is None:
        return
    if fixed.layout or fixed.data:
        free = replace(fixed, tensor=None, pipeline=None, data=None)
        found = ask(inventory, goal, replace(free, weights=fixed.weights))
        if found:
            what = f"{found.parallel} in {found.precision.weights} on the same hardware"
            yield _found(found, what, "without --set tensor, pipeline, data")
    for weights in ("fp8", "int4"):
        if fixed.weights != weights:
            found = ask(inventory, goal, replace(fixed, weights=weights))
            if found:
                yield _found(found, f"{weights} weights on the same hardware", f"--set weights={weights}")
                break
    if asked and fixed.kv != "fp8":
        yield _found(
            ask(inventory, goal, replace(fixed, kv="fp8")), "an fp8 KV cache on the same hardware", "--set kv=fp8"
        )
    anywhere = replace(fixed, tensor=None, pipeline=None, data=None)
    for larger in wider(inventory):
        found = ask(larger, goal, anywhere)
        if found:
            yield _found(found, f"{larger.label} as {found.parallel}{_narrow(found)}", _options(larger))
            break
    for kind in _BIGGER_KINDS:
        memory = GPUS[kind].memory_bytes
        if kind == inventory.gpu or memory <= inventory.memory_bytes_per_gpu:
            continue
        other = replace(inventory, gpu=kind, memory_bytes_per_gpu=memory)
        found = ask(other, goal, anywhere)
        if found:
            yield _found(found, f"{other.label} as {found.parallel}{_narrow(found)}", _options(other))
            break


def _narrow(candidate: Candidate) -> str:
    return "" if candidate.precision.how == "native" else f" in {candidate.precision.weights}"


def _found(candidate: Candidate | None, what: str, change: str) -> Nearest | None:
    return Nearest(what, change, candidate.memory.kv_cache_tokens) if candidate else None
