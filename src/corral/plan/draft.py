"""The draft of speculative decoding that `--speculative-config` names: what it takes of memory, how large a step is.

vLLM 0.32 holds a draft on the last pipeline stage, split over the tensor ranks but for the matrix that joins hidden
states, which each rank has whole. Every attention layer of it is one more layer of the KV cache. An EAGLE draft reads
the model's own table of embeddings, unless that lies on another stage, and EAGLE's first form the model's own head
too. Beside it lie two buffers, a hidden state for each token of a step; EAGLE-3 keeps three more of the model's.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corral.plan.contract import Parallel
from corral.plan.models.facts import ModelFacts

_BYTES = 2  # of a number in a draft: bf16 or fp16, as the model's
_JOINED = {"eagle": 2, "eagle3": 3}  # hidden states that one matrix joins
_BUFFERS = 2
USUAL_VOCABULARY = 32_000  # that published EAGLE-3 drafts choose among


class DraftMethod(enum.StrEnum):
    """vLLM's name of how tokens are drafted, of those that load weights of their own."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MODEL = "draft_model"
    MEDUSA = "medusa"
    MLP = "mlp_speculator"

    @property
    def is_eagle(self) -> bool:
        return self in (DraftMethod.EAGLE, DraftMethod.EAGLE3)


@dataclass(frozen=True)
class Draft:
    """What is known of a draft."""

    name: str
    method: DraftMethod
    drafted: int  # tokens in each step; 0: not said
    layers: int
    weights_bytes: int  # that it adds to the model's on one stage
    whole_bytes: int = 0  # of these, what each tensor rank has whole
    embedding_bytes: int = 0  # more, where the model's own table is on another stage
    hidden: int = 0
    kv_layers: int = 0
    kv_heads: int = 1
    head_dim: int = 0
    doubt: str = ""  # what is assumed, and what to do about it

    def bytes_per_gpu(self, parallel: Parallel) -> int:
        """Of its weights, on a GPU of the last stage."""
        split = self.weights_bytes - self.whole_bytes + (self.embedding_bytes if parallel.pipeline > 1 else 0)
        return split // parallel.tensor + self.whole_bytes

    def page_bytes(self, tensor: int, block_size: int, element: float) -> int:
        """Of one block of its own part of the KV cache, on one GPU."""
        return self.kv_layers * int(2 * block_size * max(1, self.kv_heads // tensor) * self.head_dim * element)

    def pass_bytes(self, model: ModelFacts, tokens: int, wide: float) -> int:
        """What a step of so many tokens needs more."""
        kept = _JOINED["eagle3"] * model.hidden if self.method is DraftMethod.EAGLE3 else 0
        return int(tokens * wide * (_BUFFERS * self.hidden + kept))


def draft_of_model(facts: ModelFacts, drafted: int) -> Draft:
    """A whole model that drafts: everything of it is its own."""
    return Draft(
        facts.name, DraftMethod.MODEL, drafted, facts.layers, facts.weights_bytes, facts.stored.small,
        hidden=facts.hidden, kv_layers=facts.layers, kv_heads=facts.kv_heads, head_dim=facts.head_dim,
    )  # fmt: skip


def draft_of_config(name: str, method: DraftMethod, drafted: int, config: Mapping[str, Any]) -> Draft:
    """A draft by its config alone; raises KeyError, TypeError or ValueError where that does not say enough."""
    layers, hidden = int(config.get("num_hidden_layers", 1)), int(config["hidden_size"])
    inner, heads = int(config["intermediate_size"]), int(config["num_attention_heads"])
    width = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    vocabulary = int(config["vocab_size"])
    joined = _JOINED.get(method, 0) * int(config.get("target_hidden_size") or hidden) * hidden
    qkv = hidden * (heads + 2 * kv_heads) * width
    first = qkv if method is DraftMethod.EAGLE3 else 0  # its first layer reads state and embedding together
    matrices = layers * (qkv + heads * width * hidden + 3 * hidden * inner) + first
    head = hidden * int(config.get("draft_vocab_size") or vocabulary) if method is not DraftMethod.EAGLE else 0
    table = hidden * vocabulary
    return _checked(Draft(
        name, method, drafted, layers, _BYTES * (matrices + joined + head + (0 if method.is_eagle else table)),
        _BYTES * joined, _BYTES * table if method.is_eagle else 0, hidden, layers, kv_heads, width,
    ))  # fmt: skip


def _checked(draft: Draft) -> Draft:
    if min(draft.weights_bytes, draft.layers, draft.kv_heads, draft.head_dim, draft.hidden) < 1:
        raise ValueError(f"{draft.name} has an impossible shape")
    return draft


def assumed_draft(name: str, method: DraftMethod, drafted: int, model: ModelFacts) -> Draft:
    """A draft that nothing is known of but its name: EAGLE's usual shape; of others, nothing."""
    remedy = f"`corral pull {name}` brings it here" if name.count("/") == 1 else "give a folder of this machine"
    if not method.is_eagle:
        doubt = f"the draft {name} is not on this machine, so its memory is not planned for; {remedy}"
        return Draft(name, method, drafted, 0, 0, doubt=doubt)
    usual = {
        "hidden_size": model.hidden, "intermediate_size": model.intermediate, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim, "vocab_size": model.vocab,
        "draft_vocab_size": min(USUAL_VOCABULARY, model.vocab),
    }  # fmt: skip
    made = draft_of_config(name, method, drafted, usual)
    doubt = (
        f"the draft {name} is not on this machine: its memory is planned as that of one layer of the model's shape"
        f" that chooses among {usual['draft_vocab_size']:,} tokens; {remedy}"
    )
    return Draft(**{**vars(made), "doubt": doubt})
