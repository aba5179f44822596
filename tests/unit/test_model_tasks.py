"""What a model is served for: from its architecture, said by the user, and asked by the probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corral.engines.flags import check_arguments, shipped_flags
from corral.plan.choose import make_plan
from corral.plan.contract import Goal
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.models.facts import facts_from_folder, read_facts
from corral.plan.models.task import requested_task, task_arguments, task_of

NAMES = [
    ("BAAI/bge-m3", "XLMRobertaModel", {}, "embed", ["--runner", "pooling"]),
    ("BAAI/bge-reranker-v2-m3", "XLMRobertaForSequenceClassification", {"id2label": {"0": "LABEL_0"}}, "rerank",
     ["--runner", "pooling"]),
    ("x/sentiment", "BertForSequenceClassification", {"id2label": {"0": "bad", "1": "good"}}, "classify",
     ["--runner", "pooling"]),
    ("Qwen/Qwen3-Embedding-8B", "Qwen3ForCausalLM", {}, "embed", ["--runner", "pooling", "--convert", "embed"]),
    ("Qwen/Qwen3-8B", "Qwen3ForCausalLM", {}, "generate", []),
    ("openai/whisper-large-v3", "WhisperForConditionalGeneration", {}, "transcribe", []),
    ("google/gemma-3-4b-it", "Gemma3ForConditionalGeneration", {}, "generate", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "architecture", "config", "task", "arguments"), NAMES)
def test_the_task_and_its_flags(
    name: str, architecture: str, config: dict[str, Any], task: str, arguments: list[str]
) -> None:
    assert task_of(config, architecture, name) == task
    assert task_arguments(task, architecture, []) == arguments


def test_a_reranker_that_writes_yes_or_no_is_read_as_a_classifier() -> None:
    facts = read_facts("qwen3-reranker-0.6b", offline=True)
    assert facts.task == "rerank"
    arguments = task_arguments(facts.task, facts.architecture, [])
    flags = shipped_flags()
    assert flags is not None
    check_arguments(arguments, flags)
    assert json.loads(arguments[-1])["classifier_from_token"] == ["no", "yes"]


@pytest.mark.parametrize(
    ("task", "arguments", "wanted"),
    [
        ("generate", [], "generate"),
        ("generate", ["--convert", "embed"], "embed"),
        ("generate", ["--convert=classify"], "classify"),
        ("generate", ["--runner", "pooling"], "embed"),
        ("embed", ["--runner", "generate"], "generate"),
        ("rerank", ["--convert", "classify"], "rerank"),
    ],
)
def test_the_users_own_flags_decide(task: str, arguments: list[str], wanted: str) -> None:
    assert requested_task(task, arguments) == wanted
    assert not arguments or task_arguments(wanted, "LlamaForCausalLM", arguments) == []


def test_a_folder_of_sentence_transformers_embeds(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "vocab_size": 100,
              "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "hidden_act": "silu",
              "max_position_embeddings": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert facts_from_folder(tmp_path, "mine").task == "generate"
    (tmp_path / "modules.json").write_text("[]")
    assert facts_from_folder(tmp_path, "mine").task == "embed"


@pytest.mark.parametrize("name", ["bge-m3", "qwen3-embedding-0.6b"])
def test_no_tokens_per_second_are_promised_of_a_model_that_writes_none(name: str) -> None:
    plan = make_plan(read_facts(name, offline=True), parse_gpus("1xH100"), Goal())
    assert plan.fits
    assert plan.speed.throughput_tokens_per_s is None
    assert "writes none" in plan.speed.basis
