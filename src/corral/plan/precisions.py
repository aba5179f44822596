"""In which precision a model can be run here: as stored first, then FP8, then INT4, never silently."""

from __future__ import annotations

from dataclasses import dataclass

from corral.hardware.inventory import Inventory
from corral.models import catalogue
from corral.models.facts import ModelFacts, facts_from_entry
from corral.plan.contract import Precision
from corral.plan.fixed import Fixed

__all__ = ["Form", "forms"]

_ONLINE = ("fp8", "int8")  # what vLLM makes of a 16-bit checkpoint while loading it
_WIDE = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Form:
    """One precision of one model: the facts of the checkpoint served, and how the precision comes about."""

    facts: ModelFacts
    precision: Precision
    problem: str = ""


def forms(model: ModelFacts, inventory: Inventory, fixed: Fixed) -> list[Form]:
    """The forms to try, in order of preference; one with a problem where what was fixed is impossible."""
    kv = fixed.kv or "auto"
    native = _native(model, inventory, kv)
    if fixed.weights is not None and fixed.weights != native.precision.weights:
        return [_form(model, inventory, fixed.weights, kv)]
    if fixed.weights is not None or fixed.layout or inventory.gpu is None:
        return [native]
    narrower = [_form(model, inventory, weights, kv) for weights in ("fp8", "int4") if model.weights in _WIDE]
    return [native, *(form for form in narrower if not form.problem)]


def _native(model: ModelFacts, inventory: Inventory, kv: str) -> Form:
    gpu = inventory.kind
    if gpu is not None and gpu.half == "fp16" and model.weights == "bf16":
        return Form(model, Precision("fp16", kv, "native"))
    return Form(model, Precision(model.weights, kv, "native"))


def _form(model: ModelFacts, inventory: Inventory, weights: str, kv: str) -> Form:
    gpu = inventory.kind
    if weights in _WIDE:
        if model.quantisation:
            return Form(model, Precision(weights, kv), f"the checkpoint is stored in {model.weights}")
        if weights == "bf16" and gpu is not None and gpu.half != "bf16":
            return Form(model, Precision(weights, kv), f"{gpu.kind} does not compute in bf16")
        return Form(model, Precision(weights, kv, "native"))
    if weights == "fp8" and gpu is not None and 0 < gpu.capability < 7.5:
        return Form(model, Precision(weights, kv), f"vLLM runs FP8 from compute capability 7.5, {gpu.kind} has less")
    entry = catalogue.twin(model.name, weights) or catalogue.twin(model.location, weights)
    if entry is not None and model.source != "folder":
        return Form(facts_from_entry(entry), Precision(weights, kv, "checkpoint"))
    if weights in _ONLINE and not model.quantisation:
        return Form(model, Precision(weights, kv, "online"))
    if model.quantisation:
        return Form(model, Precision(weights, kv), f"the checkpoint is already stored in {model.weights}")
    return Form(
        model,
        Precision(weights, kv),
        f"{weights} needs a checkpoint quantised to it, and Corral knows none of {model.name}",
    )
