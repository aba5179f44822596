"""The parts of a model that read images or sound before the language model does, counted from their own configs.

Families differ in names and in the part that joins both sides, which is small. A tower whose width or depth its
config does not say counts as unknown: the caller refuses the model instead of leaving the tower out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WIDTH = ("hidden_size", "vt_hidden_size", "embed_dim", "d_model")
_DEPTH = ("depth", "num_hidden_layers", "vt_num_hidden_layers", "encoder_layers", "num_layers")
_INNER = ("intermediate_size", "vt_intermediate_size", "encoder_ffn_dim", "ff_dim")
_MOST = 1 << 20
_GATED = ("qwen2_5_vl", "gemma4_vision", "pixtral", "mistral3")  # model types whose MLP has a gate


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = next((config[name] for name in names if config.get(name) is not None), 0)
    return found if type(found) is int and 0 < found <= _MOST else 0


def tower_parameters(config: Mapping[str, Any], text_hidden: int) -> int | None:
    """Parameters of one tower and of what joins it to the language model; None where its config says too little."""
    width, depth, inner = _first(config, _WIDTH), _first(config, _DEPTH), _first(config, _INNER)
    if not width or not depth:
        return None
    if not inner:
        ratio = config.get("mlp_ratio")
        if not isinstance(ratio, (int, float)) or not 0 < ratio < 100:
            return None
        inner = int(width * ratio)
    matrices = 3 if str(config.get("model_type", "")) in _GATED else 2
    block = 4 * width * (width + 1) + matrices * width * inner + inner + 5 * width
    return depth * block + _patches(config, width) + _joining(config, width, text_hidden)


def _patches(config: Mapping[str, Any], width: int) -> int:
    """What turns patches into vectors, and the table of their positions."""
    patch = _first(config, ("patch_size",))
    channels = _first(config, ("in_channels", "in_chans", "num_channels")) or 3
    pixels = patch * patch * channels * (_first(config, ("temporal_patch_size",)) or 1)
    places = _first(config, ("num_position_embeddings",))
    height, across = _first(config, ("init_pos_emb_height",)), _first(config, ("init_pos_emb_width",))
    image = _first(config, ("image_size",))
    places = places or height * across or ((image // patch) ** 2 if image and patch else 0)
    places = places or 2 * _first(config, ("position_embedding_size",))
    return (pixels + places) * width


def _joining(config: Mapping[str, Any], width: int, text_hidden: int) -> int:
    """The part between: patches are merged, and each merger is two matrices; later layers may have their own."""
    kernel = config.get("merge_kernel_size")
    side = _first(config, ("spatial_merge_size",)) or (
        kernel[0] if isinstance(kernel, list) and kernel and type(kernel[0]) is int and 0 < kernel[0] < 64 else 0
    )
    if not side:
        return width * text_hidden
    merged = width * side * side
    deep = config.get("deepstack_visual_indexes")
    mergers = 1 + (len(deep) if isinstance(deep, list) else 0)
    return mergers * merged * (merged + (_first(config, ("out_hidden_size",)) or text_hidden))
