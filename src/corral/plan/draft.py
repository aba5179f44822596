"""The draft of speculative decoding that `--speculative-config` names: what it takes of memory, how large a step is.

vLLM 0.32 holds a draft on the last pipeline stage, split over the tensor ranks but for the matrix that joins hidden
states, which each rank has whole. Every attention layer of it is one more layer of the KV cache. An EAGLE draft reads
the model's own table of embeddings, unless that lies on another stage, and EAGLE's first form the model's own head
too. Beside it lie two buffers, a hidden state for each token of a step; EAGLE-3 keeps three more of the model's.

A draft is read where its files are: in a folder, or in the hub's cache on this disk, never over the network. Sizes
come from safetensors headers where there are any, else from the config. A draft that is not here is assumed to be of
the usual shape, and the plan says so.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, UsageError
from corral.engines.flags import values_of
from corral.plan.contract import Parallel
from corral.plan.models.facts import ModelFacts, facts_from_folder, read_facts
from corral.plan.models.fields import parse_config
from corral.plan.models.weights import Tensor, folder_tensors

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


_FLAG = "--speculative-config"
_MOST_DRAFTED = 100
_NARROWEST = 2  # bytes of a number that is not quantised, as the model computes in bf16 or fp16


def read_draft(arguments: Sequence[str], model: ModelFacts) -> Draft | None:
    """What the arguments of vLLM name; None where they name no draft with weights of its own."""
    said = _said(arguments)
    name = said.get("model")
    if not isinstance(name, str) or not name:
        return None
    drafted, folder = _drafted(said), _folder(name)
    method = _method(said.get("method"), name, _config(folder))
    if method is None:
        return None
    if folder is None:
        return _known(name, method, drafted) or assumed_draft(name, method, drafted, model)
    return _measured(folder, name, method, drafted)


def tokens_from_text(arguments: Sequence[str]) -> int:
    """How many tokens vLLM drafts by looking them up in the text itself; 0: it does not."""
    said = _said(arguments)
    return _drafted(said) if said.get("method") == "ngram" else 0


def _drafted(said: Mapping[str, Any]) -> int:
    tokens = said.get("num_speculative_tokens")
    return tokens if isinstance(tokens, int) and 0 < tokens < _MOST_DRAFTED else 0


def _said(arguments: Sequence[str]) -> Mapping[str, Any]:
    """The last one counts, as in vLLM."""
    for text in reversed(values_of(_FLAG, arguments)):
        try:
            said = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{_FLAG} is not JSON: {error}.", 'For example: {"method": "ngram"}.') from None
        return said if isinstance(said, dict) else {}
    return {}


def _folder(name: str) -> Path | None:
    """Where its config is on this disk; a repository in the hub's cache need not be whole."""
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a repository's name
        return None
    return Path(found).parent if isinstance(found, str) else None


def _config(folder: Path | None) -> Mapping[str, Any]:
    try:
        return parse_config((folder / "config.json").read_bytes(), str(folder)) if folder else {}
    except (OSError, CorralError):
        return {}  # vLLM will say what is wrong with it


def _method(said: object, name: str, config: Mapping[str, Any]) -> DraftMethod | None:
    """As vLLM finds it out; None for those that draft without weights of their own, or are unknown."""
    if said:
        return DraftMethod(said) if isinstance(said, str) and said in list(DraftMethod) else None
    words = f"{Path(name).name} {config.get('model_type')} {config.get('architectures')}".lower()
    for method in (DraftMethod.EAGLE3, DraftMethod.EAGLE, DraftMethod.MEDUSA, DraftMethod.MLP):
        if method in words:
            return method
    return DraftMethod.MODEL


def _known(name: str, method: DraftMethod, drafted: int) -> Draft | None:
    """A whole model of the catalogue, where that drafts."""
    if method is not DraftMethod.MODEL:
        return None
    try:
        return draft_of_model(read_facts(name, offline=True), drafted)
    except CorralError:
        return None


def _measured(folder: Path, name: str, method: DraftMethod, drafted: int) -> Draft | None:
    label = name if name.count("/") == 1 and not name.startswith(("/", ".", "~")) else folder.name
    try:
        if method is DraftMethod.MODEL:
            return draft_of_model(facts_from_folder(folder, label), drafted)
        tensors = folder_tensors(folder)
        if not method.is_eagle:
            return Draft(label, method, drafted, 0, sum(map(_loaded, tensors))) if tensors else None
        by_config = draft_of_config(label, method, drafted, _config(folder))
        return _weighed(by_config, tensors) if tensors else by_config
    except (CorralError, OSError, ValueError, TypeError, KeyError, ZeroDivisionError):
        return None  # vLLM will say what is wrong with it


def _weighed(draft: Draft, tensors: Sequence[Tensor]) -> Draft:
    """An EAGLE draft with the sizes of its tensors, less what vLLM takes from the model."""
    shared = ("embed_tokens", "t2d") if draft.method is DraftMethod.EAGLE3 else ("embed_tokens", "lm_head", "t2d")
    own = [one for one in tensors if not any(word in one.name for word in shared)]
    joining = [one for one in own if one.name.removeprefix("model.").startswith("fc.")]
    return replace(draft, weights_bytes=sum(map(_loaded, own)), whole_bytes=sum(map(_loaded, joining)))


def _loaded(tensor: Tensor) -> int:
    """Bytes of a tensor when the engine has it: wider numbers are narrowed."""
    return min(tensor.size_bytes, _NARROWEST * tensor.elements)
