"""Fields of a plan that the user fixes (`--set key=value`), checked; the planner decides the rest around them.

A plan as vLLM's own flags. Model, served name, host and port are the launch's business, and nodes the link's.

How many API server processes a deployment gets, and how many tokens they stream together.

One process streams 9,000 to 16,000 tokens a second, however quick the GPU behind it is: an H200 with an 8B model and
256 requests at once gave 9,203 with one process, 14,541 with four, 15,110 with eight (docs/log.md). Replicas of one
engine get one each, which is vLLM's own default; more of them were not measured.

How large CUDA graphs are captured, and which steps are beyond them.

A step that no graph covers is launched kernel by kernel, and takes as long as that at least: an H200 with an 8B model
and 1,000 sequences gave 20,100 tokens a second with vLLM's own sizes, up to 512, and 30,300 with sizes up to 1,024,
for 3 s of capturing and 0.3 GiB (docs/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from corral.base.errors import UsageError
from corral.base.record import nearest
from corral.engines.flags import flag_name
from corral.plan.contract import EngineSettings, Goal, Parallel, Precision
from corral.plan.hardware.inventory import GIB, Gpu, Inventory
from corral.plan.models.facts import ModelFacts

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


VLLM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# vLLM refuses these unless told that the caller knows (`DEPRECATED_QUANTIZATION_METHODS`, 0.32).
_DEPRECATED = ("fbgemm_fp8", "fp_quant")


def engine_args(
    model: ModelFacts,
    parallel: Parallel,
    precision: Precision,
    settings: EngineSettings,
    max_model_len: int,
    cpu: bool,
) -> tuple[str, ...]:
    """Every decision of the plan, said aloud, so that no default of another vLLM version can change it."""
    args = ["--tensor-parallel-size", str(parallel.tensor)]
    if parallel.pipeline > 1:
        args += ["--pipeline-parallel-size", str(parallel.pipeline)]
    if parallel.data > 1:
        args += ["--data-parallel-size", str(parallel.data)]
    args += ["--max-model-len", str(max_model_len), "--dtype", _dtype(model, precision)]
    if precision.method:
        args += ["--quantization", precision.method]
    if precision.how != "online" and model.quantisation in _DEPRECATED:
        args += ["--allow-deprecated-quantization"]
    if precision.kv != "auto":
        args += ["--kv-cache-dtype", precision.kv]
    if not cpu:
        args += ["--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}"]
    args += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    args += ["--max-num-seqs", str(settings.max_num_seqs)]
    if settings.api_servers != parallel.data:  # one for each replica is vLLM's own default
        args += ["--api-server-count", str(settings.api_servers)]
    if settings.stream_interval > 1:
        args += ["--stream-interval", str(settings.stream_interval)]
    if settings.max_graph_size and not settings.eager:
        args += ["--max-cudagraph-capture-size", str(settings.max_graph_size)]
    if not settings.async_scheduling:
        args += ["--no-async-scheduling"]
    return (*args, "--enforce-eager") if settings.eager else tuple(args)


def _dtype(model: ModelFacts, precision: Precision) -> str:
    wide = precision.compute or (precision.weights if precision.weights in VLLM_DTYPES else model.dtype)
    return VLLM_DTYPES[wide]


def cpu_environment(kv_bytes: int, eager: bool) -> dict[str, str]:
    """The CPU build sizes its KV cache by a variable, in whole GiB.

    Under `--enforce-eager` vLLM still compiles what asks for it by itself, counting ranks for log-probabilities and
    looking up a split vocabulary: half a minute of a core for two lines of arithmetic, in every process. It is told
    not to.
    """
    sized = {"VLLM_CPU_KVCACHE_SPACE": str(max(1, kv_bytes // GIB))}
    return {**sized, "TORCH_COMPILE_DISABLE": "1"} if eager else sized


EASY_TOKENS_S = 2_500.0  # that each of several processes streams while nothing waits for it
ALONE_TOKENS_S = 4_000.0  # up to here one is enough: at 7,700 it costs 5% already
BURST = 4
_MOST = 8  # more were not measured
_MOST_UNSEEN = 4  # where nobody counted the cores


def api_servers(inventory: Inventory, parallel: Parallel, wanted_tokens_s: float | None) -> int:
    """Processes that stream what the GPUs give, as far as the cores allow; `wanted_tokens_s` None: not known."""
    if parallel.data > 1:
        return parallel.data
    if inventory.gpu is None or wanted_tokens_s is None or parallel.replica_gpus > inventory.gpus_per_node:
        return 1  # over nodes only the head has them, and no model that needs several streams so much
    busy = parallel.replica_gpus + 1  # a worker for each GPU, and the scheduler
    room = (inventory.cpu_cores - busy) // 2 if inventory.cpu_cores else _MOST_UNSEEN
    wanted = math.ceil(wanted_tokens_s / EASY_TOKENS_S) if wanted_tokens_s > ALONE_TOKENS_S else 1
    return max(1, min(wanted, room, _MOST))


def stream_interval(goal: str, wanted_tokens_s: float | None) -> int:
    """How many tokens are streamed together: several where throughput is the goal and streaming costs some of it.

    Fewer chunks gained 2% at 256 requests at once and 11% at 1,024 with four processes, 14 and 24% with one. Whoever
    reads along sees words come in bursts, so no other goal gets them; a first token is never held back.
    """
    return BURST if goal == "throughput" and wanted_tokens_s is not None and wanted_tokens_s > ALONE_TOKENS_S else 1


def streamed_tokens_s(processes: int, replicas: int, of_one: float, interval: int = 1, chunk_s: float = 0.0) -> float:
    """What the processes of one replica stream at most; `chunk_s` is what of a token's cost is its own chunk."""
    each_s = max(1e-9, 1 / of_one - chunk_s) + chunk_s / interval if of_one < math.inf else 0.0
    return max(1.0, processes / replicas) / each_s if each_s else math.inf


MEASURED_BY_ITSELF = 512  # tokens of the largest graph that vLLM captures on an H200 where nothing is said
LARGER = 1024  # more were not measured
# vLLM refuses a size beside sizes of somebody's own, and fits its own to what speculation checks
_ELSEWHERE = {"--compilation-config", "-cc", "-O", "--optimization-level", "--cudagraph-capture-sizes",
              "--cuda-graph-sizes", "--speculative-config", "-sc", "--spec-method", "--spec-model",
              "--spec-tokens"}  # fmt: skip


def most_by_itself(gpu: Gpu | None) -> int:
    """Tokens that vLLM (0.32) captures at most on such a GPU where nothing is said."""
    return 1024 if gpu is not None and 10 <= gpu.capability < 11 else MEASURED_BY_ITSELF


def largest_graph(settings: EngineSettings, gpu: Gpu | None) -> int:
    """Tokens of the largest step that a CUDA graph covers; 0: of none."""
    if settings.eager:
        return 0
    return min(settings.max_graph_size or own_largest(settings, gpu), settings.max_num_batched_tokens)


def own_largest(settings: EngineSettings, gpu: Gpu | None) -> int:
    """The same where vLLM is told nothing."""
    return min(2 * settings.max_num_seqs, most_by_itself(gpu))


def covered(settings: EngineSettings, gpu: Gpu | None, running: float, drafted: int = 0) -> bool:
    """Whether a graph covers a step of so many sequences, with so many drafted tokens of each to check.

    Where vLLM (0.32) speculates, it captures as many sequences as tokens otherwise, each with its drafted tokens.
    """
    if drafted and not settings.eager and running <= min(settings.max_num_seqs, most_by_itself(gpu)):
        return True
    return running * (1 + drafted) <= largest_graph(settings, gpu)


def graph_sizes(settings: EngineSettings, gpu: Gpu | None) -> list[int]:
    """The batch size of every CUDA graph that vLLM captures.

    Sizes are 1, 2, 4, then by 8 to 256, then by 16, once in pieces (mixed batches) and once whole (decode only, no
    more than `max_num_seqs` requests).
    """
    largest = largest_graph(settings, gpu)
    every = [n for n in (1, 2, 4) if n <= largest]
    every += [*range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]
    return [*every, *(n for n in every if n <= settings.max_num_seqs)]


def sized_elsewhere(arguments: Sequence[str]) -> bool:
    """Whether arguments of vLLM decide which graphs there are."""
    return any(flag_name(word) in _ELSEWHERE for word in arguments)


def running_at_once(settings: EngineSettings, goal: Goal, replicas: int = 1) -> int:
    """Requests of a full step of one replica."""
    return min(-(-(goal.concurrency or replicas * settings.max_num_seqs) // replicas), settings.max_num_seqs)


def size_for(settings: EngineSettings, gpu: Gpu | None, goal: Goal, replicas: int = 1) -> int:
    """The size that covers this load's steps beyond vLLM's own graphs; 0: there are none, or none that ends there.

    Such steps have many sequences, or a prompt beside what runs. Longer prompts take their time whatever is captured.
    """
    own = min(own_largest(settings, gpu), settings.max_num_batched_tokens)
    running = running_at_once(settings, goal, replicas)
    beside = min(running, own) - 1 + goal.prompt_tokens
    largest = max((tokens for tokens in (running, beside) if own < tokens <= LARGER), default=0)
    return min(1 << (largest - 1).bit_length(), settings.max_num_batched_tokens) if largest else 0
