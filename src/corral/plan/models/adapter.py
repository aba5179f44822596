"""LoRA adapters as files, and whether one fits a model: config, safetensors header, shapes. Nothing of them is run.

An adapter is a folder as `peft` saves it: `adapter_config.json` and `adapter_model.safetensors`. Pickled weights
(`adapter_model.bin`, `.pt`) are never opened. What vLLM 0.32 refuses only once a request asks for the adapter
(`PEFTHelper.validate_legal`, `LoRAModel.from_local_checkpoint`) is refused here, before a server starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, DataError, NotFoundError
from corral.base.untrusted import parse_json, plain
from corral.engines.adapters import CONFIG, PLAIN_NAME, RANKS, WEIGHTS
from corral.plan.models import catalogue
from corral.plan.models.facts import ModelFacts
from corral.plan.models.hub import hub_error
from corral.plan.models.store import HUB_TIMEOUT_S, ModelSource
from corral.plan.models.weights import read_header, weight_files

PICKLED = ("adapter_model.bin", "adapter_model.pt")
_LARGEST_CONFIG = 1 << 20
_FLOATS = ("F32", "F16", "BF16")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_QUANTISED = re.compile(r"(-unsloth)?-(bnb-)?(4bit|8bit|awq|gptq|fp8|int4|int8|quantized|w\da\d+)([-.].*)?$")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
_UNSERVED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of LoRA layers",
    "modules_to_save": "whole modules beside the LoRA layers",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
}


@dataclass(frozen=True)
class AdaptedModule:
    """The two matrices of one module of an adapter."""

    module: str  # by the model's own name: model.layers.0.self_attn.q_proj
    inputs: int
    outputs: int
    rank: int


@dataclass(frozen=True)
class Adapter:
    """One adapter, as its files say."""

    name: str
    path: str
    base: str  # the model that it says it was trained on
    revision: str
    rank: int  # the largest of its modules'
    size_bytes: int
    pairs: tuple[AdaptedModule, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The kinds of its modules."""
        return tuple(sorted({pair.module.rpartition(".")[2] for pair in self.pairs}))


def read_adapters(folder: Path) -> tuple[Adapter, ...]:
    """Every adapter of a folder; refuses one that holds none, or a broken one."""
    if not folder.is_dir():
        raise NotFoundError(f"there is no folder of adapters {folder}.", "Name a folder with a folder per adapter.")
    inside = sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    if not inside:
        raise DataError(f"{folder} holds no adapters.", f"Give it a folder for each, with {CONFIG} and {WEIGHTS}.")
    return tuple(map(read_adapter, inside))


def read_adapter(folder: Path, name: str = "") -> Adapter:
    """One adapter, checked by itself."""
    name = checked_adapter_name(name or folder.name)
    config = _config(folder / CONFIG)
    _refuse_unserved(config, folder / CONFIG)
    weights = folder / WEIGHTS
    if not weights.is_file():
        pickled = next((one for one in PICKLED if (folder / one).exists()), "")
        held = f"has {pickled}, which may run code when it is read, and no" if pickled else "has no"
        raise DataError(f"{folder} {held} {WEIGHTS}.", "Save it again with peft, which writes safetensors.")
    pairs = tuple(_pairs(read_header(weights), weights))
    said = [config["r"], *(config.get("rank_pattern") or {}).values()]
    rank = max([pair.rank for pair in pairs] + [number for number in said if type(number) is int])
    if not pairs or rank > RANKS[-1]:
        why = f"has rank {rank}, and vLLM serves ranks up to {RANKS[-1]}" if pairs else f"has no tensors in {WEIGHTS}"
        raise DataError(
            f"the adapter {name!r} {why}.", "Train it with a smaller rank." if pairs else "Save it again."
        )
    base, revision = (config.get(key) or "" for key in ("base_model_name_or_path", "revision"))
    return Adapter(name, str(folder), str(base), str(revision), rank, weights.stat().st_size, pairs)


def checked_adapter_name(name: str) -> str:
    if not PLAIN_NAME.fullmatch(name):
        raise DataError(
            f"{plain(name, 100)!r} cannot be the name of an adapter.",
            "Use letters, digits, dots, underscores and dashes, 96 at most, the first a letter or digit.",
        )
    return name


def _config(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise DataError(f"{file.parent} has no {CONFIG}, so it is no adapter.", "Name a folder that peft has saved.")
    with file.open("rb") as opened:
        found = parse_json(opened.read(_LARGEST_CONFIG + 1), str(file), _LARGEST_CONFIG)
    if not isinstance(found, dict):
        raise DataError(f"{file} is not a JSON object.", "Save the adapter again.")
    ranks = found.get("rank_pattern") or {}
    if type(found.get("r")) is not int or found["r"] < 1 or not isinstance(ranks, dict):
        raise DataError(f"{file} has no rank: r is {plain(repr(found.get('r')), 40)}.", "Save the adapter again.")
    return found


def _refuse_unserved(config: Mapping[str, Any], file: Path) -> None:
    """Refuse what vLLM does not serve, in vLLM's order."""
    init = config.get("init_lora_weights", True)
    what = next((what for key, what in _UNSERVED.items() if config.get(key)), "")
    if config.get("peft_type") != "LORA":
        what = f"adapters of type {plain(str(config.get('peft_type')), 40)}"
    elif isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        what = f"init_lora_weights={plain(init, 40)}, which changes the base model's weights"
    elif config.get("bias", "none") != "none":
        what = "adapters with a bias"
    if what:
        raise DataError(f"{file}: vLLM does not serve {what}.", "Convert it to a plain LoRA adapter with peft.")


def _pairs(header: Mapping[str, Any], file: Path) -> Iterator[AdaptedModule]:
    halves: dict[str, dict[str, tuple[int, int]]] = {}
    for name, row in header.items():
        if name == "__metadata__":
            continue
        found, shape = _TENSOR.fullmatch(name), row.get("shape")
        if found is None or row.get("dtype") not in _FLOATS:
            kind = plain(str(row.get("dtype")), 20)
            raise DataError(f"{file} has {plain(name, 100)} ({kind}), which is no LoRA weight.", "Save it with peft.")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
            raise DataError(f"{file}: {plain(name, 100)} is not a matrix.", "Save the adapter again.")
        halves.setdefault(found[1], {})[found[3]] = (shape[0], shape[1])
    for module, both in halves.items():
        if len(both) < 2 or both["A"][0] != both["B"][1]:
            raise DataError(f"{file}: the matrices of {plain(module, 100)} do not match.", "Save the adapter again.")
        yield AdaptedModule(plain(module), both["A"][1], both["B"][0], both["A"][0])


def brought(reference: str) -> Path:
    """The folder of an adapter: this one, or a repository's, of which the two files that count are downloaded."""
    folder = Path(reference).expanduser()
    if folder.is_dir() or reference.count("/") != 1 or reference.startswith(("/", ".", "~")):
        return folder
    from huggingface_hub import snapshot_download

    try:
        files = {one.filename for one in snapshot_download(reference, dry_run=True, etag_timeout=HUB_TIMEOUT_S)}
        if WEIGHTS not in files:
            has = next(
                (f"has {one}, which may run code when it is read, and no" for one in PICKLED if one in files), ""
            )
            raise DataError(f"{reference} {has or 'has no'} {WEIGHTS}.", "Name a repository with safetensors.")
        return Path(snapshot_download(reference, allow_patterns=[CONFIG, WEIGHTS], etag_timeout=HUB_TIMEOUT_S))
    except CorralError:
        raise
    except Exception as error:  # the library raises its own tree and its HTTP client's
        raise hub_error(reference, error) from error


# Against a model


def refuse_misfits(
    adapters: tuple[Adapter, ...], facts: ModelFacts, source: ModelSource, folder: Path | None, most_rank: int | None
) -> None:
    """Refuse the first adapter that does not fit the model; `folder`: of its files, where this machine has them."""
    shapes = _shapes(folder) if folder else {}
    for adapter in adapters:
        why = (
            _other_base(adapter, source, folder)
            or _beyond(adapter, most_rank)
            or next(filter(None, (_misfit(pair, facts, shapes) for pair in adapter.pairs)), "")
        )
        if why:
            raise DataError(f"the adapter {adapter.name!r} does not fit {source.name}: {why}.", _remedy(adapter, why))


def _remedy(adapter: Adapter, why: str) -> str:
    if "max_lora_rank" in why:
        return f"Start it with --set max_lora_rank={next(one for one in RANKS if one >= adapter.rank)}."
    if "says that" in why:
        return f"If it was trained on these very weights, correct that in {Path(adapter.path) / CONFIG}."
    return "Serve it with the model that it was trained on."


def _other_base(adapter: Adapter, source: ModelSource, folder: Path | None) -> str:
    """Whether it names another model of the hub, or another revision of this one."""
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", adapter.base)
    known = {source.name, *catalogue.repositories(source.repo)} if source.repo else set()
    if is_id and known and _bare(adapter.base) not in set(map(_bare, known)):
        return f"its {CONFIG} says that it was trained on {plain(adapter.base, 100)}"
    here = folder.name if folder is not None and folder.parent.name == "snapshots" else ""
    both = _COMMIT.fullmatch(adapter.revision) and _COMMIT.fullmatch(here)
    if both and adapter.revision != here:
        return f"its {CONFIG} says that it was trained on revision {adapter.revision[:12]}, and {here[:12]} is served"
    return ""


def _bare(repo: str) -> str:
    """The name without its owner, and without how a copy was quantised."""
    return _QUANTISED.sub("", repo.rpartition("/")[2].lower())


def _beyond(adapter: Adapter, most_rank: int | None) -> str:
    return (
        f"its rank is {adapter.rank}, and max_lora_rank is {most_rank}" if adapter.rank > (most_rank or 512) else ""
    )


def _misfit(pair: AdaptedModule, facts: ModelFacts, shapes: Mapping[str, tuple[int, int]]) -> str:
    """Why the model has no place for these matrices; empty where it has, or nothing is known of that module."""
    layer, kind = _LAYER.fullmatch(pair.module), pair.module.rpartition(".")[2]
    if layer and int(layer[1]) >= facts.layers:
        return f"it has {pair.module}, and the model has {facts.layers} layers"
    expected = shapes.get(_key(pair.module)) or _by_facts(facts).get(kind)
    if expected is None:
        known = "experts" in pair.module or not shapes or any(key.rpartition(".")[2] == kind for key in shapes)
        return "" if known else f"the model has no module {pair.module}"
    if (pair.outputs, pair.inputs) == expected:
        return ""
    return f"{pair.module} is {pair.inputs} × {pair.outputs}, and the model's is {expected[1]} × {expected[0]}"


def _key(module: str) -> str:
    """A module's name from its layer on: what lies before differs between a model and its wrappers."""
    layer = _LAYER.fullmatch(module)
    return f"{layer[1]}.{layer[2]}" if layer else module.rpartition(".")[2]


def _shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every matrix in the headers of a model's files; packed ones are left out."""
    found: dict[str, tuple[int, int]] = {}
    for file in weight_files(folder):
        for name, row in read_header(file).items():
            shape = row.get("shape") if name.endswith(".weight") and row.get("dtype") not in ("I32", "U8") else None
            if isinstance(shape, list) and len(shape) == 2:
                found[_key(name.removesuffix(".weight"))] = (shape[0], shape[1])
    return found


def _by_facts(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """The same of plain attention and a dense MLP, by the config; nothing for other shapes."""
    if not facts.known or facts.latent or facts.experts or facts.state_bytes:
        return {}
    query, kept = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    hidden, inner = facts.hidden, facts.intermediate
    return {
        "q_proj": (query, hidden), "k_proj": (kept, hidden), "v_proj": (kept, hidden), "o_proj": (hidden, query),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip
