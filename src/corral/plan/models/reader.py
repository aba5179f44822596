"""From the fields of a config to the model's layers, by what the config has and not by a list of names.

`Family` holds what no field says: biases, norms, how a sliding window is spread. Where a config has a field that
decides sizes and that nothing here knows, the model is refused (`Fields.unread`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from corral.base.errors import DataError
from corral.plan.models.fields import Fields, uncounted
from corral.plan.models.layers import (
    Attention,
    Compressed,
    Convolution,
    DeltaAttention,
    Dense,
    Experts,
    Latent,
    LinearAttention,
    Mamba,
    Mamba1,
    Mixer,
    ModelLayer,
)
from corral.plan.models.quantisation import wrong

MOST_LAYERS = 4096
_ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "nomic_bert", "modernbert")


@dataclass(frozen=True)
class Family:
    """What the counting needs to know of one `model_type`, beyond the fields in its config."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_matrices: int = 0  # 3: gate, up, down; 2: without a gate; 0: as the activation says
    mlp_bias: bool = False
    norms: int = 2  # per layer
    norm_bias: bool = False
    qk_norm: bool = False  # one scale of head_dim each for queries and keys
    whole_norm: bool = False  # one of all heads together
    gate: bool = False  # attention's output has a gate of its own size
    head_bias: bool = False
    tied: bool = False  # when the config does not say
    sliding_every: int = 0  # n: every layer slides except each n-th; 1: all slide
    sliding_switch: bool = False  # slides only where `use_sliding_window` says so
    sliding_heads: int = 1  # KV heads of a layer that slides, as a multiple of the others'
    sinks: bool = False  # and experts with biases
    shared: int = 0  # experts that all tokens visit, where no field says
    twice: bool = False  # each layer has two attentions and two dense MLPs
    positions: int = -1  # rows of a learned table of positions beyond the longest context; -1: no table
    embedding_norm: bool = False
    wide_state: bool = False  # of Mamba layers, in 32 bits where the config does not say
    experts_name: str = "mlp"


def _with(family: Family, **changes: Any) -> Family:
    return replace(family, **changes)


_LLAMA = Family(mlp_matrices=3)
_QWEN2 = Family(qkv_bias=True, mlp_matrices=3, sliding_every=1, sliding_switch=True)
_QWEN3 = Family(qk_norm=True, sliding_every=1, sliding_switch=True)
_QWEN_NEXT = Family(qk_norm=True, gate=True)
_GEMMA = Family(mlp_matrices=3, tied=True)
_GEMMA3 = _with(_GEMMA, norms=4, qk_norm=True, sliding_every=6)
_DSV4 = Family(mlp_matrices=3, experts_name="ffn")
_UNGATED = Family(mlp_matrices=2)
_BIASED = Family(qkv_bias=True, out_bias=True, mlp_matrices=2, mlp_bias=True, norm_bias=True)
_GPT2 = _with(_BIASED, tied=True, positions=0)
_GPTJ = Family(mlp_matrices=2, mlp_bias=True, norms=1, norm_bias=True, head_bias=True)
_BERT = _with(_BIASED, positions=0, embedding_norm=True)
_NORMED = Family(mlp_matrices=3, qk_norm=True)
_OLMO2 = Family(mlp_matrices=3, whole_norm=True)
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(mlp_matrices=3, sliding_every=1),
    "mixtral": Family(mlp_matrices=3, sliding_every=1, experts_name="block_sparse_moe"),
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3": _with(_QWEN3, mlp_matrices=3),
    "qwen3_moe": _with(_QWEN3, mlp_matrices=3),
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3,
    "qwen3_next": _QWEN_NEXT,
    "qwen3_5_text": _QWEN_NEXT,
    "qwen3_5_moe_text": _QWEN_NEXT,
    "gemma": _GEMMA,
    "gemma2": _with(_GEMMA, norms=4, sliding_every=2),
    "vaultgemma": _GEMMA,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": _GEMMA3,
    "gemma4_text": _GEMMA3,
    "gemma4_unified_text": _GEMMA3,
    "phi": _with(_BIASED, norms=1, head_bias=True),
    "phi3": Family(mlp_matrices=3, sliding_every=1),
    "granite": _with(_LLAMA, tied=True),
    "smollm3": _with(_LLAMA, tied=True),
    "gpt_oss": Family(qkv_bias=True, out_bias=True, sinks=True),
    "minimax_m2": Family(experts_name="block_sparse_moe"),
    "minimax_m3_vl_text": _NORMED,
    "nemotron_h": Family(norms=1, wide_state=True),
    "llama4_text": _LLAMA,
    "deepseek_v4": _DSV4,
    "deepseek_ref": _DSV4,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "opt": _with(_GPT2, positions=2),
    "bloom": _with(_BIASED, tied=True, embedding_norm=True),
    "gpt_neox": _BIASED,
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "falcon": Family(mlp_matrices=2, norm_bias=True, norms=1, tied=True),
    "mpt": _with(_UNGATED, tied=True),
    "starcoder2": _with(_BIASED, tied=True),
    "stablelm": Family(norm_bias=True),
    "apertus": _with(_UNGATED, qk_norm=True),
    "cohere": Family(mlp_matrices=3, norms=1, tied=True),
    "cohere2": Family(mlp_matrices=3, norms=1, tied=True, sliding_every=4),
    "cohere2_moe": Family(mlp_matrices=3, norms=1, tied=True, sliding_every=4),
    "exaone4": _with(_NORMED, sliding_every=4),
    "exaone_moe": _with(_NORMED, sliding_every=4),
    "hunyuan_v1_dense": _NORMED,
    "hunyuan_v1_moe": _with(_NORMED, shared=1),
    "hy_v3": _NORMED,
    "afmoe": _with(_NORMED, norms=4, gate=True),
    "laguna": _NORMED,
    "lfm2": _with(_NORMED, tied=True),
    "lfm2_moe": _with(_NORMED, tied=True),
    "mimo_v2_flash": _with(_LLAMA, sliding_heads=2),
    "longcat_flash": _with(_LLAMA, norms=4, twice=True),
    "olmo": _with(_LLAMA, norms=0),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _OLMO2,
    "flex_olmo": _OLMO2,
    "olmo_hybrid": _OLMO2,
    "mamba": Family(norms=1, tied=True),
    "falcon_mamba": Family(norms=1, tied=True),
    "mamba2": Family(norms=1),
    "bitnet": _LLAMA,
    **dict.fromkeys(_ENCODERS, _BERT),
    "nomic_bert": Family(mlp_matrices=3, norm_bias=True, embedding_norm=True),
    "modernbert": Family(mlp_matrices=3, embedding_norm=True),
}
_GATES = ("silu", "swish", "swiglu", "silu_and_mul")
_SQUARES = ("relu2",)
# one letter or name for each layer of a hybrid whose layers are one part each
_LETTERS = {
    "M": "mamba", "*": "attention", "E": "moe", "-": "mlp", "linear_attention": "mamba",
    "full_attention": "attention",
}  # fmt: skip
_KINDS = {
    "attention": "full", "global": "full", "compressed_sparse": "full", "heavily_compressed": "full",
    "minimax_m3_sparse": "indexed",
}  # fmt: skip


def _listed(said: object) -> bool:
    return isinstance(said, (str, list))


def is_encoder(fields: Fields) -> bool:
    """Whether the model reads a whole text at once and keeps nothing: no KV cache, no tokens one by one."""
    return str(fields.values.get("model_type")) in _ENCODERS


@dataclass(frozen=True)
class Reader:
    """The layers of one config."""

    fields: Fields
    family: Family
    hidden: int
    count: int

    def layers(self) -> list[ModelLayer]:
        """All of them, in order."""
        if blocks := self.fields.get("block_configs"):
            return self._by_blocks(blocks)
        if letters := self._letters("hybrid_override_pattern", "layers_block_type"):
            return [self._single(word) for word in letters]
        return [self._of(index)._layer(kind, index) for index, kind in enumerate(self._kinds())]

    def _of(self, index: int) -> Reader:
        fields = self.fields.of_layer(index)
        return self if fields is self.fields else replace(self, fields=fields)

    def drafting(self, last: ModelLayer) -> list[ModelLayer]:
        """Layers for multi-token prediction, which a checkpoint has and vLLM loads for speculation alone."""
        fields = self.fields
        own = self._letters("mtp_hybrid_override_pattern", "mtp_layers_block_type", whole=False)
        number = fields.first("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", most=64)
        return [self._single(word) for word in own] if own else [last] * number

    def _letters(self, *names: str, whole: bool = True) -> list[str]:
        for name in names:
            said = self.fields.get(name)
            if said:
                words = [_LETTERS.get(one, one) for one in said if isinstance(one, str)] if _listed(said) else []
                if not set(words) <= set(_LETTERS.values()) or (whole and len(words) != self.count):
                    raise uncounted(self.fields.where, f"{name} names layers that Corral does not know")
                return words
        return []

    def _single(self, word: str) -> ModelLayer:
        """A layer of one part, as Nemotron-H has them."""
        norms = self.family.norms
        if word == "mamba":
            return ModelLayer(self._mamba(), norms=norms)
        if word == "attention":
            return ModelLayer(self._attention("full"), norms=norms)
        if word == "moe":
            return ModelLayer(experts=self._experts(), norms=norms)
        return ModelLayer(dense=self._dense(self.fields.whole("intermediate_size")), norms=norms)

    def _kinds(self) -> list[str]:
        """What each layer attends to: full, sliding, chunked, linear, a Mamba layer, a convolution, …"""
        fields, count = self.fields, self.count
        named = fields.names("layer_types")
        every = fields.first("full_attention_interval", most=MOST_LAYERS)
        if 0 in fields.numbers("attn_type_list"):
            raise uncounted(fields.where, "attn_type_list names layers of lightning attention")
        if named and len(named) == count:
            words = [one.removesuffix("_attention") for one in named]
            kinds = [_KINDS.get(one, one) for one in words]
            if not set(kinds) <= {"full", "sliding", "chunked", "linear", "mamba", "conv", "indexed"}:
                raise uncounted(fields.where, f"layer_types names {', '.join(sorted(set(named)))}")
            return ["full" if one == "sliding" and not self._window() else one for one in kinds]
        if every and "linear_num_value_heads" in fields.values:
            return ["full" if (i + 1) % every == 0 else "linear" for i in range(count)]
        if (placed := self._placed()) is not None:
            return placed
        if fields.get("attention_chunk_size"):
            plain = fields.whole("no_rope_layer_interval", 4, MOST_LAYERS)
            return ["full" if (i + 1) % plain == 0 else "chunked" for i in range(count)]
        if not self._window():
            return ["full"] * count
        pattern = fields.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
            return ["full" if pattern[i % len(pattern)] == "G" else "sliding" for i in range(count)]
        if pattern is not None or self.family.sliding_every:
            every = fields.whole("sliding_window_pattern", self.family.sliding_every or 1, MOST_LAYERS)
            return ["full" if every > 1 and (i + 1) % every == 0 else "sliding" for i in range(count)]
        return ["full"] * count

    def _placed(self) -> list[str] | None:
        """Kinds of layers by the places of those that attend, or of those that do not."""
        fields, layers = self.fields, range(self.count)
        if period := fields.first("attn_layer_period", most=MOST_LAYERS):
            offset = fields.first("attn_layer_offset", most=MOST_LAYERS)
            return ["full" if i % period == offset else "mamba" for i in layers]
        if "attn_layer_indices" in fields.values and "mamba_num_heads" in fields.values:
            attend = fields.numbers("attn_layer_indices")
            return ["full" if i in attend else "mamba" for i in layers]
        if attend := fields.numbers("full_attn_idxs"):
            return ["full" if i in attend else "conv" for i in layers]
        if own := self._delta_fields():
            linear = own.numbers("kda_layers")  # counted from one
            return ["linear" if i + 1 in linear else "full" for i in layers]
        slide = fields.numbers("hybrid_layer_pattern")
        if len(slide) >= self.count:
            return ["sliding" if slide[i] else "full" for i in layers]
        sparse = fields.numbers("sparse_attention_freq")
        if len(sparse) >= self.count:
            return ["indexed" if sparse[i] else "full" for i in layers]
        if "num_attention_heads" not in fields.values:
            return ["mamba"] * self.count
        return None

    def _delta_fields(self) -> Fields | None:
        own = self.fields.get("linear_attn_config")
        return Fields(own, self.fields.where) if isinstance(own, Mapping) and own else None

    def _window(self) -> int:
        window, switch = self.fields.get("sliding_window"), self.fields.flag("use_sliding_window")
        patterns = ("layer_types", "sliding_window_pattern", "hybrid_layer_pattern")
        known = bool(self.family.sliding_every) or any(one in self.fields.values for one in patterns)
        if not isinstance(window, int) or not 1 <= window <= 1 << 30 or not known:
            return 0
        return window if switch or not self.family.sliding_switch else 0

    def _layer(self, kind: str, index: int) -> ModelLayer:
        fields, bias = self.fields, self.family.norm_bias
        routed = self._experts()
        mixer, beside = self._mixer(kind, index), None
        sparse = routed is not None and self._is_sparse(index)
        if self.family.twice:
            beside = mixer
        elif kind == "full" and fields.first("mamba_d_ssm"):
            beside = self._mamba()
        both = fields.flag("enable_moe_block") or self.family.twice  # a dense MLP beside the experts
        norms = self.family.norms + (3 if fields.flag("enable_moe_block") else 0)
        norms += fields.flag("new_decoder_architecture") and fields.whole("num_ln_in_parallel_attn", 2) == 2
        norms += "parallel_attn" in fields.values and not fields.flag("parallel_attn")
        made = ModelLayer(mixer, None, routed if sparse else None, norms, bias, beside, self._more())
        shared = fields.first("shared_intermediate_size")
        if sparse and not both:
            return replace(made, dense=self._dense(shared) if shared else None)
        if isinstance(mixer, Mamba | Mamba1) and "num_attention_heads" not in fields.values:
            return made
        width = fields.first("dense_intermediate_size") or self._width()
        if shared and not routed:
            width = shared
        if self._shares(index) and fields.flag("use_double_wide_mlp"):
            width *= 2
        return replace(made, dense=self._dense(width * (2 if self.family.twice else 1)))

    def _width(self) -> int:
        fields = self.fields
        width = fields.whole("intermediate_size", fields.whole("expansion_ratio", 4, 64) * self.hidden)
        if fields.flag("block_auto_adjust_ff_dim"):  # as LFM2 rounds it
            width, of = (
                int(2 * width / 3 * fields.ratio("block_ffn_dim_multiplier")),
                fields.whole("block_multiple_of", 1),
            )
            width = -(-width // of) * of
        return width

    def _more(self) -> int:
        """Gates of each layer's own input (Gemma), of its residual streams (Gemma 3n) and their connections."""
        fields, hidden = self.fields, self.hidden
        own = fields.first("hidden_size_per_layer_input")
        more = (2 * own + 1) * hidden if own else 0
        more += fields.first("zero_expert_num") * hidden  # routes to experts that have no weights
        if streams := fields.first("altup_num_inputs", most=64):
            more += (2 + streams) * hidden + streams**2 + streams**3
            more += (2 * fields.first("laurel_rank") + 1) * hidden
        if "o_groups" in fields.values and (many := fields.first("hc_mult", most=64)):
            more += 2 * ((many + 2) * many * (many * hidden + 1) + 3)
        return more

    def around(self) -> tuple[int, int]:
        """Parameters before and after the layers: of tables beside the embedding, and of matrices and norms."""
        fields, hidden, table, more = self.fields, self.hidden, 0, 0
        if own := fields.first("hidden_size_per_layer_input"):
            rows = fields.whole("vocab_size_per_layer_input", fields.whole("vocab_size"))
            table, more = rows * self.count * own, self.count * own * hidden + own
        if streams := fields.first("altup_num_inputs", most=64):
            more += 2 * (streams - 1) * hidden**2
        rotates = fields.get("rope_theta") is not None or fields.get("position_embedding_type") == "rotary"
        if self.family.positions >= 0 and not rotates:
            table += hidden * (fields.first("max_position_embeddings", most=1 << 30) + self.family.positions)
        if is_encoder(fields):
            table += hidden * fields.first("type_vocab_size")
        norm = hidden * (2 if self.family.norm_bias else 1)
        return table, more + norm * (bool(self.family.norms) + self.family.embedding_norm)

    def _shares(self, index: int) -> bool:
        """Whether the layer uses the keys and values of another."""
        return index >= self.count - self.fields.first("num_kv_shared_layers", most=MOST_LAYERS)

    def _is_sparse(self, index: int) -> bool:
        fields = self.fields
        kinds = fields.names("mlp_layer_types")
        if len(kinds) == self.count:
            return kinds[index] != "dense"
        if period := fields.first("expert_layer_period", most=MOST_LAYERS):
            return index % period == fields.first("expert_layer_offset", most=MOST_LAYERS)
        listed = fields.get("moe_layers")
        if isinstance(listed, list) and listed:
            return index in listed
        if index in fields.numbers("mlp_only_layers") or index < fields.first(
            "first_k_dense_replace", most=MOST_LAYERS
        ):
            return False
        if index > (fields.first("moe_layer_end_index", most=MOST_LAYERS) or self.count):
            return False
        frequency = fields.get("moe_layer_freq", 1)
        if isinstance(frequency, list):
            return bool(frequency[index]) if index < len(frequency) else True
        names = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
        step = fields.first(*names, default=1, most=MOST_LAYERS)
        step = max(step, fields.whole("moe_layer_freq", 1, MOST_LAYERS), 1)
        return (index + 1) % step == 0 if "moe_layer_freq" not in fields.values else index % step == 0

    def _mixer(self, kind: str, index: int) -> Mixer:
        fields = self.fields
        if kind == "mamba" or (kind == "linear" and "mamba_num_heads" in fields.values):
            return self._mamba()
        if kind == "conv":
            return Convolution(fields.whole("conv_L_cache", most=64), fields.whole("conv_dim", self.hidden))
        if kind == "linear":
            return self._linear()
        if ratio := self._ratio(index):
            return self._compressed(max(ratio, 0))
        if fields.get("kv_lora_rank") is not None:
            return self._latent(index, kind)
        return self._attention(kind, shares=self._shares(index))

    def _linear(self) -> Mixer:
        fields = self.fields
        own = self._delta_fields() or fields
        prefix = "linear_" if own is fields else ""
        if own is not fields or "linear_num_heads" in fields.values:
            heads, width = own.first(f"{prefix}num_heads", most=4096), own.first(f"{prefix}head_dim", most=4096)
            kernel = own.first("short_conv_kernel_size", "linear_conv_kernel_dim", default=4, most=64)
            if not heads or not width:
                raise uncounted(fields.where, "it has layers of linear attention whose heads it does not say")
            return DeltaAttention(heads, width, kernel)
        state = 4 if fields.get("mamba_ssm_dtype") == "float32" else 2
        return LinearAttention(
            fields.whole("linear_num_key_heads", most=4096), fields.whole("linear_num_value_heads", most=4096),
            fields.whole("linear_key_head_dim", most=4096), fields.whole("linear_value_head_dim", most=4096),
            fields.whole("linear_conv_kernel_dim", 4, 64), state,
        )  # fmt: skip

    def _ratio(self, index: int) -> int:
        """How many tokens of DeepSeek-V4's attention make one entry; -1: none do; 0: it is another attention."""
        fields = self.fields
        ratios, rates = fields.numbers("compress_ratios"), fields.get("compress_rates")
        if ratios:
            return (ratios[index] if index < len(ratios) else 0) or -1
        if not isinstance(rates, Mapping):
            return 0
        kinds = fields.names("layer_types")
        return Fields(rates, fields.where).first(kinds[index], most=1 << 20) or -1 if index < len(kinds) else -1

    def _attention(self, kind: str, kv_heads: int = 0, shares: bool = False) -> Attention:
        fields, family = self.fields, self.family
        slides = kind == "sliding"
        prefix = "swa_" if slides and "swa_num_attention_heads" in fields.values else ""
        heads = fields.whole(f"{prefix}num_attention_heads", most=4096)
        wide = kind == "full" and fields.get("global_head_dim") is not None
        kv_heads = kv_heads or self._kv_heads(prefix, heads) * (1 if prefix or not slides else family.sliding_heads)
        if wide:
            kv_heads = fields.whole("num_global_key_value_heads", kv_heads, most=4096)
        head_dim = fields.first(f"{prefix}head_dim", most=4096) or self._head_dim(heads)
        head_dim = fields.whole("global_head_dim", most=4096) if wide else head_dim
        value = fields.first(f"{prefix}v_head_dim", most=4096) or head_dim
        if heads % kv_heads:
            raise DataError(
                f"{fields.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.",
                "Correct the config.",
            )
        biased = fields.flag("attention_bias") or fields.flag("use_bias") or fields.flag("bias")
        bias = biased or family.qkv_bias or fields.flag("qkv_bias") or fields.flag("use_qkv_bias")
        whole = fields.get("qk_norm_type") == "per_layer" or family.whole_norm
        normed = family.qk_norm or family.whole_norm or fields.flag("use_qk_norm")
        norm = ((heads + kv_heads) if whole else 1 if shares else 2) * head_dim if normed else 0
        window = {"sliding": self._window(), "chunked": fields.first("attention_chunk_size", most=1 << 30)}
        gating = fields.get("gating")  # Laguna's: of each head, or of each number
        gate = heads * value if fields.flag("attn_output_gate") or family.gate or gating else 0
        gate = heads if gating in (True, "per-head") else gate
        indexed = kind == "indexed"
        return Attention(
            heads, kv_heads, head_dim, "full" if kind == "indexed" else kind, window.get(kind, 0), bias,
            biased or family.out_bias, norm, gate,
            (wide or kind == "full") and fields.flag("attention_k_eq_v"), not shares, family.sinks,
            0 if value == head_dim else value,
            fields.first("index_n_heads", most=4096) if indexed else 0, fields.first("index_head_dim", most=4096),
        )  # fmt: skip

    def _kv_heads(self, prefix: str, heads: int) -> int:
        fields = self.fields
        if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
            fields.read.add("num_key_value_heads")
            return 1
        return fields.whole(f"{prefix}num_key_value_heads", heads, most=4096)

    def _head_dim(self, heads: int) -> int:
        fields = self.fields
        own = fields.first("head_dim", "attention_head_dim", most=4096)
        if not own and self.hidden % heads:
            raise DataError(
                f"{fields.where}: hidden_size {self.hidden} is not a multiple of num_attention_heads {heads}.",
                "Correct the config.",
            )
        return own or self.hidden // heads

    def _latent(self, index: int, kind: str) -> Latent:
        fields = self.fields
        kinds = fields.names("indexer_types")
        indexed = not kinds or (index < len(kinds) and kinds[index] == "full")
        indexed = indexed and (kind == "indexed" or not fields.names("layer_types"))
        return Latent(
            fields.whole("num_attention_heads", most=4096), fields.whole("kv_lora_rank", most=1 << 16),
            fields.first("q_lora_rank", most=1 << 16), fields.whole("qk_nope_head_dim", most=4096),
            fields.whole("qk_rope_head_dim", most=4096), fields.whole("v_head_dim", most=4096),
            fields.first("index_n_heads", most=4096) if indexed else 0, fields.first("index_head_dim", most=4096),
        )  # fmt: skip

    def _compressed(self, ratio: int) -> Compressed:
        fields = self.fields
        return Compressed(
            fields.whole("num_attention_heads", most=4096), fields.whole("head_dim", most=4096),
            fields.whole("q_lora_rank", most=1 << 16), fields.whole("o_lora_rank", most=1 << 16),
            fields.whole("o_groups", most=4096), fields.whole("sliding_window", most=1 << 20), ratio,
            fields.first("index_n_heads", most=4096), fields.first("index_head_dim", most=4096),
        )  # fmt: skip

    def _mamba(self) -> Mamba | Mamba1:
        fields = self.fields
        alone = "num_attention_heads" not in fields.values  # then its own names have no prefix
        heads = fields.first("mamba_num_heads", *(["num_heads"] if alone else []), most=1 << 16)
        width = fields.first("mamba_head_dim", *(["head_dim"] if alone else []), most=1 << 16)
        state = fields.first("ssm_state_size", most=1 << 16)
        kernel = fields.first("conv_kernel", default=4, most=64)
        rank, expand = fields.get("time_step_rank"), fields.first("expand", most=64)
        if state and not heads and rank is not None and expand:
            inner = fields.whole("intermediate_size", expand * self.hidden) if alone else expand * self.hidden
            rank = -(-self.hidden // 16) if rank == "auto" else fields.whole("time_step_rank", most=1 << 16)
            return Mamba1(inner, state, rank, kernel, "attn_layer_period" in fields.values)
        if not heads or not state or not (width := width or expand * self.hidden // heads):
            raise uncounted(fields.where, "it has Mamba layers whose heads or state it does not say")
        default = "float32" if self.family.wide_state else "auto"
        wide = str(fields.get("mamba_ssm_cache_dtype", default)) == "float32"
        return Mamba(
            heads, width, fields.first("n_groups", default=1, most=4096), state, kernel, 4 if wide else 2,
            fields.flag("mamba_rms_norm", default=True),
        )  # fmt: skip

    def _dense(self, width: int) -> Dense:
        biased = any(self.fields.flag(name) for name in ("mlp_bias", "use_bias", "bias"))
        return Dense(width, self._matrices(), self.family.mlp_bias or biased)

    def _matrices(self) -> int:
        if self.family.mlp_matrices:
            return self.family.mlp_matrices
        act = self.fields.get("mlp_hidden_act") or self.fields.get("hidden_act")
        own = self.fields.get("ffn_act_fn")
        act = act or (own.get("name") if isinstance(own, Mapping) else None)
        if act in _SQUARES:
            return 2
        if act in _GATES or (str(self.fields.values.get("model_type")) in FAMILIES and act):
            return 3
        raise uncounted(self.fields.where, f"whether its MLP has a gate does not follow from hidden_act = {act!r}")

    def _experts(self) -> Experts | None:
        fields = self.fields
        count = fields.first("n_routed_experts", most=1 << 16)
        if not count or fields.get("enable_moe_block", True) is False:
            return None
        own = fields.first("moe_intermediate_size")
        width = own or fields.whole("intermediate_size", 4 * self.hidden)
        shared = fields.first("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
        number = fields.first("n_shared_experts", default=self.family.shared, most=4096)
        if fields.get("attention_chunk_size"):  # Llama 4: every expert layer has one that all tokens visit
            shared = width
        elif fields.first("shared_intermediate_size"):
            number = 0
        shared = shared * max(1, number) if shared else number * width
        per_token = fields.first("num_experts_per_tok", default=2, most=1 << 16)
        gate = "shared_expert_intermediate_size" in fields.values
        return Experts(
            count, per_token or 1, width, shared, gate and shared > 0, self._matrices(), self.family.sinks,
            fields.first("moe_latent_size", most=1 << 20), self.family.experts_name,
        )  # fmt: skip

    def _by_blocks(self, blocks: object) -> list[ModelLayer]:
        """A layer list of its own shape each, as Nemotron's neural architecture search leaves it."""
        if not isinstance(blocks, list) or len(blocks) != self.count:
            raise wrong(self.fields.where, "block_configs", blocks, "a list of one object for each layer")
        return [self._block(one) for one in blocks]

    def _block(self, block: object) -> ModelLayer:
        halves = [block.get(name) if isinstance(block, Mapping) else None for name in ("attention", "ffn")]
        attention, ffn = halves
        if not isinstance(attention, Mapping) or not isinstance(ffn, Mapping):
            raise wrong(self.fields.where, "block_configs", block, "an attention and an ffn")
        if attention.get("replace_with_linear") or ffn.get("replace_with_linear"):
            raise uncounted(self.fields.where, "block_configs replaces parts of layers by linear ones")
        own, mult = Fields(attention, self.fields.where), ffn.get("ffn_mult")
        heads = self.fields.whole("num_attention_heads", most=4096)
        kv_heads = heads // own.whole("n_heads_in_group", 1, heads)
        width = 0
        if not ffn.get("no_op"):
            if not isinstance(mult, (int, float)) or not 0 < mult < 100:
                raise wrong(self.fields.where, "block_configs.ffn_mult", mult, "a number below 100")
            width = -(-int(2 * mult * self.hidden / 3) // 256) * 256
        mixer = None if attention.get("no_op") else self._attention("full", kv_heads)
        return ModelLayer(mixer, self._dense(width) if width else None, norms=(mixer is not None) + bool(width))
