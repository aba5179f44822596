"""Sentences of a plan against its own numbers: nothing that it says may be false, or said in silence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import corral
from corral.base.errors import DoesNotFitError, UsageError
from corral.cli import main
from corral.deploy.lifecycle import rendering
from corral.deploy.lifecycle.decision import DeployRequest, decide
from corral.plan import measured
from corral.plan.choose import compare, make_plan
from corral.plan.contract import Goal, Plan
from corral.plan.hardware.inventory import GIB, GPUS, parse_gpus
from corral.plan.measured import Observed, StorageReading, recall_storage_speed, reconcile, remember_storage_speed
from corral.plan.models.facts import read_facts
from corral.plan.need import needs
from corral.plan.reasons import explain
from corral.plan.speed import rounded
from tests.conftest import ROOT
from tests.unit.test_bringup import Elsewhere

Run = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as caught:
            main(["plan", *words])
        return int(caught.value.code or 0), " ".join(capsys.readouterr().out.split())

    return run


def plan(model: str, gpus: str, goal: Goal | None = None, **fixed: object) -> Plan:
    return make_plan(read_facts(model), parse_gpus(gpus), goal, fixed)


def because(made: Plan, field: str) -> str:
    return next(r.because for r in made.reasons if r.field == field)


# --- what was false


def test_the_figure_of_guides_is_not_claimed_for_another_number() -> None:
    lines = "\n".join(explain(plan("llama-3.1-405b", "8xH100x2")))
    assert "61.52 GiB, the figure guides print" not in lines
    assert "61.52 GiB: the length for which guides give a figure" in lines
    assert "123.05 GiB" in lines  # what they do print, and why
    assert "39.06 GiB: the length" in "\n".join(explain(plan("llama-3.1-70b", "8xH100")))


@pytest.mark.parametrize("gpus", ["1xL40S", "1xT4", "2xL4"])
@pytest.mark.parametrize("model", ["llama-3.1-405b-instruct", "llama-3.1-70b", "llama-3.1-405b-fp8"])
def test_what_does_not_fit_is_never_said_to_fit(model: str, gpus: str) -> None:
    made = plan(model, gpus)
    assert made.verdict == "does not fit"
    assert "fits one GPU" not in str(made.reasons)
    assert made.memory.weights_bytes_per_gpu > made.memory.budget_bytes_per_gpu


def test_one_gpu_is_praised_only_where_one_gpu_serves() -> None:
    assert "fits one GPU" in because(plan("llama-3.1-8b", "1xH100"), "parallel.tensor")
    assert "fits one GPU" not in because(plan("llama-3.1-70b", "3xH100"), "parallel.tensor")  # TP1 × PP3


def test_fp16_that_was_asked_for_is_no_lack_of_the_gpu() -> None:
    asked = because(plan("llama-3.1-70b", "8xH100", weights="fp16"), "precision.weights")
    assert "does not compute in bf16" not in asked
    assert "65,504" in asked
    old = because(plan("llama-3.1-8b", "2xT4", weights="fp16"), "precision.weights")
    assert "T4 does not compute in bf16" in old


@pytest.mark.parametrize("kind", ["T4", "V100-16", "V100-32"])
@pytest.mark.parametrize("weights", [None, "fp16", "fp8", "int4"])
def test_no_bf16_for_a_gpu_without_it(kind: str, weights: str | None) -> None:
    fixed = {"weights": weights} if weights else {}
    made = make_plan(read_facts("llama-3.1-8b-instruct"), parse_gpus(f"4x{kind}"), None, fixed)
    assert "bfloat16" not in made.engine_args
    refused = plan("llama-3.1-8b-instruct", f"4x{kind}", weights="bf16")
    assert (refused.verdict, refused.reason) == ("cannot run as asked", f"{kind} does not compute in bf16")


# --- refused for a rule, not for size


@pytest.mark.parametrize(
    ("words", "reason", "remedy"),
    [
        (
            ("llama-3.1-8b", "--gpus", "1xH100", "--context", "200000"),
            "beyond the model's 131,072",
            "--context 131072",
        ),
        (("llama-3.1-8b", "--gpus", "1xH100", "--set", "weights=int4"), "needs a checkpoint", "--set weights=fp8"),
        (("llama-3.1-70b", "--gpus", "8xH100", "--set", "tensor=3"), "does not divide the 64", "--set tensor=4"),
        (("llama-3.1-405b-fp8", "--gpus", "8xH100", "--set", "weights=bf16"), "stored in fp8", "--set weights=int4"),
    ],
)
def test_a_broken_rule_is_not_a_lack_of_memory(shown: Run, words: tuple[str, ...], reason: str, remedy: str) -> None:
    code, out = shown(*words)
    assert code == 5
    assert "cannot run as asked" in out
    assert "does not fit" not in out
    assert reason in out
    assert "--gpus" not in out  # no hardware mends it
    assert "memory/GPU" not in out
    if remedy != "--set weights=int4":  # no INT4 form of the base model is published
        assert remedy in out


def test_a_split_that_needs_more_gpus_is_answered_with_gpus() -> None:
    made = plan("llama-3.1-70b", "8xH100", tensor=8, pipeline=4)
    assert made.verdict == "does not fit"
    assert any("--nodes" in near.change for near in made.nearest)


def test_up_says_the_same() -> None:
    with pytest.raises(DoesNotFitError, match=r"llama-3.1-8b cannot run as asked: a context of 200,000 is beyond"):
        decide(DeployRequest(model="llama-3.1-8b", goal=Goal(context=200_000)), Elsewhere("1xH100"))
    with pytest.raises(DoesNotFitError, match=r"llama-3.1-405b does not fit: "):
        decide(DeployRequest(model="llama-3.1-405b", fixed={"weights": "bf16"}), Elsewhere("8xH100"))


def test_context_and_max_model_len_are_one_question() -> None:
    with pytest.raises(UsageError, match="--context 4096 and max_model_len=8192 contradict"):
        plan("llama-3.1-8b", "1xH100", Goal(context=4096), max_model_len=8192)
    with pytest.raises(UsageError, match="contradict"):
        compare(read_facts("llama-3.1-8b"), parse_gpus("1xH100"), Goal(context=4096), {"max_model_len": 8192})


# --- what was said in silence


def test_an_a100_may_have_forty(shown: Run) -> None:
    _, out = shown("llama-3.1-8b", "--gpus", "8xA100")
    assert "A100 was read as A100-80; there is also A100-40, with less memory" in out
    for clear in ("8xA100-80", "8xa100-40", "8xA100-40GBx2", "8xH100", "1x4090", "V100"):
        assert parse_gpus(clear).note == ""
    assert parse_gpus("8xa100x2").note
    assert parse_gpus("1x4090").gpu == "RTX-4090"
    decision = decide(DeployRequest(model="llama-3.1-8b"), Elsewhere("8xA100"))
    assert any("A100-40" in note for note in decision.notes())


def test_another_checkpoint_is_announced_and_can_be_refused() -> None:
    decision = decide(DeployRequest(model="llama-3.1-405b-instruct"), Elsewhere("8xH100"))
    note, tools = decision.notes()
    assert tools == "tool calls are read by vLLM's parser llama3_json; --no-tools switches them off"
    assert "is served in fp8: bf16 (756.0 GiB of weights) does not fit 8 × H100-SXM" in note
    assert "meta-llama/Llama-3.1-405B-Instruct-FP8" in note
    assert "--set weights=bf16" in note
    asked = decide(DeployRequest(model="llama-3.1-405b-instruct", fixed={"weights": "fp8"}), Elsewhere("8xH100"))
    assert "--set weights=bf16" not in asked.notes()[0]
    assert decide(DeployRequest(model="llama-3.1-405b-instruct"), Elsewhere("8xH200")).notes() == [tools]


def test_a_dry_run_announces_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.deploy.lifecycle.decision.load_target", lambda *_: Elsewhere("8xH100"))
    notes: list[str] = []
    rendering.dry_run(DeployRequest(model="llama-3.1-405b-instruct"), notes.append)
    assert any("Llama-3.1-405B-Instruct-FP8" in note for note in notes)


@pytest.mark.parametrize("model", ["llama-3.1-405b-fp8", "llama-3.1-8b", "llama-3.1-70b-instruct-int4"])
def test_a_comparison_names_nothing_twice_and_says_what_it_leaves_out(model: str, shown: Run) -> None:
    rows = compare(read_facts(model), parse_gpus("8xH100"), Goal(), {})
    keys = [(c.precision.weights, c.precision.kv, c.parallel) for _, c in rows]
    assert len(set(keys)) == len(keys)
    _, out = shown(model, "--gpus", "8xH100", "--compare")
    refused, runs = sum(bool(c.problem) for _, c in rows), sum(not c.problem for _, c in rows)
    if refused > 5:
        assert f"… and {refused - 5} more (--json has all)" in out
    if runs > 20:
        assert f"… and {runs - 20} more that run" in out


# --- how many GPUs


def test_three_gpus_run_70b_and_what_a_fourth_would_give() -> None:
    (row,) = [r for r in needs(read_facts("llama-3.1-70b"), Goal(), ("H100-SXM",)) if r.weights == "bf16"]
    assert (row.by_arithmetic, row.gpus, row.layout) == (3, 3, "TP1 × PP3")
    assert "TP3 does not divide the 64 attention heads" in row.note
    four = plan("llama-3.1-70b", "4xH100")
    assert f"and {four.speed.decode_tokens_per_s:.2g} on 4" in row.note
    three = plan("llama-3.1-70b", "3xH100", Goal(context=131_072))
    assert three.fits
    assert three.memory.kv_cache_tokens == row.kv_cache_tokens


def test_twelve_gpus_and_the_kv_heads_of_405b(shown: Run) -> None:
    code, out = shown("llama-3.1-405b", "--need", "--gpus", "H100")
    assert code == 0
    assert "16 KV heads; the repository has had 8" in out
    assert "11 H100 instead of 12" in out
    twelve = plan("llama-3.1-405b", "4xH100x3", weights="bf16")
    assert twelve.fits
    assert f"3 nodes × 4 × H100-SXM can hold it in bf16 with a context of {twelve.max_model_len:,}" in out
    first = {r.weights: r for r in needs(read_facts("llama-3.1-405b-first-upload"), Goal(), ("H100-SXM",))}
    assert first["bf16"].by_arithmetic == 12


# --- load time


def test_the_assumed_speed_of_storage_stands_beside_the_load_time(shown: Run) -> None:
    _, out = shown("llama-3.1-405b", "--gpus", "8xH100x2")
    assert "378.0 GiB read on each node at 2 GB/s (assumed: a local NVMe disk)" in out
    slow = plan("llama-3.1-405b", "8xH100x2", Goal(storage_gb_s=0.11))
    assert (slow.speed.load_s or 0) / 3600 == pytest.approx(1, rel=0.1)
    assert "0.11 GB/s (as --storage says)" in because(slow, "speed.load_s")


def test_bytes_that_a_node_reads_follow_the_split() -> None:
    whole = read_facts("llama-3.1-70b").weights_bytes
    assert (
        plan("llama-3.1-70b", "8xH100x2", data=2, tensor=8).speed.read_bytes_per_node == whole
    )  # a copy on each node
    assert plan("llama-3.1-70b", "8xH100x2", tensor=8, pipeline=2).speed.read_bytes_per_node == whole // 2
    assert (
        plan("llama-3.1-70b", "4xH100x4", tensor=16).speed.read_bytes_per_node == whole
    )  # every node has all layers


def test_a_measured_speed_takes_the_place_of_the_assumed_one(home: Path, shown: Run) -> None:
    remember_storage_speed(
        home, "H100-SXM", StorageReading(0.4321, "/shared/model-00001.safetensors", 1_790_000_000.0)
    )
    remember_storage_speed(home, "CPU", StorageReading(9.0, "/x", 1.0))
    assert recall_storage_speed(home, "H200") is None
    _, out = shown("llama-3.1-70b", "--gpus", "8xH100")
    assert "at 0.43 GB/s (measured by `corral doctor` on 2026-09-2" in out
    assert "assumed" not in out
    made = make_plan(read_facts("llama-3.1-70b"), parse_gpus("8xH100"))
    measured.append_lesson(home, reconcile(made, Observed(load_s=100.0, engine_version="0.32.0")))
    _, out = shown("llama-3.1-70b", "--gpus", "8xH100")
    assert "at 1.41 GB/s (measured at 1 earlier start on H100-SXM)" in out
    (home / "storage.json").write_text("{torn")
    assert recall_storage_speed(home, "CPU") is None


def test_doctor_remembers_how_fast_a_model_was_read(tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(1 << 20))
    done = subprocess.run(
        [sys.executable, "-m", "corral", "doctor", str(folder), "--json"], capture_output=True, text=True
    )
    report = json.loads(done.stdout)
    speed = report["nodes"][0]["read_speed"]
    kept = recall_storage_speed(home, "CPU") if not report["nodes"][0]["gpus"] else None
    assert kept is not None
    assert kept.gb_s == pytest.approx(speed["read_bytes"] / speed["seconds"] / 1e9)
    assert kept.file == str(folder / "model.safetensors")


# --- tensor ranks on several nodes


def test_tp_over_nodes_is_taken_for_one_fast_stream_over_a_fast_network() -> None:
    here = parse_gpus("4xH100x4")
    made = make_plan(read_facts("llama-3.1-405b"), here, Goal(goal="latency"))
    assert made.parallel.tensor > here.gpus_per_node
    assert "over nodes every layer waits for the network (ib-ndr) twice" in because(made, "parallel.tensor")
    assert "only hidden states travel" not in because(made, "parallel.pipeline")
    inside = make_plan(read_facts("llama-3.1-405b"), here, Goal(goal="latency"), {"tensor": 4})
    assert (made.speed.decode_tokens_per_s or 0) > 1.3 * (inside.speed.decode_tokens_per_s or 0)


@pytest.mark.parametrize(
    ("link", "goal", "words"),
    [
        ("ib-ndr", "balanced", "which --goal latency considers"),
        ("ethernet-100", "balanced", "ethernet-100 is too slow for that"),
        ("ethernet-25", "latency", "ethernet-25 is too slow for that"),
    ],
)
def test_or_a_reason_is_given(link: str, goal: str, words: str) -> None:
    made = make_plan(read_facts("llama-3.1-405b"), parse_gpus("4xH100x4", link=link), Goal(goal=goal))
    assert made.parallel.tensor <= 4
    first = made.rejected[0]
    assert first.what.startswith(("TP16", "TP8"))
    assert words in first.because


def test_tp_over_nodes_reduces_over_all_adapters_of_a_node() -> None:
    """Four HDR adapters gave 85 to 96 of 100 GB/s (nccl-tests 119); one alone would be far slower."""
    fast = plan("llama-3.1-405b", "8xH100x2", tensor=16)
    slow = make_plan(
        read_facts("llama-3.1-405b"), replace(parse_gpus("8xH100x2"), link="ib-hdr"), None, {"tensor": 16}
    )
    ratio = (fast.speed.prefill_tokens_per_s or 0) / (slow.speed.prefill_tokens_per_s or 1)
    assert 1.0 < ratio < 1.5


def test_boxes_are_what_the_drivers_report() -> None:
    assert GPUS["A100-40"].memory_bytes < 40 * GIB


# --- tables of courses


def test_the_tables_of_the_workshop(shown: Run) -> None:
    code, out = shown("--table")
    assert code == 0
    assert "llama-3.1-8b 16 8 4 15.62 128,000 8" in out
    assert "llama-3.1-70b 141 71 35 39.06 128,000 8" in out
    assert "llama-3.1-405b 812 406 203 61.52 128,000 8" in out
    assert "llama-3.1-70b ≥ 2 2.25: 3 as TP1" in out  # GPUs for weights alone, as Kempner's table has them
    assert "llama-3.1-405b ≥ 11 10.92: 16 as TP8" in out
    assert "2.25: 3 as TP1 × PP3 1.37: 2 as TP2 0.93: 2 as TP2" in out
    assert "llama-3.1-405b: guides that give a 128,000-token request 123.05 GiB" in out


def test_a_table_of_any_models(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--table", "llama-3.1-405b-first-upload", "smollm2", "--gpus", "A100-40", "--json"]
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert not caught.value.code
    body = json.loads(capsys.readouterr().out)
    first, small = body["models"]
    assert body["gpu"] == "A100-40"
    assert first["kv_gib"] == pytest.approx(123.05, abs=0.01)
    assert [cell["weights"] for cell in first["cells"]] == ["bf16", "fp8", "int4"]
    assert first["cells"][0]["boxes"] == pytest.approx((820.16 + 123.05) / 40, abs=0.01)
    assert (small["context"], small["cells"][0]["gpus"]) == (8192, 1)


def test_the_notebook_shows_the_tables() -> None:
    """The cell runs as it stands, without pandas and without a server."""
    notebook = json.loads((ROOT / "notebooks" / "tutorial.ipynb").read_text())
    (cell,) = [cell for cell in notebook["cells"] if '"KV heads"' in "".join(cell["source"])]
    shown: list[dict[str, dict[str, object]]] = []

    class Frame:
        T = None

        def __init__(self, columns: dict[str, dict[str, object]]) -> None:
            shown.append(columns)

    exec("".join(cell["source"]), {"corral": corral, "pd": types.SimpleNamespace(DataFrame=Frame)})
    table = shown[0]
    assert table["llama-3.1-405b"]["KV cache, GiB"] == 61.52
    assert table["llama-3.1-405b-first-upload"]["KV cache, GiB"] == 123.05
    assert table["llama-3.1-70b"]["H100 in bf16"] == "2.25 → 3"


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(1048576.0, 3, "1,050,000"), (130.0, 2, "130"), (1234.0, 3, "1,230"), (7.456, 3, "7.46"), (0.0123, 3, "0.0123")],
)
def test_numbers_are_written_without_exponents(value: float, digits: int, text: str) -> None:
    assert rounded(value, digits) == text
