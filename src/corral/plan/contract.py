"""The values of a plan: what goes in, what comes out. `Plan` as JSON is published (docs/reference/plan-json.md).

`VERSION` rises when a key changes meaning or goes away; new keys do not raise it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from corral.base.errors import UsageError
from corral.plan.hardware.inventory import Inventory
from corral.plan.models.facts import ModelFacts
from corral.plan.models.quantisation import DTYPE_BYTES

VERSION = 1
GOALS = ("balanced", "latency", "throughput")


@dataclass(frozen=True)
class Goal:
    """What the user wants; None means: the planner chooses, and says what and why."""

    context: int | None = None
    concurrency: int | None = None
    goal: str = "balanced"
    prompt_tokens: int = 512
    output_tokens: int = 256
    price_per_gpu_hour: float | None = None
    storage_gb_s: float | None = None

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise UsageError(f"{self.goal!r} is not a goal.", f"Known: {', '.join(GOALS)}.")
        whole = (
            ("the context", self.context),
            ("the number of requests at once", self.concurrency),
            ("the length of a prompt", self.prompt_tokens),
            ("the length of an answer", self.output_tokens),
        )
        for name, count in whole:
            if count is not None and not 1 <= count <= 10**9:
                raise UsageError(f"{name} cannot be {count}.", "Give a whole number, 1 or more.")
        rates = ("the price of a GPU hour", self.price_per_gpu_hour), ("the storage's speed", self.storage_gb_s)
        for name, value in rates:
            if value is not None and not 0 < value < 1e6:
                raise UsageError(f"{name} cannot be {value:g}.", "Give a number above 0.")


@dataclass(frozen=True)
class Parallel:
    """How a model is split: tensor ranks, pipeline stages, and replicas of all of it.

    Of a mixture of experts the replicas are data-parallel ranks of one engine: each computes its own attention, and
    the routed experts are divided over all of them, by width or, with `expert`, whole.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False

    @property
    def replica_gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def expert_ranks(self) -> int:
        """GPUs over which vLLM divides the routed experts of a layer."""
        return self.tensor * self.data

    def layers_by_stage(self, layers: int) -> list[int]:
        """Layers of each pipeline stage, as vLLM's `get_pp_indices` spreads them."""
        sizes = [layers // self.pipeline] * self.pipeline
        for i in range(2, layers % self.pipeline + 2):
            sizes[-i] += 1
        return sizes

    def __str__(self) -> str:
        sizes = (("TP", self.tensor), ("PP", self.pipeline), ("DP", self.data))
        words = " × ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "TP")
        return f"{words} + EP" if self.expert else words


@dataclass(frozen=True)
class Precision:
    """The number formats that a model is loaded and computed in."""

    weights: str
    kv: str
    how: str = "native"  # native | checkpoint (another repository) | online (vLLM quantises while loading)
    compute: str = ""  # what is not quantised, and what is computed in: bf16, fp16, fp32
    method: str = ""  # vLLM's name of the quantisation, where it is to be said


UTILISATION = 0.92  # of a GPU's memory: vLLM's default


@dataclass(frozen=True)
class EngineSettings:
    """vLLM's own settings, as the plan decides them; `engines.settings` has the table."""

    gpu_memory_utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int
    eager: bool = False
    block_size: int = 16
    api_servers: int = 1  # processes that take requests and stream answers, of all replicas
    stream_interval: int = 1  # tokens that are streamed together
    max_graph_size: int | None = None  # largest batch that is captured; None: vLLM's own choice
    async_scheduling: bool = True  # the next step is scheduled while this one runs: vLLM's default
    lora: bool = False  # adapters can be served
    max_loras: int | None = None  # of these, in one step
    max_lora_rank: int | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes as vLLM accounts them, on the fullest GPU unless the name says otherwise."""

    weights_bytes: int  # of the whole model as loaded
    nominal_weights_bytes: int  # parameters × bits, as guides print it
    weights_bytes_per_gpu: int
    kv_bytes_per_token: int  # of the whole model
    kv_bytes_per_token_per_gpu: int
    kv_cache_bytes_per_gpu: int  # what is left for it
    kv_cache_tokens_per_replica: int  # what each engine logs
    kv_cache_tokens: int  # of all replicas together
    full_length_requests: float  # how many requests of max_model_len fit at once, all replicas
    activation_bytes_per_gpu: int
    graph_bytes_per_gpu: int
    overhead_bytes_per_gpu: int  # CUDA context, NCCL and other memory torch does not manage
    budget_bytes_per_gpu: int  # gpu_memory_utilization × what the driver reports
    correction_bytes_per_gpu: int = 0  # learned from earlier deployments and taken out of the KV cache
    graphs_counted: bool = True  # whether this vLLM takes graphs out of the KV cache
    draft_bytes_per_gpu: int = 0  # weights of a draft of speculative decoding
    adapter_bytes_per_gpu: int = 0  # slots for LoRA adapters

    @property
    def counted_graph_bytes(self) -> int:
        """What graphs take out of the budget; others lie outside it."""
        return self.graph_bytes_per_gpu if self.graphs_counted else 0


@dataclass(frozen=True)
class Speed:
    """Predicted speeds; None where nothing is known of the hardware."""

    decode_tokens_per_s: float | None  # one stream
    prefill_tokens_per_s: float | None
    throughput_tokens_per_s: float | None  # output tokens, all replicas, at `concurrency`
    ttft_s: float | None  # of one request of `prompt_tokens`, alone
    tpot_s: float | None  # at `concurrency`
    load_s: float | None
    concurrency: int  # that throughput and tpot are for
    prompt_tokens: int
    output_tokens: int
    basis: str  # measured | scaled from measured kinds | unknown
    storage_gb_s: float | None = None  # at which each node reads weights, of which `load_s` follows
    storage_basis: str = ""  # where that speed comes from
    read_bytes_per_node: int = 0


@dataclass(frozen=True)
class Cost:
    """What a plan costs at the stated price of a GPU hour; None where none was stated."""

    per_hour: float | None = None
    per_million_tokens: float | None = None


@dataclass(frozen=True)
class Reason:
    """Why one value of a plan is what it is."""

    field: str
    value: str
    because: str
    gain: float | None = None  # in throughput at the stated load, against vLLM's own default; None where they agree


@dataclass(frozen=True)
class Judged:
    """Something vLLM offers, judged for the stated load."""

    what: str
    taken: bool
    because: str
    pays_when: str
    gain: float | None = None  # in throughput, under what `because` or `pays_when` assumes; None: not known
    arguments: tuple[str, ...] = ()  # that turn it round: on where it is off, off where it is on


@dataclass(frozen=True)
class Rejected:
    """An alternative that was not taken."""

    what: str
    because: str


@dataclass(frozen=True)
class Nearest:
    """Something close to what was asked that would fit."""

    what: str
    change: str  # the options to give instead
    kv_cache_tokens: int
    max_model_len: int = 0
    throughput_tokens_per_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """The decision, each number with its reason."""

    version: int
    fits: bool
    reason: str
    model: ModelFacts
    checkpoint: str  # the repository or folder to serve; another than the model's when a quantised twin is used
    inventory: Inventory
    goal: Goal
    precision: Precision
    parallel: Parallel
    max_model_len: int
    settings: EngineSettings
    memory: Memory
    speed: Speed
    cost: Cost
    engine_args: tuple[str, ...]
    engine_env: dict[str, str]
    reasons: tuple[Reason, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    nearest: tuple[Nearest, ...] = ()
    notes: tuple[str, ...] = field(default=())
    # fits | barely fits (it runs, and `reason` says what is lost) | does not fit (memory, or too few GPUs)
    # | cannot run as asked (a rule is broken)
    verdict: str = "fits"
    warnings: tuple[str, ...] = ()  # what was asked for, and will hurt
    judged: tuple[Judged, ...] = ()  # what vLLM offers beside, and when it pays

    @property
    def barely(self) -> bool:
        """Whether it runs, and memory leaves less than most uses need."""
        return self.verdict == "barely fits"

    @property
    def seats(self) -> int:
        """How many requests all replicas run at once."""
        return self.settings.max_num_seqs * self.parallel.data

    @property
    def kv_element(self) -> float:
        """Bytes of one number in the KV cache."""
        wide = DTYPE_BYTES[self.precision.compute or self.model.dtype]
        return 1.0 if self.precision.kv.startswith("fp8") else wide

    @property
    def gpus(self) -> int | None:
        """How many GPUs it takes; None on CPUs."""
        return self.parallel.replica_gpus * self.parallel.data if self.inventory.gpu else None


_TIMES = {"": 1, "k": 1 << 10, "m": 1 << 20}


def token_count(text: str) -> int:
    """The number, at least 1; `k` stands for 1,024, as in the names of context lengths."""
    read = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if read is None or int(read[1]) < 1:
        raise UsageError(f"{text!r} is not a number of tokens.", "Give one such as 32768, or 32k (32,768).")
    return int(read[1]) * _TIMES[read[2]]
