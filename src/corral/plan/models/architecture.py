"""From a model's `config.json` to counts: parameters part by part, and the bytes they take as stored.

Parts follow how vLLM spreads a model: embedding and head over tensor ranks by vocabulary, query/output and MLP by
heads and width, key/value by KV heads (copied when there are more ranks than heads), routed experts over all ranks of
an engine, latents, norms and routers on every rank.

A config with fields that decide sizes and that Corral does not know is refused; its stored bytes can still be read
from the safetensors headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corral.base.errors import DataError, UncountedError
from corral.plan.models.fields import Fields, uncounted
from corral.plan.models.layers import (
    Attention,
    Cache,
    Compressed,
    DeltaAttention,
    Experts,
    Latent,
    LinearAttention,
    Mamba,
    Mamba1,
    ModelLayer,
    Module,
    Parts,
    caches_of,
    count_layers,
)
from corral.plan.models.quantisation import DTYPE_BYTES, Quantisation, format_bytes, read_quantisation, wrong
from corral.plan.models.reader import FAMILIES, MOST_LAYERS, Family, Reader, is_encoder
from corral.plan.models.towers import tower_parameters

MOST_STRETCH = 1e6  # of a context, by RoPE scaling
_DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32"}
_INNER = ("text_config", "llm_config", "language_config")  # where multi-modal wrappers keep the language model
_TOWERS = ("vision_config", "audio_config")
_OUTER = ("architectures", "quantization_config", "torch_dtype", "dtype", "tie_word_embeddings", "compression_config")


@dataclass(frozen=True)
class Divided:
    """A number that tensor ranks must divide."""

    what: str
    size: int
    role: str  # heads | width | expert: widths may be cut between blocks of a quantised matrix only


@dataclass(frozen=True)
class Shape:
    """The sizes a config gives, checked."""

    architecture: str
    family: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    tied: bool
    dtype: str
    layers: tuple[ModelLayer, ...]
    drafting: tuple[ModelLayer, ...]  # multi-token prediction, which vLLM loads for speculation only
    tower: int  # parameters
    head: int
    quantisation: Quantisation
    encoder: bool
    tables: int  # parameters of the table of embeddings, and of those beside it
    around: int  # parameters of norms and matrices before and after the layers
    problem: str = ""  # why it cannot be counted

    @property
    def caches(self) -> tuple[Cache, ...]:
        return () if self.encoder else caches_of(self.layers)

    @property
    def experts(self) -> Experts | None:
        return next((one.experts for one in self.layers if one.experts), None)

    @property
    def sliding(self) -> tuple[int | None, int]:
        """The window of the layers that have one, and their number."""
        found = [one for one in self.caches if one.window]
        return (found[0].window, sum(one.layers for one in found)) if found else (None, 0)


def read_shape(config: Mapping[str, Any], where: str) -> Shape:
    """Check a config's fields and give them one name each; `where` names the model in messages."""
    inner = next((config[name] for name in _INNER if isinstance(config.get(name), Mapping)), None)
    towers = {name: config[name] for name in _TOWERS if isinstance(config.get(name), Mapping)}
    if inner is not None:
        if "patch_size" in config and not towers:
            raise uncounted(where, "it reads pictures, and does not say how large the part is that does")
        config = {**{k: config[k] for k in _OUTER if k in config}, **inner}
    fields = Fields(config, where)
    family = str(fields.get("model_type", "")) or "unknown"
    try:
        return _read(fields, family, towers)
    except DataError as error:
        if family in FAMILIES or "lacks" not in error.message:
            raise
        missing = error.message.partition("lacks ")[2].rstrip(".")
        raise uncounted(where, f"it is of type {family}, and has no {missing}") from None


def _read(fields: Fields, family: str, towers: Mapping[str, Mapping[str, Any]]) -> Shape:
    rules = FAMILIES.get(family, Family())
    hidden = fields.whole("hidden_size", most=1 << 20)
    blocks = fields.get("layers_block_type")
    count = fields.whole(
        "num_hidden_layers", len(blocks) if isinstance(blocks, list) and blocks else None, MOST_LAYERS
    )
    first = fields.of_layer(0)
    channels = first.first("num_heads", most=1 << 16) or first.first("expand", most=64) * hidden
    heads = first.whole("num_attention_heads", channels if "ssm_state_size" in first.values else None, 1 << 16)
    architectures = fields.get("architectures") or ["unknown"]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise wrong(fields.where, "architectures", architectures, "a list of names")
    quant = fields.get("quantization_config") or fields.get("compression_config") or {}
    if not isinstance(quant, Mapping):
        raise wrong(fields.where, "quantization_config", quant, "an object")
    dtype = str(fields.get("torch_dtype") or fields.get("dtype") or "bfloat16").removeprefix("torch.")
    vocab = fields.whole("vocab_size")
    reader = Reader(fields, rules, hidden, count)
    layers, drafting, tower, problem = _layers(reader, towers)
    table, around = reader.around()
    tied = fields.flag("tie_word_embeddings", rules.tied)
    encoder = is_encoder(fields)
    head = 0 if tied or encoder else vocab * hidden
    main = _attention_of(layers, heads, hidden)
    return Shape(
        architecture=str(architectures[0]), family=family, hidden=hidden,
        intermediate=first.first("intermediate_size") or first.first("moe_intermediate_size") or 4 * hidden,
        heads=heads, kv_heads=main[0], head_dim=main[1], vocab=vocab, max_context=_context(fields, family),
        tied=tied, dtype=_DTYPE_NAMES.get(dtype, "bf16"), layers=tuple(layers), drafting=tuple(drafting), tower=tower,
        head=head + (vocab if fields.flag("lm_head_bias") or rules.head_bias else 0),
        quantisation=read_quantisation(quant, fields.where, str(fields.get("expert_dtype", ""))),
        encoder=encoder, tables=vocab * hidden + table, around=around, problem=problem or _unread(fields),
    )  # fmt: skip


def _layers(
    reader: Reader, towers: Mapping[str, Mapping[str, Any]]
) -> tuple[list[ModelLayer], list[ModelLayer], int, str]:
    """Layers, layers that draft, parameters of towers; where they cannot be read, plain ones and why."""
    try:
        layers = reader.layers()
        drafting, problem = reader.drafting(layers[-1]), ""
    except UncountedError as error:
        fields = Fields(_plain(reader.fields.values), reader.fields.where)
        plain = Reader(fields, Family(mlp_matrices=3), reader.hidden, reader.count)
        layers, drafting = plain.layers(), []
        problem = error.message.partition("its config: ")[2].rstrip(".")
    tower = 0
    for name, config in towers.items():
        size = tower_parameters(config, reader.hidden)
        tower += size or 0
        problem = problem or ("" if size else f"its {name} does not say how large it is")
    return layers, drafting, tower, problem


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that every decoder has."""
    kept = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    return {name: values[name] for name in kept if name in values}


# fields that a config may have beside those that decide, because they follow from them or are of no use to it
_FOLLOW = {
    "add_full_attention_sink_bias", "add_swa_attention_sink_bias", "attention_bias", "attention_chunk_size",
    "attention_out_bias", "block_auto_adjust_ff_dim", "block_multiple_of", "chunk_size", "conv_L_cache",
    "conv_bias", "conv_dim_out", "decoder_sparse_step", "dense_intermediate_size", "expand", "first_k_dense_replace",
    "full_attention_interval", "head_dim", "interleave_moe_layer_step", "intermediate_size", "layer_types",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "mlp_bias", "moe_intermediate_size",
    "moe_layer_freq", "moe_layers", "mtp_transformer_layers", "num_experts_per_tok", "num_key_value_heads",
    "prefix_dense_sliding_window_pattern", "projectors_bias", "qk_head_dim", "qk_rope_head_dim",
    "shared_intermediate_size", "sliding_window", "sliding_window_pattern", "time_step_rank", "use_conv_bias",
    "use_double_wide_mlp",
    "use_sliding_window",
}  # fmt: skip


def _unread(fields: Fields) -> str:
    if fields.get("word_embed_proj_dim") not in (None, fields.get("hidden_size")):
        return "its word_embed_proj_dim is not its hidden_size"
    if not fields.first("hidden_size_per_layer_input"):
        fields.read.add("vocab_size_per_layer_input")
    unread = [name for name in fields.unread() if name not in _FOLLOW]
    if not unread:
        return ""
    return f"Corral does not know what {', '.join(unread[:4])}{' and others' * (len(unread) > 4)} mean for its size"


def _attention_of(layers: list[ModelLayer], heads: int, hidden: int) -> tuple[int, int]:
    """KV heads and head size of the layers that attend; a latent counts as one head."""
    mixers = [one.mixer for one in layers]
    for mixer in mixers:
        if isinstance(mixer, Attention):
            return mixer.kv_heads, mixer.head_dim
        if isinstance(mixer, Latent):
            return 1, mixer.rank + mixer.rope
        if isinstance(mixer, Compressed):
            return 1, mixer.head_dim
    return heads, max(1, hidden // heads)


def _context(fields: Fields, family: str) -> int:
    """Longest context: the config's own, stretched by RoPE scaling of the kinds that state the short length.

    As in vLLM: YaRN and Gemma 3 state the long one.
    """
    longest = fields.whole("max_position_embeddings", 2048, most=10**9)
    stated = fields.get("rope_scaling") or fields.get("rope_parameters")
    rows = [stated, *stated.values()] if isinstance(stated, Mapping) else []  # or one for each kind of layer
    stretch = 1.0
    for row in (row for row in rows if isinstance(row, Mapping) and row.get("factor") is not None):
        factor, kind = row["factor"], row.get("rope_type", row.get("type"))
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= MOST_STRETCH:
            raise wrong(fields.where, "rope_scaling.factor", factor, f"a number up to {MOST_STRETCH:g}")
        Fields(row, fields.where).whole("original_max_position_embeddings", longest, most=10**9)
        if kind in ("linear", "dynamic") and not family.startswith("gemma3"):
            stretch = factor
    return max(1, int(longest * stretch))


def divided(shape: Shape) -> tuple[Divided, ...]:
    """What tensor ranks must divide, each number once."""
    found: dict[Divided, None] = {}
    for layer in dict.fromkeys(shape.layers):
        mixer = layer.beside if isinstance(layer.beside, Mamba) else layer.mixer
        if isinstance(mixer, LinearAttention):
            found[Divided("key heads of linear attention", mixer.key_heads, "heads")] = None
            found[Divided("value heads of linear attention", mixer.value_heads, "heads")] = None
        elif isinstance(mixer, Mamba):
            found[Divided("Mamba heads", mixer.heads, "heads")] = None
        elif isinstance(mixer, DeltaAttention):
            found[Divided("heads of linear attention", mixer.heads, "heads")] = None
        elif isinstance(mixer, Mamba1):
            found[Divided("Mamba channels", mixer.inner, "heads")] = None
        elif isinstance(mixer, Compressed):
            found[Divided("groups of output projections", mixer.out_groups, "heads")] = None
        if layer.dense is not None:
            found[Divided("MLP width", layer.dense.width, "width")] = None
        if layer.experts is not None:
            found[Divided("width of each expert", layer.experts.width, "expert")] = None
            if layer.experts.shared:
                found[Divided("width of the shared experts", layer.experts.shared, "width")] = None
    return tuple(found)


def count(shape: Shape) -> Parts:
    """Parameters part by part."""
    sums = count_layers(shape.layers, shape.hidden)
    sums["small"] += shape.around
    return Parts(**{**sums, "embedding": shape.tables, "head": shape.head, "tower": shape.tower})


def active(shape: Shape, counted: Parts) -> int:
    """Parameters that one token of text passes, the table of embeddings among them as most publishers count."""
    visited = sum(one.experts.visited(shape.hidden) for one in shape.layers if one.experts)
    return counted.total - counted.tower - counted.experts + visited


def drafting_parameters(shape: Shape) -> int:
    """Of the layers for multi-token prediction, with the matrix that joins two hidden states."""
    if not shape.drafting:
        return 0
    return sum(count_layers(shape.drafting, shape.hidden).values()) + 2 * shape.hidden**2


def stored_as(shape: Shape) -> Parts:
    """Bytes part by part: matrices as the checkpoint stores each, the rest in its wide type."""
    wide, quant = DTYPE_BYTES[shape.dtype], shape.quantisation
    counted = count(shape)
    sums: Counter[str] = Counter()
    modules: dict[ModelLayer, list[Module]] = {}
    narrow: dict[str, float] = {}
    for index, layer in enumerate(shape.layers):
        if layer not in modules:
            modules[layer] = [one for one in layer.modules(shape.hidden) if one.matrix]
        for module in modules[layer]:
            size = quant.matrix_bytes(f"layers.{index}.{module.name}", wide) if quant.method else wide
            narrow[module.part] = narrow.get(module.part, 0.0) + module.parameters * (size - wide)
    for part, parameters in vars(counted).items():
        sums[part] = round(parameters * wide + narrow.get(part, 0.0))
    if quant.method:
        sums["head"] = round(counted.head * _head_bytes(quant, wide))
    return Parts(**sums)


def _head_bytes(quant: Quantisation, wide: float) -> float:
    found = quant.others.get("lm_head")
    return format_bytes(*found, wide) if found else wide


def converted(parts: Parts, weights: str, wide: float, group: int = 0) -> Parts:
    """Bytes of parameters whose matrices are all brought to one format, as vLLM does while loading."""
    narrow = format_bytes(weights, group, wide, group > 0)
    matrices = ("query_output", "key_value", "mlp", "experts", "mixer", "copied")
    return Parts(**{name: round(n * (narrow if name in matrices else wide)) for name, n in vars(parts).items()})
