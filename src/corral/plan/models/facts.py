"""What a model is, read without torch and without its weights.

`read_facts` takes a local folder, a Hugging Face repository, or a catalogue name. From a folder or a repository it
reads `config.json` and the safetensors headers (by range request), so sizes are exact; from the catalogue it
computes them. A model whose config is not understood is refused where nothing else says how large it is; with
headers its size is exact, and what it keeps for a token is counted as plain attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, DataError, NotFoundError
from corral.plan.models import catalogue, hub
from corral.plan.models.architecture import (
    Divided,
    Shape,
    active,
    count,
    divided,
    drafting_parameters,
    read_shape,
    stored_as,
)
from corral.plan.models.fields import parse_config, uncounted
from corral.plan.models.layers import Cache, Parts
from corral.plan.models.quantisation import MODELOPT_FILE, of_modelopt_file
from corral.plan.models.reader import FAMILIES
from corral.plan.models.task import task_of
from corral.plan.models.weights import Tensor, by_dtype, by_part, folder_tensors, is_loaded, numbers_of


@dataclass(frozen=True)
class ModelFacts:
    """What planning and serving need to know of one model."""

    name: str  # as people call it
    location: str  # what vLLM is given: a repository or a folder
    source: str  # folder | hub | catalogue
    architecture: str
    family: str
    known: bool  # whether its config is understood
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
    caches: tuple[Cache, ...] = ()  # what layers keep for a sequence, one row for each kind
    divided: tuple[Divided, ...] = ()  # what tensor ranks must divide beside the heads
    block: int = 0  # rows and columns of a quantised matrix that share a scale
    drafting_parameters: int = 0  # of layers that vLLM loads for speculation only; not among `parameters`
    encoder: bool = False  # reads a text at once; has no KV cache
    task: str = "generate"  # what it is served for: generate | embed | classify | rerank | transcribe
    images: bool = False  # reads pictures beside text

    def __post_init__(self) -> None:
        """Facts that an older Corral wrote lack the caches: what they say of heads and windows is all there was."""
        if self.caches or self.encoder:
            return
        width, slid = 2 * self.head_dim, self.sliding_layers
        kinds = (("full", self.layers - slid, 0), ("sliding", slid, self.sliding_window or 0))
        caches = tuple(Cache(kind, n, self.kv_heads, width, window) for kind, n, window in kinds if n)
        object.__setattr__(self, "caches", caches)

    def kv_bytes_per_token(self, element_bytes: float = 2.0, tensor: int = 1) -> int:
        """What all layers keep of one token, those with a window too, on one GPU of so many tensor ranks."""
        return int(sum(one.layers * one.token_bytes(element_bytes, tensor) for one in self.caches if one.width))

    def kept_bytes(self, tokens: int, element_bytes: float = 2.0) -> float:
        """What a sequence of so many tokens keeps in all layers, windows and states included."""
        rows = (one for one in self.caches if one.width)
        kept = sum(one.layers * one.token_bytes(element_bytes) * min(tokens, one.window or tokens) for one in rows)
        return kept + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """What linear attention and Mamba layers keep of a sequence, however long it is."""
        return sum(one.layers * one.state_bytes for one in self.caches)

    @property
    def writes(self) -> bool:
        """Whether it answers in tokens of its own, one after another."""
        return self.task in ("generate", "transcribe") and not self.encoder

    @property
    def only_text(self) -> bool:
        """Whether it certainly reads no pictures: a family of text models, without a tower."""
        text = self.known and self.family in FAMILIES and self.architecture.endswith("ForCausalLM")
        return text and not self.counted.tower

    @property
    def latent(self) -> bool:
        """Whether one latent serves all heads, so that every tensor rank keeps it."""
        return any(one.kind in ("latent", "compressed") for one in self.caches)


def facts_from_config(
    config: Mapping[str, Any],
    name: str,
    location: str,
    source: str,
    tensors: list[Tensor] | None = None,
    weights_bytes: int = 0,
) -> ModelFacts:
    """Facts from a parsed config and, where read, the tensors of the checkpoint, or its size where it is given."""
    if not isinstance(config, Mapping):
        raise DataError(f"{name}: config.json is not a JSON object.", "Use another copy of the model.")
    shape = read_shape(config, name)
    if shape.problem and not tensors and not weights_bytes:
        raise uncounted(name, shape.problem)
    sizes, counted, parameters, dtypes = _sizes(shape, tensors, weights_bytes)
    window, sliding = shape.sliding
    experts, quant = shape.experts, shape.quantisation
    dense = next((one.dense.width for one in shape.layers if one.dense), shape.intermediate)
    task = task_of(config, shape.architecture, name)
    return ModelFacts(
        name=name,
        location=location,
        source=source,
        architecture=shape.architecture,
        family=shape.family,
        known=not shape.problem,
        parameters=parameters,
        active_parameters=active(shape, counted) if not shape.problem else parameters,
        layers=len(shape.layers),
        hidden=shape.hidden,
        intermediate=experts.width if experts else dense,
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
        experts=experts.count if experts else 0,
        experts_per_token=experts.per_token if experts else 0,
        sliding_window=window,
        sliding_layers=sliding,
        notes=(_unknown(shape, bool(tensors)),) if shape.problem else (),
        caches=shape.caches,
        divided=divided(shape),
        block=quant.block,
        drafting_parameters=drafting_parameters(shape),
        encoder=shape.encoder,
        task=task,
        images=task == "generate" and isinstance(config.get("vision_config"), Mapping),
    )


def _sizes(
    shape: Shape, tensors: list[Tensor] | None, weights_bytes: int
) -> tuple[Parts, Parts, int, dict[str, int]]:
    """Bytes and parameters part by part, parameters in all, and bytes by type: as stored where that is known."""
    counted, sizes = count(shape), stored_as(shape)
    if tensors:
        tensors = [one for one in tensors if is_loaded(one, len(shape.layers))]
        stored, parameters = by_part(tensors), counted.total
        if not shape.quantisation.method or shape.problem:
            parameters = numbers_of(tensors, shape.quantisation.weights)
            counted = counted if parameters == counted.total else _scaled(counted, parameters)
        return stored, counted, parameters, by_dtype(tensors)
    if weights_bytes:
        sizes = _scaled(sizes, weights_bytes)
        if shape.problem:
            return sizes, sizes, weights_bytes // 2, {}
    return sizes, counted, counted.total, {}


def _unknown(shape: Shape, has_tensors: bool) -> str:
    size = "stored bytes are exact (from the headers)" if has_tensors else "its size is the one given"
    return (
        f"{shape.architecture} ({shape.family}) is not understood, {shape.problem}: {size}; what it keeps of a token"
        " is counted as plain attention, and the split over GPUs is a guess"
    )


def _scaled(parts: Parts, total: int) -> Parts:
    """Counts stretched to a true total that the fields of the config miss."""
    return replace(parts, mlp=max(0, parts.mlp + total - parts.total))


def facts_from_entry(entry: catalogue.Entry) -> ModelFacts:
    """Facts of a catalogue model, computed."""
    facts = facts_from_config(entry.config, entry.name, entry.repo, "catalogue")
    task = facts.task if entry.task == "generate" else entry.task
    return replace(facts, gated=entry.gated, task=task, notes=(*facts.notes, *([entry.note] if entry.note else [])))


def _modelopt(file: Path) -> dict[str, Any]:
    """What NVIDIA's own file says of the quantisation; nothing where there is none."""
    try:
        return of_modelopt_file(parse_config(file.read_bytes(), str(file)))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.", "Check its permissions.") from None


def facts_from_folder(path: Path, name: str = "", weights_bytes: int = 0) -> ModelFacts:
    """Facts of a model folder: its `config.json` and, when it holds weights, their headers."""
    config_path = path / "config.json"
    if not config_path.is_file():
        raise DataError(f"{path} has no config.json, so it is not a model folder.", "Give the folder that holds it.")
    try:
        config = parse_config(config_path.read_bytes(), str(config_path))
    except OSError as error:
        raise DataError(f"{config_path} cannot be read: {error.strerror}.", "Check its permissions.") from None
    if "quantization_config" not in config and (quant := _modelopt(path / MODELOPT_FILE)):
        config = {**config, "quantization_config": quant}
    tensors = folder_tensors(path)
    facts = facts_from_config(config, name or path.resolve().name, str(path), "folder", tensors, weights_bytes)
    if facts.task == "generate" and (path / "modules.json").is_file():  # of Sentence Transformers
        facts = replace(facts, task="embed")
    if tensors:
        return facts
    note = f"{path} holds no safetensors: sizes are computed from its config"
    return replace(facts, notes=(*facts.notes, note))


def read_facts(ref: str, offline: bool = False, weights_bytes: int = 0, folders: bool = True) -> ModelFacts:
    """Facts of a folder, a catalogue name or a Hugging Face repository, in this order of meaning.

    Without `folders` none is looked for.
    """
    text = ref.strip()
    if not text:
        raise NotFoundError("no model was named.", f"For example: {', '.join(list(catalogue.CATALOGUE)[:3])}.")
    entry = catalogue.find(text)
    if entry is not None and text.lower() == entry.name:
        return facts_from_entry(entry)
    path = Path(text).expanduser()
    if folders and path.is_dir():
        return facts_from_folder(path, weights_bytes=weights_bytes)
    if path.is_absolute() or text.startswith(("./", "../", "~")):
        raise NotFoundError(f"there is no folder {text}.", "Give a model folder, a repository or a catalogue name.")
    if text.count("/") != 1:
        raise catalogue.unknown(text)
    if offline:
        if entry is not None:
            return facts_from_entry(entry)
        raise catalogue.unknown(text, offline=True)
    return _from_hub(text, entry, weights_bytes)


def _from_hub(repo: str, entry: catalogue.Entry | None, weights_bytes: int) -> ModelFacts:
    try:
        found = hub.read_repository(repo)
    except CorralError as error:
        if entry is None:
            raise
        known = facts_from_entry(entry)
        return replace(known, notes=(*known.notes, f"from the catalogue: {error.message}"))
    facts = facts_from_config(found.config, repo, repo, "hub", found.tensors, weights_bytes)
    return replace(facts, gated=found.gated, notes=(*facts.notes, *found.notes))
