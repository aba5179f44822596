"""Makes a tiny random Llama on the fly: a real architecture, a byte-level tokenizer, no torch and no download.

Hidden size 128, 4 layers, 8 heads of 32, 4 KV heads, so tensor parallel 2 and pipeline parallel 2 are possible.
"""

from __future__ import annotations

import json
import math
import random
import struct
from array import array
from pathlib import Path

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 128, 256, 4, 8, 4, 32, 272
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_llama(folder: Path, context: int = 2048, dtype: str = "bfloat16", **changes: object) -> Path:
    """Write the model folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": dtype,
        "transformers_version": "5.0.0",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": 257}))
    _write_tokenizer(folder)
    write_weights(folder / "model.safetensors", _shapes(), dtype)
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{at}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
        }
    return shapes


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    """Random weights; those of norms are 1."""
    source = random.Random(7)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    pieces: list[bytes] = []
    offset = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        norm = "norm" in name
        spread = 1.0 if "embed" in name else 2.5 / math.sqrt(shape[-1])
        values = array("f", [1.0] * count if norm else [source.gauss(0, spread) for _ in range(count)])
        data = values.tobytes() if dtype == "float32" else _to_bf16(values)
        header[name] = {
            "dtype": "F32" if dtype == "float32" else "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        pieces.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(pieces))


def _to_bf16(values: array[float]) -> bytes:
    halves = array("H", values.tobytes())
    return halves[1::2].tobytes()  # the upper half of each little-endian float


def _write_tokenizer(folder: Path) -> None:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    vocab = {signs[byte]: byte for byte in range(256)}
    special = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>"]
    added = [
        {"id": 256 + n, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True} for n, text in enumerate(special)
    ]  # fmt: skip
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
