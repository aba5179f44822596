"""Tiny random models of other kinds, with the tokenizer of `tiny_llama`: a mixture of experts, and one that sees."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny_llama import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, make_tiny_llama, write_weights

EXPERTS, PER_TOKEN, WIDTH = 8, 2, 64
IMAGE, IMAGE_TOKEN, PATCH, TOWER, QUERIES = 32, 261, 16, 64, 4


def make_tiny_moe(folder: Path) -> Path:
    """A Qwen3 mixture of experts: two layers of eight experts, of which a token uses two."""
    layers = 2
    make_tiny_llama(
        folder, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_hidden_layers=layers,
        num_experts=EXPERTS, num_experts_per_tok=PER_TOKEN, moe_intermediate_size=WIDTH, decoder_sparse_step=1,
        norm_topk_prob=True, mlp_only_layers=[], intermediate_size=256,
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            **_attention(at),
            f"{at}self_attn.q_norm.weight": (HEAD_DIM,),
            f"{at}self_attn.k_norm.weight": (HEAD_DIM,),
            f"{at}mlp.gate.weight": (EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            one = f"{at}mlp.experts.{expert}."
            shapes |= {
                f"{one}gate_proj.weight": (WIDTH, HIDDEN),
                f"{one}up_proj.weight": (WIDTH, HIDDEN),
                f"{one}down_proj.weight": (HIDDEN, WIDTH),
            }
    write_weights(folder / "model.safetensors", shapes, "bfloat16")
    return folder


def make_tiny_blip(folder: Path) -> Path:
    """A BLIP-2 before a tiny Llama, for `--load-format dummy`; its module in vLLM needs no torchvision."""
    make_tiny_llama(folder)
    text = json.loads((folder / "config.json").read_text())
    vision = {"model_type": "blip_2_vision_model", "image_size": IMAGE, "patch_size": PATCH}
    sizes = {"hidden_size": TOWER, "intermediate_size": 2 * TOWER, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {
        "architectures": ["Blip2ForConditionalGeneration"], "model_type": "blip-2", "text_config": text,
        "vision_config": {**vision, **sizes}, "num_query_tokens": QUERIES, "image_token_index": IMAGE_TOKEN,
        "qformer_config": {"model_type": "blip_2_qformer", "encoder_hidden_size": TOWER, "vocab_size": 32, **sizes},
        "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "BlipImageProcessor", "processor_class": "Blip2Processor", "do_resize": True,
        "size": {"height": IMAGE, "width": IMAGE}, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
        "rescale_factor": 1 / 255, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }))  # fmt: skip
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": QUERIES}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": IMAGE_TOKEN, "content": "<image>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def _attention(at: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{at}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{at}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{at}input_layernorm.weight": (HIDDEN,),
        f"{at}post_attention_layernorm.weight": (HIDDEN,),
    }
