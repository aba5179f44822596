"""One way to run a model, worked out: the memory it leaves, the context it holds, how fast it is.

The splits of a model are those that the inventory can hold (TP inside a node or over whole nodes, PP, replicas with
what is left) and that vLLM accepts. What vLLM refuses was read in vLLM 0.32.0: heads % TP
(`ModelConfig.verify_with_parallel_config`), KV heads (`QKVParallelLinear`), widths (`ColumnParallelLinear`,
`divide`), vocabulary (`VocabParallelEmbedding`, padded to 64), layers ≥ PP (`get_pp_indices`), batch limits
(`SchedulerConfig.verify_max_model_len`), quantised groups (AWQ/GPTQ linear methods), types by compute capability
(`check_if_supports_dtype`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from corral.plan.contract import UTILISATION, EngineSettings, Goal, Memory, Parallel, Precision, Rejected, Speed
from corral.plan.draft import Draft
from corral.plan.hardware.inventory import GIB, Inventory
from corral.plan.lora import AdapterFolder, broken_adapters, with_adapters
from corral.plan.memory import Coefficients, measure
from corral.plan.models.architecture import Divided
from corral.plan.models.facts import ModelFacts
from corral.plan.settings import Fixed, api_servers, own_largest, running_at_once, size_for, stream_interval
from corral.plan.speed import Efficiency, Roof, predict, roof_of

if TYPE_CHECKING:
    from corral.plan.hardware.cpu import CpuSpeed

_VOCAB_PADDING = 64
_GROUP = {"int4": 128}  # weights that share one scale must stay on one rank

_Rule = tuple[Callable[[ModelFacts, Parallel], bool], Callable[[ModelFacts, Parallel], str]]

_RULES: tuple[_Rule, ...] = (
    (
        lambda m, p: m.heads % p.tensor == 0,
        lambda m, p: f"TP{p.tensor} does not divide the {m.heads} attention heads",
    ),
    (
        lambda m, p: all(_divides_kv(heads, p.tensor) for heads in _kv_heads(m)),
        lambda m, p: f"TP{p.tensor} neither divides nor is a multiple of the {_kv_heads(m)[0]} KV heads",
    ),
    (
        lambda m, p: -(-m.vocab // _VOCAB_PADDING) * _VOCAB_PADDING % p.tensor == 0,
        lambda m, p: f"TP{p.tensor} does not divide the padded vocabulary of {m.vocab}",
    ),
    (
        lambda m, p: p.pipeline <= m.layers,
        lambda m, p: f"PP{p.pipeline} has more stages than the model has layers ({m.layers})",
    ),
    (
        lambda m, p: not p.expert or m.experts > 0,
        lambda m, _: f"expert=true is for mixtures of experts, and {m.name} has none",
    ),
)


def _kv_heads(model: ModelFacts) -> list[int]:
    """KV heads of each kind of attention; a latent has none that ranks would share."""
    return (
        [one.heads for one in model.caches if one.kind in ("full", "sliding", "chunked")] if not model.latent else []
    )


def _divides_kv(heads: int, tensor: int) -> bool:
    return heads % tensor == 0 if heads >= tensor else tensor % heads == 0


def broken_layout(model: ModelFacts, parallel: Parallel) -> str | None:
    """Why vLLM would refuse this split of this model, or None."""
    rules = (say(model, parallel) for holds, say in _RULES if not holds(model, parallel))
    return next(rules, None) or next(filter(None, (_cut(model, parallel, one) for one in model.divided)), None)


def _cut(model: ModelFacts, parallel: Parallel, one: Divided) -> str | None:
    """Why this number cannot be divided over the ranks that share it; experts may stay whole instead."""
    if one.role == "expert" and parallel.expert:
        return None
    ranks, over = (parallel.expert_ranks if one.role == "expert" else parallel.tensor), f"TP{parallel.tensor}"
    if one.role == "expert" and parallel.data > 1:
        over += f" × DP{parallel.data}"
    whole = "; --set expert=true keeps experts whole" if one.role == "expert" else ""
    if one.size % ranks:
        number = f"{one.what} {one.size}" if one.role == "width" else f"{one.size} {one.what}"
        number = f"{one.what}, {one.size}" if one.role == "expert" else number
        return f"{over} does not divide the {number}{whole}"
    block = model.block or _GROUP.get(model.weights, 1)
    left = one.size // ranks
    if one.role == "heads" or left % block == 0:
        return None
    if not model.block:
        return f"{over} would cut a group of {block} {model.weights} weights in two{whole}"
    return (
        f"{over} leaves {left} of the {one.what}, {one.size}, on each rank, which is no multiple of the"
        f" {model.weights.upper()} block of {block}{whole}"
    )


def broken_settings(model: ModelFacts, settings: EngineSettings, max_model_len: int) -> str | None:
    """Why vLLM would refuse these settings, or None."""
    s = settings
    if s.max_num_batched_tokens < s.max_num_seqs:
        return f"max_num_batched_tokens {s.max_num_batched_tokens} is below max_num_seqs {s.max_num_seqs}"
    if max_model_len > model.max_context:
        return f"a context of {max_model_len:,} is beyond the model's {model.max_context:,}"
    if not 0 < s.gpu_memory_utilization <= 1:
        return f"gpu_memory_utilization {s.gpu_memory_utilization} is not above 0 and at most 1"
    return None


def replicas_on(inventory: Inventory, tensor: int, pipeline: int) -> int:
    """How many replicas of TP × PP the inventory holds; 0 when not one can be placed.

    A replica stays inside one node, or takes whole nodes; its tensor ranks leave a node only by whole nodes too.
    """
    inside, size = inventory.gpus_per_node, tensor * pipeline
    if size <= inside:
        return inside // size * inventory.nodes
    if size % inside or (tensor < inside and inside % tensor) or (tensor > inside and tensor % inside):
        return 0
    return inventory.nodes // (size // inside)


def over_nodes(parallel: Parallel, inventory: Inventory) -> bool:
    """Whether the tensor ranks of one stage sit on several nodes that NVLink does not join."""
    return parallel.tensor > inventory.joined


def layouts(model: ModelFacts, inventory: Inventory, fixed: Fixed) -> Iterator[Parallel]:
    """Splits that vLLM accepts and the inventory can hold, with as many replicas as fit, or as many as were fixed.

    Experts stay whole on data-parallel ranks, as vLLM's recipes deploy them, where they were asked to, and where
    their width cannot be divided. vLLM accepts stages of data-parallel ranks of a mixture of experts too, but all
    ranks step together in each stage and no recipe deploys that: such splits are made only where one is set.
    """
    inside = inventory.gpus_per_node
    tensors = (
        [fixed.tensor] if fixed.tensor else [*range(1, inside + 1), *range(2 * inside, inventory.gpus + 1, inside)]
    )
    for tensor in tensors:
        stages = [fixed.pipeline] if fixed.pipeline else range(1, max(1, inventory.gpus // tensor) + 1)
        for pipeline in stages:
            replicas = replicas_on(inventory, tensor, pipeline)
            wanted = fixed.data or (min(replicas, 1) if model.experts and pipeline > 1 else replicas)
            if 1 <= wanted <= replicas:
                ways = [fixed.expert] if fixed.expert is not None else [wanted > 1, wanted == 1]
                ways = ways if model.experts else [bool(fixed.expert)]
                split = (Parallel(tensor, pipeline, wanted, expert) for expert in ways)
                yield from islice((one for one in split if broken_layout(model, one) is None), 1)


def refused_tensor(model: ModelFacts, inventory: Inventory) -> list[Rejected]:
    """The tensor sizes up to one node that vLLM would refuse, and why."""
    reasons: dict[str, list[int]] = {}
    for tensor in range(2, inventory.gpus_per_node + 1):
        why = broken_layout(model, Parallel(tensor))
        if why:
            reasons.setdefault(_of_any(why, tensor), []).append(tensor)
    return [Rejected(", ".join(f"TP{size}" for size in sizes), why) for why, sizes in reasons.items()]


def _of_any(why: str, tensor: int) -> str:
    """The reason without its subject, as it is said of one size or of several."""
    words = why.removeprefix(f"TP{tensor} ").replace("does not divide", "no divisor of")
    return words.replace("neither divides nor is a multiple of", "neither a divisor nor a multiple of")


_SATURATING = 256  # requests per GPU that show what a layout can carry, when no concurrency is asked
MOST_SEQS = 4096  # on large GPUs, where so many requests at once are asked for
SHORTEST = 2048  # a context below this is not worth starting for, unless it is all the model has
_BATCHED = {"latency": 2048, "balanced": 8192, "throughput": 16384}
_GRAPHS_MAY_TAKE = 0.03  # of the KV cache: larger ones pay in time, not where memory is what lacks


@dataclass(frozen=True)
class Tuning:
    """Measured numbers a plan rests on: the built-in ones, or those learned from deployments."""

    memory: Coefficients = field(default_factory=Coefficients)
    speed: Efficiency = field(default_factory=Efficiency)
    source: str = "built in"
    draft: Draft | None = None  # of speculative decoding, where one is named
    ngram: int = 0  # tokens that are drafted from the text itself, where vLLM's arguments ask for that
    own_graphs: bool = False  # vLLM's CUDA graphs stay as its arguments have them
    adapters: AdapterFolder | None = None  # that the deployment begins with
    cpu: CpuSpeed | None = None  # how quick this machine's CPU multiplies, where that was measured


@dataclass(frozen=True)
class Candidate:
    """A worked-out configuration; `problem` says why it cannot run, or is empty.

    `broken` tells a rule that no hardware mends (heads that TP does not divide, a context beyond the model's) from
    a lack of memory or GPUs.
    """

    parallel: Parallel
    precision: Precision
    settings: EngineSettings
    max_model_len: int
    memory: Memory
    speed: Speed
    problem: str = ""
    broken: bool = False

    def score(self, goal: str) -> float:
        """Larger is better for the goal: decode speed of one stream against tokens per second in all."""
        alone, together = self.speed.decode_tokens_per_s or 1.0, self.speed.throughput_tokens_per_s or 1.0
        weight = {"latency": 0.9, "balanced": 0.3, "throughput": 0.0}[goal]
        return float(alone**weight * together ** (1 - weight))


def is_large(inventory: Inventory) -> bool:
    """Whether vLLM takes large batches on such GPUs by itself; an A100 is slower with them (vllm PR 17885)."""
    return inventory.memory_bytes_per_gpu >= 70 * GIB and not (inventory.gpu or "").startswith("A100")


def settings_for(inventory: Inventory, goal: Goal, fixed: Fixed, context: int) -> EngineSettings:
    """vLLM's settings for the goal, starting from its own defaults for this memory size."""
    large = is_large(inventory)
    batched = _BATCHED[goal.goal] if large else 2048
    seqs = 1024 if large and goal.goal != "latency" else 256
    if goal.concurrency:
        most = MOST_SEQS if large and goal.goal != "latency" else seqs
        seqs = max(16, min(most, 1 << (goal.concurrency - 1).bit_length()))
        if large and goal.goal == "balanced" and _tokens_of_a_step(goal, seqs) > batched:
            batched = _BATCHED["throughput"]
    seqs = fixed.max_num_seqs or min(seqs, batched)
    batched = fixed.max_num_batched_tokens or max(seqs, min(batched, seqs * context))
    return EngineSettings(
        fixed.gpu_memory_utilization or UTILISATION,
        batched,
        seqs,
        bool(fixed.eager),
        stream_interval=fixed.stream_interval or 1,
        max_graph_size=fixed.max_graph_size,
        async_scheduling=fixed.async_scheduling is not False,
    )


def _tokens_of_a_step(goal: Goal, running: int) -> float:
    """Tokens of a step in which as many prompts begin as answers end."""
    return running * (1 + goal.prompt_tokens / goal.output_tokens)


def work_out(
    model: ModelFacts,
    inventory: Inventory,
    parallel: Parallel,
    precision: Precision,
    goal: Goal,
    fixed: Fixed,
    tuning: Tuning,
) -> Candidate:
    """Memory, context and speed of one configuration."""
    asked = fixed.max_model_len or goal.context
    context = asked or model.max_context

    def measured(settings: EngineSettings) -> Memory:
        return measure(model, inventory, parallel, precision, settings, context, tuning.memory, tuning.draft)

    settings = with_adapters(settings_for(inventory, goal, fixed, context), fixed, tuning.adapters)
    if inventory.kind is not None:
        roof = roof_of(model, inventory, parallel, precision, settings, tuning.speed)
        settings = _captured(roof, goal, tuning, measured, asked or min(SHORTEST, model.max_context))
    memory = measured(settings)
    problem = broken_settings(model, settings, context) or broken_adapters(fixed, tuning.adapters, model.vocab)
    broken = bool(problem)
    room = memory.kv_cache_tokens_per_replica - settings.block_size  # vLLM keeps one block back
    if not problem and model.encoder:
        problem = "" if memory.kv_cache_bytes_per_gpu else _no_room(memory, context)
    elif not problem and room < context:
        if asked or room < min(SHORTEST, model.max_context):
            problem = _no_room(memory, context if asked else min(SHORTEST, model.max_context))
        else:
            context = room // 256 * 256
            memory = measured(settings)
    concurrency = goal.concurrency or _SATURATING * parallel.data * parallel.replica_gpus

    def at(rates: Efficiency) -> Speed:
        return predict(model, inventory, parallel, precision, settings, memory, goal, concurrency, rates)

    unbound = at(replace(tuning.speed, frontend_tokens_s=math.inf)).throughput_tokens_per_s
    processes = 1 if tuning.adapters else fixed.api_servers or api_servers(inventory, parallel, unbound)
    interval = fixed.stream_interval or stream_interval(goal.goal, unbound and unbound / parallel.data)
    settings = replace(settings, api_servers=processes, stream_interval=interval)
    return Candidate(parallel, precision, settings, context, memory, at(tuning.speed), problem, broken)


def _captured(
    roof: Roof, goal: Goal, tuning: Tuning, measured: Callable[[EngineSettings], Memory], context: int
) -> EngineSettings:
    """The settings, with CUDA graphs for steps beyond vLLM's own where the GPU would wait for their launches.

    Not where they would take the room for the `context` that is needed.
    """
    settings = roof.settings
    kept = settings.eager or settings.max_graph_size or tuning.own_graphs or not tuning.memory.sizes_graphs
    size = 0 if kept else size_for(settings, roof.gpu, goal, roof.parallel.data)
    own = own_largest(settings, roof.gpu)
    running = min(running_at_once(settings, goal, roof.parallel.data), own)
    if not size or not roof.waits_for_launches(own + roof.tile_tokens, running):
        return settings
    larger = replace(settings, max_graph_size=size)
    before, after = measured(settings), measured(larger)
    cheap = after.kv_cache_tokens >= (1 - _GRAPHS_MAY_TAKE) * before.kv_cache_tokens > 0
    return larger if cheap and context <= after.kv_cache_tokens_per_replica - settings.block_size else settings


def _no_room(memory: Memory, context: int) -> str:
    used = (
        memory.weights_bytes_per_gpu
        + memory.draft_bytes_per_gpu
        + memory.adapter_bytes_per_gpu
        + memory.activation_bytes_per_gpu
        + memory.counted_graph_bytes
        + memory.overhead_bytes_per_gpu
    )
    budget = memory.budget_bytes_per_gpu
    if used >= budget:
        return (
            f"each GPU would need {used / GIB:.1f} GiB before any KV cache"
            f" ({memory.weights_bytes_per_gpu / GIB:.1f} of weights) and may use {budget / GIB:.1f}"
        )
    left = memory.kv_cache_tokens_per_replica
    return f"the KV cache would hold {left:,} tokens, fewer than a context of {context:,}"


def with_problem(candidate: Candidate, problem: str, broken: bool = True) -> Candidate:
    """The same candidate, refused."""
    return replace(candidate, problem=problem, broken=broken)
