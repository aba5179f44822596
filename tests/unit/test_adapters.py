"""LoRA adapters: read as data, compared with the model, planned for, and given to a deployment."""

from __future__ import annotations

import os
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import CorralError, DataError, NotFoundError, UsageError
from corral.deploy.launch.adapters import adapters
from corral.deploy.lifecycle.decision import DeployRequest
from corral.deploy.lifecycle.rendering import dry_run
from corral.engines.adapters import RANKS, adapter_names
from corral.plan.candidate import Tuning
from corral.plan.choose import make_plan
from corral.plan.contract import EngineSettings, Goal, Parallel, Plan
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.lora import AdapterFolder, adapter_bytes
from corral.plan.models.adapter import brought, read_adapter, read_adapters, refuse_misfits
from corral.plan.models.facts import facts_from_folder, read_facts
from corral.plan.models.store import ModelSource
from tests.adapters import SHAPES, make_adapter, write_tensors
from tests.tiny_llama import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, VOCAB, make_tiny_llama

TINY = ModelSource("tiny", "folder")
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def refused(folder: Path, **config: Any) -> str:
    """What reading an adapter with such a config says."""
    make_adapter(folder, **config)
    with pytest.raises(DataError) as caught:
        read_adapter(folder)
    return caught.value.message


def misfit(folder: Path, model: Path, source: ModelSource = TINY, rank: int | None = None, at: str = "") -> str:
    """Why an adapter does not fit; empty where it does. Without `at` the model's config alone is known."""
    try:
        refuse_misfits((read_adapter(folder),), facts_from_folder(model), source, Path(at) if at else None, rank)
    except DataError as error:
        return error.message
    return ""


def test_an_adapter_is_read_without_running_anything(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a", rank=4, rank_pattern={"q_proj": 12}, revision=None)
    found = read_adapter(tmp_path / "a")
    assert (found.name, found.rank, found.base) == ("a", 12, "/somewhere/base")
    assert found.modules == ("down_proj", "q_proj", "v_proj")
    assert len(found.pairs) == LAYERS * len(SHAPES)
    assert found.size_bytes == (tmp_path / "a" / "adapter_model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "IA3"}, "adapters of type IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "a bias of LoRA layers"),
        ({"bias": "all"}, "adapters with a bias"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"init_lora_weights": "pissa"}, "changes the base model's weights"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"r": 0}, "has no rank"),
        ({"r": "16"}, "has no rank"),
        ({"r": 1024}, "ranks up to 512"),
    ],
)
def test_what_vllm_does_not_serve_is_refused(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    assert says in refused(tmp_path / "a", **config)


@pytest.mark.parametrize("init", [True, False, "gaussian", "EVA", "lora_ga"])
def test_beginnings_that_leave_the_base_alone_are_served(tmp_path: Path, init: object) -> None:
    make_adapter(tmp_path / "a", init_lora_weights=init)
    assert read_adapter(tmp_path / "a").rank == 4


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pickle-was-run",)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickled_weights_are_named_and_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "gone")
    (tmp_path / "a" / name).write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(DataError, match=f"has {name}, which may run code when it is read"):
        read_adapter(tmp_path / "a")
    assert not (tmp_path / "pickle-was-run").exists()


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"PK\x03\x04",
        header(b"{}", 1 << 62),  # says that its header has four exabytes
        header(b"[" * 5000),
        header(b'{"a": 1}'),
        header(b'{"x.lora_A.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 1e400]}}'),
        header(b'{"x.lora_A.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}'),  # nothing follows
        header(b'{"x.lora_A.weight": {"dtype": "F32", "shape": [-4, 4], "data_offsets": [0, 0]}}'),
        header(b'{"x.lora_A.weight": {"dtype": "F32", "shape": "44", "data_offsets": [0, 0]}}'),
        header(b'{"x.lora_A.weight": {"shape": [4, 4], "data_offsets": [0, 0]}}'),
        header(b'{"x.lora_A.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 0]}}'),  # no B
        header(b'{"\\u001b[2J.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 0]}}'),
        header(b'{"__metadata__": {}}'),
    ],
)
def test_hostile_weights_end_in_one_sentence(tmp_path: Path, weights: bytes) -> None:
    make_adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(DataError) as caught:
        read_adapter(tmp_path / "a")
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("config", [b"[]", b"{", b'{"r": 4, "peft_type": "LORA"' + b" " * (1 << 20) + b"}"])
def test_hostile_configs_end_in_one_sentence(tmp_path: Path, config: bytes) -> None:
    make_adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_bytes(config)
    with pytest.raises(CorralError):
        read_adapter(tmp_path / "a")


def test_a_pipe_is_no_adapter_and_is_not_waited_for(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    os.mkfifo(tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(DataError, match=r"has no adapter_model\.safetensors"):
        read_adapter(tmp_path / "a")


def test_a_folder_of_adapters(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no folder of adapters"):
        read_adapters(tmp_path / "nothing")
    with pytest.raises(DataError, match="holds no adapters"):
        read_adapters(tmp_path)
    for name in ("b", "a"):
        make_adapter(tmp_path / name)
    (tmp_path / ".coming").mkdir()
    assert [one.name for one in read_adapters(tmp_path)] == ["a", "b"]
    assert adapter_names(tmp_path) == ("a", "b")
    make_adapter(tmp_path / "not plain")
    assert adapter_names(tmp_path) == ("a", "b")
    with pytest.raises(DataError, match="cannot be the name of an adapter"):
        read_adapters(tmp_path)


@pytest.mark.parametrize("known", ["files", "config"])
def test_shapes_are_compared_with_the_models(tmp_path: Path, model: Path, known: str) -> None:
    at = str(model) if known == "files" else ""
    make_adapter(tmp_path / "a")
    assert misfit(tmp_path / "a", model, at=at) == ""
    make_adapter(tmp_path / "b", shapes={**SHAPES, "self_attn.q_proj": (HIDDEN, HIDDEN)})
    wanted = f"q_proj is {HIDDEN} × {HIDDEN}, and the model's is {HIDDEN} × {HEADS * HEAD_DIM}"
    assert wanted in misfit(tmp_path / "b", model, at=at)
    make_adapter(tmp_path / "c", shapes={"mlp.up_proj": (INTERMEDIATE, 2 * HIDDEN)})
    assert f"up_proj is {2 * HIDDEN} × {INTERMEDIATE}" in misfit(tmp_path / "c", model, at=at)
    deep = f"base_model.model.model.layers.{LAYERS}.self_attn.q_proj"
    matrices = {
        f"{deep}.lora_A.weight": [[0.0] * HIDDEN] * 4,
        f"{deep}.lora_B.weight": [[0.0] * 4] * HEADS * HEAD_DIM,
    }
    write_tensors(tmp_path / "a" / "adapter_model.safetensors", matrices)
    assert f"the model has {LAYERS} layers" in misfit(tmp_path / "a", model, at=at)


def test_a_module_that_the_model_lacks_is_named(tmp_path: Path, model: Path) -> None:
    make_adapter(tmp_path / "a", shapes={"mixer.in_proj": (HIDDEN, HIDDEN)})
    assert "the model has no module model.layers.0.mixer.in_proj" in misfit(tmp_path / "a", model, at=str(model))


def test_a_rank_beyond_the_plans_is_refused(tmp_path: Path, model: Path) -> None:
    make_adapter(tmp_path / "a", rank=12)
    assert misfit(tmp_path / "a", model, rank=16) == ""
    assert "its rank is 12, and max_lora_rank is 8" in misfit(tmp_path / "a", model, rank=8)
    with pytest.raises(DataError) as caught:
        refuse_misfits((read_adapter(tmp_path / "a"),), facts_from_folder(model), TINY, None, 8)
    assert "--set max_lora_rank=16" in caught.value.remedy


@pytest.mark.parametrize(
    ("base", "fits"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", True),
        ("unsloth/llama-3.1-8b-instruct-unsloth-bnb-4bit", True),
        ("somebody/Llama-3.1-8B-Instruct-GPTQ-INT4", True),
        ("/home/somebody/llama", True),
        ("", True),
        ("meta-llama/Llama-3.1-8B", False),
        ("Qwen/Qwen3-8B", False),
    ],
)
def test_the_base_that_an_adapter_names(tmp_path: Path, model: Path, base: str, fits: bool) -> None:
    make_adapter(tmp_path / "a", base_model_name_or_path=base)
    hub = ModelSource("Llama-3.1-8B-Instruct", "hub", repo="meta-llama/Llama-3.1-8B-Instruct")
    why = misfit(tmp_path / "a", model, hub)
    assert (why == "") == fits
    assert fits or f"says that it was trained on {base}" in why


def test_another_revision_of_the_base_is_refused(tmp_path: Path) -> None:
    served, other = "a" * 40, "b" * 40
    model = make_tiny_llama(tmp_path / "snapshots" / served)
    make_adapter(tmp_path / "x", revision=served)
    assert misfit(tmp_path / "x", model, at=str(model)) == ""
    make_adapter(tmp_path / "x", revision=other)
    assert f"trained on revision {other[:12]}" in misfit(tmp_path / "x", model, at=str(model))


# The plan


def planned(folder: AdapterFolder | None = None, gpus: str = "1xH200", **fixed: object) -> Plan:
    facts = read_facts("llama-3.1-8b", offline=True)
    return make_plan(facts, parse_gpus(gpus), Goal(), {"max_model_len": 8192, **fixed}, Tuning(adapters=folder))


def test_the_plan_has_slots_of_the_largest_rank() -> None:
    plan = planned(AdapterFolder(3, 12))
    assert (plan.settings.lora, plan.settings.max_loras, plan.settings.max_lora_rank) == (True, 3, 16)
    words = list(plan.engine_args)
    assert "--enable-lora" in words
    assert words[words.index("--max-lora-rank") + 1] == "16"
    assert words[words.index("--max-loras") + 1] == "3"
    assert plan.settings.api_servers == 1  # each would number adapters by itself
    assert planned(AdapterFolder(300, 8)).settings.max_loras == 8
    assert planned().settings.max_loras is None
    assert "--enable-lora" not in planned().engine_args


def test_slots_are_taken_out_of_the_kv_cache() -> None:
    none, some = planned().memory, planned(AdapterFolder(3, 16)).memory
    assert none.adapter_bytes_per_gpu == 0
    assert none.kv_cache_bytes_per_gpu - some.kv_cache_bytes_per_gpu == some.adapter_bytes_per_gpu > 0
    twice = planned(AdapterFolder(3, 16), max_loras=6, max_lora_rank=32).memory
    assert twice.adapter_bytes_per_gpu == 4 * some.adapter_bytes_per_gpu
    split = planned(AdapterFolder(3, 16), "2xH200", tensor=2).memory
    assert some.adapter_bytes_per_gpu / 2 < split.adapter_bytes_per_gpu < some.adapter_bytes_per_gpu


def test_the_bytes_are_those_that_vllm_allocates(model: Path) -> None:
    """Summed over the `*_stacked` tensors of SmolLM2 in vLLM 0.32: two slots of rank 16 in float32."""
    smol = read_facts("smollm2", offline=True)
    settings = replace(EngineSettings(0.92, 2048, 128), lora=True, max_loras=2, max_lora_rank=16)
    assert adapter_bytes(smol, Parallel(), settings, 4) == 51_806_208
    tiny = facts_from_folder(model)
    per_rank = LAYERS * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + 7 * HIDDEN + 3 * INTERMEDIATE)
    assert adapter_bytes(tiny, Parallel(), settings, 2) == 2 * 16 * 2 * (per_rank + 2 * (VOCAB + HIDDEN))


@pytest.mark.parametrize(
    ("folder", "fixed", "says"),
    [
        (None, {"max_loras": 2}, "need lora=true"),
        (AdapterFolder(1, 8), {"lora": "false"}, "contradict"),
        (None, {"lora": "true", "max_lora_rank": 24}, "24 is not one of"),
        (AdapterFolder(1, 64), {"max_lora_rank": 32}, "below the rank 64"),
        (AdapterFolder(1, 8), {"api_servers": 2}, "one API server"),
    ],
)
def test_settings_that_vllm_would_refuse(folder: AdapterFolder | None, fixed: dict[str, object], says: str) -> None:
    plan = planned(folder, "1xH200", **fixed)
    assert not plan.fits
    assert says in plan.reason


def test_flags_after_the_dashes_are_planned_too() -> None:
    plan = planned(None, lora="true", max_loras="4", max_lora_rank="64")
    assert plan.fits
    assert plan.memory.adapter_bytes_per_gpu > 0
    assert {reason.field for reason in plan.reasons} >= {"max_loras", "max_lora_rank", "memory.adapter_bytes_per_gpu"}
    assert RANKS[-1] == 512


# A deployment


def test_a_launch_with_adapters(clean_home: Path, tmp_path: Path, model: Path) -> None:
    make_adapter(tmp_path / "mine" / "poet", rank=12)
    request = DeployRequest(str(model), adapters=str(tmp_path / "mine"))
    plan, spec = dry_run(request)
    rank = spec.ranks[0]
    assert rank.env["CORRAL_ADAPTERS"] == spec.adapters == str(tmp_path / "mine")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in rank.env  # the guard sets it, in its process only
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in rank.unset_env
    assert plan.settings.max_lora_rank == 16
    assert adapters(spec) == ("poet",)
    make_adapter(tmp_path / "mine" / "later")
    assert adapters(spec) == ("later", "poet")


def test_a_container_sees_the_folder_and_cannot_write_there(clean_home: Path, tmp_path: Path, model: Path) -> None:
    make_adapter(tmp_path / "mine" / "poet")
    request = DeployRequest(
        str(model), adapters=str(tmp_path / "mine"), runtime="docker", runtime_options={"image": "vllm-cpu:1"}
    )
    _, spec = dry_run(request)
    mounts = [word for word in spec.ranks[0].argv if str(tmp_path / "mine") in word and "CORRAL" not in word]
    assert mounts
    assert all(word.endswith(",ro") for word in mounts)


def test_an_adapter_that_does_not_fit_stops_the_start_before_it_begins(
    clean_home: Path, tmp_path: Path, model: Path
) -> None:
    make_adapter(tmp_path / "mine" / "wide", shapes={"mlp.up_proj": (INTERMEDIATE, 2 * HIDDEN)})
    with pytest.raises(DataError, match="'wide' does not fit tiny"):
        dry_run(DeployRequest(str(model), adapters=str(tmp_path / "mine")))
    (tmp_path / "mine" / "wide").rename(tmp_path / "elsewhere")
    make_adapter(tmp_path / "mine" / "tiny")
    with pytest.raises(UsageError, match="both called 'tiny'"):
        dry_run(DeployRequest(str(model), adapters=str(tmp_path / "mine")))


def test_a_repository_without_safetensors_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class File:
        def __init__(self, filename: str) -> None:
            self.filename = filename

    asked: list[Any] = []

    def snapshot(repo: str, **options: Any) -> Any:
        asked.append(options)
        return [File("adapter_config.json"), File("adapter_model.bin")]

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(DataError, match=r"somebody/poet has adapter_model\.bin"):
        brought("somebody/poet")
    assert [one["dry_run"] for one in asked] == [True]  # nothing was downloaded
    assert brought(str(tmp_path)) == tmp_path
