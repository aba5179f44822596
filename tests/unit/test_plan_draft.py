"""A draft of speculative decoding: where it is read from, and what a plan takes out of memory for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import UsageError
from corral.plan.candidate import Tuning
from corral.plan.choose import make_plan
from corral.plan.contract import EngineSettings, Goal, Parallel, Plan, Precision
from corral.plan.draft import Draft, DraftMethod, assumed_draft, draft_of_config, draft_of_model, read_draft
from corral.plan.hardware.inventory import GIB, parse_gpus
from corral.plan.kv_pool import pool_of
from corral.plan.measured import Observed, reconcile
from corral.plan.memory import measure
from corral.plan.models.facts import read_facts
from corral.plan.reasons import explain
from tests.unit.test_model_facts import safetensors_file

MODEL = read_facts("llama-3.1-8b", offline=True)
# as published for Llama 3.1 8B: one layer of the model's shape, and a small vocabulary
EAGLE3: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "draft_vocab_size": 32000,
}  # fmt: skip
LAYER = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336  # q, k, v; output; gate, up, down
SETTINGS = EngineSettings(0.92, 8192, 256)
HERE = parse_gpus("1xH200")


def said(folder: Path | str, method: str = "eagle3", tokens: int = 5) -> tuple[str, str]:
    config = {"method": method, "model": str(folder), "num_speculative_tokens": tokens}
    return "--speculative-config", json.dumps({name: value for name, value in config.items() if value})


def saved(folder: Path, config: dict[str, Any], tensors: dict[str, list[int]] | None = None) -> Path:
    """A draft's folder; of its tensors, in fp16, the header alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        safetensors_file(folder / "model.safetensors", {name: ("F16", shape) for name, shape in tensors.items()})
    return folder


def planned(draft: Draft | None, **fixed: object) -> Plan:
    return make_plan(MODEL, HERE, Goal(concurrency=16), {"max_model_len": 8192, **fixed}, Tuning(draft=draft))


def test_eagle3_by_its_config(tmp_path: Path) -> None:
    draft = read_draft(said(saved(tmp_path / "d", EAGLE3)), MODEL)
    assert draft is not None
    joined, first = 3 * 4096 * 4096, 4096 * (4096 + 2 * 1024)  # its first layer reads state and embedding
    assert draft.weights_bytes == 2 * (LAYER + first + joined + 4096 * 32000)
    assert draft.whole_bytes == 2 * joined
    assert draft.embedding_bytes == 2 * 4096 * 128256
    assert (draft.layers, draft.kv_layers, draft.kv_heads, draft.head_dim, draft.drafted) == (1, 1, 8, 128, 5)


def test_the_first_eagle_reads_the_head_of_the_model(tmp_path: Path) -> None:
    draft = read_draft(said(saved(tmp_path / "d", EAGLE3), "eagle"), MODEL)
    assert draft is not None
    assert draft.weights_bytes == 2 * (LAYER + 2 * 4096 * 4096)


def test_tensors_count_before_the_config_and_what_is_shared_does_not(tmp_path: Path) -> None:
    tensors = {"embed_tokens.weight": [128256, 4096], "fc.weight": [4096, 12288], "lm_head.weight": [32000, 4096],
               "midlayer.mlp.up_proj.weight": [14336, 4096], "t2d": [128256]}  # fmt: skip
    folder = saved(tmp_path / "d", EAGLE3, tensors)
    third, first = read_draft(said(folder), MODEL), read_draft(said(folder, "eagle"), MODEL)
    assert third is not None
    assert first is not None
    assert third.weights_bytes == 2 * (4096 * 12288 + 32000 * 4096 + 14336 * 4096)
    assert first.weights_bytes == 2 * (4096 * 12288 + 14336 * 4096)
    assert third.whole_bytes == 2 * 4096 * 12288


def test_a_draft_of_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    name = "someone/EAGLE3-wide"
    before = read_draft(said(name), MODEL)
    cached = tmp_path / "models--someone--EAGLE3-wide"
    saved(cached / "snapshots" / "abc", {**EAGLE3, "num_hidden_layers": 2})
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    after = read_draft(said(name, method=""), MODEL)  # the method is told by its name
    assert before is not None
    assert after is not None
    assert (before.layers, "is not on this machine" in before.doubt) == (1, True)
    assert (after.name, after.method, after.layers, after.kv_layers, after.doubt) == (name, "eagle3", 2, 2, "")


def test_a_draft_that_is_not_here_is_assumed_and_the_plan_warns() -> None:
    draft = read_draft(said("someone/on-the-hub"), MODEL)
    assert draft is not None
    assert draft == replace(draft_of_config(draft.name, DraftMethod.EAGLE3, 5, EAGLE3), doubt=draft.doubt)
    plan = planned(draft)
    assert any("someone/on-the-hub is not on this machine" in warning for warning in plan.warnings)
    assert any("`corral pull someone/on-the-hub`" in warning for warning in plan.warnings)
    assert plan.memory.draft_bytes_per_gpu == draft.weights_bytes
    elsewhere = read_draft(said("/there/draft"), MODEL)
    assert elsewhere is not None
    assert "give a folder of this machine" in elsewhere.doubt
    other = assumed_draft("someone/small", DraftMethod.MODEL, 3, MODEL)
    assert planned(other).memory == planned(None).memory
    assert any("its memory is not planned for" in warning for warning in planned(other).warnings)


@pytest.mark.parametrize("words", [
    (), ("--speculative-config", '{"method": "ngram"}'), ("--speculative-config", "[]"),
    ("--speculative-config", '{"method": "suffix", "model": "a/b"}'), ("--speculative-config", '{"model": 3}'),
])  # fmt: skip
def test_no_draft(words: tuple[str, ...]) -> None:
    assert read_draft(words, MODEL) is None


@pytest.mark.parametrize("config", ["{}", "[", '{"hidden_size": "x"}', json.dumps({**EAGLE3, "hidden_size": 0}),
                                    json.dumps({**EAGLE3, "num_attention_heads": 0})])  # fmt: skip
def test_a_config_that_says_nothing_is_left_to_vllm(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert read_draft(said(tmp_path), MODEL) is None


def test_arguments_that_are_not_json() -> None:
    with pytest.raises(UsageError, match="is not JSON"):
        read_draft(("--speculative-config", "{"), MODEL)


def test_the_plan_takes_weights_and_layer_out_of_the_cache() -> None:
    draft = draft_of_config("d", DraftMethod.EAGLE3, 3, EAGLE3)
    without, having = planned(None), planned(draft)
    assert having.memory.kv_bytes_per_token_per_gpu == without.memory.kv_bytes_per_token_per_gpu * 33 // 32
    lost = without.memory.kv_cache_bytes_per_gpu - having.memory.kv_cache_bytes_per_gpu
    states = 2 * having.settings.max_num_batched_tokens * (2 * 4096 + 3 * 4096)
    assert lost == draft.weights_bytes + states
    expected = having.memory.kv_cache_bytes_per_gpu / having.memory.kv_bytes_per_token_per_gpu
    assert having.memory.kv_cache_tokens == pytest.approx(expected, rel=1e-4)
    assert 0.95 < having.memory.kv_cache_tokens / without.memory.kv_cache_tokens < 0.965  # 32/33, and 1.1 GiB
    assert "draft" in "\n".join(explain(having))
    assert "− draft" not in "\n".join(explain(without))
    assert any(reason.field == "memory.draft_bytes_per_gpu" for reason in having.reasons)


def test_splits_of_a_draft() -> None:
    draft = draft_of_config("d", DraftMethod.EAGLE3, 3, EAGLE3)
    split = draft.weights_bytes - draft.whole_bytes
    assert draft.bytes_per_gpu(Parallel(tensor=4)) == split // 4 + draft.whole_bytes
    staged = draft.bytes_per_gpu(Parallel(pipeline=2))
    assert staged == draft.weights_bytes + draft.embedding_bytes  # the model's own table is on the first stage
    assert draft.page_bytes(4, 16, 2.0) == draft.page_bytes(1, 16, 2.0) // 4
    precision, inventory = Precision("bf16", "auto", compute="bf16"), parse_gpus("2xH200")
    plain = measure(MODEL, inventory, Parallel(pipeline=2), precision, SETTINGS, 8192)
    drafting = measure(MODEL, inventory, Parallel(pipeline=2), precision, SETTINGS, 8192, None, draft)
    assert drafting.kv_cache_tokens < 0.95 * plain.kv_cache_tokens  # 16 layers there, 17 on the last stage
    assert drafting.kv_bytes_per_token_per_gpu == plain.kv_bytes_per_token_per_gpu * 17 // 16


def test_beside_windows_the_layer_of_a_draft_joins_those_without() -> None:
    (full,) = MODEL.caches
    model = replace(MODEL, caches=(replace(full, layers=16), replace(full, kind="sliding", layers=16, window=1024)))
    pools = {also: pool_of(model, SETTINGS, 8192, Parallel(), 2.0, also) for also in (0, 1)}
    assert pools[0].group == 16
    assert pools[1].group == 17  # one group of 17 layers, and one of 16 in pages of the same size


def test_a_whole_model_drafts_with_all_its_layers() -> None:
    small = read_facts("smollm2", offline=True)
    draft = read_draft(said("smollm2", "draft_model"), MODEL)
    assert draft == draft_of_model(small, 5)
    assert draft.kv_layers == small.layers
    assert planned(draft).memory.draft_bytes_per_gpu == small.weights_bytes


def test_what_was_loaded_is_compared_with_model_and_draft() -> None:
    plan = planned(draft_of_config("d", DraftMethod.EAGLE3, 3, EAGLE3))
    whole = (plan.memory.weights_bytes_per_gpu + plan.memory.draft_bytes_per_gpu) / GIB
    found = reconcile(plan, Observed(weights_gib=whole))
    assert [row.percent for row in found.rows if row.name == "weights_gib"] == [0.0]


def test_a_named_draft_is_judged_by_its_own_size(tmp_path: Path) -> None:
    draft = read_draft(said(saved(tmp_path / "mine", EAGLE3)), MODEL)
    judged = {one.what: one for one in planned(draft).judged}
    named = judged["speculative decoding, mine"]
    assert named.taken
    assert "1 more of its layers in each block are taken from the KV cache" in named.because
    assert "checks 5 tokens" in named.because
    assert not any("EAGLE" in what for what in judged)
