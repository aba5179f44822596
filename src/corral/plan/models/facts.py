"""What a model is, read without torch and without its weights.

`read_facts` takes a local folder, a Hugging Face repository, or a catalogue name. From a folder or a repository it
reads `config.json` and the safetensors headers (by range request), so sizes are exact; from the catalogue it
computes them. A family the table of `plan.models.architecture` lacks is said to be unknown, and what can be computed
anyway (stored bytes, KV per token) still is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, DataError, NotFoundError
from corral.plan.models import catalogue, hub
from corral.plan.models.architecture import Parts, Shape, count, parse_config, read_shape, stored
from corral.plan.models.weights import Tensor, by_dtype, by_part, folder_tensors


@dataclass(frozen=True)
class ModelFacts:
    """What planning and serving need to know of one model."""

    name: str  # as people call it
    location: str  # what vLLM is given: a repository or a folder
    source: str  # folder | hub | catalogue
    architecture: str
    family: str
    known: bool  # whether parameters are counted by this family's rules
    parameters: int
    active_parameters: int  # per token; fewer than `parameters` for mixtures of experts
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    tied_embeddings: bool
    dtype: str  # of what is not quantised
    weights: str  # of the matrices: bf16, fp16, fp8, int4, …
    quantisation: str  # the method, or "" for none
    weights_bytes: int
    counted: Parts  # parameters
    stored: Parts  # bytes
    bytes_by_dtype: dict[str, int]  # from headers; empty when they were not read
    experts: int = 0
    experts_per_token: int = 0
    sliding_window: int | None = None
    sliding_layers: int = 0
    gated: bool | None = False  # None: the hub did not say
    notes: tuple[str, ...] = ()

    def kv_bytes_per_token(self, element_bytes: float = 2.0) -> int:
        """Keys and values of one token in all layers."""
        return int(2 * self.layers * self.kv_heads * self.head_dim * element_bytes)


def facts_from_config(
    config: Mapping[str, Any], name: str, location: str, source: str, tensors: list[Tensor] | None = None
) -> ModelFacts:
    """Facts from a parsed config and, where read, the tensors of the checkpoint."""
    if not isinstance(config, Mapping):
        raise DataError(f"{name}: config.json is not a JSON object.", "Use another copy of the model.")
    shape = read_shape(config, name)
    counted = count(shape)
    quant = shape.quantisation
    sizes = stored(counted, quant, shape.dtype, shape.layers)
    parameters, dtypes, notes = counted.total, {}, []
    if tensors:
        sizes, dtypes = by_part(tensors), by_dtype(tensors)
        if not quant.method:
            parameters = sum(t.elements for t in tensors)
            counted = counted if parameters == counted.total else _scaled(counted, parameters)
    if not shape.known:
        notes.append(_unknown(shape, bool(tensors)))
    return ModelFacts(
        name=name,
        location=location,
        source=source,
        architecture=shape.architecture,
        family=shape.family,
        known=shape.known,
        parameters=parameters,
        active_parameters=_active(shape, counted),
        layers=shape.layers,
        hidden=shape.hidden,
        intermediate=shape.expert_intermediate or shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab,
        max_context=shape.max_context,
        tied_embeddings=shape.tied,
        dtype=shape.dtype,
        weights=quant.weights or shape.dtype,
        quantisation=quant.method,
        weights_bytes=sizes.total,
        counted=counted,
        stored=sizes,
        bytes_by_dtype=dtypes,
        experts=shape.experts,
        experts_per_token=shape.experts_per_token,
        sliding_window=shape.sliding_window,
        sliding_layers=shape.sliding_layers,
        notes=tuple(notes),
    )


def _unknown(shape: Shape, has_tensors: bool) -> str:
    known = "stored bytes are exact (from the headers)" if has_tensors else "parameters are counted as for Llama"
    return (
        f"{shape.architecture} ({shape.family}) is not a family Corral knows: {known}, the split over GPUs is a guess"
    )


def _scaled(parts: Parts, parameters: int) -> Parts:
    """Counts stretched to a true total that the family's rules miss."""
    return replace(parts, mlp=max(0, parts.mlp + parameters - parts.total))


def _active(shape: Shape, counted: Parts) -> int:
    if not shape.experts:
        return counted.total
    one = 3 * shape.hidden * shape.expert_intermediate * shape.layers
    return counted.total - one * max(0, shape.experts - shape.experts_per_token)


def facts_from_entry(entry: catalogue.Entry) -> ModelFacts:
    """Facts of a catalogue model, computed."""
    facts = facts_from_config(entry.config, entry.name, entry.repo, "catalogue")
    return replace(facts, gated=entry.gated, notes=(*facts.notes, *([entry.note] if entry.note else [])))


def facts_from_folder(path: Path, name: str = "") -> ModelFacts:
    """Facts of a model folder: its `config.json` and, when it holds weights, their headers."""
    config_path = path / "config.json"
    if not config_path.is_file():
        raise DataError(f"{path} has no config.json, so it is not a model folder.", "Give the folder that holds it.")
    try:
        config = parse_config(config_path.read_bytes(), str(config_path))
    except OSError as error:
        raise DataError(f"{config_path} cannot be read: {error.strerror}.", "Check its permissions.") from None
    tensors = folder_tensors(path)
    facts = facts_from_config(config, name or path.resolve().name, str(path), "folder", tensors)
    if tensors:
        return facts
    note = f"{path} holds no safetensors: sizes are computed from its config"
    return replace(facts, notes=(*facts.notes, note))


def read_facts(ref: str, offline: bool = False) -> ModelFacts:
    """Facts of a folder, a catalogue name or a Hugging Face repository, in this order of meaning."""
    text = ref.strip()
    if not text:
        raise NotFoundError("no model was named.", f"For example: {', '.join(list(catalogue.CATALOGUE)[:3])}.")
    entry = catalogue.find(text)
    if entry is not None and text.lower() == entry.name:
        return facts_from_entry(entry)
    path = Path(text).expanduser()
    if path.is_dir():
        return facts_from_folder(path)
    if path.is_absolute() or text.startswith(("./", "../", "~")):
        raise NotFoundError(f"there is no folder {text}.", "Give a model folder, a repository or a catalogue name.")
    if text.count("/") != 1:
        raise catalogue.unknown(text)
    if offline:
        if entry is not None:
            return facts_from_entry(entry)
        raise catalogue.unknown(text, offline=True)
    return _from_hub(text, entry)


def _from_hub(repo: str, entry: catalogue.Entry | None) -> ModelFacts:
    try:
        found = hub.read_repository(repo)
    except CorralError as error:
        if entry is None:
            raise
        known = facts_from_entry(entry)
        return replace(known, notes=(*known.notes, f"from the catalogue: {error.message}"))
    facts = facts_from_config(found.config, repo, repo, "hub", found.tensors)
    return replace(facts, gated=found.gated, notes=(*facts.notes, *found.notes))
