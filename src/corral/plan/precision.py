"""In which precision a model can run: as stored first, then FP8, then INT4, and never narrower without saying so."""

from __future__ import annotations

from dataclasses import dataclass

from corral.engines.settings import DTYPES
from corral.plan.contract import Precision
from corral.plan.hardware.inventory import Inventory
from corral.plan.models import catalogue
from corral.plan.models.facts import ModelFacts, facts_from_entry
from corral.plan.settings import Fixed

# how vLLM 0.32 quantises a 16-bit checkpoint while loading it (`_ONLINE_SHORTHANDS`, and `fp8`): method -> weights
ONLINE = {
    "fp8": "fp8",
    "fp8_per_tensor": "fp8",
    "fp8_per_block": "fp8",
    "fp8_per_channel": "fp8",
    "mxfp8": "fp8",
    "int8_per_channel_weight_only": "int8",
    "nvfp4_per_token": "int4",
}
_METHOD = {"fp8": "fp8", "int8": "int8_per_channel_weight_only"}  # the one taken when only bits are asked for


@dataclass(frozen=True)
class Form:
    """One precision of one model: the facts of the checkpoint served, and how the precision comes about."""

    facts: ModelFacts
    precision: Precision
    problem: str = ""
    because: str = ""  # why this precision, where the hardware decides it
    warning: str = ""  # what the user should know before it starts


def forms(model: ModelFacts, inventory: Inventory, fixed: Fixed) -> list[Form]:
    """The forms to try, in order of preference; one with a problem where what was fixed is impossible."""
    request = _Request(model, inventory, fixed)
    if fixed.quantization is not None:
        return [request.quantised_by(fixed.quantization)]
    weights = fixed.weights or (fixed.dtype if not model.quantisation else None)
    native = request.native()
    if weights is not None and weights != native.precision.weights:
        return [request.in_weights(weights)]
    if weights is not None or fixed.layout or inventory.gpu is None:
        return [native]
    narrower = [request.in_weights(bits) for bits in ("fp8", "int4") if model.weights in DTYPES]
    return [native, *(form for form in narrower if not form.problem)]


@dataclass(frozen=True)
class _Request:
    """A model to run on some hardware, with what the user fixed."""

    model: ModelFacts
    inventory: Inventory
    fixed: Fixed

    def native(self) -> Form:
        """As the checkpoint is stored; in fp16 where the GPU has no bf16."""
        weights = self._half() if self.model.weights == "bf16" else self.model.weights
        return self._form(weights, "native")

    def in_weights(self, weights: str) -> Form:
        model, gpu = self.model, self.inventory.kind
        if weights in DTYPES:
            if model.quantisation:
                return self._form(weights, problem=f"the checkpoint is stored in {model.weights}")
            return self._form(weights)
        if weights == "fp8" and gpu is not None and 0 < gpu.capability < 7.5:
            why = f"vLLM runs FP8 from compute capability 7.5, {gpu.kind} has {gpu.capability}"
            return self._form(weights, problem=why)
        entry = catalogue.twin(model.name, weights) or catalogue.twin(model.location, weights)
        if entry is not None and model.source != "folder":
            return self._form(weights, "checkpoint", facts=facts_from_entry(entry))
        if weights in _METHOD and not model.quantisation:
            return self._form(weights, "online", _METHOD[weights])
        if model.quantisation:
            return self._form(weights, problem=f"the checkpoint is already stored in {model.weights}")
        why = f"{weights} needs a checkpoint quantised to it, and Corral knows none of {model.name}"
        return self._form(weights, problem=why)

    def quantised_by(self, method: str) -> Form:
        """What `--quantization METHOD` means: the way the checkpoint is stored, or what vLLM makes of it."""
        model, weights = self.model, ONLINE.get(method, self.fixed.weights or self.model.weights)
        if model.quantisation:
            same = method.split("_")[0] == model.quantisation.split("_")[0]  # awq_marlin runs awq
            why = "" if same else f"the checkpoint is quantised by {model.quantisation}, not by {method}"
            return self._form(model.weights, "native", method, problem=why)
        if method not in ONLINE:
            known = ", ".join(ONLINE)
            return self._form(
                weights, "native", problem=f"vLLM does not quantise by {method!r} while loading, only by {known}"
            )
        why = f"{method} gives {weights}, not {self.fixed.weights}"
        return self._form(weights, "online", method, problem=why if self.fixed.weights not in (None, weights) else "")

    def _half(self) -> str:
        """The 16-bit type that this GPU computes in."""
        gpu = self.inventory.kind
        return gpu.half if gpu is not None else "bf16"

    def _form(
        self, weights: str, how: str = "native", method: str = "", problem: str = "", facts: ModelFacts | None = None
    ) -> Form:
        facts = facts or self.model
        compute = self.fixed.dtype or (weights if weights in DTYPES else facts.dtype)
        if compute == "bf16" and self._half() != "bf16":
            asked = self.fixed.dtype or (self.fixed.weights if self.fixed.weights in DTYPES else None)
            if asked == "bf16" and not problem:
                problem = f"{self.inventory.gpu} does not compute in bf16"
            compute = self._half()
        return Form(facts, Precision(weights, self.fixed.kv or "auto", how, compute, method), problem)
