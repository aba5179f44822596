"""How the matrices of a checkpoint are stored: which narrow, in which format, and which stay wide.

The methods differ in how they say it. A `quantization_config` names one format and lists what it leaves alone
(`ignore`, `modules_to_not_convert`), in names, beginnings of names, wildcards or expressions; ModelOpt's mixed
checkpoints list what they narrow instead. NVIDIA's older ones say all that in a file of its own,
`hf_quant_config.json`, which `of_modelopt_file` puts into the same words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from corral.base.errors import DataError
from corral.base.untrusted import plain

DTYPE_BYTES = {
    "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5,
    "mxfp8": 1.0, "mxfp4": 0.5, "nvfp4": 0.5,
}  # fmt: skip
MODELOPT_FILE = "hf_quant_config.json"
_MICRO_GROUP = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}  # weights that share a scale of one byte
# what ModelOpt calls its algorithms
_ALGORITHMS = {
    "FP8": "fp8", "FP8_PB_WO": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4", "W4A16_NVFP4": "nvfp4", "NVFP4_SVDQUANT": "nvfp4", "W4A8_NVFP4_FP8": "nvfp4",
    "INT4_AWQ": "int4", "W4A16_AWQ": "int4", "W4A8_AWQ": "int4", "INT8_SQ": "int8", "W8A16": "int8",
}  # fmt: skip
_EMBEDDED = ("lm_head", "embed_tokens")  # wide wherever nothing says otherwise
_NUMBER = re.compile(r"^layers\.\d+\.")
_PREFIX = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)")


@dataclass(frozen=True)
class Quantisation:
    """The method and precision of a checkpoint's matrices, and what it stores otherwise."""

    method: str = ""
    weights: str = ""
    group_size: int = 0  # weights sharing one scale; 0: one per output channel
    zero_points: bool = False
    kept: tuple[str, ...] = ()  # names, or patterns of names, of what stays wide
    others: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # format and group of what is stored so
    listed_only: bool = False  # whether only `others` is narrow
    block: int = 0  # columns and rows that no tensor rank may cut

    def format_of(self, name: str) -> tuple[str, int] | None:
        """Format and group of the matrix of that name; None where it stays wide."""
        if not self.method:
            return None
        if self.others:
            names = (*_beginnings(name), *_beginnings(_NUMBER.sub("layers.*.", name)), name.rpartition(".")[2])
            found = next((self.others[one] for one in names if one in self.others), None)
            if found is not None or self.listed_only:
                return found
        if any(word in name for word in _EMBEDDED) or _rules(self.kept).match(name):
            return None
        return self.weights, self.group_size

    def matrix_bytes(self, name: str, wide: float) -> float:
        """Bytes per parameter of the matrix of that name, scales and zero points included."""
        found = self.format_of(name)
        return wide if found is None else format_bytes(*found, wide, self.zero_points)


def format_bytes(weights: str, group: int, wide: float, zero_points: bool = False) -> float:
    """Bytes per parameter in a format."""
    narrow = DTYPE_BYTES.get(weights, wide)
    group = group or _MICRO_GROUP.get(weights, 0)
    if not group:
        return narrow
    scale = 1.0 if weights in _MICRO_GROUP else 4.0 if weights == "fp8" else 2.0
    return narrow + scale / group + (narrow / group if zero_points else 0.0)


def _beginnings(name: str) -> Iterable[str]:
    """The name, and the names of all modules that it is in."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def _bare(name: str) -> str:
    return _PREFIX.sub("", name.strip("."))


@dataclass(frozen=True)
class _Rules:
    """Patterns of names, sorted by how they are tried."""

    modules: frozenset[str]  # a module with all that is in it
    begins: tuple[str, ...]
    inside: tuple[str, ...]  # part of a name, from one dot to another
    expressions: re.Pattern[str] | None

    def match(self, name: str) -> bool:
        if any(one in self.modules for one in _beginnings(name)) or name.startswith(self.begins):
            return True
        if any(one in f".{name}." for one in self.inside):
            return True
        return bool(self.expressions and self.expressions.match(f"model.{name}"))


@lru_cache(maxsize=16)
def _rules(patterns: tuple[str, ...]) -> _Rules:
    modules, begins, inside, expressions = set(), [], [], []
    for pattern in patterns:
        if pattern.startswith("re:"):
            expressions.append(pattern[3:])
            continue
        bare = _bare(pattern)
        if "*" not in bare:
            modules.add(bare)
            if not bare.startswith("layers."):
                inside.append(f".{bare}.")
        elif bare.index("*") == len(bare) - 1:
            begins.append(bare[:-1])
        else:
            expressions.append(f"(?:model\\.)?{re.escape(bare).replace(chr(92) + '*', '.*')}(?:\\..*)?$")
    try:
        joined = re.compile("|".join(f"(?:{one})" for one in expressions)) if expressions else None
    except re.error:
        joined = None
    return _Rules(frozenset(modules), tuple(begins), tuple(inside), joined)


def wrong(where: str, key: str, value: object, wanted: str) -> DataError:
    return DataError(
        f"{where}: config.json has {key} = {plain(repr(value), 100)}, which is not {wanted}.",
        "Correct the config or use another copy of the model.",
    )


def of_modelopt_file(found: Mapping[str, Any]) -> dict[str, Any]:
    """What `hf_quant_config.json` says, as a `quantization_config` says it."""
    said = found.get("quantization")
    if not isinstance(said, Mapping):
        return {}
    return {**said, "quant_method": "modelopt", "ignore": said.get("exclude_modules") or []}


def read_quantisation(quant: Mapping[str, Any], where: str = "the model", expert_dtype: str = "") -> Quantisation:
    """What a `quantization_config` says; unknown methods keep their name and count as stored."""
    method = str(quant.get("quant_method") or ("modelopt" if quant.get("quant_algo") else ""))
    if not method:
        return Quantisation()
    listed = quant.get("modules_to_not_convert") or quant.get("ignore") or []
    if not isinstance(listed, list):
        raise wrong(where, "quantization_config.modules_to_not_convert", listed, "a list")
    try:
        bits, group, zero = _bits(quant, method)
        block = _block(quant)
        others, only = _others(quant)
    except (TypeError, ValueError, AttributeError, OverflowError, IndexError, KeyError):
        raise wrong(where, "quantization_config", dict(quant), "one that vLLM could read") from None
    if not 0 <= group <= 1 << 30 or not 0 <= block <= 1 << 20:
        raise wrong(where, "quantization_config.group_size", group, "a size of groups")
    if expert_dtype == "fp4" and not others:
        others = {"experts": ("mxfp4", 0)}
    kept = tuple(str(one) for one in listed) if not others else ()
    return Quantisation(method, bits, group, zero, kept, others, only, block)


def _others(quant: Mapping[str, Any]) -> tuple[dict[str, tuple[str, int]], bool]:
    """What a checkpoint of several formats stores in which; whether all else is wide."""
    rows = quant.get("quantized_layers") or {}
    if str(quant.get("quant_algo")) != "MIXED_PRECISION" or not rows:
        return {}, False
    found = {}
    for name, row in rows.items():
        weights = _ALGORITHMS.get(str(row["quant_algo"]), "")
        found[_bare(str(name))] = (weights, int(row.get("group_size") or 0))
    return found, quant.get("quant_method") in (None, "modelopt")


def _block(quant: Mapping[str, Any]) -> int:
    block = quant.get("weight_block_size")
    if not isinstance(block, list) and isinstance(quant.get("config_groups"), Mapping):
        block = _first_scheme(quant).get("block_structure")
    return int(block[0]) if isinstance(block, list) and len(block) == 2 else 0


def _first_scheme(quant: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = list((quant.get("config_groups") or {}).values())
    first = groups[0] if groups and isinstance(groups[0], Mapping) else {}
    return first.get("weights") or {}


def _bits(quant: Mapping[str, Any], method: str) -> tuple[str, int, bool]:
    if method.startswith("modelopt") or (quant.get("quant_algo") and method != "fp8"):
        return _of_modelopt(quant)
    if method == "compressed-tensors":
        return _of_scheme(quant)
    if method == "bitsandbytes":
        return ("int4", 64, False) if quant.get("load_in_4bit") or quant.get("_load_in_4bit") else ("int8", 0, False)
    if method in ("awq", "gptq", "gptq_marlin", "awq_marlin", "auto-round", "auto_round"):
        bits, group = int(quant.get("bits") or 4), int(quant.get("group_size") or 128)
        return f"int{bits}", max(group, 0), True
    if method in _MICRO_GROUP:
        return method, 0, False
    if "fp8" in method:
        block = quant.get("weight_block_size")
        return "fp8", int(block[0]) * int(block[1]) if isinstance(block, list) and len(block) == 2 else 0, False
    return method, 0, False


def _of_scheme(quant: Mapping[str, Any]) -> tuple[str, int, bool]:
    """By bits and kind of number, as compressed-tensors and ModelOpt's groups say it."""
    scheme = _first_scheme(quant)
    bits, group = int(scheme.get("num_bits") or 8), int(scheme.get("group_size") or 0)
    floating = scheme.get("type", "float" if bits == 8 else "int") == "float"
    if bits == 4 and floating:
        return "mxfp4" if group == 32 else "nvfp4", 0, False
    if bits == 8 and floating:
        return ("mxfp8", 0, False) if group == 32 else ("fp8", group, not scheme.get("symmetric", True))
    return f"int{bits}", group, not scheme.get("symmetric", True)


def _of_modelopt(quant: Mapping[str, Any]) -> tuple[str, int, bool]:
    algorithm = str(quant.get("quant_algo") or "").upper()
    if algorithm == "MIXED_PRECISION":
        rows = list((quant.get("quantized_layers") or {}).values())
        named = [_ALGORITHMS.get(str(row.get("quant_algo")), "") for row in rows]
        return max(set(named), key=named.count) if named else "fp8", 0, False
    if algorithm not in _ALGORITHMS:
        return _of_scheme(quant)
    weights = _ALGORITHMS[algorithm]
    return weights, int(quant.get("group_size") or 128) if weights == "int4" else 0, False
