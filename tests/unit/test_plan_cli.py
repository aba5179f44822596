"""`corral plan` as people and programs use it."""

import json
from dataclasses import replace

import pytest

from corral.base.errors import BARELY_FITS
from corral.base.record import from_json
from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Plan
from corral.plan.hardware.inventory import Inventory
from corral.plan.measured import Observed, append_lesson, learn_tuning, read_lessons, read_log, reconcile
from corral.plan.models.facts import read_facts
from tests.unit.conftest import in_process


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


@pytest.fixture
def corral(capsys):
    return in_process(capsys, "plan")


def test_json_contract(corral):
    code, out, _ = corral("llama-3.1-70b", "--gpus", "8xH100", "--price", "2.5", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["version"] == 1
    assert plan["fits"] is True
    assert set(plan["model"]) >= {"name", "parameters", "layers", "heads", "kv_heads", "head_dim", "max_context"}
    assert set(plan["inventory"]) >= {"gpu", "gpus_per_node", "nodes", "memory_bytes_per_gpu"}
    assert set(plan["precision"]) >= {"weights", "kv"}
    assert set(plan["parallel"]) == {"tensor", "pipeline", "data", "expert"}
    assert set(plan["memory"]) >= {
        "weights_bytes", "weights_bytes_per_gpu", "kv_bytes_per_token", "kv_cache_tokens",
        "activation_bytes_per_gpu", "graph_bytes_per_gpu", "overhead_bytes_per_gpu",
    }  # fmt: skip
    assert set(plan["speed"]) >= {
        "decode_tokens_per_s", "prefill_tokens_per_s", "throughput_tokens_per_s", "ttft_s", "tpot_s", "load_s",
    }  # fmt: skip
    assert plan["cost"]["per_million_tokens"] > 0
    assert all(isinstance(word, str) for word in plan["engine_args"])
    assert all(set(reason) == {"field", "value", "because", "gain"} for reason in plan["reasons"])
    assert all(set(row) == {"what", "because"} for row in plan["rejected"])
    assert plan["nearest"] == []
    assert from_json(Plan, plan).fits


def test_refusal_has_its_own_exit_code(corral):
    code, out, _ = corral("llama-3.1-405b", "--gpus", "8xH100", "--set", "weights=bf16", "--json")
    plan = json.loads(out)
    assert code == 5
    assert plan["fits"] is False
    assert plan["reason"]
    assert plan["nearest"]


def test_table_reads_in_80_columns(corral, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = corral("llama-3.1-405b", "--gpus", "8xH100", "--nodes", "2")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "llama-3.1-405b on 2 nodes × 8 × H100-SXM: fits"
    commands = [line for line in lines if "corral up" in line or "vllm serve" in line]
    assert len(commands) == 2  # each on one line, to be copied
    assert all(len(line) <= 80 for line in lines if line not in commands)
    assert "corral up llama-3.1-405b --context 131072 --set tensor=8 --set pipeline=2 --set data=1" in commands[0]
    assert "vllm serve meta-llama/Llama-3.1-405B --tensor-parallel-size 8 --pipeline-parallel-size 2" in commands[1]


def test_explain_shows_the_arithmetic(corral):
    code, out, _ = corral("llama-3.1-70b", "--gpus", "8xH100", "--explain")
    assert code == 0
    assert "2 × 80 layers × 8 KV heads × 128 × 2 bytes = 327,680 bytes" in out
    assert "0.92 of 79.10 GiB" in out
    assert "Not taken" in out


def test_compare_ranks_what_runs_before_what_does_not(corral):
    code, out, _ = corral("llama-3.1-70b", "--gpus", "8xH100", "--compare", "--json")
    rows = json.loads(out)["candidates"]
    assert code == 0
    assert len(rows) > 20
    assert [bool(row["problem"]) for row in rows] == sorted(bool(row["problem"]) for row in rows)
    code, out, _ = corral("llama-3.1-70b", "--gpus", "8xH100", "--compare")
    assert "TP4·DP2" in out


def test_need(corral):
    code, out, _ = corral("llama-3.1-405b", "--need")
    assert code == 0
    row = next(line.split() for line in out.splitlines() if line.startswith("H100-SXM") and "bf16" in line)
    assert row[2:4] == ["11", "16"]
    code, out, _ = corral("llama-3.1-405b", "--need", "--gpus", "H100", "--json")
    assert {row["weights"] for row in json.loads(out)["needs"]} == {"bf16", "fp8", "int4"}


def test_this_machine_without_gpu(corral, monkeypatch):
    here = Inventory(None, 1, 1, 0, 4, 16 << 30, 12 << 30, source="probed")
    monkeypatch.setattr("corral.deploy.profile.merging.probe", lambda: here)
    code, out, _ = corral("smollm2", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["engine_env"] == {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert plan["memory"]["kv_cache_tokens"] == 46_592  # 364 blocks of 128; 46,080 bytes per token of fp32 in 2 GiB
    assert plan["max_model_len"] == 8192
    code, out, _ = corral("smollm2", "--set", "eager=true", "--json")
    assert json.loads(out)["engine_env"]["TORCH_COMPILE_DISABLE"] == "1"  # nothing is compiled, no helper either
    code, out, _ = corral("llama-3.1-70b", "--json")
    assert code == 5
    assert "GiB of memory" in json.loads(out)["reason"]


BAD = [
    (["llama-3.1-8b", "--gpus", "-8xH100"], 2, "-8 is not a possible number of GPUs per node"),
    (["llama-3.1-8b", "--gpus", "8xH900"], 2, "'H900' is not a kind of GPU"),
    (["llama-3.1-8b", "--gpus", "8xH100", "--nodes", "0"], 2, "0 is not a possible number of nodes"),
    (["llama-3.1-8b", "--nodes", "2"], 2, "--nodes needs --gpus"),
    (["llama-3.1-8b", "--gpus", "H100", "--context", "-5"], 2, "'-5' is not a number of tokens"),
    (["llama-3.1-8b", "--gpus", "H100", "--price", "-1"], 2, "the price of a GPU hour cannot be -1."),
    (["llama-3.1-8b", "--gpus", "H100", "--input-len", "0"], 2, "the length of a prompt cannot be 0."),
    (["llama-3.1-8b", "--gpus", "H100", "--set", "tensr=4"], 2, "'tensr' is not a field"),
    (["llama-3.1-8b", "--gpus", "H100", "--set", "tensor"], 2, "is not key=value"),
    (["llama-3.1-8b", "--gpus", "H100", "--set", "tensor=four"], 2, "tensor must be a whole number"),
    (["llama-3.1-8b", "--gpus", "H100", "--set", "tensor=1", "--set", "tensor=2"], 2, "tensor is set twice"),
    (["llama-3.1-8b", "--gpus", "H100", "--set", "weights=fp5"], 2, "weights cannot be 'fp5'"),
    (["llama-3.1-8b", "--gpus", "H100", "--set", "gpu_memory_utilization=1.5"], 2, "at most 1"),
    (["llama-3.1-8b", "--gpus", "H100", "--set", "eager=maybe"], 2, "eager must be true or false"),
    (["no-such-model", "--gpus", "H100"], 3, "no model is called 'no-such-model'"),
    (["someone/unknown", "--gpus", "H100"], 3, "network is not to be used"),
    (["someone/unknown", "--gpus", "H100", "--offline"], 3, "leave out --offline"),
    ([], 2, "no model was named"),
]


@pytest.mark.parametrize(("words", "code", "sentence"), BAD)
def test_bad_input_gets_one_sentence_and_a_remedy(corral, words, code, sentence):
    got, out, err = corral(*words)
    assert got == code
    assert out == ""
    assert sentence in err
    assert "→" in err
    assert "Traceback" not in err


def test_wrong_key_is_answered_with_the_right_one(corral):
    assert "Did you mean tensor?" in corral("llama-3.1-8b", "--gpus", "H100", "--set", "tensr=4")[2]


LOG = """
INFO [core.py:116] Initializing a V1 LLM engine (v0.26.0) with config: model='x'
INFO [model_runner.py:305] Model loading took 15.0 GiB and 2.000045 seconds
INFO [gpu_worker.py:560] Available KV cache memory: 112.28 GiB
INFO [kv_cache_utils.py:2177] GPU KV cache size: 919,824 tokens
INFO [model_runner.py:747] Graph capturing finished in 7 secs, took 0.98 GiB
INFO Actual usage is 15.0 GiB for weight, 1.1 GiB for peak activation, 0.22 GiB for non-torch memory, and
INFO [core.py:340] init engine (profile, create kv cache, warmup model) took 54.37 s (compilation: 25.22 s)
"""


def test_log_is_read():
    seen = read_log(LOG.splitlines())
    assert seen == Observed(15.0, 919_824, 0.98, 1.1, 0.22, 2.000045, 54.37, None, "0.26.0")
    assert read_log(["nothing of interest"]) == Observed()


def test_differences_are_learned_and_used(home, corral):
    facts, here = read_facts("llama-3.1-8b"), Inventory("H200", 1, 1, 150_109_880_320)
    goal = Goal(context=8192)
    plan = make_plan(facts, here, goal)
    found = reconcile(plan, read_log(LOG.splitlines()))
    assert {row.name for row in found.rows} == {
        "weights_gib", "activation_gib", "graph_gib", "non_torch_gib", "kv_tokens", "load_s"}  # fmt: skip
    assert (found.gpu, found.engine_version) == ("H200", "0.26.0")
    append_lesson(home, found)
    lessons = read_lessons(home)
    assert lessons == [found]
    better = make_plan(facts, here, goal, {}, learn_tuning(lessons, "H200", facts.name))
    assert better.memory.kv_cache_tokens == pytest.approx(919_824, rel=0.001)
    assert any("corrected by 1 earlier deployment of" in r.because for r in better.reasons)
    again = reconcile(better, read_log(LOG.splitlines()))
    assert again.missing_gib == pytest.approx(found.gap_gib(counting=False), abs=0.01)  # corrections do not pile up
    assert learn_tuning(lessons, "A100-80").source == "built in"
    assert learn_tuning(lessons, "H200", engine_version="0.99").source == "built in"
    code, out, _ = corral("--calibration")
    assert code == 0
    assert "H200  0.26.0  llama-3.1-8b" in out


def test_nothing_is_learned_of_memory_from_a_kv_cache_of_a_given_size():
    facts, here = read_facts("llama-3.1-8b"), Inventory("H200", 1, 1, 150_109_880_320)
    given = (
        "INFO [gpu_worker.py:466] Initial free memory 138.9 GiB, reserved 12.5 GiB memory for KV Cache as specified"
        " by kv_cache_memory_bytes config and skipped memory profiling."
    )
    found = reconcile(make_plan(facts, here, Goal(context=8192)), read_log([*LOG.splitlines(), given]))
    assert (found.missing_gib, found.storage_gb_s) == (None, None)
    assert "kv_tokens" not in {row.name for row in found.rows}
    assert learn_tuning([found], "H200", facts.name).memory.correction_gib == 0


def test_a_lesson_of_a_plan_that_counted_graphs_serves_one_that_does_not():
    """Plans for vLLM 0.26 used to take graphs out of the KV cache: what such a plan missed is no correction."""
    facts, here, goal = read_facts("llama-3.1-8b"), Inventory("H200", 1, 1, 150_109_880_320), Goal(context=8192)
    own = {"max_graph_size": 512}
    before = reconcile(make_plan(facts, here, goal, own), read_log(LOG.splitlines()))
    assert before.graphs_counted
    assert before.missing_gib == pytest.approx(-0.87, abs=0.1)
    tuning = learn_tuning([before], "H200", facts.name, "0.26.0")
    assert not tuning.memory.counts_graphs
    assert tuning.memory.correction_gib == pytest.approx(0, abs=0.1)
    assert make_plan(facts, here, goal, {}, tuning).memory.kv_cache_tokens == pytest.approx(919_824, rel=0.001)
    counting = replace(before, graphs_counted=False, missing_gib=0.0)
    assert counting.gap_gib(counting=True) == pytest.approx(-0.87, abs=0.1)


def test_the_engine_of_a_profile_chooses_the_coefficients(corral, tmp_path, monkeypatch):
    info = tmp_path / "venv/lib/python3.12/site-packages/vllm-0.26.0.dist-info"
    info.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config/corral/profiles").mkdir(parents=True)
    (tmp_path / "config/corral/profiles/old.toml").write_text(f'[runtime]\nname = "venv"\npath = "{tmp_path}/venv"\n')
    asked = ("llama-3.1-8b", "--gpus", "H200", "--context", "8192", "--json")
    tokens = json.loads(corral(*asked, "--on", "old")[1])["memory"]["kv_cache_tokens"]
    assert tokens == pytest.approx(919_824, rel=0.002)
    assert json.loads(corral(*asked)[1])["memory"]["kv_cache_tokens"] < 0.995 * tokens


def test_torn_and_foreign_lessons_are_left_out(home):
    home.mkdir(parents=True)
    (home / "calibration.jsonl").write_text('{"gpu": "H200"}\n\nnot json\n{"gpu": "H2')
    assert read_lessons(home) == []


def test_nothing_learned_yet(corral):
    assert "Nothing learned yet" in corral("--calibration")[1]
    assert json.loads(corral("--calibration", "--json")[1]) == {"lessons": []}


def test_a_context_cut_to_almost_nothing_barely_fits_and_the_better_choice_comes_first(corral):
    asked = ("llama-3.1-70b-instruct", "--gpus", "1xH100")
    code, out, _ = corral(*asked)
    assert code == BARELY_FITS
    assert "barely fits" in out.splitlines()[0]
    assert out.index("--set weights=int4") < out.index("one stream")
    code, out, _ = corral(*asked, "--json")
    plan = json.loads(out)
    assert (code, plan["verdict"], plan["fits"]) == (BARELY_FITS, "barely fits", True)
    assert "131,072" in plan["reason"]
    better = plan["nearest"][0]
    assert better["change"] == "--set weights=int4"
    assert better["max_model_len"] > 10 * plan["max_model_len"]
    assert better["throughput_tokens_per_s"] > 10 * plan["speed"]["throughput_tokens_per_s"]
    assert corral(*asked, "--set", "weights=int4")[0] == 0
    assert corral(*asked, "--context", "2560")[0] == 0  # what was asked for


def test_throughput_on_a_cpu_is_judged_with_many_requests_at_once(corral, monkeypatch):
    here = Inventory(None, 1, 1, 0, 4, 16 << 30, 12 << 30, source="probed")
    monkeypatch.setattr("corral.deploy.profile.merging.probe", lambda: here)
    _, out, _ = corral("smollm2", "--goal", "throughput", "--json")
    speed = json.loads(out)["speed"]
    assert speed["concurrency"] == 16
    assert speed["throughput_tokens_per_s"] > 2 * speed["decode_tokens_per_s"]
