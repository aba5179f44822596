"""The settings of a plan: what the user fixes, what a load needs, and the plan as flags of vLLM.

The table of all settings is `engines.settings`. What the user fixes with `--set` is checked here and planned around.
Model, served name, host and port are the launch's business, nodes are the link's.

API servers: one process streams 9,000 to 16,000 tokens a second, however quick the GPU behind it is. An H200 with an
8B model and 256 requests at once gave 9,203 with one process, 14,541 with four, 15,110 with eight
(docs/measurements/gpu-settings.md). Replicas of one engine get one each, which is vLLM's own default; more of them
were not measured.

CUDA graphs: a step that no graph covers is launched kernel by kernel, and takes at least as long as that. An H200
with an 8B model and 1,000 sequences gave 20,100 tokens a second with vLLM's own sizes, up to 512, and 30,300 with
sizes up to 1,024, for 3 s of capturing and 0.3 GiB (docs/measurements/gpu-settings.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from corral.base.errors import UsageError
from corral.base.record import nearest
from corral.engines.flags import flag_name
from corral.engines.settings import DTYPES, SETTINGS, VLLM_DTYPES, arguments_of
from corral.plan.contract import EngineSettings, Goal, Parallel, Precision
from corral.plan.hardware.inventory import GIB, Gpu, Inventory
from corral.plan.models.facts import ModelFacts

WHOLE_PROMPTS = "--no-enable-chunked-prefill"


@dataclass(frozen=True)
class Fixed:
    """What the user fixed; None means: the planner decides."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    expert: bool | None = None
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
    lora: bool | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    passed_on: Mapping[str, object] = field(default_factory=dict)  # settings that the planner has no opinion on

    @property
    def precision(self) -> bool:
        return self.weights is not None or self.dtype is not None or self.quantization is not None

    @property
    def layout(self) -> bool:
        return self.tensor is not None or self.pipeline is not None


def read_fixed(values: Mapping[str, object]) -> Fixed:
    """Check what the user fixed; an unknown name is answered with the nearest known one."""
    for name in values:
        if name not in SETTINGS:
            guess = nearest(name, list(SETTINGS), 1)
            hint = f"Did you mean {guess[0]}?" if guess else f"Known: {', '.join(SETTINGS)}."
            raise UsageError(f"{name!r} is not a field of a plan that can be set.", hint)
    read: dict[str, Any] = {name: SETTINGS[name].read(name, value) for name, value in values.items()}
    known = {one.name for one in fields(Fixed)}
    passed_on = {name: read.pop(name) for name in values if name not in known}
    fixed = Fixed(**read, passed_on=passed_on)
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


# vLLM refuses these unless told that the caller knows (`DEPRECATED_QUANTIZATION_METHODS`, 0.32).
_DEPRECATED = ("fbgemm_fp8", "fp_quant")


def refuse_flags(arguments: Sequence[str], settings: EngineSettings, max_model_len: int) -> None:
    """Refuse flags that vLLM would refuse, given what else is decided, once it had been started."""
    budget = settings.max_num_batched_tokens
    if WHOLE_PROMPTS in arguments and budget < max_model_len:
        raise UsageError(
            f"with {WHOLE_PROMPTS} a step must hold the longest prompt, but max_num_batched_tokens {budget:,} is"
            f" below the context of {max_model_len:,}.",
            f"Leave {WHOLE_PROMPTS} out, or say --context {budget}.",
        )


def engine_args(
    model: ModelFacts,
    parallel: Parallel,
    precision: Precision,
    settings: EngineSettings,
    max_model_len: int,
    passed_on: Mapping[str, object],
    cpu: bool,
) -> tuple[str, ...]:
    """Every decision of the plan as a flag, so that no default of another vLLM version can change it."""
    values: dict[str, object] = {**passed_on, **vars(parallel), **vars(settings)}
    values |= {"max_model_len": max_model_len, "dtype": _dtype(model, precision)}
    values |= {"quantization": precision.method, "kv": precision.kv}
    if cpu:
        values["gpu_memory_utilization"] = None
    if settings.api_servers == parallel.data:  # one for each replica is vLLM's own default
        values["api_servers"] = None
    if settings.eager:
        values["max_graph_size"] = None
    deprecated = precision.how != "online" and model.quantisation in _DEPRECATED
    return (*arguments_of(values), *(["--allow-deprecated-quantization"] if deprecated else []))


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
