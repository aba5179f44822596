"""How far a run is from what the hardware allows, what holds it back, and what would likely help.

Decode must read the weights once a step and the KV cache of every running request: that traffic over the memory
bandwidth is the decode share. Every token costs two operations per active parameter: that over the arithmetic rate
is the compute share; for requests that ran (nearly) alone, the prompt over the time to the first token gives the
prefill share. Rates are the vendors' for GPUs in the table; on a CPU they are the plan's own.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from corral.lab.bench.metrics import Summary
from corral.lab.bench.server_metrics import ServerDelta
from corral.plan.contract import Plan
from corral.plan.measured import speed_at
from corral.plan.settings import LARGER, largest_graph
from corral.plan.speed import Efficiency

NEAR = 0.65  # of the rate that a cause allows; a slower run has another cause


class LimitCause(enum.StrEnum):
    """What limited a run."""

    KV_CACHE = "kv cache"
    MAX_SEQS = "seats"  # as it stands in the runs of earlier versions
    LAUNCHES = "launches"
    ARITHMETIC = "arithmetic"
    BANDWIDTH = "bandwidth"
    FRONT_END = "front end"
    EAGER = "eager"
    LOAD = "load"
    SCHEDULING = "scheduling"
    OVERHEADS = "overheads"


@dataclass(frozen=True)
class _Verdict:
    """A cause as text, and what would likely help."""

    cause: LimitCause
    why: str
    advice: str
    advised: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Limit:
    """Shares of the hardware's rates that were reached, and the likely reason for the rest."""

    decode_share: float  # of memory bandwidth
    prefill_share: float | None  # of arithmetic, while a prompt ran alone
    compute_share: float  # of arithmetic, over the whole run
    roof_tokens_per_s: float | None  # output, as the plan predicts for this load
    limited_by: str
    advice: str
    basis: str
    cause: LimitCause | None = None
    advised: Mapping[str, str] = field(default_factory=dict)  # fields of a plan, as `--set` takes them

    @property
    def sentence(self) -> str:
        prefill = f"; prefill at {self.prefill_share:.0%} of FLOPs" if self.prefill_share is not None else ""
        text = (
            f"decode at {self.decode_share:.0%} of memory bandwidth{prefill}; "
            f"arithmetic at {self.compute_share:.0%} over the run; limited by {self.limited_by}"
        )
        shares = (self.decode_share, self.compute_share, self.prefill_share or 0.0)
        if max(shares) > 1:
            text += " (over 100%: the rates assumed for this machine are too low)"
        return text


@dataclass(frozen=True)
class TokenCost:
    """The cost of tokens at the measured rate."""

    gpus: int
    gpu_hours_per_million_output: float
    gpu_hours_per_million_total: float
    price_per_gpu_hour: float | None = None
    money_per_million_output: float | None = None
    money_per_million_total: float | None = None


def cost_of(summary: Summary, gpus: int, price: float | None) -> TokenCost | None:
    if not gpus or not summary.output_throughput:
        return None
    output = gpus * 1e6 / summary.output_throughput / 3600
    total = gpus * 1e6 / summary.total_token_throughput / 3600
    money = (output * price, total * price) if price else (None, None)
    return TokenCost(gpus, output, total, price, *money)


@dataclass(frozen=True)
class _Rates:
    bytes_s: float  # memory, of one GPU (or the CPU)
    flops: float
    basis: str


def _rates(plan: Plan) -> _Rates | None:
    gpu = plan.inventory.kind
    if gpu is not None:
        narrow = plan.precision.weights == "fp8" and gpu.fp8_tflops > 0
        flops = (gpu.fp8_tflops if narrow else gpu.bf16_tflops) * 1e12
        return _Rates(gpu.bandwidth_gb_s * 1e9, flops, f"vendor's rates of {gpu.kind}")
    speed = plan.speed
    if not speed.decode_tokens_per_s or not speed.prefill_tokens_per_s:
        return None
    implied = plan.memory.weights_bytes * speed.decode_tokens_per_s
    return _Rates(implied, 2 * plan.model.active_parameters * speed.prefill_tokens_per_s, f"the plan ({speed.basis})")


def distance(
    plan: Plan, summary: Summary, server: ServerDelta | None, api_servers: int | None = None
) -> Limit | None:
    """The distance from the limit; None when the speed of the hardware is unknown or nothing was measured.

    `api_servers` are the processes that stream, None where it is not known: then one for each replica is assumed.
    """
    rates = _rates(plan)
    step_ms = summary.itl.median or summary.tpot.mean  # pieces that were read together have no gaps
    if rates is None or not summary.output_tokens or not step_ms:
        return None
    parallel = plan.parallel
    running = max(1.0, summary.mean_concurrency / parallel.data)
    mean_input = summary.input_tokens / summary.completed
    mean_output = summary.output_tokens / summary.completed
    steps_s = min(parallel.pipeline, running) / (step_ms / 1000)
    kv = running / parallel.pipeline * (mean_input + mean_output / 2) * plan.memory.kv_bytes_per_token_per_gpu
    decode = steps_s * (plan.memory.weights_bytes_per_gpu + kv) / rates.bytes_s
    per_token = 2 * plan.model.active_parameters
    gpus = parallel.replica_gpus * parallel.data
    compute = summary.total_token_throughput * per_token / (rates.flops * gpus)
    prefill = None
    if summary.mean_concurrency <= 1.5 and summary.ttft.median:
        prefill = mean_input / (summary.ttft.median / 1000) * per_token / (rates.flops * parallel.replica_gpus)
    front = FrontEnd.of(plan, api_servers)
    load = (running * parallel.data, mean_input, mean_output)
    endless = replace(Efficiency(), frontend_tokens_s=math.inf)
    reachable, unbound = roof(plan, *load, front.processes), roof(plan, *load, rates=endless)
    bound = front.binds(summary.output_throughput, reachable, unbound)
    verdict = _reason(plan, summary, server, decode, compute, front if bound else None,
                    _launches(plan, summary.output_throughput, front, *load))  # fmt: skip
    reason = (verdict.why, verdict.advice, rates.basis, verdict.cause, verdict.advised)
    return Limit(decode, prefill, compute, reachable, *reason)


@dataclass(frozen=True)
class FrontEnd:
    """The API server processes of all replicas."""

    processes: int
    known: bool  # from the deployment's flags

    @classmethod
    def of(cls, plan: Plan, api_servers: int | None) -> FrontEnd:
        return cls(max(plan.parallel.data, api_servers or 1), api_servers is not None)

    @property
    def tokens_s(self) -> float:
        return Efficiency().frontend_tokens_s * self.processes

    def binds(self, measured: float, reachable: float | None, unbound: float | None) -> bool:
        """Whether these processes are the limit: the roofline says so, and the measured rate is near theirs.

        An H200 streams 8,304 tokens a second at 64 requests at once, its own limit; at 256 it could do more.
        """
        if not reachable or not unbound:
            return False
        return unbound >= 1.1 * reachable and unbound > measured >= NEAR * self.tokens_s

    @property
    def verdict(self) -> _Verdict:
        rate = f"{Efficiency().frontend_tokens_s:,.0f} tokens a second"
        wanted = max(4, 2 * self.processes)
        more = f" (`--set api_servers={wanted}`)" if self.known else ""
        return _Verdict(
            LimitCause.FRONT_END,
            f"the {self.processes} API server processes: each streams some {rate}"
            if self.known and self.processes > 1
            else f"the API server: one process streams some {rate}",
            f"more API server processes{more} or replicas; `corral batch` does not stream",
            {"api_servers": str(wanted)},
        )


def _reason(
    plan: Plan,
    summary: Summary,
    server: ServerDelta | None,
    decode: float,
    compute: float,
    front: FrontEnd | None,
    launches: _Verdict | None,
) -> _Verdict:
    """The first cause that fits, gravest first, and what would likely help; `front` and `launches` when they bind."""
    settings, cause = plan.settings, LimitCause
    full = server is not None and (server.preemptions >= 1 or server.peak_kv_use > 0.95)
    waiting = server is not None and server.peak_waiting >= 1
    if full:
        help_ = "raise gpu_memory_utilization, take an fp8 KV cache, or more GPUs"
        return _Verdict(cause.KV_CACHE, "the size of the KV cache", help_)
    if waiting and server is not None and server.peak_running >= settings.max_num_seqs:
        seqs = str(settings.max_num_seqs * 2)
        why = f"max_num_seqs ({settings.max_num_seqs})"
        return _Verdict(cause.MAX_SEQS, why, f"--set max_num_seqs={seqs}", {"max_num_seqs": seqs})
    if launches is not None:
        return launches
    on_cpu = plan.inventory.gpu is None
    if compute >= 0.5:
        more = "more cores, or a GPU" if on_cpu else "fp8 weights, or more GPUs"
        shared = "shared prefixes, so that the prefix cache saves prompt tokens"
        return _Verdict(cause.ARITHMETIC, "arithmetic", f"{more}; {shared}")
    if decode >= 0.6:
        lighter = "a smaller model" if on_cpu else "fp8/int4 weights"
        more = f"more requests at once (they share each read of the weights), or {lighter}"
        return _Verdict(cause.BANDWIDTH, "memory bandwidth", more)
    if front is not None:
        return front.verdict
    return _outside(plan, summary, waiting)


def _launches(
    plan: Plan, measured: float, front: FrontEnd, concurrency: float, input_len: float, output_len: float
) -> _Verdict | None:
    """Steps with more sequences than the largest CUDA graph, where the roofline has a tenth more with larger ones.

    A run that is faster than launches allow has other graphs than planned; one that is far slower has another cause.
    """
    gpu, running = plan.inventory.kind, concurrency / plan.parallel.data
    if gpu is None or not (captured := largest_graph(plan.settings, gpu)) < running <= LARGER:
        return None
    larger = replace(plan, settings=replace(plan.settings, max_graph_size=LARGER))
    now, then = (roof(one, concurrency, input_len, output_len, front.processes) for one in (plan, larger))
    if not now or not then or then < 1.1 * now or not NEAR * now <= measured <= 1.15 * now:
        return None
    why = f"kernel launches: {running:,.0f} requests at once are beyond the largest CUDA graph ({captured})"
    return _Verdict(LimitCause.LAUNCHES, why, f"--set max_graph_size={LARGER}", {"max_graph_size": str(LARGER)})


def _outside(plan: Plan, summary: Summary, waiting: bool) -> _Verdict:
    """The cause where a run uses up no part of the hardware."""
    settings, cause = plan.settings, LimitCause
    if summary.mean_concurrency < 0.5 * settings.max_num_seqs and not waiting:
        if settings.eager:
            help_ = "start without eager mode, and offer more requests at once"
            return _Verdict(cause.EAGER, "kernel launches (eager mode)", help_, {"eager": "false"})
        help_ = "offer more: --concurrency higher, or a higher --request-rate"
        return _Verdict(cause.LOAD, "the load: few requests at once", help_)
    if waiting:
        more = {"max_num_batched_tokens": str(2 * settings.max_num_batched_tokens)}
        why = "scheduling: requests wait while the hardware has room"
        return _Verdict(cause.SCHEDULING, why, "raise max_num_batched_tokens", more)
    why = "overheads outside the model (scheduler, tokenizer, streaming)"
    more = {"api_servers": str(max(4, 2 * settings.api_servers))}
    return _Verdict(cause.OVERHEADS, why, "more API server processes, or replicas", more)


def roof(
    plan: Plan,
    concurrency: float,
    input_len: float,
    output_len: float,
    api_servers: int | None = None,
    rates: Efficiency | None = None,
) -> float | None:
    """Output tokens per second that the plan predicts for a load, with its own API servers or so many."""
    n, before, after = max(1, round(concurrency)), max(1, round(input_len)), max(1, round(output_len))
    return speed_at(plan, before, after, n, api_servers, rates).throughput_tokens_per_s
