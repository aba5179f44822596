"""Flags that the plan decides, pasted after `--`: read back, planned with, and in the command once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corral.base.errors import CorralError, UsageError
from corral.deploy.lifecycle.decision import DeployDecision, DeployRequest, decide
from corral.engines.settings import joined, read_back
from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Plan
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.models.facts import read_facts
from tests.unit.test_bringup import Elsewhere

DIGITALOCEAN = (
    "--enforce-eager --tensor-parallel-size 8 --pipeline-parallel-size 2 --distributed-executor-backend ray"
    " --dtype float16 --gpu-memory-utilization 0.99 --max-model-len 8192 --max-num-batched-tokens 65536"
)


def decided(model: str, gpus: str | None, arguments: str, **more: object) -> DeployDecision:
    request = DeployRequest(model=model, extra_args=tuple(arguments.split()), **more)  # type: ignore[arg-type]
    return decide(request, Elsewhere(gpus))


def flag(plan: Plan, name: str) -> str:
    assert plan.engine_args.count(name) == 1
    return plan.engine_args[plan.engine_args.index(name) + 1]


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ("-tp 8 -pp=2 -dp 1", {"tensor": "8", "pipeline": "2", "data": "1"}),
        ("--tensor_parallel_size=8", {"tensor": "8"}),
        ("--max-model-len 8K", {"max_model_len": "8192"}),
        ("--max-model-len 25.6k", {"max_model_len": "25600"}),
        ("--max-model-len -1", {"max_model_len": "auto"}),
        ("--dtype half", {"dtype": "fp16"}),
        ("-q fp8 --kv-cache-dtype fp8_e5m2", {"quantization": "fp8", "kv": "fp8_e5m2"}),
        ("--no-enforce-eager", {"eager": "false"}),
        ("--max-num-seqs 4 --max-num-seqs 8", {"max_num_seqs": "8"}),
    ],
)
def test_spellings_of_vllm_become_fields_of_the_plan(arguments: str, fields: dict[str, str]) -> None:
    read = read_back(arguments.split())
    assert read.fields == fields
    assert read.rest == ()


def test_what_the_plan_does_not_decide_stays_as_it_is() -> None:
    words = ("--load-format", "dummy", "-tp", "2", "--seed", "-1", "--lora-modules", "a=b", "c=d", "-cc.mode=2")
    read = read_back(words)
    assert read.fields == {"tensor": "2"}
    assert read.rest == tuple(word for word in words if word not in ("-tp", "2"))


def test_the_whole_command_of_a_document_is_planned_with_and_shown_once() -> None:
    decision = decided("llama-3.1-405b-instruct", "8xH100x2", DIGITALOCEAN)
    plan = decision.plan
    assert str(plan.parallel) == "TP8 × PP2"
    assert (plan.max_model_len, plan.settings.eager, plan.precision.weights) == (8192, True, "fp16")
    for name in ("--tensor-parallel-size", "--dtype", "--gpu-memory-utilization", "--max-model-len"):
        flag(plan, name)
    assert flag(plan, "--dtype") == "float16"
    assert flag(plan, "--max-num-batched-tokens") == "65536"
    assert plan.engine_args.count("--enforce-eager") == 1
    assert decision.request.extra_args == ()
    assert decision.request.link == "ray"


def test_a_tensor_size_after_the_dashes_is_the_layout() -> None:
    free = decided("llama-3.1-70b-instruct", "8xH100", "").plan
    assert str(free.parallel) == "TP4 × DP2"
    asked = decided("llama-3.1-70b-instruct", "8xH100", "--tensor-parallel-size 8").plan
    assert str(asked.parallel) == "TP8"
    assert "as set" in next(r.because for r in asked.reasons if r.field == "parallel.tensor")


def test_two_answers_to_one_question_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--set tensor=4 and --tensor-parallel-size 8 after `--` contradict"):
        decided("llama-3.1-70b-instruct", "8xH100", "--tensor-parallel-size 8", fixed={"tensor": "4"})
    decided("llama-3.1-70b-instruct", "8xH100", "--tensor-parallel-size 8", fixed={"tensor": 8})
    with pytest.raises(UsageError, match="--context 4096 and max_model_len=8192 contradict"):
        decided("llama-3.1-70b-instruct", "8xH100", "--max-model-len 8192", goal=Goal(context=4096))
    decided("llama-3.1-70b-instruct", "8xH100", "--max-model-len auto", goal=Goal(context=4096))
    assert joined({"gpu_memory_utilization": 0.9}, read_back(["--gpu-memory-utilization", "0.90"]))


@pytest.mark.parametrize(
    ("arguments", "spelling"),
    [
        ("--enable-chunked-prefill=False", "--no-enable-chunked-prefill today"),
        ("--enable-chunked-prefill False", "--no-enable-chunked-prefill today"),
        ("--enable-chunked-prefill=true", "--enable-chunked-prefill today"),
        ("--no-enable-prefix-caching=0", "--enable-prefix-caching today"),
        ("--enforce-eager=true", "--enforce-eager today"),
        ("--enforce-eager no", "--no-enforce-eager today"),
        ("--enable-lora=maybe", "Leave the value out"),
        ("--grpc=False", "--grpc"),  # Corral's own: refused as such
    ],
)
def test_a_value_of_a_flag_that_takes_none(arguments: str, spelling: str) -> None:
    with pytest.raises(UsageError) as caught:
        decided("llama-3.1-8b-instruct", "1xH100", arguments)
    assert spelling in caught.value.message + caught.value.remedy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--tensor-parallel-size", "--tensor-parallel-size needs a value"),
        ("--tensor-parallel-size eight", "tensor must be a whole number, not 'eight'"),
        ("--dtype float64", "dtype cannot be 'float64'"),
        ("--kv-cache-dtype nvfp4", "kv cannot be 'nvfp4'"),
        ("--gpu-memory-utilization 99", "gpu_memory_utilization must be above 0"),
    ],
)
def test_bad_values_are_refused_before_anything_starts(arguments: str, words: str) -> None:
    with pytest.raises(CorralError) as caught:
        decided("llama-3.1-8b-instruct", "1xH100", arguments)
    assert words in caught.value.message


def test_quantisation_while_loading_is_not_another_checkpoint() -> None:
    plan = decided("llama-3.1-70b-instruct", "2xH100", "--quantization fp8 --dtype float16").plan
    assert (plan.precision.how, plan.precision.weights, plan.checkpoint) == (
        "online", "fp8", "meta-llama/Llama-3.1-70B-Instruct",
    )  # fmt: skip
    assert flag(plan, "--quantization") == "fp8"
    assert flag(plan, "--dtype") == "float16"
    block = decided("llama-3.1-70b-instruct", "2xH100", "--quantization fp8_per_block").plan
    assert flag(block, "--quantization") == "fp8_per_block"


@pytest.mark.parametrize(
    ("model", "method", "words"),
    [
        ("llama-3.1-8b-instruct", "awq", "does not quantise by 'awq' while loading"),
        ("llama-3.1-8b-instruct-int4", "fp8", "quantised by awq, not by fp8"),
    ],
)
def test_a_quantisation_that_cannot_be(model: str, method: str, words: str) -> None:
    plan = make_plan(read_facts(model), parse_gpus("1xH100"), Goal(), {"quantization": method})
    assert not plan.fits
    assert words in plan.reason


def test_the_way_a_checkpoint_is_stored_may_be_said() -> None:
    plan = make_plan(read_facts("llama-3.1-8b-instruct-int4"), parse_gpus("1xH100"), Goal(), {"quantization": "awq"})
    assert plan.fits
    assert flag(plan, "--quantization") == "awq"


def test_float32_takes_its_room() -> None:
    wide = make_plan(read_facts("llama-3.1-8b"), parse_gpus("1xH100"), Goal(), {"dtype": "fp32"})
    half = make_plan(read_facts("llama-3.1-8b"), parse_gpus("1xH100"))
    assert flag(wide, "--dtype") == "float32"
    assert wide.memory.weights_bytes == 2 * half.memory.weights_bytes
    assert wide.memory.kv_bytes_per_token == 2 * half.memory.kv_bytes_per_token
    assert decided("smollm2", None, "--dtype float32").plan.precision.weights == "fp32"


def test_plan_reads_arguments_after_the_dashes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from corral.cli import main

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(["plan", *words])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out + captured.err

    words = ("llama-3.1-405b-instruct", "--gpus", "8xH100x2", "--json", "--", *DIGITALOCEAN.split())
    code, out = run(*words)
    assert code == 0
    plan = json.loads(out)
    assert plan["parallel"] == {"tensor": 8, "pipeline": 2, "data": 1, "expert": False}
    assert plan["precision"]["weights"] == "fp16"
    code, out = run("llama-3.1-8b", "--gpus", "1xH100", "--", "--max-model-len", "4K", "--seed", "7")
    assert code == 0
    by_hand = next(line for line in out.splitlines() if "vllm serve" in line)
    assert by_hand.endswith("--seed 7")
    assert by_hand.count("--max-model-len 4096") == 1
    assert "-- --seed 7" in next(line for line in out.splitlines() if "corral up" in line)
    code, out = run("llama-3.1-8b", "--gpus", "1xH100", "--", "--enable-chunked-prefill=False")
    assert code == 2
    assert "--no-enable-chunked-prefill" in out
    whole = ("--max-num-batched-tokens", "65536", "--no-enable-chunked-prefill")  # of prompts of up to 131,072 tokens
    for more in ((), ("--replicas", "2")):
        code, out = run("llama-3.1-8b", "--gpus", "2xH100", *more, "--", *whole)
        assert code == 2
        assert "65,536" in out
