"""What LoRA takes of a GPU, and how much of it a plan has: slots, rank, bytes.

vLLM 0.32 allocates for each of `max_loras` slots the matrices of every linear layer at `max_lora_rank`, whatever an
adapter adapts. Tensor ranks divide the outputs of a layer that is split by columns (B) and the inputs of one that is
split by rows (A), and hold the other matrix whole. The table of embeddings and the head have slots too
(`create_lora_weights` of each class in `vllm/lora/layers`). What adapters cost in speed is not predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from corral.engines.adapters import RANKS
from corral.plan.contract import EngineSettings, Parallel
from corral.plan.models.facts import ModelFacts
from corral.plan.settings import Fixed

MOST_SLOTS = 8  # that a plan takes by itself: each costs memory whether it is used or not
_USUAL_RANK = 16  # vLLM's default


@dataclass(frozen=True)
class AdapterFolder:
    """The adapters that a deployment begins with: how many there are, and the largest rank."""

    count: int
    rank: int


def with_adapters(settings: EngineSettings, fixed: Fixed, folder: AdapterFolder | None) -> EngineSettings:
    """The settings with slots for adapters, where there are to be any."""
    if not (fixed.lora or folder) or fixed.lora is False:
        return settings
    rank = next(one for one in RANKS if one >= (folder.rank if folder else _USUAL_RANK))
    slots = min(folder.count, MOST_SLOTS, settings.max_num_seqs) if folder else 1
    return replace(settings, lora=True, max_loras=fixed.max_loras or slots, max_lora_rank=fixed.max_lora_rank or rank)


def broken_adapters(fixed: Fixed, folder: AdapterFolder | None, vocab: int) -> str:
    """Why vLLM would refuse these settings of adapters."""
    if (fixed.max_loras or fixed.max_lora_rank) and not (fixed.lora or folder):
        return "max_loras and max_lora_rank need lora=true"
    if folder and fixed.lora is False:
        return "a folder of adapters and lora=false contradict each other"
    if fixed.max_lora_rank and fixed.max_lora_rank not in RANKS:
        return f"max_lora_rank {fixed.max_lora_rank} is not one of {', '.join(map(str, RANKS))}"
    if folder and fixed.max_lora_rank and fixed.max_lora_rank < folder.rank:
        return f"max_lora_rank {fixed.max_lora_rank} is below the rank {folder.rank} of an adapter"
    if folder and (fixed.api_servers or 1) > 1:
        return "with a folder of adapters there is one API server: each would number them by itself"
    if (fixed.lora or folder) and vocab > _LARGEST_VOCABULARY:
        return f"vLLM serves adapters of vocabularies up to {_LARGEST_VOCABULARY:,}, and this model's is {vocab:,}"
    return ""


_LARGEST_VOCABULARY = 258_048  # `LogitsProcessorWithLoRA.create_lora_weights`


def adapter_bytes(model: ModelFacts, parallel: Parallel, settings: EngineSettings, wide: float) -> int:
    """Of all slots on one GPU of the fullest stage."""
    if not settings.lora:
        return 0
    layers = max(parallel.layers_by_stage(model.layers))
    ends = 2 * (model.vocab + model.hidden)  # the table of embeddings, and the head
    numbers = layers * _layer(model, parallel) + ends
    return int(numbers * (settings.max_lora_rank or 0) * (settings.max_loras or 0) * wide)


def _layer(model: ModelFacts, parallel: Parallel) -> float:
    """Numbers of one layer for each rank of one slot, as of plain attention and a gated MLP."""
    hidden, tensor = model.hidden, parallel.tensor
    query, kept = model.heads * model.head_dim / tensor, max(1, model.kv_heads / tensor) * model.head_dim
    attention = 3 * hidden + query + 2 * kept + query + hidden
    copies, ranks = (model.experts, parallel.expert_ranks) if model.experts else (1, tensor)
    inner = model.intermediate / ranks
    return attention + copies * (3 * hidden + 3 * inner)
