"""What the report of a measurement advises, a plan for that load does by itself; and what is judged for a load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tune_rivals import vendor_knobs

from corral.base.record import dump_json, from_json, to_json
from corral.deploy.lifecycle.decision import DeployRequest, sized
from corral.deploy.targets.local import LocalTarget
from corral.lab.bench.limit import Limit, LimitCause, distance, roof
from corral.lab.tune.knobs import knobs_for
from corral.plan.candidate import Tuning
from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Judged, Plan
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.judged import needed_acceptance
from corral.plan.measured import tuning_for
from corral.plan.memory import Coefficients
from corral.plan.models.facts import read_facts
from corral.plan.reasons import explain
from corral.plan.settings import largest_graph
from corral.plan.speed import roof_of
from tests.unit.test_bench_limit import CALM, streamed, summary

HERE = replace(parse_gpus("1xH200"), cpu_cores=32)
# causes that no setting of a plan mends: other hardware, other weights, or more load
NO_SETTING = {LimitCause.KV_CACHE, LimitCause.ARITHMETIC, LimitCause.BANDWIDTH, LimitCause.LOAD}


def planned(goal: Goal, **fixed: object) -> Plan:
    return make_plan(read_facts("llama-3.1-8b"), HERE, goal, {"max_model_len": 8192, **fixed})


def measured(cause: LimitCause) -> tuple[Limit | None, Plan, Goal]:
    """A run that was limited by this, with settings of somebody's own, its plan, and its load as a goal."""
    short = {"prompt_tokens": 128, "output_tokens": 128}
    match cause:
        case LimitCause.KV_CACHE:
            goal = Goal(concurrency=64)
            return distance(planned(goal), summary(3000, 20.0, 64), replace(CALM, preemptions=3)), planned(goal), goal
        case LimitCause.MAX_SEQS:
            goal = Goal(concurrency=2048)
            plan = planned(goal, max_num_seqs=1024)
            return distance(plan, summary(3000, 200.0, 1024),
                            replace(CALM, peak_waiting=9, peak_running=1024)), plan, goal  # fmt: skip
        case LimitCause.LAUNCHES:
            goal = Goal(concurrency=1024, **short)  # type: ignore[arg-type]
            plan = planned(goal, max_graph_size=512)  # 15,467 tokens a second on an H200, 17,048 with 1,024
            return distance(plan, streamed(1024, 15_467), CALM, 5), plan, goal
        case LimitCause.ARITHMETIC:
            goal = Goal(concurrency=400)
            return distance(planned(goal), summary(14_000, 30.0, 400), CALM), planned(goal), goal
        case LimitCause.BANDWIDTH:
            goal = Goal(concurrency=1)
            return distance(planned(goal), summary(165.0, 5.0, 1.0), CALM), planned(goal), goal
        case LimitCause.FRONT_END:
            goal = Goal(concurrency=256, **short)  # type: ignore[arg-type]
            plan = planned(goal, api_servers=1)
            return distance(plan, streamed(256, 13_327), CALM, 1), plan, goal
        case LimitCause.EAGER | LimitCause.LOAD:
            goal, eager = Goal(concurrency=256), cause is LimitCause.EAGER
            plan = planned(goal, eager=eager)
            return distance(plan, summary(100, 30.0, 4), CALM), plan, goal
        case LimitCause.SCHEDULING:
            goal = Goal(concurrency=1024, prompt_tokens=6144, output_tokens=384)
            plan = planned(goal, max_num_batched_tokens=8192)
            return distance(plan, summary(3_000, 60.0, 900), replace(CALM, peak_waiting=3)), plan, goal
        case LimitCause.OVERHEADS:
            goal = Goal(concurrency=256, **short)  # type: ignore[arg-type]
            plan = planned(goal, api_servers=1)
            return distance(plan, streamed(200, 5_000), CALM, 1), plan, goal


@pytest.mark.parametrize("cause", LimitCause)
def test_the_next_plan_does_what_the_report_advises(cause: LimitCause) -> None:
    found, before, goal = measured(cause)
    assert found is not None
    assert found.cause is cause
    assert bool(found.advised) is (cause not in NO_SETTING)
    settings = planned(goal).settings
    for name, value in found.advised.items():
        chosen = getattr(settings, name)
        assert str(getattr(before.settings, name)).lower() != value
        if value in ("true", "false"):
            assert str(chosen).lower() == value
        else:
            assert chosen >= int(value)


def test_a_limit_reads_back() -> None:
    found, _, _ = measured(LimitCause.MAX_SEQS)
    assert from_json(Limit, to_json(found)) == found


def reason(plan: Plan, field: str) -> tuple[str, float | None]:
    return next((row.because, row.gain) for row in plan.reasons if row.field == field)


def test_tokens_are_streamed_together_where_nobody_reads_along() -> None:
    load = {"concurrency": 1024, "prompt_tokens": 128, "output_tokens": 128}
    plan = planned(Goal(goal="throughput", **load))
    at = plan.engine_args.index("--stream-interval")
    assert plan.engine_args[at + 1] == "4"
    for goal in (Goal(**load), Goal(goal="latency", **load), Goal(goal="throughput", concurrency=4)):  # type: ignore[arg-type]
        assert "--stream-interval" not in planned(goal).engine_args
    assert "--stream-interval" not in planned(Goal(goal="throughput", **load), stream_interval=1).engine_args


def test_every_setting_that_is_not_vllms_default_says_what_it_is_worth() -> None:
    plan = planned(Goal(concurrency=256, prompt_tokens=128, output_tokens=128))
    because, gain = reason(plan, "api_servers")
    assert gain == pytest.approx(0.22, abs=0.03)  # 14,700 against 12,000; 13 to 39% were measured
    assert f"{gain:+.0%} at 256 requests at once" in because
    eager = planned(Goal(concurrency=16), eager=True)
    assert reason(eager, "eager")[1] == pytest.approx(-0.7, abs=0.1)  # 58.9 against 206 tokens a second
    assert reason(planned(Goal()), "max_num_seqs")[1] is None


@pytest.mark.parametrize(("field", "value", "flags"), [
    ("max_graph_size", "1024", ("--max-cudagraph-capture-size", "1024")),
    ("async_scheduling", "false", ("--no-async-scheduling",)),
    ("stream_interval", "2", ("--stream-interval", "2")),
])  # fmt: skip
def test_what_is_set_becomes_a_flag(field: str, value: str, flags: tuple[str, ...]) -> None:
    plan = planned(Goal(), **{field: value})
    assert " ".join(flags) in " ".join(plan.engine_args)
    assert reason(plan, field)[0].startswith("as set; ")
    if field == "max_graph_size":
        assert plan.memory.graph_bytes_per_gpu > planned(Goal(), max_graph_size=512).memory.graph_bytes_per_gpu


@pytest.mark.parametrize(("goal", "size"), [
    (Goal(), 1024),  # up to 1,024 sequences
    (Goal(concurrency=1024, prompt_tokens=4096), 1024),
    (Goal(concurrency=256), 1024),  # 255 and a prompt of 512 tokens
    (Goal(concurrency=16, prompt_tokens=128), 256),  # vLLM's own end at 32
    (Goal(concurrency=256, prompt_tokens=128), None),  # 383 tokens: vLLM's own cover them
    (Goal(concurrency=64, prompt_tokens=4096), None),  # a prompt of its own length, whatever is captured
    (Goal(concurrency=4096, prompt_tokens=4096), None),
    (Goal(concurrency=2048, prompt_tokens=4096), None),
])  # fmt: skip
def test_graphs_cover_the_steps_that_would_wait_for_their_launches(goal: Goal, size: int | None) -> None:
    plan = planned(goal)
    assert plan.settings.max_graph_size == size
    assert ("--max-cudagraph-capture-size" in plan.engine_args) is bool(size)
    assert planned(goal, eager=True).settings.max_graph_size is None


def test_each_replica_has_graphs_for_its_own_requests() -> None:
    several = replace(parse_gpus("4xH200"), cpu_cores=64)
    many = Goal(concurrency=4096, prompt_tokens=600, output_tokens=256)
    facts, fixed = read_facts("llama-3.1-8b"), {"data": 4, "tensor": 1, "max_model_len": 8192}
    assert make_plan(facts, several, many, fixed).settings.max_graph_size == 1024
    few = Goal(concurrency=1024, prompt_tokens=128, output_tokens=128)  # 256 each: vLLM's own cover them
    assert make_plan(facts, several, few, fixed).settings.max_graph_size is None


def test_a_gpu_whose_own_graphs_are_larger_gains_nothing() -> None:
    """vLLM 0.32 captures up to 1,024 on a B200 by itself."""
    load = Goal(concurrency=1024, prompt_tokens=20, output_tokens=128)
    plan = make_plan(read_facts("llama-3.1-8b"), parse_gpus("1xB200"), load)
    assert reason(plan, "max_graph_size")[1] is None
    assert largest_graph(plan.settings, plan.inventory.kind) == 1024
    fewer = make_plan(plan.model, plan.inventory, load, {"max_num_seqs": 256})
    assert largest_graph(fewer.settings, plan.inventory.kind) == 512  # twice the seats, there too
    small = make_plan(plan.model, plan.inventory, load, {"max_graph_size": 512})
    found = distance(small, streamed(1024, roof(small, 1024, 128, 128, 32) or 0.0), CALM, 32)
    assert found is not None
    assert found.cause is LimitCause.LAUNCHES


@pytest.mark.parametrize(("gpus", "arguments", "flag"), [
    ("1xH200", (), "--max-cudagraph-capture-size 512"),
    ("1xB200", (), ""),  # the plan asks for none, and vLLM takes its own
    ("1xH200", ("--compilation-config", "{}"), ""),
])  # fmt: skip
def test_stock_flags_have_the_graphs_of_vllm(
    gpus: str, arguments: tuple[str, ...], flag: str, monkeypatch: pytest.MonkeyPatch, clean_home: Path
) -> None:
    monkeypatch.setattr(LocalTarget, "inventory", lambda _: parse_gpus(gpus))
    load = Goal(concurrency=1024, prompt_tokens=20, output_tokens=128)
    request = DeployRequest(model="llama-3.1-8b", goal=load, extra_args=arguments)
    stock = vendor_knobs(sized(request)[1].plan, request, ("stock",))[0].values[0]
    assert stock.endswith(flag or "--async-scheduling")


def test_an_old_vllm_gets_no_flag_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch, clean_home: Path) -> None:
    monkeypatch.setattr(LocalTarget, "inventory", lambda _: parse_gpus("1xH200"))
    monkeypatch.setattr("corral.plan.measured.known_tuning", lambda *_: Tuning(Coefficients.of_version("0.11.2")))
    request = DeployRequest(model="llama-3.1-8b", goal=Goal(concurrency=1024, prompt_tokens=20, output_tokens=128))
    assert "--max-cudagraph" not in vendor_knobs(sized(request)[1].plan, request, ("stock",))[0].values[0]


def test_a_draft_from_the_text_that_is_asked_for_is_judged_as_asked_for(clean_home: Path) -> None:
    asked = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}')
    facts = read_facts("llama-3.1-8b")
    plan = make_plan(facts, HERE, Goal(concurrency=64), {}, tuning_for(facts, HERE, "0.32.0", asked))
    ways = [one for one in plan.judged if one.what.startswith("speculative")]
    assert [(one.what, one.taken, one.arguments) for one in ways] == [("speculative decoding, ngram", True, ())]
    assert "checks 5 drafted tokens" in ways[0].because


@pytest.mark.parametrize("requests", [16, 64, 128, 256])
def test_drafted_tokens_are_checked_in_graphs_of_their_own(requests: int) -> None:
    """vLLM captures as many sequences, each with what is drafted for it: no step waits for its launches."""
    plan = planned(Goal(concurrency=requests, prompt_tokens=4096))
    steps = roof_of(plan.model, plan.inventory, plan.parallel, plan.precision, plan.settings, Tuning().speed)
    assert steps.step(requests, 4096, 3) < 1.8 * steps.step(requests, 4096)


@pytest.mark.parametrize(("processes", "measured"), [(1, 11_900.0), (5, 19_000.0), (5, 4_000.0)])
def test_launches_are_not_the_limit_of_what_others_limit(processes: int, measured: float) -> None:
    """One API server streams no more with larger graphs; what is quicker than launches allow has larger ones; and
    what is far slower waits for something else."""
    goal = Goal(concurrency=1024, prompt_tokens=128, output_tokens=128)
    found = distance(planned(goal, max_graph_size=512), streamed(1024, measured), CALM, processes)
    assert found is not None
    assert found.cause is not LimitCause.LAUNCHES


def test_larger_graphs_say_what_they_are_worth() -> None:
    load = Goal(concurrency=1024, prompt_tokens=20, output_tokens=128, goal="throughput")
    because, gain = reason(planned(load), "max_graph_size")
    assert gain == pytest.approx(0.5, abs=0.05)  # 20,110 and 30,345 tokens a second, in process
    assert "+50% at 1,024 requests at once" in because
    assert reason(planned(load, max_graph_size=512), "max_graph_size")[1] == pytest.approx(0.0)


def test_graphs_stay_as_they_are_where_steps_take_longer_than_their_launches() -> None:
    for model, gpus, fixed in (("llama-3.1-70b", "1xH200", {"weights": "fp8"}), ("llama-3.1-8b", "1xA100", {})):
        plan = make_plan(
            read_facts(model), parse_gpus(gpus), Goal(concurrency=1024), {"max_model_len": 2048, **fixed}
        )
        assert plan.settings.max_graph_size is None


def test_graphs_stay_as_they_are_where_memory_or_the_engine_forbids_it() -> None:
    asked = (read_facts("llama-3.1-8b"), HERE, Goal())
    tight = make_plan(*asked, {"gpu_memory_utilization": "0.14", "max_model_len": 2048})
    assert tight.settings.max_graph_size is None
    within = {"gpu_memory_utilization": "0.34", "weights": "fp8"}
    room = make_plan(asked[0], parse_gpus("1xH100"), Goal(), {**within, "max_graph_size": 512})
    longest = room.memory.kv_cache_tokens_per_replica - room.settings.block_size
    full = make_plan(asked[0], parse_gpus("1xH100"), Goal(context=min(longest, 131072)), within)
    assert full.fits, full.reason
    old = Tuning(memory=Coefficients.of_version("0.11.2"))
    assert make_plan(*asked, {}, old).settings.max_graph_size is None


@pytest.mark.parametrize("words", [
    ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
    ["--compilation-config", '{"cudagraph_capture_sizes": [1, 2, 4]}'], ["--compilation-config={}"],
    ["-cc.cudagraph_mode=FULL"], ["-O3"], ["-O", "3"], ["--cudagraph-capture-sizes", "1", "2"],
    ["--cudagraph_capture_sizes", "1", "2"], ["--compilation-config.level=3"], ["-sc", "{}"], ["--spec-method=ngram"],
])  # fmt: skip
def test_graphs_stay_as_the_users_own_flags_have_them(words: list[str]) -> None:
    """vLLM refuses a largest size beside sizes of somebody's own, and fits its own to speculation."""
    facts = read_facts("llama-3.1-8b")
    assert make_plan(facts, HERE, Goal(), {}, tuning_for(facts, HERE)).settings.max_graph_size == 1024
    assert make_plan(facts, HERE, Goal(), {}, tuning_for(facts, HERE, "", words)).settings.max_graph_size is None
    knobs = knobs_for(planned(Goal()), DeployRequest(), words, bursts=False, shares_prefixes=False)
    assert "max_graph_size" not in {knob.name for knob in knobs}


def test_an_engine_of_unknown_age_is_asked_for_nothing_new() -> None:
    facts = read_facts("llama-3.1-8b")
    for version, managed, size in (
        ("", True, 1024),
        ("", False, None),
        ("0.26.0", False, 1024),
        ("0.10.2", False, None),
    ):
        tuning = tuning_for(facts, HERE, version, (), managed)
        assert make_plan(facts, HERE, Goal(), {}, tuning).settings.max_graph_size == size


def judged(plan: Plan) -> dict[str, Judged]:
    return {one.what.removeprefix("speculative decoding, "): one for one in plan.judged}


def test_speculation_pays_for_few_requests_and_not_for_many() -> None:
    alone, crowd = (judged(planned(Goal(concurrency=n))) for n in (1, 1024))
    assert (alone["ngram"].gain or 0) > 0.8  # a step reads the weights anyway
    assert (crowd["ngram"].gain or 0) < 0
    assert (alone["EAGLE"].gain or 0) < (alone["ngram"].gain or 0)  # its draft takes time
    assert not alone["ngram"].taken  # what is accepted depends on the text
    assert "more than" in crowd["ngram"].pays_when


@pytest.mark.parametrize(("dearer", "needed"), [(1.0, 0.0), (4.0, None), (3.999, 1.0), (2.176, 0.6)])
def test_the_acceptance_that_breaks_even(dearer: float, needed: float | None) -> None:
    found = needed_acceptance(dearer)
    assert found is None if needed is None else found == pytest.approx(needed, abs=0.001)


def test_a_narrow_cache_pays_where_the_cache_is_full() -> None:
    tight = Goal(concurrency=1024, prompt_tokens=6000, output_tokens=500)
    assert (judged(planned(tight))["fp8 KV cache"].gain or 0) > 0.1
    assert abs(judged(planned(Goal(concurrency=16)))["fp8 KV cache"].gain or 0) < 0.05
    assert judged(planned(tight, kv="fp8"))["fp8 KV cache"].taken


def test_what_is_on_by_default_has_its_condition() -> None:
    found = judged(planned(Goal(concurrency=64, prompt_tokens=4000, output_tokens=100)))
    assert found["prefix caching"].taken
    assert (found["prefix caching"].gain or 0) > 0.3  # prompts are most of the work
    assert found["chunked prefill"].taken
    assert "8,192" in found["chunked prefill"].pays_when


def test_the_judgements_are_shown_and_read_back() -> None:
    plan = planned(Goal(concurrency=16))
    text = "\n".join(explain(plan))
    assert "Judged for this load" in text
    assert all(one.pays_when in text for one in plan.judged)
    assert from_json(Plan, to_json(plan)).judged == plan.judged
    assert '"judged"' in dump_json(plan)
    assert make_plan(read_facts("smollm2"), replace(HERE, gpu=None, host_available_bytes=2**34)).judged == ()
