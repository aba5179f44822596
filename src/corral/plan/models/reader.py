"""From the fields of a config to the model's layers, by what the config has and not by a list of names.

`Family` holds what no field says: biases, norms, how a sliding window is spread. Where a config has a field that
decides sizes and that nothing here knows, the model is refused (`Fields.unread`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from corral.base.errors import DataError
from corral.plan.models.fields import Fields, uncounted
from corral.plan.models.layers import (
    Attention,
    Compressed,
    Dense,
    Experts,
    Latent,
    LinearAttention,
    Mamba,
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
    head_bias: bool = False
    tied: bool = False  # when the config does not say
    sliding_every: int = 0  # n: every layer slides except each n-th; 1: all slide
    sliding_switch: bool = False  # slides only where `use_sliding_window` says so
    sinks: bool = False  # and experts with biases
    experts_name: str = "mlp"


_QWEN3 = Family(qk_norm=True, sliding_every=1, sliding_switch=True)
_GEMMA3 = Family(mlp_matrices=3, tied=True, norms=4, qk_norm=True, sliding_every=6)
_DSV4 = Family(mlp_matrices=3, experts_name="ffn")
FAMILIES: Mapping[str, Family] = {
    "llama": Family(mlp_matrices=3),
    "mistral": Family(mlp_matrices=3, sliding_every=1),
    "mixtral": Family(mlp_matrices=3, sliding_every=1, experts_name="block_sparse_moe"),
    "qwen2": Family(qkv_bias=True, mlp_matrices=3, sliding_every=1, sliding_switch=True),
    "qwen2_moe": Family(qkv_bias=True, mlp_matrices=3, sliding_every=1, sliding_switch=True),
    "qwen2_5_vl_text": Family(qkv_bias=True, mlp_matrices=3, sliding_every=1, sliding_switch=True),
    "qwen3": Family(**{**vars(_QWEN3), "mlp_matrices": 3}),
    "qwen3_moe": Family(**{**vars(_QWEN3), "mlp_matrices": 3}),
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3,
    "qwen3_next": Family(qk_norm=True),
    "qwen3_5_text": Family(qk_norm=True),
    "qwen3_5_moe_text": Family(qk_norm=True),
    "gemma": Family(mlp_matrices=3, tied=True),
    "gemma2": Family(mlp_matrices=3, tied=True, norms=4, sliding_every=2),
    "gemma3_text": _GEMMA3,
    "gemma4_text": Family(**{**vars(_GEMMA3), "norms": 7}),
    "phi": Family(
        qkv_bias=True, out_bias=True, mlp_matrices=2, mlp_bias=True, norms=1, norm_bias=True, head_bias=True
    ),
    "phi3": Family(mlp_matrices=3, sliding_every=1),
    "granite": Family(mlp_matrices=3, tied=True),
    "smollm3": Family(mlp_matrices=3, tied=True),
    "gpt_oss": Family(qkv_bias=True, out_bias=True, sinks=True),
    "minimax_m2": Family(experts_name="block_sparse_moe"),
    "nemotron_h": Family(norms=1),
    "llama4_text": Family(mlp_matrices=3),
    "deepseek_v4": _DSV4,
    "deepseek_ref": _DSV4,
    **dict.fromkeys(_ENCODERS, Family(qkv_bias=True, out_bias=True, mlp_matrices=2, mlp_bias=True, norm_bias=True)),
}
_GATED = ("silu", "swish", "swiglu", "silu_and_mul")
_UNGATED = ("relu2",)
# one letter or name for each layer of a hybrid whose layers are one part each
_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}


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
        kinds = self._kinds()
        routed = self._experts()
        return [self._layer(kind, index, routed) for index, kind in enumerate(kinds)]

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
                words = [_LETTERS.get(one, one) for one in said] if isinstance(said, (str, list)) else []
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
        """What each layer attends to: full, sliding, chunked, linear, or a Mamba layer."""
        fields, count = self.fields, self.count
        named = fields.names("layer_types")
        every = fields.first("full_attention_interval", most=MOST_LAYERS)
        if 0 in fields.numbers("attn_type_list"):
            raise uncounted(fields.where, "attn_type_list names layers of lightning attention")
        if named and len(named) == count:
            kinds = [{"attention": "full"}.get(one, one.removesuffix("_attention")) for one in named]
            if not set(kinds) <= {"full", "sliding", "chunked", "linear", "mamba"}:
                raise uncounted(fields.where, f"layer_types names {', '.join(sorted(set(named)))}")
            return ["full" if one == "sliding" and not self._window() else one for one in kinds]
        if every and "linear_num_value_heads" in fields.values:
            return ["full" if (i + 1) % every == 0 else "linear" for i in range(count)]
        if fields.get("attention_chunk_size"):
            plain = fields.whole("no_rope_layer_interval", 4, MOST_LAYERS)
            return ["full" if (i + 1) % plain == 0 else "chunked" for i in range(count)]
        if not self._window():
            return ["full"] * count
        if fields.get("sliding_window_pattern") is not None or self.family.sliding_every:
            every = fields.whole("sliding_window_pattern", self.family.sliding_every or 1, MOST_LAYERS)
            return ["full" if every > 1 and (i + 1) % every == 0 else "sliding" for i in range(count)]
        return ["full"] * count

    def _window(self) -> int:
        window, switch = self.fields.get("sliding_window"), self.fields.flag("use_sliding_window")
        known = bool(self.family.sliding_every) or "layer_types" in self.fields.values
        if not isinstance(window, int) or not 1 <= window <= 1 << 30 or not known:
            return 0
        return window if switch or not self.family.sliding_switch else 0

    def _layer(self, kind: str, index: int, routed: Experts | None) -> ModelLayer:
        fields, norms, bias = self.fields, self.family.norms, self.family.norm_bias
        mixer = self._mixer(kind, index)
        sparse = routed is not None and self._is_sparse(index)
        beside = fields.flag("enable_moe_block")  # a dense MLP beside the experts
        if sparse and not beside:
            shared = fields.first("shared_intermediate_size") if "mamba_n_heads" in fields.values else 0
            dense = self._dense(shared) if shared else None
            return ModelLayer(mixer, dense, routed, norms, bias)
        width = fields.first("intermediate_size_mlp") or fields.whole("intermediate_size", 4 * self.hidden)
        if fields.first("shared_intermediate_size") and not routed:
            width = fields.first("shared_intermediate_size")
        return ModelLayer(mixer, self._dense(width), routed if sparse else None, norms, bias)

    def _is_sparse(self, index: int) -> bool:
        fields = self.fields
        kinds = fields.names("mlp_layer_types")
        if len(kinds) == self.count:
            return kinds[index] == "sparse"
        listed = fields.get("moe_layers")
        if isinstance(listed, list) and listed:
            return index in listed
        if index in fields.numbers("mlp_only_layers") or index < fields.first(
            "first_k_dense_replace", most=MOST_LAYERS
        ):
            return False
        frequency = fields.get("moe_layer_freq", 1)
        if isinstance(frequency, list):
            return bool(frequency[index]) if index < len(frequency) else True
        step = fields.first("decoder_sparse_step", "interleave_moe_layer_step", default=1, most=MOST_LAYERS)
        step = max(step, fields.whole("moe_layer_freq", 1, MOST_LAYERS), 1)
        return (index + 1) % step == 0 if "moe_layer_freq" not in fields.values else index % step == 0

    def _mixer(self, kind: str, index: int) -> Mixer:
        fields = self.fields
        if kind == "mamba":
            return self._mamba()
        if kind == "linear":
            state = 4 if fields.get("mamba_ssm_dtype") == "float32" else 2
            return LinearAttention(
                fields.whole("linear_num_key_heads", most=4096), fields.whole("linear_num_value_heads", most=4096),
                fields.whole("linear_key_head_dim", most=4096), fields.whole("linear_value_head_dim", most=4096),
                fields.whole("linear_conv_kernel_dim", 4, 64), state,
            )  # fmt: skip
        if ratios := fields.numbers("compress_ratios"):
            return self._compressed(ratios[index] if index < len(ratios) else 0)
        if fields.get("kv_lora_rank") is not None:
            return self._latent(index)
        return self._attention(kind)

    def _attention(self, kind: str, kv_heads: int = 0) -> Attention:
        fields, family = self.fields, self.family
        heads = fields.whole("num_attention_heads", most=4096)
        wide = kind == "full" and fields.get("global_head_dim") is not None
        kv_heads = kv_heads or fields.whole("num_key_value_heads", heads, most=4096)
        if wide:
            kv_heads = fields.whole("num_global_key_value_heads", kv_heads, most=4096)
        head_dim = self._head_dim(heads)
        head_dim = fields.whole("global_head_dim", most=4096) if wide else head_dim
        if heads % kv_heads:
            raise DataError(
                f"{fields.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.",
                "Correct the config.",
            )
        biased = fields.flag("attention_bias")
        bias = biased or family.qkv_bias or fields.flag("qkv_bias")
        whole = fields.get("qk_norm_type") == "per_layer"
        normed = family.qk_norm or fields.flag("use_qk_norm")
        window = {"sliding": self._window(), "chunked": fields.first("attention_chunk_size", most=1 << 30)}
        return Attention(
            heads, kv_heads, head_dim, kind, window.get(kind, 0), bias, biased or family.out_bias,
            ((heads + kv_heads) if whole else 2) * head_dim if normed else 0, fields.flag("attn_output_gate"),
            wide and fields.flag("attention_k_eq_v"), sinks=family.sinks,
        )  # fmt: skip

    def _head_dim(self, heads: int) -> int:
        fields = self.fields
        own = fields.first("head_dim", "attention_head_dim", most=4096)
        if not own and self.hidden % heads:
            raise DataError(
                f"{fields.where}: hidden_size {self.hidden} is not a multiple of num_attention_heads {heads}.",
                "Correct the config.",
            )
        return own or self.hidden // heads

    def _latent(self, index: int) -> Latent:
        fields = self.fields
        kinds = fields.names("indexer_types")
        indexed = not kinds or (index < len(kinds) and kinds[index] == "full")
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

    def _mamba(self) -> Mamba:
        fields = self.fields
        heads = fields.first("mamba_num_heads", "mamba_n_heads", most=1 << 16)
        width = fields.first("mamba_head_dim", "mamba_d_head", most=1 << 16)
        state = fields.first("ssm_state_size", "mamba_d_state", most=1 << 16)
        if not heads or not width or not state:
            raise uncounted(fields.where, "it has Mamba layers whose heads or state it does not say")
        # vLLM keeps Nemotron's state in 32 bits where the config does not say
        wide = str(fields.get("mamba_ssm_cache_dtype", "float32")) == "float32"
        return Mamba(
            heads, width, fields.first("n_groups", "mamba_n_groups", default=1, most=4096), state,
            fields.first("conv_kernel", "mamba_d_conv", default=4, most=64), 4 if wide else 2,
        )  # fmt: skip

    def _dense(self, width: int) -> Dense:
        return Dense(width, self._matrices(), self.family.mlp_bias or self.fields.flag("mlp_bias"))

    def _matrices(self) -> int:
        if self.family.mlp_matrices:
            return self.family.mlp_matrices
        act = (
            self.fields.get("mlp_hidden_act") or self.fields.get("hidden_act") or self.fields.get("hidden_activation")
        )
        if act in _UNGATED:
            return 2
        if act in _GATED or (str(self.fields.values.get("model_type")) in FAMILIES and act):
            return 3
        raise uncounted(self.fields.where, f"whether its MLP has a gate does not follow from hidden_act = {act!r}")

    def _experts(self) -> Experts | None:
        fields = self.fields
        count = fields.first("n_routed_experts", "num_experts", "num_local_experts", most=1 << 16)
        if not count:
            return None
        own = fields.first("moe_intermediate_size")
        width = own or fields.whole("intermediate_size", 4 * self.hidden)
        shared = fields.first("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
        number = fields.first("n_shared_experts", most=4096)
        if fields.get("attention_chunk_size"):  # Llama 4: every expert layer has one that all tokens visit
            shared = width
        shared = shared * max(1, number) if shared else number * width
        per_token = fields.first("num_experts_per_tok", "top_k_experts", "experts_per_token", default=2, most=1 << 16)
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
