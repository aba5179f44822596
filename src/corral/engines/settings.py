"""The settings of vLLM that Corral plans: one table, one row for each.

A row says how `--set` reads a value, which flag of `vllm serve` carries it, whether it may change what a model
answers, who may vary it, and against which default of vLLM its gain is predicted. Everything else follows from the
table: `--set`, the flags of a plan, flags after `--` that are read back as `--set`, and what tuning tries. A row that
nothing else knows of is passed on to vLLM as the user sets it; a setting that the planner decides has a field of that
name in `plan.contract.EngineSettings` and a function in `plan` that decides its value.

People paste commands from documents, and `--tensor-parallel-size 8` after `--` is a request about the plan, not a
second opinion beside it. `read_back` treats such flags as `--set`: planned with, checked, and shown once.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from corral.base.errors import UsageError
from corral.engines.flags import boolean_with_value, flag_name, takes_next

WEIGHTS = ("bf16", "fp16", "fp32", "fp8", "int8", "int4", "mxfp8", "mxfp4", "nvfp4")
DTYPES = ("bf16", "fp16", "fp32")
VLLM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
KV = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")

Read = Callable[[str, object], object]  # name and value of an assignment -> the value, checked
_OPEN = "auto"  # some settings take it: the planner decides, whatever a profile says
_DTYPE_NAMES = {**{name: short for short, name in VLLM_DTYPES.items()}, "half": "fp16", "float": "fp32"}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_TIMES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def whole(name: str, value: object) -> int:
    try:
        number = int(str(value))
    except ValueError:
        raise UsageError(f"{name} must be a whole number, not {value!r}.", f"For example --set {name}=4.") from None
    if not 1 <= number <= 10**9:
        raise UsageError(f"{name} cannot be {number}.", "Give a whole number, 1 or more.")
    return number


def share(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0 < number <= 1:
        raise UsageError(f"{name} must be above 0 and at most 1, not {value!r}.", f"For example --set {name}=0.95.")
    return number


def boolean(name: str, value: object) -> bool:
    text = str(value).lower()
    if text in ("true", "yes", "1", "on"):
        return True
    if text in ("false", "no", "0", "off"):
        return False
    raise UsageError(f"{name} must be true or false, not {value!r}.", f"For example --set {name}=true.")


def any_text(_: str, value: object) -> str:
    return str(value).lower()


def one_of(*known: str) -> Read:
    def read(name: str, value: object) -> str:
        text = str(value).lower()
        if text not in known:
            raise UsageError(f"{name} cannot be {value!r}.", f"Known: {', '.join(known)}.")
        return text

    return read


def or_open(read: Read) -> Read:
    """The same, and `auto` for: the planner decides."""
    return lambda name, value: None if str(value).lower() == _OPEN else read(name, value)


def _short_dtype(value: str) -> str:
    return _DTYPE_NAMES.get(value.lower(), value)


def _tokens(value: str) -> str:
    """vLLM's own way to write numbers: `8k` is 8,000 and `8K` is 8,192; -1 is `auto`."""
    if value == "-1":
        return _OPEN
    parts = _NUMBER.fullmatch(value)
    if parts is None or (parts[2].isupper() and "." in parts[1]):
        return value
    return str(int(float(parts[1]) * _TIMES[parts[2]]))


class VariedBy(enum.StrEnum):
    """Who chooses a value; what a user sets is never changed by the others."""

    USER = "user"  # only `--set`; otherwise vLLM's own default holds
    PLANNER = "planner"  # the planner, too
    TUNE = "tune"  # the planner, and tuning tries others


@dataclass(frozen=True)
class Setting:
    """One row."""

    name: str  # in `--set`, in a plan, in reports
    read: Read  # type and range of its values
    flag: str = ""  # of `vllm serve`; that of a boolean has a negative beginning with --no-
    aliases: tuple[str, ...] = ()
    from_flag: Callable[[str], str] = str  # the flag's value as `--set` writes it
    unsaid: object = None  # the value for which no flag is needed
    varied_by: VariedBy = VariedBy.USER
    changes_answers: bool = False
    # what vLLM takes where nothing is said, by (a large GPU?, replicas); None: no gain is predicted against it
    vllm_default: Callable[[bool, int], int | bool | None] | None = None
    tries: tuple[str, ...] = ()  # what tuning tries, where it has no values that depend on the plan

    @property
    def is_boolean(self) -> bool:
        return self.read is boolean

    def arguments(self, value: object) -> Iterator[str]:
        """The flag that carries a value; nothing where none is needed."""
        if not self.flag or value is None or value == self.unsaid:
            return
        if self.is_boolean:
            yield self.flag if value else _negative(self.flag)
        else:
            yield from (self.flag, f"{value:g}" if isinstance(value, float) else str(value))


def _negative(flag: str) -> str:
    return f"--no-{flag[2:]}"


_PLANNER, _TUNE = VariedBy.PLANNER, VariedBy.TUNE
_UTILISATION = ("--device-memory-utilization",)

_ROWS = (  # in the order of a plan's flags; defaults are those of vLLM 0.32 (`EngineArgs`)
    Setting("tensor", whole, "--tensor-parallel-size", ("-tp",), varied_by=_PLANNER),
    Setting("pipeline", whole, "--pipeline-parallel-size", ("-pp",), unsaid=1, varied_by=_PLANNER),
    Setting("data", whole, "--data-parallel-size", ("-dp",), unsaid=1, varied_by=_PLANNER),
    Setting("expert", boolean, "--enable-expert-parallel", unsaid=False, varied_by=_PLANNER),
    Setting("weights", one_of(*WEIGHTS), varied_by=_PLANNER, changes_answers=True),
    Setting("max_model_len", or_open(whole), "--max-model-len", from_flag=_tokens, varied_by=_PLANNER,
            changes_answers=True),
    Setting("dtype", or_open(one_of(*DTYPES)), "--dtype", from_flag=_short_dtype, varied_by=_PLANNER,
            changes_answers=True),
    Setting("quantization", any_text, "--quantization", ("-q",), unsaid="", varied_by=_PLANNER, changes_answers=True),
    Setting("kv", one_of(*KV), "--kv-cache-dtype", unsaid="auto", changes_answers=True),
    Setting("gpu_memory_utilization", share, "--gpu-memory-utilization", _UTILISATION, varied_by=_PLANNER),
    Setting("max_num_batched_tokens", whole, "--max-num-batched-tokens", from_flag=_tokens, varied_by=_TUNE,
            vllm_default=lambda large, _: 8192 if large else 2048),
    Setting("max_num_seqs", whole, "--max-num-seqs", varied_by=_TUNE,
            vllm_default=lambda large, _: 1024 if large else 256),
    Setting("api_servers", whole, "--api-server-count", ("-asc",), varied_by=_TUNE,
            vllm_default=lambda _, replicas: replicas),
    Setting("stream_interval", whole, "--stream-interval", unsaid=1, varied_by=_TUNE, vllm_default=lambda *_: 1),
    Setting("max_graph_size", whole, "--max-cudagraph-capture-size", varied_by=_TUNE, vllm_default=lambda *_: None),
    Setting("async_scheduling", boolean, "--async-scheduling", unsaid=True, varied_by=_TUNE),
    Setting("eager", boolean, "--enforce-eager", unsaid=False, vllm_default=lambda *_: False),
    Setting("lora", boolean, "--enable-lora", unsaid=False, varied_by=_PLANNER, changes_answers=True),
    Setting("max_loras", whole, "--max-loras", varied_by=_PLANNER),
    Setting("max_lora_rank", whole, "--max-lora-rank", varied_by=_PLANNER, changes_answers=True),
    Setting("max_cpu_loras", whole, "--max-cpu-loras"),
)  # fmt: skip
SETTINGS: dict[str, Setting] = {row.name: row for row in _ROWS}


def vllm_defaults(large_gpu: bool, replicas: int) -> dict[str, int | bool | None]:
    """What `vllm serve` takes where nothing is said, of the settings whose gain is predicted."""
    return {row.name: row.vllm_default(large_gpu, replicas) for row in SETTINGS.values() if row.vllm_default}


def arguments_of(values: Mapping[str, object]) -> list[str]:
    """Flags for these values, in the order of the table."""
    return [word for row in SETTINGS.values() for word in row.arguments(values.get(row.name))]


_BACKEND = "--distributed-executor-backend"
_LINKS = {"ray": "ray", "mp": "native"}  # other backends are vLLM's own business


@dataclass(frozen=True)
class ReadBack:
    """Arguments after `--`, taken apart: settings and the flag that each came from, the link, and the rest."""

    fields: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    link: str | None = None
    rest: tuple[str, ...] = ()


def _by_flag() -> tuple[dict[str, Setting], dict[str, tuple[Setting, str]]]:
    """Settings by each flag that takes a value, and by each that takes none with the value it stands for."""
    rows = [row for row in SETTINGS.values() if row.flag]
    valued = {flag: row for row in rows if not row.is_boolean for flag in (row.flag, *row.aliases)}
    switches = {row.flag: (row, "true") for row in rows if row.is_boolean}
    return valued, switches | {_negative(flag): (row, "false") for flag, (row, _) in switches.items()}


def read_back(arguments: Sequence[str]) -> ReadBack:
    """Take out what the plan decides; of two equal flags the last holds, as it does for vLLM."""
    valued, switches = _by_flag()
    fields: dict[str, str] = {}
    flags: dict[str, str] = {}
    rest: list[str] = []
    link: str | None = None
    index = 0
    while index < len(arguments):
        word, name = arguments[index], flag_name(arguments[index])
        index += 1
        if name in switches:
            if error := boolean_with_value(word, arguments[index : index + 1], name, tuple(switches)):
                raise error
            row, value = switches[name]
            fields[row.name], flags[row.name] = value, name
            continue
        if name not in valued and name != _BACKEND:
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
            row = valued[name]
            fields[row.name], flags[row.name] = row.from_flag(value), f"{name} {value}"
    return ReadBack(fields, flags, link, tuple(rest))


def joined(fixed: Mapping[str, object], read: ReadBack) -> dict[str, object]:
    """Settings of `--set` and settings read back, as one; two that contradict each other are refused."""
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
