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
    r"|pattern|expand|width|moe|block|depth|groups|dense|attn|attention|mlp|ffn|ratio|window|shared?_|_share|rnn|lightning|compress|^hc_|channels"
)
# names that match and decide no size here: training, sampling, numerics, tokens, or what follows from other fields
_HARMLESS = re.compile(
    r"dropout|router|scoring|routed_scaling|swiglu|softcap|logit|_loss|loss_|beam|length|return|penalty|ngram|_token"
    r"|position_embeddings|rope|rotary|_eps(_|$)|_std|init|clip|max_window_layers|use_cache|pretraining_tp|ep_size|_dtype"
    r"|chunk_size_feed_forward|group_size$|vision_|video_|image_|audio_|hash_layers|mamba_hidden_act|_kernels"
    r"|mscale|temperature|scal(e|ing|ar)|floor_scale|attn_implementation|is_decoder|tie_|use_mtp|_overlap|keys_to|merge"
    r"|num_labels|topk_group|n_group$|num_expert_group|num_limited_groups|layer_norm|residual|pad_|token_type|summary|classifier"
    r"|max_batch|decoder_start|bidirectional|training|type_vocab_size|final_layer|router|quant|fp32|sinkhorn|multiplier|before_gate|sparsity"
    r"|relative_attention|renormalize|expert_bias|index_(block_size|local|topk)|sparse_(topk|block|disable|init|local)"
    r"|use_sparse"
)


# other names of one field
_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "block_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "kv_n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "block_ff_dim"),
    "dense_intermediate_size": ("prefix_dense_intermediate_size", "intermediate_size_mlp"),
    "hidden_act": ("hidden_activation", "activation_function", "activation"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "model_max_length"),
    "n_routed_experts": ("num_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k",
    ),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "first_k_dense_replace": ("num_dense_layers", "moe_layer_start_index"),
    "mamba_num_heads": ("mamba_n_heads",), "mamba_head_dim": ("mamba_d_head",),
    "ssm_state_size": ("mamba_d_state", "state_size"), "conv_kernel": ("mamba_d_conv",),
    "n_groups": ("mamba_n_groups",), "expand": ("mamba_expand",), "time_step_rank": ("mamba_dt_rank",),
    "index_n_heads": ("sparse_num_index_heads",), "index_head_dim": ("sparse_index_dim",),
    "sliding_window": ("local_attention", "sliding_window_size"),
    "sliding_window_pattern": ("_sliding_window_pattern", "global_attn_every_n_layers"),
    "tie_word_embeddings": ("tie_embedding",),
}  # fmt: skip
_NESTED = ("attn_config", "ffn_config", "sparse_attention_config")  # groups of fields
# fields that may hold one number for each layer
_BY_LAYER = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok",
    "n_shared_experts",
)  # fmt: skip


def _with_one_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under one name each; of two that differ, both stay."""
    found = dict(values)
    for group in _NESTED:
        inner = found.get(group)
        if isinstance(inner, Mapping):
            found = {**inner, **found}
            del found[group]
    if isinstance(found.get("num_attention_heads_per_layer"), list):
        found["num_attention_heads"] = found.pop("num_attention_heads_per_layer")
    if "num_heads" in found and found["num_heads"] == found.get("num_attention_heads"):  # not so in Mamba's
        del found["num_heads"]
    for name, others in _NAMES.items():
        for other in others:
            if other in found and found.get(name) in (None, found[other]):
                found[name] = found.pop(other)
    return found


class Fields:
    """A config's fields; `where` names the model in messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = _with_one_name(values), where
        self.read: set[str] = set()

    def of_layer(self, index: int) -> Fields:
        """The fields of one layer, where some are given for each by itself."""
        lists = {name: self.values[name] for name in _BY_LAYER if isinstance(self.values.get(name), list)}
        own = {name: value[index] for name, value in lists.items() if index < len(value)}
        rows = self.get("per_layer_config")
        if isinstance(rows, Mapping):
            found = [row for key, row in rows.items() if str(key).isdecimal() and int(key) == index]
            own.update(*(_with_one_name(row) for row in found[:1] if isinstance(row, Mapping)))
        if not own:
            return self
        fields = Fields({**self.values, **own}, self.where)
        fields.read = self.read
        return fields

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

    def ratio(self, name: str) -> float:
        """A factor; 1 where there is none."""
        value = self.get(name, 1.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 100:
            raise wrong(self.where, name, value, "a number below 100")
        return value

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
