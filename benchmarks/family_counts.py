"""What transformers counts for the families of models that it has: configs with their numbers of parameters.

    ENGINE_PYTHON benchmarks/family_counts.py [FAMILY…]

Of each family that writes text, and of the encoders that vLLM serves, a default config with few layers and two that
differ from it in every number and in every switch that transformers accepts are built on torch's meta device, which
takes no memory. `tests/data/family_counts.json` gets their configs as `save_pretrained` writes them, cut to what may
decide sizes, and their numbers of parameters; `tests/unit/test_family_counts.py` compares the reader with them.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSpeechSeq2Seq
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as WRITERS

FILE = Path(__file__).parent.parent / "tests/data/family_counts.json"
ENCODERS = {
    "bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel", "camembert": "CamembertModel",
    "mpnet": "MPNetModel", "nomic_bert": "NomicBertModel", "modernbert": "ModernBertModel",
}  # fmt: skip
SPEECH = {"whisper": "WhisperForConditionalGeneration"}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
FEW = 6
# what a default lacks to be a model, or to have layers of all kinds
MIXED = {"num_hidden_layers": 6, "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2}
CONVOLUTIONS = {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2}
GIVEN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 4]}, "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 4}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False}},
    "gemma4_text": {"num_kv_shared_layers": 2, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 512},
    "glm4_moe": {"head_dim": 128}, "granitemoehybrid": MIXED,
    "hunyuan_v1_dense": {"head_dim": 128}, "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8},
    "kimi_linear": {**MIXED, "pad_token_id": 0}, "nemotron": {"num_key_value_heads": 8},
    "minimax_m3_vl_text": {"num_hidden_layers": 6, "layer_types": ["full_attention", "minimax_m3_sparse"] * 3},
    "longcat_flash": {"zero_expert_num": 0},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
}  # fmt: skip
# what transformers reads otherwise than vLLM, or not at all
ALONE = {
    "dbrx": ("num_key_value_heads",), "deepseek_v4": ("n_shared_experts",), "helium": ("head_dim",),
    "kimi_linear": ("tie_word_embeddings",), "laguna": ("gating",),
    "nemotron_h": ("n_shared_experts", "tie_word_embeddings"),
}  # fmt: skip
# what the second config of a family has another number of: a factor, or the number itself
NUMBERS: dict[str, float] = {
    "vocab_size": 0.25, "intermediate_size": 1.5, "ffn_dim": 1.5, "n_inner": 3072, "ffn_hidden_size": 1.5,
    "moe_intermediate_size": 0.5, "num_key_value_heads": 0.5, "num_kv_heads": 0.5, "head_dim": 2, "v_head_dim": 0.5,
    "num_experts": 12, "num_local_experts": 12, "n_routed_experts": 12, "moe_num_experts": 12,
    "num_experts_per_tok": 3, "n_shared_experts": 3, "num_shared_experts": 3, "moe_num_shared_experts": 3,
    "shared_intermediate_size": 1.5, "shared_expert_intermediate_size": 1.5, "first_k_dense_replace": 2,
    "num_dense_layers": 2, "q_lora_rank": 0.5, "kv_lora_rank": 0.5, "mamba_d_state": 32, "mamba_d_conv": 3,
    "mamba_n_groups": 2, "state_size": 32, "n_groups": 4, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 64, "linear_num_value_heads": 2, "linear_key_head_dim": 0.5, "conv_L_cache": 5,
    "index_n_heads": 0.5, "dense_intermediate_size": 1.5, "decoder_sparse_step": 2, "max_position_embeddings": 4096,
    "n_positions": 4096,
}  # fmt: skip
SWITCHES = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "bias", "qkv_bias", "use_qkv_bias",
    "use_qk_norm", "qk_layernorm", "add_bias_linear", "alibi", "new_decoder_architecture", "multi_query",
    "parallel_attn", "mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "projectors_bias", "use_conv_bias",
    "conv_bias", "lm_head_bias", "use_parallel_residual", "attention_out_bias", "enable_bias", "enable_moe_block",
    "attention_k_eq_v", "use_double_wide_mlp", "no_bias", "gating", "norm_bias", "hidden_size_per_layer_input",
    "do_layer_norm_before", "num_kv_shared_layers",
)  # fmt: skip
# what every config of transformers has, and what decides no size
COMMON = {*transformers.PreTrainedConfig().to_dict(), "rope_parameters", "rope_scaling"} - {
    "model_type", "architectures", "tie_word_embeddings"
}  # fmt: skip
NOISE = re.compile(
    r"token|dropout|use_cache|_cross_attention|is_decoder|output_router|return_|scale_emb|summary|mask_"
)
STRINGS = ("model_type", "architectures", "act", "type", "dtype", "norm")


def parameters(family: str, changes: dict[str, Any]) -> tuple[Any, int] | None:
    """The config and what its model has; None where transformers refuses it."""
    made = AutoModelForCausalLM.from_config
    more = {}
    if family in ENCODERS:
        made, more = (
            AutoModel.from_config,
            {} if family in ("modernbert", "nomic_bert") else {"add_pooling_layer": False},
        )
    elif family in SPEECH:
        made = AutoModelForSpeechSeq2Seq.from_config
    try:
        config = CONFIG_MAPPING[family](**changes)
        if hasattr(config, "vision_config") and config.vision_config is not None:
            made = AutoModelForImageTextToText.from_config
        with torch.device("meta"):
            model = made(config, **more)
        model.tie_weights()
    except Exception as error:  # each family has its own way to refuse
        sys.stderr.write(f"{family} {changes}: {str(error)[:200]}\n")
        return None
    return config, sum(one.numel() for one in model.parameters())


def variants(family: str) -> list[tuple[Any, int]]:
    """Few layers; other numbers; other switches."""
    small: dict[str, Any] = dict(GIVEN.get(family, {}))
    first = parameters(family, small)
    if first is None:
        return []
    given = first[0].to_dict()
    alone = (*ALONE.get(family, ()), *(["tie_word_embeddings"] if "text_config" in given else []))
    for name in LAYERS:
        if isinstance(given.get(name), int) and name not in small:
            few = {**small, name: FEW}
            small = few if parameters(family, few) else small
    found, many = [small], dict(small)
    for name, value in NUMBERS.items():
        now = given.get(name)
        if isinstance(now, int) and now and name not in alone:
            other = max(1, int(now * value)) if value < 2 or name in ("head_dim", "linear_num_value_heads") else value
            if parameters(family, {**many, name: other}):
                many[name] = other
    found.append(many)
    turned = dict(small)
    for name in SWITCHES:
        now = given.get(name)
        if type(now) in (bool, int) and name not in alone and parameters(family, {**turned, name: not now}):
            turned[name] = not now if isinstance(now, bool) else 0
    found.append(turned)
    rows = [parameters(family, changes) for changes in found]
    return [row for row in rows if row is not None]


def reduced(config: dict[str, Any]) -> dict[str, Any]:
    """What may decide sizes: as the reader sees it, nested configs too."""
    kept = {}
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            kept[name] = reduced(value)
        elif name in COMMON or NOISE.search(name) or value is None or isinstance(value, float) or value in ([], {}):
            continue
        elif not isinstance(value, str) or any(word in name for word in STRINGS):
            kept[name] = value
    return kept


def architecture(family: str) -> str:
    name = {**WRITERS, **ENCODERS, **SPEECH}[family]
    return name if isinstance(name, str) else name[0]


def served(name: str) -> bool:
    """Whether vLLM's registry has the architecture."""
    spec = find_spec("vllm")
    text = (
        (Path(spec.origin).parent / "model_executor/models/registry.py").read_text() if spec and spec.origin else ""
    )
    return f'"{name}": (' in text


def main(*names: str) -> None:
    rows: list[dict[str, Any]] = []
    for family in names or sorted({*WRITERS, *ENCODERS, *SPEECH}):
        made = architecture(family)
        configs = []
        for config, number in variants(family):
            row = [{**reduced(json.loads(config.to_json_string())), "architectures": [made]}, number]
            if row not in configs:
                configs.append(row)
        if not configs:
            sys.stdout.write(f"{family}: transformers makes no model of its default\n")
            continue
        rows.append({"family": family, "served": served(made), "configs": configs})
        sys.stdout.write(f"{family}: {[number for _, number in configs]}\n")
    if names:
        found = json.loads(FILE.read_text())["families"]
        rows = sorted([*rows, *(row for row in found if row["family"] not in names)], key=lambda row: row["family"])
    said = {"transformers": transformers.__version__, "vllm": metadata.version("vllm")}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    FILE.write_text(f'{{"versions": {json.dumps(said)},\n"families": [\n{lines}\n]}}\n')
    sys.stdout.write(f"{FILE}: {len(rows)} families, {FILE.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
