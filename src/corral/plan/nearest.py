"""What close to the question would fit: a shorter context, narrower numbers, more GPUs, another kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from corral.plan.candidate import Candidate
from corral.plan.contract import Goal, Nearest
from corral.plan.fixed import Fixed
from corral.plan.hardware.inventory import GPUS, Inventory

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


def nearest_fits(
    ask: Question, inventory: Inventory, goal: Goal, fixed: Fixed, room_tokens: int, refused: Candidate
) -> list[Nearest]:
    """The smallest changes that make it run, each tried with the planner; no hardware where a rule is broken."""
    tries = [_shorter(ask, inventory, goal, fixed, room_tokens)]
    if inventory.gpu is not None:
        tries += _same_hardware(ask, inventory, goal, fixed)
    if inventory.gpu is not None and not refused.broken:
        tries += _more_hardware(ask, inventory, goal, replace(fixed, tensor=None, pipeline=None, data=None))
    return [found for found in tries if found is not None]


def _shorter(ask: Question, inventory: Inventory, goal: Goal, fixed: Fixed, room_tokens: int) -> Nearest | None:
    asked = fixed.max_model_len or goal.context
    if not asked or not 2 * _STEP <= room_tokens < asked:
        return None
    length = room_tokens // _STEP * _STEP
    found = ask(inventory, replace(goal, context=length), replace(fixed, max_model_len=None))
    return _found(found, f"a context of {length:,} on the same hardware", f"--context {length}")


def _same_hardware(ask: Question, inventory: Inventory, goal: Goal, fixed: Fixed) -> Iterator[Nearest | None]:
    if fixed.layout or fixed.data:
        found = ask(inventory, goal, replace(fixed, tensor=None, pipeline=None, data=None))
        if found:
            named = [name for name in ("tensor", "pipeline", "data") if getattr(fixed, name)]
            sizes = " ".join(f"--set {name}={getattr(found.parallel, name)}" for name in named)
            yield _found(found, f"{found.parallel} in {found.precision.weights} on the same hardware", sizes)
    gpu = inventory.kind
    for weights in (*(("fp16",) if gpu and gpu.half == "fp16" else ()), "fp8", "int4"):
        if fixed.weights != weights:
            found = ask(inventory, goal, replace(fixed, weights=weights, dtype=None, quantization=None))
            if found and found.precision.weights == weights:
                yield _found(found, f"{weights} weights on the same hardware", f"--set weights={weights}")
                break
    if (fixed.max_model_len or goal.context) and fixed.kv in (None, "auto"):
        yield _found(
            ask(inventory, goal, replace(fixed, kv="fp8")), "an fp8 KV cache on the same hardware", "--set kv=fp8"
        )


def _more_hardware(ask: Question, inventory: Inventory, goal: Goal, fixed: Fixed) -> Iterator[Nearest | None]:
    for larger in wider(inventory):
        found = ask(larger, goal, fixed)
        if found:
            yield _found(found, f"{larger.label} as {found.parallel}{_narrow(found)}", _options(larger))
            break
    for kind in _BIGGER_KINDS:
        memory = GPUS[kind].memory_bytes
        if kind == inventory.gpu or memory <= inventory.memory_bytes_per_gpu:
            continue
        other = replace(inventory, gpu=kind, memory_bytes_per_gpu=memory, note="")
        found = ask(other, goal, fixed)
        if found:
            yield _found(found, f"{other.label} as {found.parallel}{_narrow(found)}", _options(other))
            break


def _narrow(candidate: Candidate) -> str:
    return "" if candidate.precision.how == "native" else f" in {candidate.precision.weights}"


def _found(candidate: Candidate | None, what: str, change: str) -> Nearest | None:
    return Nearest(what, change, candidate.memory.kv_cache_tokens) if candidate else None
