"""The smallest inventories that serve a model, per kind of GPU and per precision.

Two answers stand side by side: what documents compute (bytes over the size on the box) and what really runs, where
TP must divide the heads, pipelines split whole layers, and vLLM needs room for activations and graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from corral.hardware.inventory import GPUS, Gpu, Inventory
from corral.models.architecture import DTYPE_BYTES
from corral.models.facts import ModelFacts
from corral.plan.candidate import Tuning
from corral.plan.choose import decide
from corral.plan.contract import Goal
from corral.plan.fixed import Fixed
from corral.plan.memory import convert
from corral.plan.precisions import Form, forms

__all__ = ["Need", "box_gb", "by_arithmetic", "needs"]

_SIZES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 3), (8, 4), (8, 6), (8, 8), (8, 16))


@dataclass(frozen=True)
class Need:
    """One kind of GPU and one precision; `gpus_per_node` is 0 when 128 GPUs are not enough."""

    gpu: str
    weights: str
    by_arithmetic: int  # GPUs for weights and one request, by the size on the box
    gpus_per_node: int
    nodes: int
    layout: str
    context: int
    kv_cache_tokens: int

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes


def box_gb(gpu: Gpu) -> int:
    """The size on the box, in 10^9 bytes: 80 for an H100."""
    sizes = (16, 24, 32, 40, 48, 80, 94, 141, 180, 192)
    return min(sizes, key=lambda size: abs(size - gpu.memory_bytes / 1e9))


def by_arithmetic(model: ModelFacts, gigabytes: float, context: int = 0, weights: str = "") -> int:
    """GPUs as documents count them: parameters × bits, plus the KV of one request in GiB taken as GB."""
    stored = model.parameters * DTYPE_BYTES.get(weights or model.weights, 2.0) / 1e9
    cache = model.kv_bytes_per_token() * context / (1 << 30)
    return max(1, ceil((stored + cache) / gigabytes))


def needs(model: ModelFacts, goal: Goal, kinds: tuple[str, ...] = (), tuning: Tuning | None = None) -> list[Need]:
    """For each kind and precision the first inventory, from one GPU up, that holds the asked context."""
    context = goal.context or model.max_context
    rows = []
    for kind in kinds or tuple(GPUS):
        gpu = GPUS[kind]
        if gpu.half != "bf16" and not kinds:
            continue  # old kinds only when asked for
        for weights in dict.fromkeys((model.weights, "fp8", "int4")):
            found = _smallest(model, gpu, weights, replace(goal, context=context), tuning or Tuning())
            if found is not None:
                rows.append(found)
    return rows


def _smallest(model: ModelFacts, gpu: Gpu, weights: str, goal: Goal, tuning: Tuning) -> Need | None:
    fixed = Fixed(weights=None if weights == model.weights else weights)
    one = Inventory(gpu.kind, 1, 1, gpu.memory_bytes)
    form = forms(model, one, fixed)[0]
    if form.problem and (model.quantisation or weights != "int4"):
        return None
    if form.problem:  # no checkpoint in INT4 is known, but somebody may make one
        model = replace(model, weights="int4", stored=convert(model, form.precision), notes=())
        form = Form(model, form.precision)
    context = goal.context or model.max_context
    least = by_arithmetic(model, box_gb(gpu), context, weights)
    pinned = replace(fixed, weights=form.precision.weights)
    stored = convert(form.facts, form.precision).total
    for inside, nodes in _SIZES:
        if inside * nodes * gpu.memory_bytes < stored:
            continue
        made = decide(model, replace(one, gpus_per_node=inside, nodes=nodes), goal, pinned, tuning)
        if made.fits:
            c = made.chosen
            return Need(gpu.kind, weights, least, inside, nodes, str(c.parallel), context, c.memory.kv_cache_tokens)
    return Need(gpu.kind, weights, least, 0, 0, "", context, 0)
