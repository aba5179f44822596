"""KV caches as planned and as vLLM makes them, on a CPU: small models of several kinds with random weights.

    benchmarks/model_kv.py ENGINE_PYTHON [NAME…]

Configs of the catalogue, and of families in `tests/data/family_counts.json`, are cut to a few layers and experts and
a small vocabulary; what a layer of the catalogue keeps of a token stays as it is. vLLM gets one GiB for its cache,
and its log says how many tokens that holds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from corral.plan.contract import EngineSettings, Parallel
from corral.plan.kv_pool import pool_of
from corral.plan.models import catalogue
from corral.plan.models.facts import facts_from_config

GIB = 1 << 30
CONTEXT, BATCHED = 4096, 1024
FEW = {"vocab_size": 2048, "num_experts_per_tok": 2}
CUTS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {**FEW, "num_hidden_layers": 4, "num_experts": 4},
    "deepseek-v3": {
        **FEW, "num_hidden_layers": 4, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "hidden_size": 1024,
        "moe_intermediate_size": 256, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "rope_theta": 10000, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    },
    "gpt-oss-20b": {
        **FEW, "num_hidden_layers": 4, "num_local_experts": 4, "experts_per_token": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma-3-1b-it": {"vocab_size": 2048, "num_hidden_layers": 12},
    "qwen3-next-80b-a3b-instruct": {
        **FEW, "num_hidden_layers": 8, "num_experts": 4, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6,
        "norm_topk_prob": True, "mlp_only_layers": [], "rope_theta": 1e7,
    },
    "nemotron-h-56b-base-8k": {
        "vocab_size": 2048, "num_hidden_layers": 8, "hybrid_override_pattern": "M-M*-M-*", "hidden_size": 1024,
        "intermediate_size": 2048, "mamba_num_heads": 32, "num_attention_heads": 16, "num_key_value_heads": 8,
    },
    "exaone4": {**FEW, "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 16,
                "num_key_value_heads": 4, "sliding_window": 512, "num_hidden_layers": 8,
                "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2},
    "gemma3_text": {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 1024, "sliding_window": 512,
                    "head_dim": 256, "num_hidden_layers": 12,
                    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2},
    "jamba": {**FEW, "hidden_size": 1024, "intermediate_size": 1024, "num_experts": 4, "num_hidden_layers": 8,
              "attn_layer_period": 4, "attn_layer_offset": 2, "num_attention_heads": 16, "num_key_value_heads": 8,
              "mamba_dt_rank": 64},
    "falcon_h1": {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 16,
                  "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 4, "mamba_n_heads": 32,
                  "mamba_d_head": 32, "mamba_d_state": 64, "mamba_n_groups": 1},
    "lfm2": {"vocab_size": 2048, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
             "intermediate_size": 1024, "num_hidden_layers": 6, "conv_dim": 1024,
             "block_dim": 1024, "block_ff_dim": 1024, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
             "block_auto_adjust_ff_dim": True},
    "granitemoehybrid": {**FEW, "hidden_size": 1024, "intermediate_size": 512, "shared_intermediate_size": 512,
                         "num_local_experts": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
                         "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1},
}  # fmt: skip
FAMILIES = Path(__file__).parent.parent / "tests/data/family_counts.json"
START = """
import os, sys
from vllm import LLM
LLM(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=int(sys.argv[2]),
    max_num_batched_tokens=int(sys.argv[3]), max_num_seqs=4, enforce_eager=True, dtype="bfloat16")
os._exit(0)
"""


def config_of(name: str) -> dict[str, Any]:
    entry = catalogue.find(name)
    if entry is None:  # a family
        rows = json.loads(FAMILIES.read_text(encoding="utf-8"))["families"]
        configs = next(row["configs"] for row in rows if row["family"] == name)
        base = {key: value for key, value in configs[1][0].items() if key != "time_step_limit"}
    else:
        base = dict(entry.config)
    config = {**base, **CUTS[name]}
    config.pop("quantization_config", None)  # experts in bf16: only the cache is compared
    return config


def reported(python: str, config: dict[str, Any]) -> int:
    """Tokens as vLLM's log has them."""
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
           "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        command = [python, "-c", START, folder, str(CONTEXT), str(BATCHED)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=folder, check=False)
    text = done.stdout + done.stderr
    tokens = re.search(r"KV cache size: ([\d,]+) tokens", text)
    if tokens is None:
        print(f"vLLM did not start:\n{text[-2000:]}", file=sys.stderr)
        return 0
    return int(tokens[1].replace(",", ""))


def planned(name: str, config: dict[str, Any]) -> int:
    """Tokens that one GiB holds, in blocks of 128 and one step at a time, as on vLLM's CPU platform."""
    facts = facts_from_config(config, name, name, "hub")
    settings = EngineSettings(0.92, BATCHED, 4, block_size=16 if facts.latent else 128, async_scheduling=False)
    pool = pool_of(facts, settings, CONTEXT, Parallel(), 2.0)
    return int(GIB // pool.block_bytes / pool.needed * CONTEXT)


def main(python: str, *names: str) -> None:
    print("| model, cut | planned tokens | vLLM's | |")
    print("|---|---|---|---|")
    for name in names or CUTS:
        config = config_of(name)
        mine, theirs = planned(name, config), reported(python, config)
        off = f"{100 * (mine / theirs - 1):+.2f}%" if theirs else "did not start"
        print(f"| {name} | {mine:,} | {theirs:,} | {off} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
