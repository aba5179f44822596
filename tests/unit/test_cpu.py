"""CPUs of many kinds by their own /proc/cpuinfo: what they are, the number format they are quick in, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from corral.base.errors import CorralError
from corral.base.shell import Completed
from corral.plan.candidate import Tuning
from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Plan
from corral.plan.cpu import formats_to_measure, products, quick_format
from corral.plan.hardware import cpu as cpu_speed
from corral.plan.hardware.cpu import (
    CpuKind,
    CpuSpeed,
    FormatSpeed,
    measure_cpu_speed,
    recall_cpu_speed,
    remember_cpu_speed,
)
from corral.plan.hardware.inventory import GIB, CpuFacts, Inventory, common_cpu, parse_cpuinfo, read_cpu
from corral.plan.measured import cpu_kind, speed_at, tuning_for
from corral.plan.models.facts import ModelFacts, read_facts
from corral.plan.settings import Fixed

TEXTS = Path(__file__).parent / "cpuinfo"

# file -> architecture, name, format by the flags, a part of the reason
KNOWN = {
    "cascade-lake": ("x86_64", "Intel(R) Xeon(R) Processor @ 2.50GHz", "fp32", "AVX-512 and no bf16"),
    "icelake": ("x86_64", "Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz", "fp32", "AVX-512 and no bf16"),
    "sapphire-rapids": ("x86_64", "Intel(R) Xeon(R) Platinum 8480C", "bf16", "AMX"),
    "zen3": ("x86_64", "AMD EPYC 7763 64-Core Processor", "fp32", "AVX2 and no bf16"),
    "neoverse-n1": ("aarch64", "Neoverse-N1", "fp32", "no bf16 instructions"),
    "altra": ("aarch64", "Neoverse-N1", "fp32", "no bf16 instructions"),
    "neoverse-v1": ("aarch64", "Neoverse-V1", "bf16", "bf16 instructions and SVE"),
    "neoverse-v2": ("aarch64", "Neoverse-V2", "bf16", "bf16 instructions and SVE"),
    "grace": ("aarch64", "Neoverse-V2", "bf16", "bf16 instructions and SVE"),
}
ROWS = (1, 4, 32, 512)
# GFLOP/s as measured on the machine of cascade-lake.txt (docs/measurements/cpu-formats.md)
EMULATED = CpuSpeed(
    "smollm2",
    (),
    threads=2,
    read_gb_s=20.0,
    python_s=2.4e-3,
    formats=(
        FormatSpeed("bf16", ROWS, (15.0, 13.5, 36.7, 40.0), "onednn"),
        FormatSpeed("fp32", ROWS, (9.4, 37.0, 151.0, 226.0), "onednn"),
    ),
)


# and on that of neoverse-n1.txt, with the tokens per second that `corral bench` found there (the same page)
NEOVERSE_N1 = CpuSpeed(
    "smollm2",
    (),
    threads=2,
    read_gb_s=39.35,
    python_s=2.836e-3,
    formats=(
        FormatSpeed("bf16", ROWS, (0.824, 0.292, 0.292, 0.292), "torch"),
        FormatSpeed("fp32", ROWS, (10.575, 38.113, 65.79, 72.895), "onednn"),
    ),
)
FOUND_ON_NEOVERSE_N1 = {1: 20.3, 4: 60.8, 32: 101.1}  # requests at once, of 128 + 128 tokens


def facts_of(name: str) -> CpuFacts:
    return parse_cpuinfo((TEXTS / f"{name}.txt").read_text())


def machine(name: str, cores: int = 2, memory_gib: int = 20) -> Inventory:
    return Inventory(
        None, 1, 1, 0, cores, memory_gib * GIB, memory_gib * GIB, source="probed", cpu=facts_of(name)
    )  # fmt: skip


@pytest.fixture
def smollm2() -> ModelFacts:
    return read_facts("smollm2", offline=True)


def planned(
    model: ModelFacts, inventory: Inventory, measured: CpuSpeed | None = None, fixed: dict[str, object] | None = None
) -> Plan:
    return make_plan(model, inventory, Goal(), fixed, Tuning(cpu=measured))


def because(plan: Plan) -> str:
    return next(reason.because for reason in plan.reasons if reason.field == "precision.weights")


@pytest.mark.parametrize("name", KNOWN)
def test_a_cpu_is_known_by_its_text(name: str) -> None:
    architecture, model, _, _ = KNOWN[name]
    facts = facts_of(name)
    assert (facts.architecture, facts.model) == (architecture, model)


def test_every_text_is_tested() -> None:
    assert {path.stem for path in TEXTS.glob("*.txt")} == set(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_the_flags_choose_a_format_with_its_reason(name: str, smollm2: ModelFacts) -> None:
    _, model, wanted, why = KNOWN[name]
    plan = planned(smollm2, machine(name))
    assert plan.precision.weights == plan.precision.compute == wanted
    assert {"bf16": "bfloat16", "fp32": "float32"}[wanted] in plan.engine_args
    assert model in because(plan)
    assert why in because(plan)
    assert plan.speed.basis == "rough: this CPU was not measured"
    assert not plan.warnings


def test_only_telling_flags_are_kept() -> None:
    assert facts_of("neoverse-n1").flags == ("asimdhp", "asimddp")
    assert facts_of("neoverse-v1").flags == ("asimdhp", "asimddp", "i8mm", "bf16", "sve", "svebf16", "svei8mm")
    assert "amx_bf16" in facts_of("sapphire-rapids").flags


def test_a_cpu_that_nobody_knows_gets_what_crawls_nowhere(smollm2: ModelFacts) -> None:
    facts = parse_cpuinfo("processor : 0\nisa : rv64imafdc\n", "riscv64")
    assert (facts.architecture, facts.flags) == ("riscv64", ())
    assert quick_format(facts).format == "fp32"
    plan = planned(smollm2, replace(machine("zen3"), cpu=None))
    assert plan.precision.weights == "fp32"
    assert "nothing is known of this CPU" in because(plan)
    assert "--set weights=bf16" in because(plan)


@pytest.mark.parametrize("text", ["", "\n\n", "processor", "flags", ": :\n::", "Features\t:\n", "\x00\n\xff"])
def test_odd_texts_are_no_error(text: str) -> None:
    assert parse_cpuinfo(text, "x").model


def test_this_machine_is_read(tmp_path: Path) -> None:
    assert read_cpu().architecture
    assert read_cpu(tmp_path).model == "unknown CPU"  # no /proc/cpuinfo there


def test_a_measurement_overrules_the_flags(smollm2: ModelFacts) -> None:
    slow_amx = replace(EMULATED, products=products(smollm2))
    plan = planned(smollm2, machine("sapphire-rapids"), slow_amx)
    assert plan.precision.weights == "fp32"
    assert "measured here" in because(plan)
    assert "151 GFLOP/s against 37 in bf16" in because(plan)
    quick = replace(slow_amx, formats=(FormatSpeed("bf16", ROWS, (90.0, 300.0, 900.0, 1500.0)), slow_amx.formats[1]))
    assert planned(smollm2, machine("cascade-lake"), quick).precision.weights == "bf16"


def test_a_measurement_that_hardly_differs_leaves_the_flags_choice(smollm2: ModelFacts) -> None:
    even = replace(EMULATED, formats=tuple(replace(EMULATED.formats[1], format=name) for name in ("bf16", "fp32")))
    for name in ("zen3", "grace"):
        assert planned(smollm2, machine(name), even).precision.weights == KNOWN[name][2]


def test_measured_here_says_whose_shapes(smollm2: ModelFacts) -> None:
    own = replace(EMULATED, products=products(smollm2))
    assert planned(smollm2, machine("zen3"), own).speed.basis == "measured here"
    assert planned(smollm2, machine("zen3"), EMULATED).speed.basis == "measured here with the shapes of smollm2"


@pytest.mark.parametrize("fixed", [{"weights": "bf16"}, {"dtype": "bf16"}])
def test_a_fixed_format_stays_and_one_that_crawls_is_warned_of(fixed: dict[str, object], smollm2: ModelFacts) -> None:
    quick = planned(smollm2, machine("grace"), fixed=fixed)
    assert quick.precision.weights == "bf16"
    assert not quick.warnings
    guessed = planned(smollm2, machine("neoverse-n1"), fixed=fixed)
    assert guessed.precision.weights == "bf16"
    assert "--dtype" in guessed.engine_args
    assert "bf16 will be slow on this CPU" in guessed.warnings[0]
    assert "not measured here" in guessed.warnings[0]
    crawling = replace(
        EMULATED, formats=(FormatSpeed("bf16", ROWS, (1.0, 1.0, 1.0, 1.0), "torch"), EMULATED.formats[1])
    )
    measured = planned(smollm2, machine("neoverse-n1"), crawling, fixed=fixed)
    assert measured.precision.weights == "bf16"
    assert "times slower than fp32 (measured here)" in measured.warnings[0]
    assert "as set" in because(measured)


def test_a_quick_format_that_does_not_fit_gives_way(smollm2: ModelFacts) -> None:
    llama = read_facts("llama-3.1-8b", offline=True)
    assert planned(llama, machine("altra", memory_gib=64)).precision.weights == "fp32"
    narrow = planned(llama, machine("altra", memory_gib=24))
    assert narrow.fits
    assert narrow.precision.weights == "bf16"
    assert "will be slow" in narrow.warnings[0]


def test_a_checkpoint_in_fp32_stays_in_it(smollm2: ModelFacts) -> None:
    wide = replace(smollm2, dtype="fp32", weights="fp32")
    plan = planned(wide, machine("grace"))
    assert plan.precision.weights == "fp32"
    assert because(plan) == "as the checkpoint stores it"


def test_formats_that_are_measured(smollm2: ModelFacts) -> None:
    assert formats_to_measure(smollm2, Fixed()) == ("bf16", "fp32")
    assert formats_to_measure(smollm2, Fixed(dtype="fp16")) == ("bf16", "fp32", "fp16")
    assert formats_to_measure(replace(smollm2, dtype="fp16"), Fixed()) == ("bf16", "fp32", "fp16")


def test_rates_between_measured_rows() -> None:
    speed = FormatSpeed("fp32", (1, 4, 16), (10.0, 40.0, 80.0))
    assert speed.at(0.5) == speed.at(1) == 10.0
    assert speed.at(2) == pytest.approx(20.0)
    assert speed.at(4) == pytest.approx(40.0)
    assert speed.at(8) == pytest.approx(40.0 * 2**0.5)
    assert speed.at(1000) == 80.0


def test_what_was_measured_is_remembered_by_machine_engine_and_shapes(smollm2: ModelFacts) -> None:
    llama = read_facts("llama-3.1-8b", offline=True)
    kind = CpuKind(facts_of("zen3"), 8, "lock")
    assert recall_cpu_speed(kind, products(smollm2)) is None
    small, large = (
        replace(EMULATED, products=products(smollm2)),
        replace(EMULATED, products=products(llama), threads=7),
    )
    remember_cpu_speed(kind, small)
    assert recall_cpu_speed(kind, products(llama)) == small  # better than nothing
    remember_cpu_speed(kind, large)
    assert recall_cpu_speed(kind, products(llama)) == large
    assert recall_cpu_speed(kind, products(smollm2)) == small
    for other in (replace(kind, cores=4), replace(kind, engine="x"), replace(kind, cpu=facts_of("grace"))):
        assert recall_cpu_speed(other, products(smollm2)) is None


def test_a_disturbed_measurement_is_taken_again_and_only_gets_quicker(smollm2: ModelFacts) -> None:
    kind = CpuKind(facts_of("zen3"), 8, "lock")
    first = replace(
        EMULATED,
        busy=0.6,
        read_gb_s=3.0,
        formats=(FormatSpeed("bf16", ROWS, (1.0, 20.0, 3.0, 4.0)), EMULATED.formats[1]),
    )
    remember_cpu_speed(kind, first)
    assert first.disturbed
    remember_cpu_speed(kind, replace(EMULATED, busy=0.05, python_s=3e-3))
    known = recall_cpu_speed(kind, ())
    assert known is not None
    assert (known.busy, known.times, known.disturbed) == (0.05, 2, False)
    assert (known.read_gb_s, known.python_s) == (20.0, 2.4e-3)
    bf16 = known.of("bf16")
    assert bf16 is not None
    assert bf16.gflops == (15.0, 20.0, 36.7, 40.0)
    assert not replace(first, times=5).disturbed  # a machine that is never quiet is not measured for ever


def test_a_damaged_memory_is_measured_again(smollm2: ModelFacts) -> None:
    kind = CpuKind(facts_of("zen3"), 8, "lock")
    remember_cpu_speed(kind, EMULATED)
    cpu_speed._path(kind).write_text('{"kind": 3')
    assert recall_cpu_speed(kind, products(smollm2)) is None
    remember_cpu_speed(kind, EMULATED)
    assert recall_cpu_speed(kind, products(smollm2)) == EMULATED


def test_plans_use_what_is_remembered(smollm2: ModelFacts) -> None:
    inventory = machine("icelake")
    kind = cpu_kind(inventory)
    assert kind is not None
    assert cpu_kind(replace(inventory, gpu="H100-SXM")) is None
    assert tuning_for(smollm2, inventory).cpu is None
    remember_cpu_speed(kind, replace(EMULATED, products=products(smollm2)))
    tuning = tuning_for(smollm2, inventory)
    assert make_plan(smollm2, inventory, tuning=tuning).speed.basis == "measured here"


def test_a_plan_predicts_other_loads_than_its_own_as_if_made_for_them(smollm2: ModelFacts) -> None:
    """And within a quarter of what was measured on that machine."""
    inventory = machine("neoverse-n1")
    kind = cpu_kind(inventory)
    assert kind is not None
    made = make_plan(
        smollm2, inventory, tuning=replace(Tuning(), cpu=replace(NEOVERSE_N1, products=products(smollm2)))
    )
    alone = speed_at(made, 512, 256, 32)  # nothing is remembered: the plan's own rates
    assert (alone.concurrency, alone.basis) == (32, "measured here")
    remember_cpu_speed(kind, replace(NEOVERSE_N1, products=products(smollm2)))
    for running, found in FOUND_ON_NEOVERSE_N1.items():
        goal = Goal(prompt_tokens=128, output_tokens=128, concurrency=running)
        anew = make_plan(smollm2, inventory, goal, tuning=tuning_for(smollm2, inventory)).speed
        at = speed_at(made, 128, 128, running)
        assert at.throughput_tokens_per_s == anew.throughput_tokens_per_s == pytest.approx(found, rel=0.25)
        assert (at.ttft_s, at.tpot_s) == (anew.ttft_s, anew.tpot_s)


def answer(text: str, code: int = 0) -> Completed:
    return Completed(("python",), code, text, "no torch")


def test_the_script_is_asked_and_its_answer_read(monkeypatch: pytest.MonkeyPatch, smollm2: ModelFacts) -> None:
    asked: list[list[str]] = []
    formats = [{"format": "fp32", "kernel": "torch", "rows": [1, 4], "gflops": [1.5, 2.5]}]
    told = {"threads": 2, "read_gb_s": 9.5, "python_s": 0.01, "formats": formats, "busy": 0.1, "took_s": 1.2}

    def run(argv: list[str], timeout_s: float) -> Completed:
        asked.append(argv)
        return answer("a warning of torch\n" + json.dumps(told) + "\n")

    monkeypatch.setattr(cpu_speed, "run", run)
    speed = measure_cpu_speed("/e/bin/python", "smollm2", products(smollm2), ("fp32",))
    assert speed.formats == (FormatSpeed("fp32", (1, 4), (1.5, 2.5), "torch"),)
    assert speed.products == products(smollm2)
    assert speed.read_gb_s == 9.5
    order = json.loads(asked[0][-1])
    assert asked[0][:3] == ["/e/bin/python", "-m", "corral_cpu_engine.measure"]
    assert order["products"][-1] == [49152, 576, 1]
    assert order["budget_s"] <= 2


@pytest.mark.parametrize(
    "done", [answer("", 1), answer(""), answer("no json"), answer("[1]"), answer('{"threads": "two"}'), answer("{}")]
)
def test_a_measurement_that_fails_is_one_clear_error(
    done: Completed, monkeypatch: pytest.MonkeyPatch, smollm2: ModelFacts
) -> None:
    monkeypatch.setattr(cpu_speed, "run", lambda argv, timeout_s: done)
    with pytest.raises(CorralError, match="could not be measured"):
        measure_cpu_speed("python", "m", products(smollm2), ("bf16",))


def test_nodes_get_a_format_that_suits_them_all() -> None:
    amx, skylake = (
        CpuFacts("x86_64", "Sapphire", ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")),
        CpuFacts("x86_64", "Skylake", ("avx2", "avx512f")),
    )
    assert common_cpu([amx, amx]) == amx
    mixed = common_cpu([amx, skylake])
    assert mixed == CpuFacts("x86_64", "Sapphire and Skylake", ("avx2", "avx512f"))
    assert quick_format(mixed).format == "fp32"
    assert common_cpu([amx, CpuFacts("aarch64", "Neoverse-V2", ("bf16",))]) is None
    assert common_cpu([CpuFacts("unknown", "unknown CPU"), amx]) is None
    assert common_cpu([]) is None
