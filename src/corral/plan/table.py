"""Memory of several models in bf16, fp8 and int4, side by side, with the GPUs that hold them: the tables of courses.

Two figures stand side by side: what documents compute (parameters × bits and one request, over the size on the box),
and how many GPUs really run it (some tensors stay in 16 bits, vLLM needs room, TP must divide the heads).
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.plan.candidate import Tuning
from corral.plan.contract import Goal
from corral.plan.hardware.inventory import GIB, Gpu
from corral.plan.models.architecture import DTYPE_BYTES
from corral.plan.models.facts import ModelFacts
from corral.plan.need import box_gb, needs

DOCUMENTED_CONTEXT = 128_000  # tokens for which documents give the KV cache of one request
WIDTHS = ("bf16", "fp8", "int4")


@dataclass(frozen=True)
class Cell:
    """One model in one precision on one kind of GPU; `gpus` is 0 where nobody publishes it, or 128 do not hold it."""

    weights: str
    nominal_gb: float
    boxes: float  # GPUs as documents divide: weights and one request over the size on the box
    gpus: int
    layout: str


@dataclass(frozen=True)
class TableRow:
    """One model."""

    model: str
    parameters: int
    kv_heads: int
    kv_gib: float  # of one request of `context` tokens, in 16 bits
    context: int
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


def memory_table(models: list[ModelFacts], gpu: Gpu, context: int | None = None) -> list[TableRow]:
    """One row per model; the context is that of documents, or the model's own where that is shorter."""
    return [_row(model, gpu, min(context or DOCUMENTED_CONTEXT, model.max_context)) for model in models]


def _row(model: ModelFacts, gpu: Gpu, context: int) -> TableRow:
    kv_gib = model.kv_bytes_per_token() * context / GIB
    runs = {need.weights: need for need in needs(model, Goal(context=context), (gpu.kind,), Tuning())}
    cells = []
    for weights in WIDTHS:
        nominal = model.parameters * DTYPE_BYTES[weights] / 1e9
        need = runs.get(weights)
        boxes = (nominal + kv_gib) / box_gb(gpu)
        cells.append(Cell(weights, nominal, boxes, need.gpus if need else 0, need.layout if need else ""))
    notes = (*(need.note for need in runs.values() if need.note), *model.notes)
    named = tuple(f"{model.name}: {note}" for note in notes)
    return TableRow(model.name, model.parameters, model.kv_heads, kv_gib, context, tuple(cells), named)
