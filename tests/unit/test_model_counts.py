"""Models that people serve: what their configs count to, against what their publishers say.

The catalogue has the fields of their configs, `tests/data/model_configs.json` those of models that are not in it.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.base.errors import CorralError, UncountedError
from corral.base.record import to_json
from corral.cli import root
from corral.plan.candidate import broken_layout, layouts
from corral.plan.choose import make_plan
from corral.plan.contract import EngineSettings, Goal, Parallel
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.kv_pool import pool_of
from corral.plan.models import catalogue
from corral.plan.models.facts import ModelFacts, facts_from_config, facts_from_folder, read_facts
from corral.plan.models.weights import Tensor, is_loaded
from corral.plan.settings import read_fixed
from tests.unit.conftest import Corral

REPOSITORY = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = [
    row
    for file in ("src/corral/data/models.json", "tests/data/model_configs.json")
    for row in json.loads((REPOSITORY / file).read_text(encoding="utf-8"))
]
SEVERAL = json.loads((REPOSITORY / "tests/data/family_counts.json").read_text(encoding="utf-8"))["families"]
CONFIGS: list[dict[str, Any]] = [
    *(row["config"] for row in ROWS), *(row["configs"][-1][0] for row in SEVERAL if row["served"])
]  # fmt: skip
# two checkpoints of one model, of which one is said to have 30 and the other 31.6 billion parameters
CONTRADICTORY = ("nvidia-nemotron-3-nano-30b-a3b-bf16", "nvidia-nemotron-3.5-lightning-30b-a3b-nvfp4")


def facts(name: str) -> ModelFacts:
    row = next(row for row in ROWS if row["name"] == name)
    return facts_from_config(row["config"], name, row["repo"], "hub")


def agrees(counted: float, published: float, within: float) -> bool:
    """Within a share of the published figure, or as near as its digits can say."""
    text = f"{published:.15g}"
    unit = 0.1 ** len(text.partition(".")[2]) if "." in text else 1.0
    return abs(counted - published) <= max(within * published, unit / 2)


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_parameters_are_as_published(row: dict[str, Any]) -> None:
    counted = facts(row["name"])
    published = 31.6 if row["name"] in CONTRADICTORY else row["published_b"]  # of the two figures, the more exact
    assert agrees(counted.parameters / 1e9, published, 0.003 if row["name"] in CONTRADICTORY else 0.03)
    if row["published_active_b"] and row["name"] not in CONTRADICTORY:
        # publishers differ in whether the table of embeddings, or the head too, counts as active
        ends = (0, counted.counted.embedding, counted.counted.embedding + counted.counted.head)
        active = [(counted.active_parameters - end) / 1e9 for end in ends]
        assert any(agrees(one, row["published_active_b"], 0.05) for one in active)


def test_there_are_as_many_as_people_serve() -> None:
    assert len(ROWS) >= 65 + 20
    assert {entry.task for entry in catalogue.entries().values()} == {"generate", "embed", "rerank"}


# what a token keeps, in bytes of 16-bit numbers: by hand from what each paper or config says
KEPT = {
    "deepseek-v3": 61 * (512 + 64) * 2,
    "deepseek-v3.2": 61 * ((512 + 64) * 2 + 128 + 4),  # and the keys of its indexer, in FP8 with a scale
    "qwen3-30b-a3b": 2 * 48 * 4 * 128 * 2,
    "gpt-oss-20b": 2 * 24 * 8 * 64 * 2,
    "gemma-3-27b-it": 2 * 62 * 16 * 128 * 2,
    "gemma-4-26b-a4b": 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512),
    "qwen3.5-35b-a3b": 2 * 10 * 2 * 256 * 2,  # ten of its forty layers attend
    "nemotron-h-56b-base-8k": 2 * 10 * 8 * 128 * 2,
    "bge-m3": 0,
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_token_keeps(name: str) -> None:
    assert facts(name).kv_bytes_per_token() == KEPT[name]


def test_states_do_not_grow_and_windows_end() -> None:
    hybrid, windows = facts("qwen3.5-35b-a3b"), facts("gpt-oss-20b")
    state = 30 * (4 * 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    assert hybrid.state_bytes == state
    assert hybrid.kept_bytes(1000) == state + 1000 * KEPT["qwen3.5-35b-a3b"]
    one = 2 * 8 * 64 * 2
    assert windows.kept_bytes(10_000) == 12 * one * 10_000 + 12 * one * 128


SIZES = {  # GB of the checkpoints' weights, without layers for multi-token prediction
    "deepseek-v3": 673, "gpt-oss-120b": 65.2, "gpt-oss-20b": 13.8, "kimi-k2.5": 595, "qwen3-235b-a22b-fp8": 236,
    "kimi-k2.5-nvfp4": 591, "deepseek-v4-flash": 156, "qwen3-32b-fp8": 34.3, "qwen3.6-27b-nvfp4": 21.1,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_bytes_go_by_what_each_matrix_is_stored_in(name: str) -> None:
    assert facts(name).weights_bytes / 1e9 == pytest.approx(SIZES[name], rel=0.01)


def test_the_quantisation_may_be_said_in_a_file_of_its_own(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row["name"] == "qwen3-235b-a22b-nvfp4")
    (tmp_path / "config.json").write_text(json.dumps(row["config"]))
    assert facts_from_folder(tmp_path).weights == "bf16"
    said = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": said}))
    found = facts_from_folder(tmp_path)
    assert (found.weights, found.quantisation) == ("nvfp4", "modelopt")
    assert 130e9 < found.weights_bytes < 140e9


def test_a_config_with_infinities_is_read(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row["name"] == "nemotron-h-56b-base-8k")
    (tmp_path / "config.json").write_text(json.dumps({**row["config"], "time_step_limit": [0.0, float("inf")]}))
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert facts_from_folder(tmp_path).parameters == pytest.approx(56.3e9, rel=0.01)


def test_layers_that_only_speculation_loads_do_not_count() -> None:
    names = ("model.layers.60.mlp.down_proj.weight", "model.layers.61.eh_proj.weight", "mtp.layers.0.fc.weight")
    assert [is_loaded(Tensor(name, "BF16", 1), 61) for name in names] == [True, False, False]
    assert is_loaded(Tensor("visual.blocks.70.attn.qkv.weight", "BF16", 1), 61)


@pytest.mark.parametrize(
    "change",
    [{"kda_state_size": 64}, {"linear_attn_config": {"kda_layers": [1]}}, {"layer_types": ["spiral"] * 36},
     {"hidden_act": "xielu", "model_type": "new"}, {"vision_config": {"model_type": "eye"}}],
)  # fmt: skip
def test_what_is_not_understood_never_fits(change: dict[str, Any], tmp_path: Path, corral: Corral) -> None:
    row = next(row for row in ROWS if row["name"] == "qwen3-8b")
    config = {**row["config"], **change}
    if "vision_config" in change:
        config["text_config"] = row["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UncountedError):
        facts_from_folder(tmp_path)
    done = corral("plan", str(tmp_path), "--gpus", "8xH200")
    assert done.code == 11
    assert "cannot be counted from its config" in done.err
    assert "--weights-gib" in done.err
    assert corral("plan", str(tmp_path), "--gpus", "8xH200", "--weights-gib", "16").code == 0


PLAIN = {
    "model_type": "new", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "hidden_act": "silu",
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("change", "context"),
    [({"rope_scaling": LINEAR}, 16384), ({"rope_parameters": {**LINEAR, "rope_theta": 1e6}}, 16384),
     ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048),
     ({"model_type": "gemma3_text", "rope_scaling": LINEAR}, 2048),
     ({"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}}, 16384)],
)  # fmt: skip
def test_the_longest_context_is_the_one_that_vllm_takes(change: dict[str, Any], context: int) -> None:
    config = {**PLAIN, "max_position_embeddings": 2048, **change}
    assert facts_from_config(config, "plain", "plain", "hub").max_context == context


NOT_UNDERSTOOD: dict[str, dict[str, Any]] = {
    "Kimi Linear": {"linear_attn_config": {"kda_layers": [1], "head_dim": 128}, "kv_lora_rank": 512,
                    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "Jamba, half": {"attn_layer_period": 8, "expert_layer_period": 2, "mamba_d_state": 16, "num_experts": 16},
    "StarCoder 2": {"hidden_act": "gelu_pytorch_tanh"},
    "Llama 3.2 Vision": {"cross_attention_layers": [1, 3]},
    "Zamba 2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2, "mamba_d_state": 64},
    "RecurrentGemma": {"block_types": ["recurrent", "attention"], "lru_width": 2560, "conv1d_width": 4},
    "HY 4": {"hc_mult": 4, "hc_magnitude": 2.0},
    "JetMoE": {"kv_channels": 128, "num_local_experts": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_families_that_are_not_understood_are_refused(name: str) -> None:
    assert facts_from_config(PLAIN, "plain", "plain", "hub").known
    with pytest.raises(UncountedError):
        facts_from_config({**PLAIN, **NOT_UNDERSTOOD[name]}, name, name, "hub")


_VALUE = st.one_of(st.none(), st.booleans(), st.integers(-3, 10**9), st.floats(), st.text(max_size=5),
                   st.lists(st.integers(-1, 3), max_size=3), st.just({}), st.just({"a": [1]}))  # fmt: skip


@settings(max_examples=150)
@given(st.data())
def test_damaged_configs_end_in_facts_or_in_a_sentence(data: st.DataObject) -> None:
    config = json.loads(json.dumps(data.draw(st.sampled_from(CONFIGS))))
    for _ in range(data.draw(st.integers(1, 3))):
        inner = [one for one in (config, *config.values()) if isinstance(one, dict) and one]
        place = data.draw(st.sampled_from(inner))
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(_VALUE)
    with contextlib.suppress(CorralError):
        found = facts_from_config(config, "damaged", "damaged", "hub")
        assert found.parameters > 0
        assert json.dumps(to_json(found))


def test_a_gpu_is_not_enough_for_deepseek_and_eight_are() -> None:
    model = facts("deepseek-v3")
    assert not make_plan(model, parse_gpus("1xH200")).fits
    plan = make_plan(model, parse_gpus("8xH200"))
    assert plan.fits
    assert plan.memory.weights_bytes_per_gpu > 78e9
    assert "not measured with such models" in plan.speed.basis


SETTINGS = EngineSettings(0.92, 8192, 256)


def test_latents_are_on_every_tensor_rank() -> None:
    model = facts("deepseek-v3")
    assert model.kv_bytes_per_token(2.0, 8) == model.kv_bytes_per_token(2.0, 1)
    one, eight = (pool_of(model, SETTINGS, 65_536, Parallel(tensor), 2.0) for tensor in (1, 8))
    assert one == eight


def test_pages_of_several_kinds_are_equally_large() -> None:
    """As vLLM groups them: 25 layers with windows and 5 without; ten that attend and thirty with a state."""
    gemma, hybrid = facts("gemma-4-26b-a4b"), facts("qwen3.5-35b-a3b")
    pool = pool_of(gemma, SETTINGS, 65_536, Parallel(), 2.0)
    assert pool.group == 5
    assert pool.block_bytes == 5 * 16 * 2 * 8 * 256 * 2  # the wider head of full attention: twice the tokens
    assert pool.needed == 65_536 // 32 + 5 * (-(-(1024 - 1 + 2 * 8192) // 16) + 1)
    pool = pool_of(hybrid, SETTINGS, 65_536, Parallel(), 2.0)
    state = hybrid.state_bytes // 30
    tokens = -(-state // (16 * 2 * 2 * 256 * 2)) * 16
    assert pool.group == 10
    assert pool.needed == -(-65_536 // tokens) + 3 * 2  # two pages of states in each group of layers


def test_a_block_of_fp8_is_not_cut() -> None:
    model = facts("qwen3-235b-a22b-fp8")
    assert broken_layout(model, Parallel(4)) is None
    why = broken_layout(model, Parallel(8)) or ""
    assert "192" in why
    assert "no multiple of the FP8 block of 128" in why
    assert broken_layout(model, Parallel(8, expert=True)) is None
    refused = make_plan(model, parse_gpus("8xH200"), Goal(), {"tensor": 8, "expert": False})
    assert not refused.fits
    assert refused.verdict == "cannot run as asked"
    taken = make_plan(model, parse_gpus("8xH200"), Goal(), {"tensor": 8})
    assert taken.parallel.expert
    assert "--enable-expert-parallel" in taken.engine_args
    asked = ("plan", model.name, "--gpus", "8xH200", "--offline", "--set", "tensor=8")
    assert "--set expert=true" in CliRunner().invoke(root, asked).output


def test_experts_are_divided_over_all_ranks_of_an_engine() -> None:
    model = facts("qwen3-30b-a3b")
    replicas = make_plan(model, parse_gpus("8xH100"), Goal(), {"tensor": 2, "data": 4})
    alone = make_plan(model, parse_gpus("8xH100"), Goal(), {"tensor": 2, "pipeline": 1, "data": 1})
    assert replicas.memory.weights_bytes_per_gpu < alone.memory.weights_bytes_per_gpu
    because = {reason.field: reason.because for reason in replicas.reasons}
    assert "independently" not in because["parallel.data"]
    assert "divided over all 8 GPUs" in because["parallel.data"]
    dense = make_plan(facts("qwen3-8b"), parse_gpus("8xH100"), Goal(), {"data": 8})
    assert "independently" in next(r.because for r in dense.reasons if r.field == "parallel.data")


@pytest.mark.parametrize(
    ("goal", "wanted"), [("balanced", Parallel(2, 1, 4, expert=True)), ("latency", Parallel(8)),  # DP8: 2% less
                         ("throughput", Parallel(1, 1, 8, expert=True))],
)  # fmt: skip
def test_deepseek_on_eight_h200_is_laid_out_as_the_recipes_deploy_it(goal: str, wanted: Parallel) -> None:
    plan = make_plan(facts("deepseek-v3"), parse_gpus("8xH200"), Goal(goal=goal))
    assert plan.parallel == wanted
    if wanted.expert:
        assert "--enable-expert-parallel" in plan.engine_args
        because = {reason.field: reason.because for reason in plan.reasons}
        assert "data-parallel ranks" in because["parallel.expert"]


def test_stages_of_data_parallel_ranks_of_experts_are_made_only_where_they_are_set() -> None:
    model = facts("qwen3-235b-a22b-fp8")
    free = list(layouts(model, parse_gpus("8xH200x2"), read_fixed({})))
    assert any(one.pipeline > 1 for one in free)
    assert not [one for one in free if one.pipeline > 1 and one.data > 1]
    asked = make_plan(model, parse_gpus("8xH200x2"), Goal(), {"tensor": 4, "pipeline": 2, "data": 2})
    assert asked.fits
    assert (asked.parallel.pipeline, asked.parallel.data) == (2, 2)


def test_experts_of_a_dense_model_are_refused_in_a_sentence() -> None:
    plan = make_plan(facts("qwen3-8b"), parse_gpus("8xH100"), Goal(), {"expert": True})
    assert not plan.fits
    assert "qwen3-8b has none" in plan.reason


def test_an_encoder_has_no_cache_and_no_tokens_a_second() -> None:
    for hardware in ("1xH100", "1xL4"):
        plan = make_plan(facts("bge-m3"), parse_gpus(hardware))
        assert plan.fits
        assert (plan.memory.kv_cache_tokens, plan.speed.decode_tokens_per_s) == (0, None)
        assert plan.judged == ()


def test_a_plan_needs_no_network_for_a_model_of_the_catalogue() -> None:
    assert read_facts("deepseek-ai/DeepSeek-V3", offline=True).source == "catalogue"
    done = CliRunner().invoke(root, ["plan", "zai-org/GLM-5-FP8", "--gpus", "8xH200", "--nodes", "2", "--offline"])
    assert done.exit_code == 0, done.output
