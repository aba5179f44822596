"""`corral up` measures the CPU once the engine is there, once per machine, engine and shapes; the plan uses it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.conftest import Corral


def plan_of(corral: Corral, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((corral.home / "corral/deployments" / name / "plan.json").read_text())
    return found


def kept(corral: Corral) -> list[Path]:
    return list((corral.home / "corral/cache").glob("cpu-speed-*.json"))


def test_a_first_start_measures_and_a_second_remembers(corral: Corral) -> None:
    before = corral("plan", str(corral.model), "--json").json()
    assert before["speed"]["basis"] == "rough: this CPU was not measured"
    first = corral("up", str(corral.model), "--name", "first")
    assert first.code == 0, first.err
    assert "measuring CPU" in first.err
    assert plan_of(corral, "first")["speed"]["basis"] == "measured here"  # type: ignore[index]
    (file,) = kept(corral)
    after = corral("plan", str(corral.model), "--json").json()
    assert after["speed"]["basis"] == "measured here"
    written = file.stat().st_mtime_ns
    second = corral("up", str(corral.model), "--name", "second")
    assert second.code == 0, second.err
    assert "measuring" not in second.err
    assert file.stat().st_mtime_ns == written


def test_a_format_that_crawls_is_warned_of_before_anything_starts(corral: Corral) -> None:
    done = corral("up", str(corral.model), "--set", "weights=fp32", STUB_MEASURED="slow-fp32")
    assert done.code == 0, done.err
    assert "warning: fp32 will be slow on this CPU" in done.err
    assert "times slower than bf16 (measured here)" in done.err
    assert done.err.index("warning: fp32") < done.err.index("starting")
    assert "--dtype float32" in " ".join(json.loads((corral.home / "corral/deployments/tiny/launch.json").read_text())
                                         ["ranks"][0]["argv"])  # fmt: skip


def test_a_cpu_that_cannot_be_measured_is_planned_by_its_flags(corral: Corral) -> None:
    done = corral("up", str(corral.model), STUB_MEASURED="broken")
    assert done.code == 0, done.err
    assert "the plan goes by its flags" in done.err
    assert "could not be measured" in done.err
    assert not kept(corral)
