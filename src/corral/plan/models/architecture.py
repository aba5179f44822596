"""From a model's `config.json` to counts: parameters part by part, and the bytes they take as stored.

The families are a table of what distinguishes them (biases, norms, gated or plain MLP, experts). Parts follow how
vLLM spreads a model: embedding and head over tensor ranks by vocabulary, query/output and MLP by heads and width,
key/value by KV heads (copied when there are more ranks than heads), norms and routers on every rank.

Not covered: multi-head latent attention, state-space layers, vision towers. Such a model is said to be unknown;
its stored bytes can still be read from the safetensors headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corral.base.errors import DataError
from corral.base.untrusted import parse_json, plain

LONGEST_CONFIG_BYTES = 16 << 20
MOST_STRETCH = 1e6  # of a context, by RoPE scaling
DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
_DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32"}


@dataclass(frozen=True)
class Family:
    """What the counting needs to know of one `model_type`, beyond the sizes in its config."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_matrices: int = 3  # gate, up, down
    mlp_bias: bool = False
    norms: int = 2  # per layer
    norm_bias: bool = False
    qk_norm: bool = False  # one scale of head_dim each for queries and keys
    head_bias: bool = False
    tied: bool = False  # when the config does not say
    sliding_every: int = 0  # n: every layer slides except each n-th; 1: all slide
    sliding_switch: bool = False  # slides only where `use_sliding_window` says so


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(sliding_every=1),
    "mixtral": Family(sliding_every=1),
    "qwen2": Family(qkv_bias=True, sliding_every=1, sliding_switch=True),
    "qwen2_moe": Family(qkv_bias=True, sliding_every=1, sliding_switch=True),
    "qwen3": Family(qk_norm=True, sliding_every=1, sliding_switch=True),
    "qwen3_moe": Family(qk_norm=True, sliding_every=1, sliding_switch=True),
    "gemma": Family(tied=True),
    "gemma2": Family(tied=True, norms=4, sliding_every=2),
    "gemma3_text": Family(tied=True, norms=4, qk_norm=True, sliding_every=6),
    "phi": Family(
        qkv_bias=True, out_bias=True, mlp_matrices=2, mlp_bias=True, norms=1, norm_bias=True, head_bias=True
    ),
    "phi3": Family(sliding_every=1),
    "granite": Family(tied=True),
    "smollm3": Family(tied=True),
}


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's matrices are stored: the method, the precision, and what stays in 16 bits."""

    method: str = ""
    weights: str = ""
    group_size: int = 0  # weights sharing one scale; 0: one per output channel
    zero_points: bool = False
    keeps_attention: bool = False
    keeps_layers: int = 0  # whole layers that stay in 16 bits


@dataclass(frozen=True)
class Parts:
    """A number (parameters or bytes) split as vLLM spreads it; layer parts are sums over all layers."""

    embedding: int = 0
    head: int = 0
    query_output: int = 0
    key_value: int = 0
    mlp: int = 0
    small: int = 0  # norms, biases, routers: on every tensor rank

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.layers

    @property
    def layers(self) -> int:
        return self.query_output + self.key_value + self.mlp + self.small


@dataclass(frozen=True)
class Shape:
    """The sizes a config gives, checked."""

    architecture: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    tied: bool
    dtype: str
    experts: int
    experts_per_token: int
    expert_intermediate: int
    shared_intermediate: int
    sliding_window: int | None
    sliding_layers: int
    quantisation: Quantisation

    @property
    def known(self) -> bool:
        return self.family in FAMILIES


def _whole(config: Mapping[str, Any], key: str, where: str, default: int | None = None, most: int = 10**7) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            raise DataError(f"{where}: config.json lacks {key!r}.", "Use a complete model folder or repository.")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _wrong(where, key, value, f"a whole number from 1 to {most}")
    return value


def _wrong(where: str, key: str, value: object, wanted: str) -> DataError:
    return DataError(
        f"{where}: config.json has {key} = {plain(repr(value), 100)}, which is not {wanted}.",
        "Correct the config or use another copy of the model.",
    )


def parse_config(text: bytes | str, where: str) -> dict[str, Any]:
    """A model's `config.json`, which anybody may have written."""
    found = parse_json(text, where, LONGEST_CONFIG_BYTES, "Download it again.")
    if not isinstance(found, dict):
        raise DataError(f"{where} is not an object, so it is not a model's config.", "Download it again.")
    return found


def read_shape(config: Mapping[str, Any], where: str) -> Shape:
    """Check a config's fields and give them one name each; `where` names the model in messages."""
    if isinstance(config.get("text_config"), Mapping):  # multi-modal wrappers keep the language model inside
        outer = {k: config[k] for k in ("architectures", "quantization_config", "torch_dtype") if k in config}
        config = {**outer, **config["text_config"]}
    family = str(config.get("model_type", "")) or "unknown"
    rules = FAMILIES.get(family, Family())
    heads = _whole(config, "num_attention_heads", where, most=4096)
    hidden = _whole(config, "hidden_size", where, most=1 << 20)
    kv_heads = _whole(config, "num_key_value_heads", where, heads, most=4096)
    if config.get("head_dim") is None and hidden % heads:
        raise DataError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.", "Correct the config."
        )
    if heads % kv_heads:
        raise DataError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.",
            "Correct the config.",
        )
    layers = _whole(config, "num_hidden_layers", where, most=4096)
    experts = _whole(config, "num_local_experts", where, 0) or _whole(config, "num_experts", where, 0)
    intermediate = _whole(config, "intermediate_size", where, 4 * hidden)
    window, sliding = _sliding(config, rules, layers)
    architectures = config.get("architectures") or ["unknown"]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise _wrong(where, "architectures", architectures, "a list of names")
    quant = config.get("quantization_config") or {}
    if not isinstance(quant, Mapping):
        raise _wrong(where, "quantization_config", quant, "an object")
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    return Shape(
        architecture=str(architectures[0]),
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_whole(config, "head_dim", where, hidden // heads, most=4096),
        vocab=_whole(config, "vocab_size", where),
        max_context=_context(config, where),
        tied=bool(config.get("tie_word_embeddings", rules.tied)),
        dtype=_DTYPE_NAMES.get(dtype, "bf16"),
        experts=experts,
        experts_per_token=_whole(config, "num_experts_per_tok", where, 2 if experts else 0) if experts else 0,
        expert_intermediate=_whole(config, "moe_intermediate_size", where, intermediate) if experts else 0,
        shared_intermediate=_whole(config, "shared_expert_intermediate_size", where, 0) if experts else 0,
        sliding_window=window,
        sliding_layers=sliding,
        quantisation=read_quantisation(quant, where),
    )


def _context(config: Mapping[str, Any], where: str) -> int:
    """Longest context: the config's own, stretched by RoPE scaling of the kinds that state the short length."""
    longest = _whole(config, "max_position_embeddings", where, 2048, most=10**9)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "")) if isinstance(scaling, Mapping) else ""
    factor = scaling.get("factor") if kind in ("linear", "dynamic", "yarn") else None
    if factor is None:
        return longest
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= MOST_STRETCH:
        raise _wrong(where, "rope_scaling.factor", factor, f"a number up to {MOST_STRETCH:g}")
    return max(1, int(_whole(scaling, "original_max_position_embeddings", where, longest, most=10**9) * factor))


def _sliding(config: Mapping[str, Any], rules: Family, layers: int) -> tuple[int | None, int]:
    window = config.get("sliding_window")
    if not isinstance(window, int) or window < 1 or not rules.sliding_every:
        return None, 0
    if rules.sliding_switch and not config.get("use_sliding_window", False):
        return None, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        sliding = sum(kind == "sliding_attention" for kind in kinds)
    else:
        every = _whole(config, "sliding_window_pattern", "the model", rules.sliding_every)
        sliding = layers if every == 1 else layers - layers // every
    return (window, sliding) if sliding else (None, 0)


def read_quantisation(quant: Mapping[str, Any], where: str = "the model") -> Quantisation:
    """What a `quantization_config` says, in Corral's words; unknown methods keep their name and count as stored."""
    method = str(quant.get("quant_method", ""))
    if not method:
        return Quantisation()
    listed = quant.get("modules_to_not_convert") or quant.get("ignore") or []
    if not isinstance(listed, list):
        raise _wrong(where, "quantization_config.modules_to_not_convert", listed, "a list")
    kept = [str(m) for m in listed]
    whole_layers = {m for m in kept if m.startswith("model.layers.") and m.endswith(".")}
    attention = any(m.endswith("self_attn") for m in kept) or sum("self_attn" in m for m in kept) > 8
    if "mlp" in " ".join(kept) and not whole_layers:  # fbgemm lists every module it leaves alone
        whole_layers = {m.split(".mlp")[0] for m in kept if ".mlp" in m}
    try:
        bits, group, zero = _bits(quant, method)
    except (TypeError, ValueError, AttributeError, OverflowError, IndexError):
        raise _wrong(where, "quantization_config", dict(quant), "one that vLLM could read") from None
    if not 0 <= group <= 1 << 30:
        raise _wrong(where, "quantization_config.group_size", group, "a size of groups")
    return Quantisation(method, bits, group, zero, attention, len(whole_layers))


def _bits(quant: Mapping[str, Any], method: str) -> tuple[str, int, bool]:
    if method == "compressed-tensors":
        groups = list((quant.get("config_groups") or {}).values())
        first = groups[0] if groups and isinstance(groups[0], Mapping) else {}
        scheme = first.get("weights") or {}
        bits = int(scheme.get("num_bits") or 8)
        floating = scheme.get("type", "float" if bits == 8 else "int") == "float"
        name = "fp8" if bits == 8 and floating else f"int{bits}"
        return name, int(scheme.get("group_size") or 0), not scheme.get("symmetric", True)
    if method == "bitsandbytes":
        return ("int4", 64, False) if quant.get("load_in_4bit") or quant.get("_load_in_4bit") else ("int8", 0, False)
    if method in ("awq", "gptq", "gptq_marlin", "awq_marlin", "auto-round"):
        bits, group = int(quant.get("bits") or 4), int(quant.get("group_size") or 128)
        return f"int{bits}", max(group, 0), True
    if "fp8" in method:
        block = quant.get("weight_block_size")
        return "fp8", int(block[0]) * int(block[1]) if isinstance(block, list) and len(block) == 2 else 0, False
    return method, 0, False


def count(shape: Shape) -> Parts:
    """Parameters part by part."""
    rules, s = FAMILIES.get(shape.family, Family()), shape
    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    small = rules.norms * s.hidden * (2 if rules.norm_bias else 1)
    small += (2 * s.head_dim if rules.qk_norm else 0) + (s.hidden if rules.out_bias else 0)
    small += queries + 2 * keys if rules.qkv_bias else 0
    small += s.intermediate + s.hidden if rules.mlp_bias else 0
    mlp = rules.mlp_matrices * s.hidden * s.intermediate
    if s.experts:
        mlp = s.experts * rules.mlp_matrices * s.hidden * s.expert_intermediate
        mlp += rules.mlp_matrices * s.hidden * s.shared_intermediate
        small += s.hidden * s.experts + (s.hidden if s.shared_intermediate else 0)
    final = s.hidden * (2 if rules.norm_bias else 1)
    return Parts(
        embedding=s.vocab * s.hidden,
        head=(0 if s.tied else s.vocab * s.hidden) + (s.vocab if rules.head_bias else 0),
        query_output=2 * s.hidden * queries * s.layers,
        key_value=2 * s.hidden * keys * s.layers,
        mlp=mlp * s.layers,
        small=small * s.layers + final,
    )


def stored(parts: Parts, quantisation: Quantisation, dtype: str, layers: int) -> Parts:
    """Bytes part by part: matrices in the checkpoint's precision, the rest (embedding, head, norms) in `dtype`."""
    wide = DTYPE_BYTES[dtype]
    narrow = matrix_bytes(quantisation, wide)
    kept = min(quantisation.keeps_layers, layers) / layers

    def mixed(parameters: int, quantised: bool) -> int:
        return round(parameters * (wide if not quantised else kept * wide + (1 - kept) * narrow))

    attention = bool(quantisation.method) and not quantisation.keeps_attention
    return Parts(
        embedding=round(parts.embedding * wide),
        head=round(parts.head * wide),
        query_output=mixed(parts.query_output, attention),
        key_value=mixed(parts.key_value, attention),
        mlp=mixed(parts.mlp, bool(quantisation.method)),
        small=round(parts.small * wide),
    )


def matrix_bytes(quantisation: Quantisation, wide: float) -> float:
    """Bytes per parameter of a quantised matrix, scales and zero points included."""
    plain = DTYPE_BYTES.get(quantisation.weights, wide)
    if not quantisation.group_size:
        return plain
    scale = (4.0 if quantisation.weights == "fp8" else 2.0) / quantisation.group_size
    return plain + scale + (plain / quantisation.group_size if quantisation.zero_points else 0.0)
