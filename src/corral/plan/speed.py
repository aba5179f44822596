"""How fast: a roofline with efficiencies that were measured, and a word about which were not.

One decode step reads the weights once and the KV cache of every running request; below that floor no step goes.
On top come a cost per layer (small kernels, measured), two all-reduces per layer when TP > 1, and the stages of a
pipeline one after another. Prefill is arithmetic: two operations per active parameter and token, and attention.
Throughput is what a closed loop of `concurrency` requests gives: their prefills and decode steps in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from corral.plan.contract import EngineSettings, Goal, Memory, Parallel, Precision, Speed
from corral.plan.hardware.inventory import LINKS, Gpu, Inventory
from corral.plan.memory import convert, kv_element
from corral.plan.models.facts import ModelFacts
from corral.plan.models.quantisation import DTYPE_BYTES
from corral.plan.settings import covered, streamed_tokens_s

MEASURED_KINDS = ("H200",)  # kinds whose predictions rest on measurements; docs/measurements/planning.md has them
READS_ONLY = "unknown: it reads texts and writes none"
MEASURED_FAMILIES = ("llama",)
TILE_TOKENS = 128  # rows that a matrix product of many tokens is cut into
FP8_TILE_TOKENS = 256  # vLLM's FP8 kernel of Hopper pairs such tiles: 513 tokens of 70B take as long as 768


@dataclass(frozen=True)
class Efficiency:
    """What of the vendors' rates is reached, and the costs they do not mention; sources in
    docs/measurements/planning.md.
    """

    bandwidth: float = 0.905  # of HBM while decoding: 8B and 405B shapes in bf16
    matrix: float = 0.68  # of the dense rate while prefilling, bf16
    matrix_fp8: float = 0.57
    matrix_experts: float = 0.28  # of the experts' grouped products: sums of measured operators, not whole steps
    layer_s: float = 34e-6  # small kernels of one layer, CUDA graphs on
    fp8_layer_s: float = 12e-6  # quantising activations, more of the same
    latent_layer_s: float = (
        120e-6  # latent attention in fp8, from sums of measured operators; in bf16 nothing was seen
    )
    experts_layer_s: float = 10e-6  # routing and sorting for the experts
    step_s: float = 0.3e-3  # scheduling and sampling that no kernel hides, one step
    sequence_s: float = 14e-6  # per running request and step
    hidden_sequences: int = 256  # beyond so many, products hide it: 1,000 of an 8B model ran in 29 ms
    floor_s: float = 2.3e-3  # no step is shorter: the engine's own loop, seen with a 1B model
    floor_sequence_s: float = 22e-6
    frontend_s: float = 13.5e-3  # HTTP, scheduling and streaming before a first token
    frontend_tokens_s: float = 12_000.0  # tokens one API server process streams: 10,500 to 16,000 seen
    frontend_chunk_s: float = 20e-6  # of the 83 µs that a token costs there: one process with 4 a chunk gave 14,592
    eager_layer_s: float = 0.52e-3  # per layer when kernels are launched one by one; depends on the host's cores
    eager_sequence_s: float = 28e-6
    reduce_s: float = 12e-6  # one small all-reduce inside a node over NVLink
    reduce_pcie_s: float = 30e-6
    reduce_bandwidth: float = 0.7  # of the link, for large all-reduces
    hop_s: float = 60e-6  # one pipeline hop
    startup_s: float = 60.0  # compile, profile, capture
    storage_gb_s: float = 2.0
    storage_basis: str = "assumed: a local NVMe disk"


def significant(value: float, digits: int = 3) -> float:
    """Rounded to the digits that a prediction can claim."""
    return float(f"{value:.{digits}g}")


def rounded(value: float, digits: int = 3) -> str:
    """A rounded number as people write it: never with an exponent."""
    found = significant(value, digits)
    return f"{found:,.0f}" if abs(found) >= 1000 else f"{found:g}"


def tiled(tokens: float, tile: int) -> float:
    """Tokens as a matrix product counts them: whole tiles."""
    return math.ceil(tokens / tile) * tile


@dataclass(frozen=True)
class _Machine:
    """The rates of one GPU in bytes/s and operations/s, and the costs of its links."""

    bandwidth: float
    flops: float
    reduce_s: float
    reduce_bytes_s: float
    hop_s: float


def _machine(
    gpu: Gpu, inventory: Inventory, parallel: Parallel, precision: Precision, e: Efficiency, together: int
) -> _Machine:
    """Rates where so many ranks wait for one another in every layer."""
    narrow = precision.weights == "fp8" and gpu.fp8_tflops > 0
    rate = gpu.fp8_tflops * e.matrix_fp8 if narrow else gpu.bf16_tflops * e.matrix
    reduce_s = e.reduce_s if gpu.nvlink else e.reduce_pcie_s
    link = gpu.link_gb_s
    hop = e.hop_s
    if together > inventory.joined:  # they are on several nodes
        between = LINKS[inventory.link]
        reduce_s += 3 * between.latency_s
        # NCCL's rings use every adapter of a node: 85 to 96 of 100 GB/s were seen with four of HDR (nccl-tests 119)
        link = min(link, between.gb_s_per_gpu * inventory.gpus_per_node)
    if parallel.replica_gpus > inventory.gpus_per_node:
        hop += LINKS[inventory.link].latency_s
    return _Machine(
        gpu.bandwidth_gb_s * 1e9 * e.bandwidth, rate * 1e12, reduce_s, link * 1e9 * e.reduce_bandwidth, hop
    )


def roof_of(
    model: ModelFacts,
    inventory: Inventory,
    parallel: Parallel,
    precision: Precision,
    settings: EngineSettings,
    e: Efficiency,
) -> Roof:
    """The roofline of one configuration; the kind of GPU must be known."""
    kind = inventory.kind
    assert kind is not None
    engine = model.experts > 0 and parallel.data > 1  # its replicas lie on as many nodes as they fill
    together = parallel.replica_gpus * parallel.data if engine else parallel.tensor
    machine = _machine(kind, inventory, parallel, precision, e, together)
    return Roof(model, parallel, precision, settings, kind, machine, e)


def predict(
    model: ModelFacts,
    inventory: Inventory,
    parallel: Parallel,
    precision: Precision,
    settings: EngineSettings,
    memory: Memory,
    goal: Goal,
    concurrency: int,
    efficiency: Efficiency | None = None,
) -> Speed:
    """Speeds of one plan; all None but the load time when nothing is known of the GPU."""
    e = efficiency or Efficiency()
    gpu = inventory.kind
    storage = goal.storage_gb_s or e.storage_gb_s
    basis = "as --storage says" if goal.storage_gb_s else e.storage_basis
    read = _read_by_one_node(memory, inventory, parallel)
    load_s = significant(read / (storage * 1e9) + e.startup_s)
    if gpu is None or not model.writes:
        unknown = (None,) * 5
        lengths = (goal.prompt_tokens, goal.output_tokens)
        why = "unknown" if model.writes else READS_ONLY
        return Speed(*unknown, load_s, concurrency, *lengths, why, storage, basis, read)
    roof = roof_of(model, inventory, parallel, precision, settings, e)
    running = max(1, min(-(-concurrency // parallel.data), settings.max_num_seqs))
    length = goal.prompt_tokens + goal.output_tokens / 2
    capacity = memory.kv_cache_tokens_per_replica / (goal.prompt_tokens + goal.output_tokens)
    running = max(1, min(running, int(capacity)))
    alone = roof.step(1, length)
    step = roof.step(running, length)
    prefill = roof.prefill_rate(goal.prompt_tokens)
    waiting = e.frontend_s * (1 + running / 32)  # requests that arrive together wait for each other
    cycle = running * goal.prompt_tokens / prefill + goal.output_tokens * step + waiting
    front = (settings.api_servers, parallel.data, e.frontend_tokens_s)
    streamed = streamed_tokens_s(*front, settings.stream_interval, e.frontend_chunk_s)
    cycle = max(cycle, running * goal.output_tokens / streamed)
    return Speed(
        decode_tokens_per_s=significant(1 / alone),
        prefill_tokens_per_s=significant(prefill),
        throughput_tokens_per_s=significant(parallel.data * running * goal.output_tokens / cycle),
        ttft_s=significant(roof.chunk(goal.prompt_tokens, goal.prompt_tokens) + e.frontend_s),
        tpot_s=significant(cycle / goal.output_tokens),
        load_s=load_s,
        concurrency=min(concurrency, running * parallel.data),
        prompt_tokens=goal.prompt_tokens,
        output_tokens=goal.output_tokens,
        basis=_basis(model, gpu, parallel, precision),
        storage_gb_s=storage,
        storage_basis=basis,
        read_bytes_per_node=read,
    )


def _basis(model: ModelFacts, gpu: Gpu, parallel: Parallel, precision: Precision) -> str:
    """What a prediction rests on: measured is only what was run, on that hardware and with that kind of model."""
    here = gpu.kind in MEASURED_KINDS and parallel.replica_gpus == 1 and precision.compute != "fp32"
    if model.family not in MEASURED_FAMILIES:
        place = "" if here else ", not measured on this hardware"
        return f"scaled from Llama on an H200, not measured with such models{place}"
    return "measured" if here else "scaled from an H200, not measured on this hardware"


def _read_by_one_node(memory: Memory, inventory: Inventory, parallel: Parallel) -> int:
    """Bytes that a node reads before it can serve: its stages, once for all ranks and replicas on it."""
    nodes = -(-parallel.replica_gpus // inventory.gpus_per_node)
    return memory.weights_bytes // min(parallel.pipeline, nodes)


@dataclass(frozen=True)
class Roof:
    """How long steps and prefills take, one configuration."""

    model: ModelFacts
    parallel: Parallel
    precision: Precision
    settings: EngineSettings
    gpu: Gpu
    machine: _Machine
    e: Efficiency

    def _stage_bytes(self, batch: float) -> list[float]:
        """Weight bytes one GPU of each stage reads in a step of `batch` sequences."""
        model, tp = self.model, self.parallel.tensor
        parts = convert(model, self.precision)
        experts = parts.experts * self._touched(batch * self.parallel.data) / self.parallel.data
        divided = (parts.query_output + (parts.mlp + parts.mixer + experts) + parts.key_value) / tp
        per_layer = (divided + parts.copied) / model.layers
        read = [per_layer * n for n in self.parallel.layers_by_stage(model.layers)]
        read[-1] += (parts.embedding if model.tied_embeddings else parts.head) / tp
        return read

    def _layer_s(self) -> float:
        more = self.e.experts_layer_s if self.model.experts else 0.0
        if self.precision.weights == "fp8":
            more += self.e.fp8_layer_s + (self.e.latent_layer_s if self.model.latent else 0.0)
        return self.e.layer_s + more

    def _touched(self, batch: float) -> float:
        """Share of the experts that a batch needs."""
        if not self.model.experts:
            return 1.0
        return 1 - float((1 - self.model.experts_per_token / self.model.experts) ** batch)

    def _matrices(self) -> float:
        """Active parameters that multiply: all but the embedding table."""
        return self.model.active_parameters - (0 if self.model.tied_embeddings else self.model.counted.embedding)

    def _active_experts(self) -> float:
        """Parameters of the routed experts that one token passes through."""
        share = self.model.experts_per_token / self.model.experts if self.model.experts else 0.0
        return self.model.counted.experts * share

    def _reduce(self, tokens: float) -> float:
        """Two all-reduces of one layer; of a mixture of experts the second is over all ranks of the engine."""
        p, size = self.parallel, tokens * self.model.hidden * DTYPE_BYTES[self.precision.compute or self.model.dtype]
        if not self.model.experts or p.data == 1:
            return 2 * self._all_reduce(p.tensor, size)
        return self._all_reduce(p.tensor, size) + self._all_reduce(p.expert_ranks, size * p.data)

    def _all_reduce(self, ranks: int, size: float) -> float:
        if ranks == 1:
            return 0.0
        return self.machine.reduce_s + 2 * size * (ranks - 1) / ranks / self.machine.reduce_bytes_s

    def step(self, running: float, length: float, drafted: int = 0) -> float:
        """Seconds of one step with `running` requests of `length` tokens, so many drafted tokens of each checked."""
        m, model, p = self.machine, self.model, self.parallel
        batch = max(1.0, running / p.pipeline)
        kv = batch * self._kept_bytes_per_layer(length)
        total = self.e.step_s + self.sequences_s(running) + (p.pipeline - 1) * m.hop_s
        for layers, read in zip(p.layers_by_stage(model.layers), self._stage_bytes(batch), strict=True):
            moving = (read + kv * layers) / m.bandwidth
            adding = batch * (1 + drafted) * 2 * self._matrices() * layers / model.layers / p.tensor / m.flops
            busy = max(moving, adding) + layers * (self._layer_s() + self._reduce(batch))
            total += max(busy, layers * self.e.eager_layer_s) if self.settings.eager else busy
        if not covered(self.settings, self.gpu, batch, drafted):
            total = max(total, self.launch_s(running))
        return max(total, self.e.floor_s + self.e.floor_sequence_s * running)

    def sequences_s(self, running: float) -> float:
        """Seconds of a step that its sequences cost, each for itself."""
        if self.settings.eager:
            return self.e.eager_sequence_s * running
        return self.e.sequence_s * min(running, self.e.hidden_sequences)

    @property
    def tile_tokens(self) -> int:
        """Tokens that matrix products take together: a few more cost as much as this many."""
        return FP8_TILE_TOKENS if self.precision.weights == "fp8" else TILE_TOKENS

    def launch_s(self, running: float) -> float:
        """Seconds that a step takes at least whose kernels are launched one by one."""
        return self.model.layers * self.e.eager_layer_s + self.e.eager_sequence_s * running

    def waits_for_launches(self, tokens: int, running: int) -> bool:
        """Whether a step of so many tokens, most of prompts, is computed sooner than its kernels are launched."""
        computed = self.chunk(tokens, tokens) + self.e.step_s + self.sequences_s(running)
        return computed < self.launch_s(running)

    def named_draft_s(self, weights_bytes: int, layers: int) -> float:
        """Seconds that a draft of so many bytes and layers takes for one token."""
        return weights_bytes / self.parallel.tensor / self.machine.bandwidth + layers * self._layer_s()

    def draft_s(self) -> float:
        """Seconds that a draft of one layer and the model's own head takes for one token."""
        parts = convert(self.model, self.precision)
        layer = (parts.query_output + parts.key_value + parts.mlp) / self.model.layers
        return (layer + self.head_bytes()) / self.parallel.tensor / self.machine.bandwidth + self._layer_s()

    def head_bytes(self) -> int:
        """Of the model's own head, as loaded."""
        parts = convert(self.model, self.precision)
        return parts.embedding if self.model.tied_embeddings else parts.head

    def _attended(self, length: float) -> float:
        """Tokens that an average layer compares each token with."""
        model = self.model
        tokens = [one for one in model.caches if one.width and one.kind != "index"]
        if not any(one.window for one in tokens) and sum(one.layers for one in tokens) == model.layers:
            return length
        return sum(one.layers * min(length, one.window or length) for one in tokens) / model.layers

    def _kept_bytes_per_layer(self, length: float) -> float:
        """Bytes that an average layer reads of what it keeps of a sequence; a state is written again too."""
        element, tp = kv_element(self.model, self.precision), self.parallel.tensor
        read = 0.0
        for one in self.model.caches:
            read += (
                one.layers * min(length, one.window or length) * one.token_bytes(element, tp) if one.width else 0.0
            )
            read += 2 * one.layers * one.state_bytes / tp
        return read / self.model.layers

    def chunk(self, tokens: float, length: float) -> float:
        """Seconds to prefill `tokens` of prompts `length` long in one pass through all stages."""
        m, model, p = self.machine, self.model, self.parallel
        attention = tokens * 2 * model.heads * model.head_dim * self._attended(length) * model.layers
        rows = tiled(tokens, self.tile_tokens)
        slower = self.e.matrix / self.e.matrix_experts - 1  # how much longer the experts' products take
        products = self._matrices() + slower * self._active_experts()
        work = (rows * 2 * products + attention) / p.tensor / m.flops
        floor = sum(self._stage_bytes(tokens)) / m.bandwidth
        layers = model.layers * (self._layer_s() + self._reduce(tokens))
        return max(work, floor) + layers + (p.pipeline - 1) * m.hop_s

    def prefill_rate(self, length: float) -> float:
        """Prompt tokens per second of one replica with full batches, all stages busy."""
        tokens = self.settings.max_num_batched_tokens
        return tokens * self.parallel.pipeline / (self.chunk(tokens, length) + self.e.step_s)
