"""Memory of one GPU, as vLLM accounts it, and what that leaves for the KV cache.

vLLM profiles: `available KV = utilisation × total − consumed − transient peak − CUDA graphs`, where *consumed* is
weights plus what torch does not manage, and the peak is one forward pass of `max_num_batched_tokens` or one sampling
pass of `max_num_seqs`, whichever is larger. The same sum is made here from the model's shape. Blocks are then cut
from what is left; all pipeline stages get as many blocks as the poorest. A draft of speculative decoding lies on the
last stage: its weights, and its layers in every block (see `plan.draft`).

Of a mixture of experts, data-parallel ranks of one engine hold each expert once between them. What blocks the cache
is cut into says `plan.kv_pool`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from corral.engines import PINNED_VERSION
from corral.plan.contract import EngineSettings, Memory, Parallel, Precision
from corral.plan.draft import Draft
from corral.plan.hardware.inventory import GIB, Gpu, Inventory
from corral.plan.kv_pool import pool_of
from corral.plan.lora import adapter_bytes
from corral.plan.models.architecture import converted
from corral.plan.models.facts import ModelFacts
from corral.plan.models.layers import Parts
from corral.plan.models.quantisation import DTYPE_BYTES
from corral.plan.settings import MEASURED_BY_ITSELF, graph_sizes


@dataclass(frozen=True)
class Coefficients:
    """What cannot be derived, only measured; docs/measurements/planning.md says where each was."""

    non_torch_gib: float = 0.22  # H200, one GPU
    nccl_gib: float = 1.1  # per GPU when a group of GPUs talks; not yet measured
    hidden_copies: float = 3.0  # tensors of tokens × hidden alive at the peak of the MLP
    forward_gib: float = 0.09  # work space of a pass, whatever its size
    graph_hidden_copies: float = 2.74  # tensors of size × hidden that each captured graph keeps
    graph_large_copies: float = 0.4  # the same of sizes beyond vLLM's own; one 8B shape
    graph_batch_copies: float = 2.84  # the same of max_num_batched_tokens × hidden
    graph_layer_gib: float = 0.0079  # per layer, 51 sizes captured whole and in pieces
    graph_latent_splits: int = (
        64  # latents' partial results of the largest graph, in fp32; vLLM's 32 twice; one shape
    )
    correction_gib: float = 0.0  # learned from deployments (corral.plan.measured)
    counts_graphs: bool = True  # whether vLLM takes CUDA graphs out of the KV cache
    sizes_graphs: bool = True  # whether it can be told how large they are to be

    @classmethod
    def of_version(cls, version: str) -> Coefficients:
        """The built-in numbers for a version of vLLM; an empty one is the version that Corral installs."""
        release = _release(version or PINNED_VERSION)
        return cls(counts_graphs=release >= COUNT_GRAPHS, sizes_graphs=release >= SIZE_GRAPHS)


COUNT_GRAPHS = (0, 30)  # the first version seen to; 0.26 with its second model runner leaves them out
SIZE_GRAPHS = (0, 12)  # `--max-cudagraph-capture-size` came late in 2025


def _release(version: str) -> tuple[int, ...]:
    """`0.26.1+cu130` as (0, 26); what cannot be read is taken for new."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else COUNT_GRAPHS


def convert(model: ModelFacts, precision: Precision) -> Parts:
    """Bytes of the model's parts when loaded in the plan's precision."""
    if precision.weights == model.weights:
        return model.stored
    wide = precision.weights if precision.weights in ("bf16", "fp16", "fp32") else model.dtype
    group = 128 if precision.weights == "int4" else 0
    return converted(model.counted, precision.weights, DTYPE_BYTES[wide], group)


def stage_weights(model: ModelFacts, parts: Parts, parallel: Parallel) -> list[int]:
    """Weight bytes per GPU for each pipeline stage."""
    tp, sizes = parallel.tensor, parallel.layers_by_stage(model.layers)
    kv_share = 1 / min(tp, model.kv_heads)  # beyond that, KV projections are copied
    divided = (parts.query_output + parts.mlp + parts.mixer) / tp + parts.experts / parallel.expert_ranks
    per_layer = (divided + parts.key_value * kv_share + parts.small + parts.copied) / model.layers
    weights = [round(per_layer * layers) for layers in sizes]
    weights[0] += parts.embedding // tp + parts.tower  # a tower may be divided or not: the larger share is planned
    if parallel.pipeline > 1 and model.tied_embeddings:
        weights[-1] += parts.embedding // tp  # the last stage needs its own copy as the head
    weights[-1] += parts.head // tp
    return weights


def _wide(model: ModelFacts, precision: Precision) -> float:
    """Bytes of one number of what is computed: activations, and keys and values unless they are narrower."""
    return DTYPE_BYTES[precision.compute or model.dtype]


def kv_element(model: ModelFacts, precision: Precision) -> float:
    """Bytes of one number in the KV cache."""
    return 1.0 if precision.kv.startswith("fp8") else _wide(model, precision)


LATENT_ROWS = 256  # the largest graph whose partial results were measured: not continued beyond
LATENT_TOKENS = 64 << 10  # of an earlier part of a prompt, expanded at once: vLLM's own limit


def _activation(
    model: ModelFacts,
    parallel: Parallel,
    wide: float,
    settings: EngineSettings,
    max_model_len: int,
    c: Coefficients,
) -> int:
    """The larger of two peaks, which fit the shapes measured on an H200 to 5% (docs/measurements/planning.md).

    In the MLP: gate, up and their product, and three hidden tensors. At the head, in compiled models: as much as the
    head itself, and two hidden tensors. With latent attention, the keys and values that latents are expanded to.
    """
    pages = settings.max_num_seqs * settings.block_size
    read = max(min(max(8 * max_model_len, 4 * pages), LATENT_TOKENS), pages)
    latents = read * max((one.expanded for one in model.caches), default=0) / parallel.tensor * wide
    tokens = settings.max_num_batched_tokens
    experts = max(1, model.experts_per_token)
    width = 3 * model.intermediate * experts / parallel.tensor
    forward = tokens * wide * (width + c.hidden_copies * model.hidden) + c.forward_gib * GIB
    head = wide * (model.vocab * model.hidden / parallel.tensor + 2 * tokens * model.hidden)
    return int(latents + (forward if settings.eager else max(forward, head)))


def _graphs(
    model: ModelFacts, gpu: Gpu | None, parallel: Parallel, wide: float, settings: EngineSettings, c: Coefficients
) -> int:
    """Memory CUDA graphs keep: fitted to 8B, 70B and 405B shapes on an H200 (docs/measurements/planning.md)."""
    sizes = graph_sizes(settings, gpu)
    layers = c.graph_layer_gib * GIB * model.layers / parallel.pipeline * len(sizes) / 102
    rows_kept = c.graph_hidden_copies * sum(n for n in sizes if n <= MEASURED_BY_ITSELF)
    rows_kept += c.graph_large_copies * sum(n for n in sizes if n > MEASURED_BY_ITSELF)
    rows_kept += c.graph_batch_copies * settings.max_num_batched_tokens
    latent = next((one.width for one in model.caches if one.expanded), 0)
    rows = min(max(sizes, default=0), LATENT_ROWS)
    splits = c.graph_latent_splits * rows * model.heads / parallel.tensor * latent * 4
    return int(layers + rows_kept * model.hidden * wide + splits)


def measure(
    model: ModelFacts,
    inventory: Inventory,
    parallel: Parallel,
    precision: Precision,
    settings: EngineSettings,
    max_model_len: int,
    coefficients: Coefficients | None = None,
    draft: Draft | None = None,
) -> Memory:
    """The memory of the fullest GPU and the KV capacity; the capacity is 0 when nothing is left."""
    c = coefficients or Coefficients()
    parts = convert(model, precision)
    weights = stage_weights(model, parts, parallel)
    graphs, wide = 0, _wide(model, precision)
    if not settings.eager and inventory.gpu is not None:
        graphs = _graphs(model, inventory.kind, parallel, wide, settings, c)
    talking = parallel.replica_gpus > 1 or (model.experts > 0 and parallel.data > 1)
    overhead = int((c.non_torch_gib + (c.nccl_gib if talking else 0)) * GIB)
    activation = _activation(model, parallel, wide, settings, max_model_len, c)
    activation += draft.pass_bytes(model, settings.max_num_batched_tokens, wide) if draft else 0
    drafting = [0] * (parallel.pipeline - 1) + [draft.bytes_per_gpu(parallel) if draft else 0]
    budget = int(settings.gpu_memory_utilization * inventory.memory_bytes_per_gpu)
    counted = graphs if c.counts_graphs else 0
    correction = int(c.correction_gib * GIB)
    held = [own + more for own, more in zip(weights, drafting, strict=True)]
    adapters = adapter_bytes(model, parallel, settings, wide)
    left = [budget - w - adapters - activation - counted - overhead - correction for w in held]

    element = kv_element(model, precision)
    pool = pool_of(model, settings, max_model_len, parallel, element, draft.kv_layers if draft else 0)
    drafted = draft.page_bytes(parallel.tensor, settings.block_size, element) if draft else 0
    stages = parallel.layers_by_stage(model.layers)
    shared = model.sliding_window or model.state_bytes  # a draft's layers are in the groups of the model's
    pages = [pool.block_bytes // pool.group * max(1, -(-pool.group * n // model.layers)) for n in stages]
    pages[-1] += 0 if shared else drafted
    blocks = max(0, min(space // max(1, size) for space, size in zip(left, pages, strict=True)))
    per_request = blocks / pool.needed if model.caches else 0.0
    tokens = int(per_request * max_model_len)
    fullest = max(range(len(held)), key=lambda i: held[i])
    block = settings.block_size
    all_layers = sum(one.layers * int(block * one.token_bytes(element, parallel.tensor)) for one in model.caches)
    tokens_bytes = [all_layers * layers // model.layers for layers in stages]
    tokens_bytes[-1] += drafted
    return Memory(
        weights_bytes=parts.total,
        nominal_weights_bytes=round(model.parameters * DTYPE_BYTES.get(precision.weights, 2.0)),
        weights_bytes_per_gpu=weights[fullest],
        kv_bytes_per_token=model.kv_bytes_per_token(element),
        kv_bytes_per_token_per_gpu=max(tokens_bytes) // settings.block_size,
        kv_cache_bytes_per_gpu=max(0, left[fullest]),
        kv_cache_tokens_per_replica=tokens,
        kv_cache_tokens=tokens * parallel.data,
        full_length_requests=round(per_request * parallel.data, 2),
        activation_bytes_per_gpu=activation,
        graph_bytes_per_gpu=graphs,
        overhead_bytes_per_gpu=overhead,
        budget_bytes_per_gpu=budget,
        correction_bytes_per_gpu=correction,
        graphs_counted=c.counts_graphs,
        draft_bytes_per_gpu=drafting[fullest],
        adapter_bytes_per_gpu=adapters,
    )
