"""A tuning run on disk and on servers: what a trial leaves, what a kill leaves, what `up --tuned` makes of it."""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
from tune_rivals import VENDORS, vendor_knobs

from corral.base.errors import CorralError, NotFoundError, UsageError
from corral.base.files import write_atomic
from corral.base.processes import Identity
from corral.base.record import dump_json
from corral.cli.up import read_words
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.decision import DeployRequest, as_planned, sized
from corral.deploy.lifecycle.deployments import Record
from corral.deploy.profile.folders import user_folder
from corral.deploy.profile.merging import merged
from corral.deploy.profile.profile import load_profile
from corral.lab.bench.metrics import Spread, Summary
from corral.lab.bench.spec import Spec, Workload, parse_slos
from corral.lab.report.tune import html_page, tune_lines
from corral.lab.tune import tuner
from corral.lab.tune.knobs import BASE, Knob, Setup, knobs_for, tuned_request
from corral.lab.tune.objective import Objective, ObjectiveKind, distance, roofline
from corral.lab.tune.parallel_trials import Turns, refuse_beyond, shares_for, with_part
from corral.lab.tune.race import Race, RaceEnd, RaceResult, next_order, verdict
from corral.lab.tune.store import TuneRun, TuneSpec, find_run, new_run
from corral.lab.tune.trials import Purpose, Roofline, Trial, TrialOrder
from corral.lab.tune.workload import LoadSnapshot, SeenLoad, _bound, read_snapshots, seen_load, workload_of
from corral.node.agent import probe
from corral.node.agent.probe import LoadLog
from corral.plan.choose import make_plan
from corral.plan.contract import Goal
from corral.plan.hardware.inventory import NodeSlice, parse_gpus
from corral.plan.models.facts import read_facts
from tests.tiny_llama import make_tiny_llama
from tests.unit.conftest import Corral, in_process

KNOBS = (Knob("max_num_seqs", ("256", "64")), Knob("max_num_batched_tokens", ("4096",)))
SLOS = parse_slos("ttft_p99=1s")
TUNED = {"": 3000, "--max-num-batched-tokens 4096": 1.5, "--max-num-seqs 256": 0}


def summarise_lengths(count: int, prompt: int, answer: int) -> Summary:
    no = Spread()
    lengths = (count, 0, count * prompt, count * answer)
    return Summary(1.0, *lengths, 1.0, 1.0, 1.0, None, no, no, no, no, no, no, 1.0, 1, 1.0)


class Silent:
    def __init__(self) -> None:
        self.begun: list[TrialOrder] = []

    def begins(self, number: int, order: TrialOrder, left_s: float) -> None:
        self.begun.append(order)

    def phase(self, text: str) -> None: ...

    def waits(self, who: str) -> None: ...

    def ended(self, trial: Trial, so_far: RaceResult) -> None: ...


def a_run(model: str = "tiny", budget_s: float = 600.0) -> TuneRun:
    race = Race(KNOBS, budget_s, measure_s=1.0, start_s=10.0)
    objective = Objective(ObjectiveKind.THROUGHPUT, concurrency=8)
    bench = Spec(Workload(input_len=16, output_len=8))
    request = DeployRequest(model=model, fixed={"max_model_len": "512"})
    return new_run(TuneSpec(model, request, race, objective, bench, 0.0), "t1")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials without servers: batched tokens help by half, 256 sequences do not start."""

    def made(run: TuneRun, spec: TuneSpec, order: TrialOrder, number: int, *_: object) -> Trial:
        choices = dict(order.setup.choices)
        score = None if choices.get("max_num_seqs") == "256" else 100.0 * (1 + number % 3 / 100)
        score = score * 1.5 if score and "max_num_batched_tokens" in choices else score
        return Trial(order.setup, order.purpose, score, 20.0, 10.0, "" if score else "out of memory")

    monkeypatch.setattr(tuner, "make_trial", made)


@pytest.mark.usefixtures("scripted", "clean_home")
def test_a_run_that_was_killed_goes_on_where_it_was() -> None:
    run = a_run()
    whole = tuner.tune(run, Silent())
    trials = run.trials()
    assert whole.outcome is RaceEnd.BETTER
    assert whole.best == Setup.of(max_num_batched_tokens="4096")
    file = run.folder / "trials.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # killed while it wrote the fifth
    again = Silent()
    assert tuner.tune(run, again).best == whole.best
    assert len(again.begun) == len(trials) - 4
    assert [one.setup for one in run.trials()] == [one.setup for one in trials]


@pytest.mark.usefixtures("scripted", "clean_home")
def test_the_report_says_what_helped_and_what_did_not_start() -> None:
    run = a_run()
    found = tuner.tune(run, Silent())
    text = "\n".join(tune_lines(run, run.trials(), found, 80))
    assert "max_num_batched_tokens=4096: +" in text
    assert "failed: out of memory" in text
    assert "corral up --tuned t1" in text
    assert max(map(len, text.splitlines())) <= 80
    page = html_page(run, run.trials(), found)
    assert "<script" not in page
    assert "max_num_batched_tokens=4096" in page
    fixed, arguments = tuner.settings_found(run)
    assert fixed == {"max_model_len": "512", "max_num_batched_tokens": "4096"}
    assert arguments == ()


@pytest.mark.usefixtures("clean_home")
def test_runs_are_found_by_name_beginning_and_last() -> None:
    run = a_run()
    assert find_run("t1") == find_run("t") == find_run("last") == run
    with pytest.raises(NotFoundError, match="there is no tuning run called 'x9'"):
        find_run("x9")


@pytest.mark.usefixtures("clean_home")
def test_the_last_run_of_none_is_not_taken_for_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = in_process(capsys, "tune")("last")
    assert code == 3
    assert "there is no tuning run called 'last'. → `corral tune MODEL` starts one." in " ".join(err.split())


def test_one_trial_on_a_server_leaves_nothing_running(
    answering: Corral, clean_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(clean_home / "corral"))
    monkeypatch.setenv("FAKE_TUNED", json.dumps(TUNED))
    run = a_run(str(answering.model))
    spec = run.spec
    turns = Turns(shared=False)
    good = tuner.make_trial(run, spec, TrialOrder(BASE, Purpose.SCREEN, 0.5), 1, Silent(), turns)
    assert good.score
    assert good.start_s > 0
    assert (Path(good.run) / "run.json").is_file()
    order = TrialOrder(Setup.of(max_num_seqs="256"), Purpose.SCREEN, 0.5)
    bad = tuner.make_trial(run, spec, order, 2, Silent(), turns)
    assert bad.score is None
    assert "ran out of memory" in bad.why
    states = {one["state"] for one in answering("ps", "--all", "--json").json()}
    assert states <= {"stopped", "failed"}


def test_knobs_leave_alone_what_is_fixed_and_offer_to_drop_what_was_pasted() -> None:
    pasted = ("--enforce-eager", "--max-num-batched-tokens", "65536", "--enable-chunked-prefill=False")
    request = as_planned(DeployRequest(model="llama-3.1-8b", fixed={"max_num_seqs": "256"}, extra_args=pasted))
    plan = make_plan(read_facts("llama-3.1-8b", offline=True), parse_gpus("1xH200"), request.goal, request.fixed)
    knobs = knobs_for(plan, request, pasted, bursts=True, shares_prefixes=False)
    names = [knob.name for knob in knobs]
    assert "max_num_seqs" not in names
    assert [one for one in names if one.startswith("given ")] == [
        "given eager", "given max_num_batched_tokens", "given --enable-chunked-prefill",
    ]  # fmt: skip
    assert {"api_servers", "async_scheduling", "prefix_caching", "stream_interval"} <= set(names)
    freed = tuned_request(request, knobs, Setup((("given --enable-chunked-prefill", ""), ("given eager", ""))))
    assert freed.extra_args == ()
    assert set(freed.fixed) == {"max_num_seqs", "max_num_batched_tokens"}
    streamed = tuned_request(request, knobs, Setup.of(stream_interval="4", async_scheduling="false"))
    assert (streamed.fixed["stream_interval"], streamed.fixed["async_scheduling"]) == ("4", "false")


def test_objectives_refuse_what_they_cannot_judge() -> None:
    with pytest.raises(UsageError, match="--objective rate needs a service level"):
        Objective(ObjectiveKind.RATE, concurrency=8)
    with pytest.raises(UsageError, match="--objective latency needs a request rate"):
        Objective(ObjectiveKind.LATENCY)


def test_workloads_by_name_and_by_file(tmp_path: Path) -> None:
    assert workload_of("chat", False, 1).shares_prefixes
    assert workload_of("rag", False, 1).input_len == 4096
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"custom_id": "1", "body": {}}\n')
    assert workload_of(str(rows), False, 1).dataset == "batch"
    with pytest.raises(UsageError, match="there is no workload called 'chta'"):
        workload_of("chta", False, 1)


def test_an_unfinished_run_keeps_the_base() -> None:
    trials = [Trial(BASE, Purpose.SCREEN, 100.0, 10), Trial(Setup.of(max_num_seqs="64"), Purpose.SCREEN, 200.0, 10)]
    found = verdict(Race(KNOBS, 30, 1, 10), trials)
    assert found.outcome is RaceEnd.UNFINISHED
    assert found.best == BASE


@pytest.mark.usefixtures("clean_home")
def test_a_deployment_is_tuned_as_it_was_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.cli.tune.tune", lambda run, _: verdict(run.spec.race, []))
    model = make_tiny_llama(tmp_path / "tiny")
    folder = DeploymentFolder.of("served")
    folder.path.mkdir(parents=True)
    words = ("up", str(model), "--name", "served", "--port", "8123", "--context", "512", "--set", "eager=true",
             "--concurrency", "7", "--goal", "latency", "--flavour", "cpu",
             "--env", "A=1", "--", "--max-num-seqs", "4")  # fmt: skip
    record = Record("served", "x", "tiny", "tiny", "local", 0.0, Identity(1, "here", "boot", 1), words=words)
    folder.record.write_text(dump_json(record))
    corral = in_process(capsys, "tune")
    code, _, err = corral(
        "--deployment", "served", "--budget", "1s", "--measure", "1", "--set", "api_servers=1", "--name", "r"
    )
    spec = find_run("r").spec
    assert (spec.model, spec.request.model) == (str(model), str(model))
    assert (spec.request.name, spec.request.port) == (None, None)  # it may still run
    assert (spec.request.goal.context, spec.request.goal.concurrency, spec.request.goal.goal) == (512, 7, "latency")
    assert spec.request.flavour == "cpu"
    assert dict(spec.request.fixed) == {"eager": "true", "api_servers": "1", "max_num_seqs": "4"}
    assert spec.request.extra_env == {"A": "1"}
    assert "given max_num_seqs" in {knob.name for knob in spec.race.knobs}
    assert corral("tiny", "--deployment", "served")[0] == 2
    assert corral()[0] == 2
    folder.record.write_text(dump_json(replace(record, words=())))
    code, _, err = corral("--deployment", "served")
    assert code == 2
    assert "how 'served' was started is not known" in err
    code, _, err = corral("--deployment", "served", "--workload", "chat", "--input-len", "3")
    assert code == 2
    code, _, err = corral("tiny", "--workload", "seen")
    assert "--workload seen needs a deployment" in err


def test_a_run_goes_on_for_longer_and_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clean_home: Path
) -> None:
    monkeypatch.setattr("corral.cli.tune.tune", lambda run, _: verdict(run.spec.race, []))
    monkeypatch.chdir(tmp_path)
    make_tiny_llama(tmp_path / "tiny")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    corral = in_process(capsys, "tune")
    corral("./tiny", "--workload", "./prompts.jsonl", "--budget", "10m", "--name", "r")
    spec = find_run("r").spec
    assert (spec.request.model, spec.bench.workload.file) == (str(tmp_path / "tiny"), str(tmp_path / "prompts.jsonl"))
    corral("r", "--budget", "80m")
    assert find_run("r").spec == replace(spec, race=replace(spec.race, budget_s=4800.0))
    code, _, err = corral("r", "--measure", "30s")
    assert (code, "--measure cannot be changed: r is a run that was begun already" in err) == (2, True)
    code, _, err = corral("r", "--", "--max-num-seqs", "4")
    assert (code, "what follows `--` cannot be changed" in err) == (2, True)
    (tmp_path / "prompts.jsonl").unlink()
    code, _, err = corral("r")
    assert code not in (0, 1)
    assert "prompts.jsonl" in err
    code, _, err = corral("./tiny", "--name", "team/chat")
    assert (code, "'team/chat' cannot name a run" in err) == (2, True)


def test_what_was_tuned_is_started_as_it_was_measured(tmp_path: Path, clean_home: Path) -> None:
    run = a_run(str(make_tiny_llama(tmp_path / "tiny")), budget_s=60.0)
    goal, options = Goal(context=512, concurrency=16, goal="throughput"), {"name": "vllm", "options": {"env": 1}}
    measured = replace(
        run.spec.request, goal=goal, runtime="conda", runtime_options=options, extra_env={"A": "1", "B": "2"}
    )
    write_atomic(run.folder / "tune.json", dump_json(replace(run.spec, request=measured)))
    found = read_words(("up", "--tuned", run.name, "--env", "B=3"))
    said = {name: found.given[name] for name in ("context", "concurrency", "goal", "runtime", "runtime_options")}
    assert said == {"context": 512, "concurrency": 16, "goal": "throughput", "runtime": "conda",
                    "runtime_options": ("name=vllm", "options.env=1")}  # fmt: skip
    assert found.given["extra_env"] == ("A=1", "B=2", "B=3")
    own = read_words(("up", "--tuned", run.name, "--concurrency", "4", "--on", "somewhere"))
    assert (own.given["concurrency"], own.given["runtime"]) == (4, None)


def test_flags_that_decide_what_is_answered_are_never_left_out() -> None:
    brought = ("--dtype", "float16", "--max-model-len", "4096", "--kv-cache-dtype", "fp8", "--enable-lora",
               "--tool-call-parser", "hermes", "--max-logprobs", "-1", "--enforce-eager", "--block-size", "32",
               "--no-enable-chunked-prefill")  # fmt: skip
    plan = make_plan(read_facts("llama-3.1-8b", offline=True), parse_gpus("1xH200"))
    knobs = knobs_for(plan, DeployRequest(), brought, False, False)
    given = {one.name for one in knobs if one.name.startswith("given")}
    assert given == {"given eager", "given --block-size", "given --no-enable-chunked-prefill"}
    request = DeployRequest(extra_args=("--block-size", "32", "--max-logprobs", "-1", "--enable-lora"))
    left = tuned_request(request, knobs, Setup.of(**{"given --block-size": ""}))
    assert left.extra_args == ("--max-logprobs", "-1", "--enable-lora")


def test_no_two_runs_servers_have_one_name(tmp_path: Path) -> None:
    runs = [TuneRun(tmp_path / name) for name in ("chat", "chat-2", "m" * 70 + "-1", "m" * 70 + "-2")]
    names = [tuner._name(run, place) for run in runs for place in range(4)]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 62


def a_snapshot(t: float, requests: int, each: int = 400, **more: Any) -> LoadSnapshot:
    tokens = {"prompt_tokens": requests * each, "prefix_queries": requests * each, "prefix_hits": requests * each / 4}
    return LoadSnapshot.of({"t": t, "finished": requests, "output_tokens": requests * 64, **tokens, **more})


def test_what_a_deployment_saw_is_lengths_and_a_rate() -> None:
    found = a_snapshot(1050.0, 100)
    load = seen_load(found, [], "x", 1000.0)
    assert load == SeenLoad(100, 400, 64, 100, 2.0, 50.0)
    shared = load.workload(False, 7)
    assert (shared.dataset, shared.input_len, shared.output_len, shared.prefix_len) == (
        "prefix_repetition",
        400,
        64,
        100,
    )
    assert replace(load, shared_tokens=3).workload(False, 7).dataset == "random"
    with pytest.raises(UsageError, match="has answered 3 requests in the last 50 s: too few"):
        seen_load(replace(found, finished=3.0), [], "x", 1000.0)


def test_only_the_last_hour_counts_and_only_of_this_engine() -> None:
    kept = [a_snapshot(300.0 * n, 1000 * n, each=2000) for n in range(20)]
    now = replace(a_snapshot(7200.0, 22_000), finished=19_600.0, prompt_tokens=0.0, output_tokens=0.0)
    hour_ago = kept[12]  # at 3,600 s
    now = replace(
        now, prompt_tokens=hour_ago.prompt_tokens + 7600 * 100, output_tokens=hour_ago.output_tokens + 7600 * 30
    )
    load = seen_load(now, kept, "x", 0.0)
    assert (load.requests, load.prompt_tokens, load.output_tokens, load.seconds) == (7600, 100, 30, 3600.0)
    assert "7,600 requests in the last 1 h" in load.words
    again = [*kept, a_snapshot(6000.0, 1), a_snapshot(6300.0, 50)]  # the engine was restarted: it counts anew
    load = seen_load(a_snapshot(7000.0, 100), again, "x", 0.0)
    assert (load.requests, load.prompt_tokens, load.seconds) == (100, 400, 1000.0)


def test_the_agents_own_questions_are_taken_out_and_lengths_vary_as_seen() -> None:
    tokens = {"prompt_tokens": 100 * 300 + 60 * 2, "output_tokens": 100 * 64 + 60}
    buckets = {"1.0": 0, "2.0": 60, "200.0": 60, "400.0": 160, "+Inf": 160}
    outputs = {"1.0": 60, "50.0": 60, "100.0": 160, "+Inf": 160}
    found = a_snapshot(1100.0, 160, own=60, prompts=buckets, outputs=outputs, **tokens)
    load = seen_load(found, [], "x", 1000.0)
    assert (load.requests, load.prompt_tokens, load.output_tokens) == (100, 300, 64)
    assert load.varies == 0.0  # all of them in one bucket
    wide = {"1.0": 0, "2.0": 60, "200.0": 110, "400.0": 160, "+Inf": 160}
    load = seen_load(replace(found, prompts={_bound(k): float(v) for k, v in wide.items()}), [], "x", 1000.0)
    assert load.varies is not None
    assert 0.5 < load.varies <= 0.9
    assert load.workload(False, 1).range_ratio == load.varies


def test_what_the_agent_kept_is_read_with_care(tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    assert read_snapshots(file) == []
    log = LoadLog(str(file))
    page = b'vllm:request_success_total{engine="0"} 7\nvllm:request_success_total{engine="1"} 5\n'
    page += b'vllm:request_prompt_tokens_bucket{engine="0",le="10.0"} 3\n'
    page += (
        b'vllm:request_prompt_tokens_bucket{engine="1",le="10.0"} 4\nvllm:request_prompt_tokens_bucket{le="+Inf"} 9\n'
    )
    log.note(page, own=2)
    log.note(page, own=3)  # too soon
    with file.open("a") as more:
        more.write('{"t": -1}\n[]\nnot json\n{"t": 5, "finished": NaN}\n{"t": 5, "prompts": {"x": 1}}\n{"t":')
    (found,) = read_snapshots(file)
    assert (found.finished, found.own, dict(found.prompts)) == (12.0, 2.0, {10.0: 7.0, math.inf: 9.0})
    assert file.stat().st_mode & 0o077 == 0


def test_the_agents_log_of_the_load_does_not_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MOST_BYTES", 2000)
    monkeypatch.setattr(probe, "EVERY_S", 0.0)
    file = tmp_path / "load.jsonl"
    log = LoadLog(str(file))
    for number in range(200):
        log.note(b"vllm:request_success_total %d\n" % number, own=0)
    assert file.stat().st_size < 2200
    assert read_snapshots(file)[-1].finished == 199.0
    LoadLog("").note(b"", 0)  # an agent that was started by an older Corral
    LoadLog(str(tmp_path / "missing" / "load.jsonl")).note(b"", 0)


def test_baselines_are_setups_of_their_own() -> None:
    request = as_planned(DeployRequest(model="llama-3.1-8b", fixed={"max_num_seqs": "64"}))
    plan = make_plan(read_facts("llama-3.1-8b", offline=True), parse_gpus("1xH200"), request.goal, request.fixed)
    knobs = (*vendor_knobs(plan, request, VENDORS), Knob("max_num_seqs", ("128",)))
    stock, ocean = (tuned_request(request, knobs, BASE.with_(knob.name, knob.values[0])) for knob in knobs[:2])
    assert (stock.fixed["max_num_seqs"], stock.fixed["api_servers"], stock.fixed["eager"]) == ("1024", "1", "false")
    assert (ocean.fixed["eager"], ocean.fixed["dtype"], ocean.fixed["max_model_len"]) == ("true", "fp16", "8192")
    assert ocean.extra_args == ("--no-enable-chunked-prefill",)
    longer = replace(request, goal=Goal(context=16384))
    assert "--max-model-len" not in vendor_knobs(plan, longer, ("digitalocean",))[0].values[0]
    race = Race(knobs, 9_000.0, 1.0, 10.0)
    trials: list[Trial] = []
    while order := next_order(race, trials):
        score = 150.0 if order.setup.choices else 100.0
        trials.append(Trial(order.setup, order.purpose, score + len(trials) % 2, 20.0))
    assert {knob.name for knob in knobs} <= {name for one in trials for name, _ in one.setup.choices}
    assert all(len(one.setup.choices) < 2 for one in trials)  # compared with, not combined


def test_servers_side_by_side_need_hardware_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.deploy.targets.local import LocalTarget

    assert shares_for(DeployRequest(), 1) == ((), False)
    monkeypatch.setattr(LocalTarget, "inventory", lambda _: parse_gpus("8xH100"))
    shares, in_turns = shares_for(DeployRequest(), 3)
    assert [share.gpus for share in shares] == [(0, 1), (2, 3), (4, 5)]
    assert not in_turns
    monkeypatch.setattr(LocalTarget, "inventory", lambda _: parse_gpus("2xH100"))
    assert shares_for(DeployRequest(), 3) == ((NodeSlice(),) * 3, True)
    with pytest.raises(UsageError, match="2 x H100-SXM hold 4 servers side by side at most, not 5"):
        shares_for(DeployRequest(), 5)
    monkeypatch.setattr(LocalTarget, "inventory", lambda _: parse_gpus("2xH100x2"))
    with pytest.raises(UsageError, match="need one machine; here: 2 nodes"):
        shares_for(DeployRequest(), 3)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="on the same cores"):
        shares_for(DeployRequest(), 2)


def _on(gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.deploy.targets.local import LocalTarget

    monkeypatch.setattr(LocalTarget, "inventory", lambda _: parse_gpus(gpus))


def test_servers_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _on("1xH200", monkeypatch)
    whole = DeployRequest(model="llama-3.1-8b", fixed={"max_model_len": "8192"})
    part = with_part(whole, 4)
    assert part.fixed == {
        "max_model_len": "8192", "gpu_memory_utilization": "0.2300", "max_num_seqs": "1024", "api_servers": "4",
        "max_num_batched_tokens": "8192", "stream_interval": "1", "max_graph_size": "1024",
    }  # fmt: skip
    assert part.extra_args[0] == "--kv-cache-memory-bytes"
    gib = int(part.extra_args[1]) / 2**30
    assert 0.23 * 139.8 - 15 - 4 < gib < 0.23 * 139.8 - 15 - 2  # without weights, activations, graphs
    said = replace(whole, fixed={"gpu_memory_utilization": "0.99"})  # outside it others need room too
    assert with_part(said, 2).fixed["gpu_memory_utilization"] == "0.4600"
    with pytest.raises(UsageError, match="4 servers do not fit the same GPUs"):
        with_part(replace(whole, model="llama-3.1-70b", fixed={"weights": "fp8"}), 4)
    for flag in ("--kv-cache-memory-bytes=1000", "--kv_cache_memory_bytes=1000"):
        with pytest.raises(UsageError, match="a GPU to itself"):
            with_part(replace(whole, extra_args=(flag,)), 2)
    whatever_fits = with_part(replace(whole, fixed={"max_model_len": "auto"}), 4)
    assert 100_000 < int(str(whatever_fits.fixed["max_model_len"])) < 131072
    plan = make_plan(read_facts("llama-3.1-8b", offline=True), parse_gpus("1xH200"), Goal(), part.fixed)
    refuse_beyond(plan, 4, 256, 256)
    refuse_beyond(plan, 4, 100_000, None)
    with pytest.raises(UsageError, match="1,024 requests at once of 256 tokens need 262,144"):
        refuse_beyond(plan, 4, 1024, 256)
    with pytest.raises(UsageError, match=r"hold 8,192 tokens of one request each, .* 9,000") as refused:
        refuse_beyond(plan, 4, 1, 9000)
    assert "--input-len" in refused.value.remedy


def test_a_part_of_a_model_with_a_short_context_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on("1xH200", monkeypatch)
    short = make_tiny_llama(tmp_path / "short", context=1024)
    assert with_part(DeployRequest(model=str(short)), 4).fixed["max_model_len"] == "1024"


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--input-len 320 --output-len 128 --concurrency 256", ""),
        ("--input-len 512 --output-len 512 --concurrency 256", "256 requests at once of 1,024 tokens"),
        (
            "--input-len 512 --output-len 512 --concurrency 256 --request-rate 2",
            "256 requests at once of 1,024 tokens",
        ),
        ("--input-len 512 --output-len 512 --concurrency 256 --request-rate 2 --objective latency", ""),
        ("--input-len 130000 --output-len 512 --request-rate 2 --objective latency", "the longest here has 130,512"),
    ],
)
def test_a_part_must_hold_the_load_of_every_setup(
    words: str,
    refused: str,
    clean_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("corral.cli.tune.tune", lambda run, _: verdict(run.spec.race, []))
    _on("1xH200", monkeypatch)
    corral = in_process(capsys, "tune")
    code, _, err = corral("llama-3.1-8b", *words.split(), "--side-by-side", "4", "--name", "r", "--budget", "40m")
    assert (code == 2) is bool(refused), err
    assert refused in err
    if not refused and "--request-rate" not in words:  # with 16,384 batched tokens less is left
        assert "never started: max_num_batched_tokens=16384: 4 servers on the same GPUs have" in err
        batched = next(one for one in find_run("r").spec.race.knobs if one.name == "max_num_batched_tokens")
        assert "16384" not in batched.values


@pytest.mark.parametrize(("gpus", "places", "more"), [
    ("1xH200", 4, {}), ("1xH200", 4, {"goal": Goal(concurrency=16)}), ("1xH100", 3, {}), ("2xH100", 3, {}),
    ("1xL40S", 2, {}),
])  # fmt: skip
def test_a_part_is_the_same_server_and_holds_its_longest_request(
    gpus: str, places: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses a KV cache that is smaller than its longest request."""
    _on(gpus, monkeypatch)
    request = DeployRequest(model="llama-3.1-8b", **more)
    part = with_part(request, places)
    alone, plan = (sized(one)[1].plan for one in (request, part))
    kept = int(part.extra_args[-1]) // plan.memory.kv_bytes_per_token_per_gpu
    assert plan.max_model_len <= kept - plan.settings.block_size
    assert (plan.precision, plan.parallel) == (alone.precision, alone.parallel)
    names = ("max_num_seqs", "max_num_batched_tokens", "api_servers", "stream_interval", "max_graph_size")
    assert [getattr(plan.settings, name) for name in names] == [getattr(alone.settings, name) for name in names]


@pytest.mark.parametrize(("gpus", "model", "places"), [("1xB200", "llama-3.1-70b", 2), ("1xL40S", "llama-3.1-8b", 3)])
def test_a_part_is_refused_where_it_would_be_another_server(
    gpus: str, model: str, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(gpus, monkeypatch)
    with pytest.raises(UsageError, match=r"fit the same GPUs only as TP1 in fp8, and one alone is TP1 in bf16"):
        with_part(DeployRequest(model=model), places)
    with pytest.raises(UsageError, match=r"do not fit the same GPUs|KV tokens, a request may have"):
        with_part(DeployRequest(model=model, goal=Goal(context=131072)), places)


def test_what_is_left_of_a_failed_server_is_ended_too(clean_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ended = DeploymentFolder.of("tune-r"), list[str]()
    monkeypatch.setattr(deployments, "stop", lambda one: ended.append(one.name))
    tuner._stop("tune-r")
    assert not ended  # nothing was started
    folder.path.mkdir(parents=True)
    folder.record.write_text("{}")
    for found in (State.FAILED, State.STOPPED, State.READY):
        monkeypatch.setattr(deployments, "status", lambda _, state=found: SimpleNamespace(state=state))
        tuner._stop("tune-r")
    assert len(ended) == 2

    def unreadable(_: DeploymentFolder) -> None:
        raise CorralError("its record cannot be read.")

    monkeypatch.setattr(deployments, "status", unreadable)
    tuner._stop("tune-r")
    assert len(ended) == 3


def test_what_is_measured_is_alone_and_what_starts_is_not() -> None:
    turns, begun, log = Turns(shared=True), Barrier(3), list[str]()

    def trial(number: int) -> None:
        with turns.start():
            log.append("start")
            begun.wait(10)  # all three start at once
            time.sleep(0.01 * number)
            log.append("ready")
        with turns.measurement():
            log.append("measure")
            time.sleep(0.01)
            log.append("measured")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(trial, range(6)))
    group = ["start"] * 3 + ["ready"] * 3 + ["measure", "measured"] * 3
    assert log == 2 * group
    with turns.measurement(), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trial, 0)
        turns.end()
        with pytest.raises(CorralError, match="the run was ended"):
            waiting.result(10)


@pytest.mark.parametrize("in_turns", [False, True])
def test_trials_side_by_side_on_servers_leave_nothing_running(
    in_turns: bool, answering: Corral, clean_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(clean_home / "corral"))
    monkeypatch.setenv("FAKE_TUNED", json.dumps(TUNED))
    monkeypatch.setattr(tuner, "with_part", lambda request, _: request)  # there is no GPU here
    run = a_run(str(answering.model), budget_s=8.0)
    race = replace(run.spec.race, measure_s=0.3, start_s=1.0)
    spec = replace(run.spec, shares=(NodeSlice(), NodeSlice()), race=race, in_turns=in_turns)
    write_atomic(run.folder / "tune.json", dump_json(spec))
    watcher = Silent()
    tuner.tune(run, watcher)
    trials = run.trials()
    assert len(trials) >= 2
    assert all(one.spent_s is not None for one in trials)
    names = {one["name"] for one in answering("ps", "--all", "--json").json()}
    assert {f"tune-{run.name}", f"tune-{run.name}+2"} <= names
    states = {one["state"] for one in answering("ps", "--all", "--json").json()}
    assert states <= {"stopped", "failed"}


@pytest.mark.usefixtures("clean_home")
def test_the_result_says_how_far_from_the_roofline() -> None:
    run = a_run()
    plan = make_plan(read_facts("llama-3.1-8b", offline=True), parse_gpus("1xH200"), Goal())
    summary = summarise_lengths(count=10, prompt=512, answer=128)
    for kind, more in (("throughput", {}), ("cost", {}), ("latency", {"rate": 1.0}), ("rate", {"slos": SLOS})):
        bounds = roofline(plan, Objective(ObjectiveKind(kind), 64, **more), summary)
        assert bounds is not None
        assert bounds.hardware is not None
        assert bounds.hardware > bounds.planned > 0, kind
    assert roofline(None, run.spec.objective, summary) is None
    bounds = Roofline(hardware=20_000.0, planned=10_000.0)
    trials = [Trial(BASE, Purpose.SCREEN, score, 20.0, roofline=bounds) for score in (9_000.0, 10_000.0)]
    found = verdict(run.spec.race, trials)
    far = distance(run.spec.objective, found, trials)
    assert far is not None
    assert far.words == (
        "48% of the hardware's roofline (20,000 tok/s), 95% of what the plan predicts for it (10,000 tok/s)"
    )
    assert "48% of the hardware's roofline" in " ".join(" ".join(tune_lines(run, trials, found, 80)).split())
    assert "of the hardware&#x27;s roofline" in html_page(run, trials, found)
    assert distance(run.spec.objective, found, [replace(one, roofline=None) for one in trials]) is None
    cpu = [replace(one, roofline=Roofline(None, 10_000.0)) for one in trials]
    only = distance(run.spec.objective, found, cpu)
    assert only is not None
    assert only.words == "95% of what the plan predicts for it (10,000 tok/s)"


@pytest.mark.usefixtures("scripted")
def test_the_result_is_a_profile(clean_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run()
    tuner.tune(run, Silent())
    corral = in_process(capsys, "tune", "report")
    code, _, err = corral("t1", "--profile", "mine")
    assert code == 0, err
    path = user_folder() / "mine.toml"
    assert str(path) in " ".join(err.split()).replace(" ", "")
    text = path.read_text()
    assert "# max_num_batched_tokens=4096: +" in text
    assert "makes no measurable difference" in text
    profile = load_profile("mine", {})
    request = DeployRequest.of(merged(profile, {"model": None}))
    assert request.model == "tiny"
    assert dict(request.fixed) == {"max_model_len": "512", "max_num_batched_tokens": "4096"}
    code, _, err = corral("t1", "--profile", "mine")
    assert code == 4
    assert "exists already" in err
