"""The draft of speculative decoding that `--speculative-config` names: how large it is, where its files are here.

By the size of its weights, or, where only its config is there, by that: EAGLE's draft is a layer or more of the
model's kind, a matrix that joins the model's hidden states, and a head; the table of embeddings is the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.engines.flags import values_of
from corral.errors import UsageError

__all__ = ["Draft", "read_draft"]

_FLAG = "--speculative-config"
_BYTES = 2  # of a number in a draft: bf16 or fp16
_JOINED = 3  # hidden states of the model that an EAGLE-3 draft reads


@dataclass(frozen=True)
class Draft:
    """A draft model on this disk."""

    name: str
    weights_bytes: int
    layers: int
    drafted: int  # tokens in each step


def read_draft(arguments: Sequence[str]) -> Draft | None:
    """What the arguments of vLLM name; None where they name no draft, or one that is not in a folder here."""
    for text in reversed(values_of(_FLAG, arguments)):
        try:
            said = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{_FLAG} is not JSON: {error}.", 'For example: {"method": "ngram"}.') from None
        name = said.get("model") if isinstance(said, dict) else None
        folder = Path(name) if isinstance(name, str) else None
        if folder is None or not (folder / "config.json").is_file():
            return None
        tokens = said.get("num_speculative_tokens")
        return _measured(folder, tokens if isinstance(tokens, int) and 0 < tokens < 100 else 0)
    return None


def _measured(folder: Path, drafted: int) -> Draft | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layers = int(config.get("num_hidden_layers", 1))
        stored = sum(path.stat().st_size for path in (*folder.glob("*.safetensors"), *folder.glob("*.bin")))
        size = stored or _BYTES * _parameters(config, layers)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # vLLM will say what is wrong with it
    return Draft(folder.name, size, layers, drafted) if size > 0 and layers > 0 else None


def _parameters(config: Mapping[str, Any], layers: int) -> int:
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or hidden // heads)
    keys = int(config.get("num_key_value_heads") or heads) * head
    attention = (
        2 * hidden * (heads * head + 2 * keys) + heads * head * hidden
    )  # it reads state and embedding together
    vocabulary = int(config.get("draft_vocab_size") or config["vocab_size"])
    return layers * (attention + 3 * hidden * inner) + _JOINED * hidden * hidden + hidden * vocabulary
