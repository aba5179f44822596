"""Families of models: what their configs count to, against the parameters of the models that transformers makes.

`benchmarks/family_counts.py` writes `tests/data/family_counts.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import UncountedError
from corral.plan.models.facts import facts_from_config

DATA = json.loads((Path(__file__).parents[1] / "data/family_counts.json").read_text(encoding="utf-8"))
FAMILIES: dict[str, dict[str, Any]] = {row["family"]: row for row in DATA["families"]}
# families that vLLM serves and that are refused, and what is not understood
REFUSED = {
    "hrm_text": "num_layers_per_stack",
    "hy_v4": "hc_mult",
    "inkling_text": "hybrid_sliding",
    "whisper": "num_hidden_layers",
    "zamba2": "layers_block_type",
}


def differences(family: str) -> list[float]:
    """Of what is counted from what transformers has, as shares, for each config of the family."""
    rows = FAMILIES[family]["configs"]
    return [facts_from_config(config, family, family, "hub").parameters / n - 1 for config, n in rows]


@pytest.mark.parametrize("family", sorted(row["family"] for row in DATA["families"] if row["served"]))
def test_what_vllm_serves_is_counted_as_transformers_makes_it(family: str) -> None:
    if family in REFUSED:
        with pytest.raises(UncountedError, match=f"cannot be counted from its config: .*{REFUSED[family]}"):
            differences(family)
    else:
        assert max(map(abs, differences(family))) < 0.001


def test_no_family_is_counted_wrong() -> None:
    read = []
    for family in FAMILIES:
        try:
            assert max(map(abs, differences(family))) < 0.001, family
        except UncountedError:
            continue
        read.append(family)
    assert len(read) >= 116


# the same layers as their publishers' own code spells them
PUBLISHED: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        "linear_attn_config": {"kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6], "num_heads": 32,
                               "head_dim": 128, "short_conv_kernel_size": 4},
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_expert_group": 1,
    },
    "minimax_m3_vl_text": {
        "sparse_attention_config": {"use_sparse_attention": True, "sparse_index_dim": 128, "sparse_topk_blocks": 16,
                                    "sparse_num_index_heads": 4, "sparse_attention_freq": [0, 1, 0, 1, 0, 1]},
        "moe_layer_freq": [1] * 6,
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
        "add_swa_attention_sink_bias": True,
    },
    "lfm2": {"full_attn_idxs": [2, 5]},
}  # fmt: skip
INSTEAD = (
    "layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim",
    "index_n_heads", "index_head_dim", "index_block_size", "index_local_blocks", "index_topk_blocks",
)  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_both_spellings_of_a_family_are_one_model(family: str) -> None:
    config = FAMILIES[family]["configs"][0][0]
    other = {name: value for name, value in config.items() if name not in INSTEAD}
    ours, theirs = (facts_from_config(one, family, family, "hub") for one in (config, {**other, **PUBLISHED[family]}))
    assert ours.counted == theirs.counted
    assert set(ours.caches) == set(theirs.caches)


# of one layer for one sequence, as the models' own `get_mamba_state_shape_from_config` has them in vLLM 0.32.0
STATES = {
    "jamba": 557_056, "falcon_h1": 70_144, "mamba": 161_280, "mamba2": 574_976, "nemotron_h": 4_249_600,
    "qwen3_next": 1_110_016, "olmo_hybrid": 604_800, "lfm2_moe": 16_384, "granitemoehybrid": 557_568,
    "kimi_linear": 2_170_880,
}  # fmt: skip


@pytest.mark.parametrize("family", STATES)
def test_states_are_as_large_as_in_vllm(family: str) -> None:
    caches = facts_from_config(FAMILIES[family]["configs"][1][0], family, family, "hub").caches
    assert {one.state_bytes for one in caches if one.state_bytes} == {STATES[family]}


def test_lfm2_as_it_was_published() -> None:
    """Names that only its publisher uses; 1.17 billion parameters, as its page says."""
    config = {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True,
        "block_dim": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
        "block_use_swiglu": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
        "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "torch_dtype": "bfloat16", "vocab_size": 65536,
    }  # fmt: skip
    model = facts_from_config(config, "lfm2", "lfm2", "folder")
    assert model.parameters == 1_170_340_608
    assert [(cache.kind, cache.layers) for cache in model.caches] == [("state", 10), ("full", 6)]
