"""Flags of `vllm serve` that the plan decides, read back as fields of the plan.

People paste commands from documents, and `--tensor-parallel-size 8` after `--` is a request about the plan, not a
second opinion beside it. What is read here goes the way of `--set`: planned with, checked, and shown once. A value's
meaning is the plan's business; here only spellings are translated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from corral.base.errors import UsageError
from corral.engines.flags import boolean_with_value, flag_name, takes_next

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_TIMES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _as_is(value: str) -> str:
    return value


def _dtype(value: str) -> str:
    return _DTYPES.get(value.lower(), value)


def _tokens(value: str) -> str:
    """vLLM's own way to write numbers: `8k` is 8,000 and `8K` is 8,192; -1 is `auto`."""
    if value == "-1":
        return "auto"
    found = _NUMBER.fullmatch(value)
    if found is None or (found[2].isupper() and "." in found[1]):
        return value
    return str(int(float(found[1]) * _TIMES[found[2]]))


@dataclass(frozen=True)
class _Flag:
    field: str
    read: Callable[[str], str] = _as_is


_PLANNED: Mapping[str, _Flag] = {
    "--tensor-parallel-size": _Flag("tensor"),
    "-tp": _Flag("tensor"),
    "--pipeline-parallel-size": _Flag("pipeline"),
    "-pp": _Flag("pipeline"),
    "--data-parallel-size": _Flag("data"),
    "-dp": _Flag("data"),
    "--max-model-len": _Flag("max_model_len", _tokens),
    "--dtype": _Flag("dtype", _dtype),
    "--quantization": _Flag("quantization"),
    "-q": _Flag("quantization"),
    "--kv-cache-dtype": _Flag("kv"),
    "--gpu-memory-utilization": _Flag("gpu_memory_utilization"),
    "--device-memory-utilization": _Flag("gpu_memory_utilization"),
    "--max-num-batched-tokens": _Flag("max_num_batched_tokens", _tokens),
    "--max-num-seqs": _Flag("max_num_seqs"),
    "--api-server-count": _Flag("api_servers"),
    "-asc": _Flag("api_servers"),
    "--stream-interval": _Flag("stream_interval"),
    "--max-cudagraph-capture-size": _Flag("max_graph_size"),
}
_SWITCHES = {
    "--enforce-eager": ("eager", "true"),
    "--no-enforce-eager": ("eager", "false"),
    "--async-scheduling": ("async_scheduling", "true"),
    "--no-async-scheduling": ("async_scheduling", "false"),
}
_BACKEND = "--distributed-executor-backend"
_LINKS = {"ray": "ray", "mp": "native"}  # other backends are vLLM's own business


@dataclass(frozen=True)
class ReadBack:
    """Arguments after `--`, taken apart: fields of the plan with the flag that said them, the link, and the rest."""

    fields: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    link: str | None = None
    rest: tuple[str, ...] = ()


def read_back(arguments: Sequence[str]) -> ReadBack:
    """Take out what the plan decides; of two equal flags the last holds, as it does for vLLM."""
    fields: dict[str, str] = {}
    flags: dict[str, str] = {}
    rest: list[str] = []
    link: str | None = None
    index = 0
    while index < len(arguments):
        word, name = arguments[index], flag_name(arguments[index])
        index += 1
        if name in _SWITCHES:
            if error := boolean_with_value(word, arguments[index : index + 1], name, tuple(_SWITCHES)):
                raise error
            fields[_SWITCHES[name][0]], flags[_SWITCHES[name][0]] = _SWITCHES[name][1], name
            continue
        if name not in _PLANNED and name != _BACKEND:
            rest.append(word)
            continue
        _, equals, value = word.partition("=")
        if not equals:
            if not takes_next(arguments, index):
                raise UsageError(f"{name} needs a value.", f"Give one: `{name} VALUE`.")
            value, index = arguments[index], index + 1
        if name == _BACKEND and value not in _LINKS:
            rest += [name, value]
        elif name == _BACKEND:
            link = _LINKS[value]
        else:
            planned = _PLANNED[name]
            fields[planned.field], flags[planned.field] = planned.read(value), f"{name} {value}"
    return ReadBack(fields, flags, link, tuple(rest))


def joined(fixed: Mapping[str, object], read: ReadBack) -> dict[str, object]:
    """Fields set by hand and fields read back, as one; two that contradict each other are refused."""
    for name, value in read.fields.items():
        if name in fixed and not _equal(fixed[name], value):
            raise UsageError(
                f"--set {name}={fixed[name]} and {read.flags[name]} after `--` contradict each other.",
                "Give one of them.",
            )
    return {**fixed, **read.fields}


def _equal(one: object, other: object) -> bool:
    try:
        return float(str(one)) == float(str(other))
    except ValueError:
        return str(one).lower() == str(other).lower()
