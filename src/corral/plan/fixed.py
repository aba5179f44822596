"""Fields of a plan that the user fixes (`--set key=value`), checked; the planner decides the rest around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from corral.base.errors import UsageError
from corral.base.record import nearest
from corral.plan.contract import Goal

WEIGHTS = ("bf16", "fp16", "fp32", "fp8", "int8", "int4")
DTYPES = ("bf16", "fp16", "fp32")
KV = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
_OPEN = "auto"  # fields that take it: the planner decides, whatever a profile says


@dataclass(frozen=True)
class Fixed:
    """None means: the planner decides."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    weights: str | None = None
    kv: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    api_servers: int | None = None
    stream_interval: int | None = None
    max_graph_size: int | None = None
    async_scheduling: bool | None = None
    eager: bool | None = None

    @property
    def precision(self) -> bool:
        return self.weights is not None or self.dtype is not None or self.quantization is not None

    @property
    def layout(self) -> bool:
        return self.tensor is not None or self.pipeline is not None


def _open(read: Callable[[str, object], object]) -> Callable[[str, object], object]:
    return lambda key, value: None if str(value).lower() == _OPEN else read(key, value)


def _whole(key: str, value: object) -> int:
    try:
        number = int(str(value))
    except ValueError:
        raise UsageError(f"{key} must be a whole number, not {value!r}.", f"For example --set {key}=4.") from None
    if not 1 <= number <= 10**9:
        raise UsageError(f"{key} cannot be {number}.", "Give a whole number, 1 or more.")
    return number


def _share(key: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0 < number <= 1:
        raise UsageError(f"{key} must be above 0 and at most 1, not {value!r}.", f"For example --set {key}=0.95.")
    return number


def _one_of(*known: str) -> Callable[[str, object], str]:
    def read(key: str, value: object) -> str:
        text = str(value).lower()
        if text not in known:
            raise UsageError(f"{key} cannot be {value!r}.", f"Known: {', '.join(known)}.")
        return text

    return read


def _flag(key: str, value: object) -> bool:
    text = str(value).lower()
    if text in ("true", "yes", "1", "on"):
        return True
    if text in ("false", "no", "0", "off"):
        return False
    raise UsageError(f"{key} must be true or false, not {value!r}.", f"For example --set {key}=true.")


KEYS: Mapping[str, Callable[[str, object], object]] = {
    "tensor": _whole,
    "pipeline": _whole,
    "data": _whole,
    "weights": _one_of(*WEIGHTS),
    "kv": _one_of(*KV),
    "dtype": _open(_one_of(*DTYPES)),
    "quantization": lambda _, value: str(value).lower(),
    "max_model_len": _open(_whole),
    "gpu_memory_utilization": _share,
    "max_num_batched_tokens": _whole,
    "max_num_seqs": _whole,
    "api_servers": _whole,
    "stream_interval": _whole,
    "max_graph_size": _whole,
    "async_scheduling": _flag,
    "eager": _flag,
}


def read_fixed(values: Mapping[str, object]) -> Fixed:
    """Check what the user fixed; unknown keys are answered with the nearest known one."""
    for key in values:
        if key not in KEYS:
            guess = nearest(key, list(KEYS), 1)
            hint = f"Did you mean {guess[0]}?" if guess else f"Known: {', '.join(KEYS)}."
            raise UsageError(f"{key!r} is not a field of a plan that can be set.", hint)
    read = {key: KEYS[key](key, value) for key, value in values.items()}
    fixed = Fixed(**read)  # type: ignore[arg-type]
    if fixed.weights in DTYPES and fixed.dtype and fixed.dtype != fixed.weights:
        raise UsageError(f"weights={fixed.weights} and dtype={fixed.dtype} contradict each other.", "Set one.")
    return fixed


def refuse_two_contexts(goal: Goal, fixed: Fixed) -> None:
    """`--context` and `max_model_len` are one question: two answers are no plan."""
    if goal.context and fixed.max_model_len and goal.context != fixed.max_model_len:
        raise UsageError(
            f"--context {goal.context} and max_model_len={fixed.max_model_len} contradict each other.",
            "Give one of them.",
        )


def parse_assignments(pairs: tuple[str, ...]) -> dict[str, object]:
    """`("tensor=4", …)` as a mapping."""
    values: dict[str, object] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.strip() or not value.strip():
            raise UsageError(f"{pair!r} is not key=value.", "For example --set tensor=4.")
        if key.strip() in values:
            raise UsageError(f"{key.strip()} is set twice.", "Set it once.")
        values[key.strip().replace("-", "_")] = value.strip()
    return values
