"""The fields of a model's `config.json`, which anybody may have written: each read with its range, once.

What was read is remembered, so that a field that says something about the model's structure and that nobody read is
noticed: such a model is not understood, and nothing is counted from half of its config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from corral.base.errors import DataError, UncountedError
from corral.base.untrusted import parse_json
from corral.plan.models.quantisation import wrong

LONGEST_CONFIG_BYTES = 16 << 20


def uncounted(where: str, why: str) -> UncountedError:
    return UncountedError(
        f"{where} cannot be counted from its config: {why}.",
        "Give a folder or repository with safetensors, whose headers say how large it is, or the size with"
        " `corral plan --weights-gib N`.",
    )


def parse_config(text: bytes | str, where: str) -> dict[str, Any]:
    """A model's `config.json`, which anybody may have written."""
    found = parse_json(text, where, LONGEST_CONFIG_BYTES, "Download it again.", infinities=True)  # as Mamba's limits
    if not isinstance(found, dict):
        raise DataError(f"{where} is not an object, so it is not a model's config.", "Download it again.")
    return found


# names that speak of structure; what else a config has (training, sampling, tokens) decides no size
_STRUCTURE = re.compile(
    r"^num_|_num|layers?($|_)|size|_dim|rank|heads?($|_)|expert|state|conv|ssm|mamba|lora|latent|config$|kernel"
    r"|pattern|expand|width|moe|block|depth|groups|dense|attn|attention|mlp|ffn|ratio|window|shared?_|_share|rnn|lightning|compress"
)
# names that match and decide no size here: training, sampling, numerics, tokens, or what follows from other fields
_HARMLESS = re.compile(
    r"dropout|router|scoring|routed_scaling|swiglu|softcap|logit|_loss|loss_|beam|length|return|penalty|ngram|_token"
    r"|position_embeddings|rope|rotary|_eps(_|$)|_std|init|clip|max_window_layers|use_cache|pretraining_tp|ep_size|_dtype"
    r"|chunk_size_feed_forward|group_size$|vision_|video_|image_|audio_|hash_layers|mamba_hidden_act|_kernels"
    r"|mscale|temperature|scal(e|ing)|floor_scale|attn_implementation|is_decoder|tie_|use_mtp|_overlap|keys_to|merge"
    r"|num_labels|topk_group|n_group$|num_expert_group|num_limited_groups|layer_norm|residual|pad_|token_type|summary|classifier"
    r"|max_batch|decoder_start|bidirectional|training|type_vocab_size|final_layer|router|quant"
)


class Fields:
    """A config's fields; `where` names the model in messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Whatever the field holds; null is as if it were not there."""
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None, most: int = 10**7, least: int = 1) -> int:
        """A number within its range; without a default it must be there."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise DataError(
                    f"{self.where}: config.json lacks {name!r}.", "Use a complete model folder or repository."
                )
            return default
        if isinstance(value, list):
            raise uncounted(self.where, f"it gives {name} for each layer by itself")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise wrong(self.where, name, value, f"a whole number from {least} to {most}")
        return value

    def first(self, *names: str, default: int = 0, most: int = 10**7) -> int:
        """The first of several names for the same number; 0 means none."""
        numbers = [self.whole(name, -1, most, 0) for name in names]
        return next((number for number in numbers if number >= 0), default)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.get(name, default))

    def names(self, name: str) -> list[str]:
        """A list of words; empty where there is none."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise wrong(self.where, name, value, "a list of names")
        return value

    def numbers(self, name: str) -> list[int]:
        value = self.get(name, [])
        if not isinstance(value, list) or not all(type(one) is int and 0 <= one <= 1 << 30 for one in value):
            raise wrong(self.where, name, value, "a list of whole numbers")
        return value

    def unread(self) -> list[str]:
        """Fields that speak of the model's structure, say something, and were read by nobody."""
        return sorted(
            name
            for name, value in self.values.items()
            if name not in self.read
            and value not in (None, False, 0, "", [], {})
            and not isinstance(value, (str, float))
            and _STRUCTURE.search(name)
            and not _HARMLESS.search(name)
        )
