"""Model folders that are damaged or lie: one sentence in `plan` and in `up`, never a traceback, never a start."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from corral.base.errors import CorralError, DataError, UncountedError
from corral.cli import root
from corral.plan.models.facts import facts_from_folder
from corral.plan.models.store import verify_folder

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 100,
    "max_position_embeddings": 512,
}  # fmt: skip


def safetensors(rows: dict[str, Any], data: bytes) -> bytes:
    header = json.dumps(rows).encode()
    return struct.pack("<Q", len(header)) + header + data


def tensor(begin: int, end: int, shape: object = None) -> dict[str, Any]:
    return {"dtype": "BF16", "shape": [(end - begin) // 2] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(safetensors({"lm_head.weight": tensor(0, 2000)}, bytes(2000)))
    return folder


def test_the_whole_model_is_taken(model: Path) -> None:
    facts_from_folder(model)
    verify_folder(model)


@pytest.mark.parametrize("kept", [-1, -1999, 100, 50, 8, 3])
def test_a_cut_off_file_is_refused_by_plan_and_up(model: Path, kept: int) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:kept])
    for check in (facts_from_folder, verify_folder):
        with pytest.raises(DataError, match="cut off"):
            check(model)
    done = CliRunner().invoke(root, ["plan", str(model), "--gpus", "1xH100"])
    assert isinstance(done.exception, DataError)


HEADERS: list[Any] = [
    {"a": tensor(0, 10, [10**9] * 10)}, {"a": tensor(0, 10, ["x"])}, {"a": tensor(0, 10, [-1])},
    {"a": tensor(0, 10, 5)},
    {"a": {"dtype": "BF16", "shape": [1]}}, {"a": 5}, {"a": {**tensor(0, 10), "data_offsets": [5, 1]}},
    {"a": {**tensor(0, 10), "data_offsets": [0, 1 << 70]}}, {"a": {**tensor(0, 10), "data_offsets": "x"}}, [1],
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_headers_that_lie_are_refused(model: Path, header: Any) -> None:
    (model / "model.safetensors").write_bytes(safetensors(header, bytes(100)))
    with pytest.raises((DataError, UncountedError)):
        facts_from_folder(model)


@pytest.mark.parametrize("names", [{"a": "../../etc/passwd"}, {"a": "/etc/passwd"}, {"a": 5}, [1], {"a": "gone"}])
def test_an_index_names_files_of_its_folder_only(model: Path, names: Any) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for check in (facts_from_folder, verify_folder):
        with pytest.raises(DataError):
            check(model)


CHANGES: list[dict[str, Any]] = [
    {"architectures": 5}, {"architectures": [5]}, {"architectures": "x"}, {"quantization_config": 5},
    {"quantization_config": {"quant_method": "awq", "bits": [1]}}, {"quantization_config": {"quant_method": "fp8",
     "weight_block_size": ["a", "b"]}}, {"quantization_config": {"quant_method": "awq", "ignore": 5}},
    {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": 5}},
    {"quantization_config": {"quant_method": "gptq", "group_size": 10**30}},
    {"hidden_size": 10**30}, {"num_hidden_layers": 10**9}, {"hidden_size": "64"}, {"vocab_size": 1.5},
    {"rope_scaling": {"type": "linear", "factor": 1e300}}, {"rope_scaling": {"type": "yarn", "factor": "x"}},
    {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": "x"}},
    {"model_type": "gemma2", "sliding_window": 8, "sliding_window_pattern": "x"},
    {"num_local_experts": 4, "shared_expert_intermediate_size": "x"}, {"text_config": {"architectures": 5}},
]  # fmt: skip


@pytest.mark.parametrize("changed", CHANGES, ids=[str(change)[:40] for change in CHANGES])
def test_configs_that_cannot_be_meant_are_one_sentence(model: Path, changed: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    done = CliRunner().invoke(root, ["plan", str(model), "--gpus", "1xH100"])
    assert isinstance(done.exception, CorralError), done.exception
    assert done.exception.remedy


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[]", "5", "", "\0", '{"hidden_size": NaN}', "9" * 9999]
)
def test_configs_that_are_none_are_one_sentence(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises((DataError, UncountedError)):
        facts_from_folder(model)
