"""Starts that take long: what is usual is known, what is late is said, and what does not advance is not endless."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from corral.base.wording import duration
from corral.deploy.deployment import start_times as starts
from corral.deploy.deployment.diagnosis import explain_slow
from corral.deploy.deployment.events import Event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.signatures import SLOW
from corral.deploy.deployment.start_times import Expected, Phase, course_of, durations, planned_start
from corral.deploy.deployment.state import Patience
from corral.deploy.lifecycle import staging as staging_module
from corral.deploy.lifecycle.staging import Staging
from corral.deploy.lifecycle.watching import slow_text
from corral.lab.report.screen import CountLine, PhaseScreen
from corral.node.agent.start_progress import StartProgress
from corral.plan.choose import make_plan
from corral.plan.contract import Goal
from corral.plan.hardware.inventory import Inventory, parse_gpus
from corral.plan.models.facts import read_facts
from tests.unit.conftest import Corral, Silent

EXPECTED = {"usual_s": {"compiling": 20.0, "loading": 100.0}, "limit_s": {"compiling": 900.0}, "weights_bytes": 10**9}
ONEDNN = (
    "(EngineCore pid=9) WARNING 11-16 14:29:08 [cpu.py:1] Failed to create oneDNN linear, fallback to torch linear."
    " Exception: mkldnn_matmul: mkldnn_matmul bf16 path needs the cpu support avx512bw, or AWS Graviton3"
)


# What an advance is


def test_phases_shards_and_figures_are_advances_and_noise_is_none() -> None:
    start = StartProgress(EXPECTED, 0.0)
    start.enter("loading", 10.0)
    assert start.advanced_at == 10.0
    start.enter("loading", 20.0)  # it goes on: no news
    start.note_line("INFO 11-16 14:29:08 [a.py:1] still the same thing")
    assert start.advanced_at == 10.0
    start.advance(30.0)  # a shard
    assert start.advanced_at == 30.0


def test_reading_weights_is_an_advance_but_not_for_ever() -> None:
    start = StartProgress(EXPECTED, 0.0)
    start.read(5 * 10**8, 5.0)
    assert start.advanced_at == 0.0  # nothing is loaded yet
    start.enter("loading", 10.0)
    start.read(5 * 10**8, 20.0)
    assert start.advanced_at == 20.0
    start.read(5 * 10**8 + 100, 30.0)  # less than a part of it
    assert start.advanced_at == 20.0
    start.read(4 * 10**9, 40.0)  # four times the model: it is read again and again
    assert start.advanced_at == 20.0


def test_a_two_hour_load_that_advances_is_never_late() -> None:
    start = StartProgress({"usual_s": {"loading": 600.0}, "limit_s": {"loading": 6000.0}}, 0.0)
    start.enter("loading", 0.0)
    for shard in range(191):
        now = 40.0 * shard
        assert now - start.advanced_at <= start.limit_s()
        start.advance(now)


def test_it_is_told_at_twice_the_usual_length_and_at_every_doubling() -> None:
    start = StartProgress(EXPECTED, 0.0)
    start.enter("compiling", 100.0)
    start.note_line(ONEDNN)
    start.note_line(
        "(EngineCore pid=9) INFO 11-16 14:29:08 [cpu_model_runner.py:87] Warming up model for the compilation..."
    )
    start.note_line("       █     █     █▄   ▄█")
    told = [now for now in range(100, 500) if start.slow(float(now))]
    assert told == [140, 180, 260, 420]
    start.enter("warming", 500.0)  # nothing is known of it
    assert start.slow(10_000.0) is None
    said = start.log_lines()
    assert said["line"] == "Warming up model for the compilation..."
    assert len(said["lines"]) == 1
    assert said["lines"][0].startswith("Failed to create oneDNN linear")


def test_short_delays_are_nobodys_concern() -> None:
    start = StartProgress({"usual_s": {"loading": 0.5}}, 0.0)
    start.enter("loading", 0.0)
    assert start.slow(5.0) is None
    assert start.slow(5.6)


def test_notable_lines_are_few_and_different() -> None:
    start = StartProgress({}, 0.0)
    for number in range(100):
        start.note_line(f"WARNING 11-16 14:29:08 [a.py:1] trouble {number % 30} {'x' * 1000}")
    lines = start.log_lines()["lines"]
    assert len(lines) == len(set(lines)) == 20
    assert max(map(len, lines)) == 300


def test_the_limit_depends_on_what_is_expected_unless_it_is_given() -> None:
    patience = Patience()
    assert patience.limit_s() == patience.limit_s(10.0) == 900.0
    assert patience.limit_s(600.0) == 6000.0
    assert Patience(stall_s=60.0).limit_s(600.0) == 60.0
    assert (patience.settled().idle_s, Patience(stall_s=60.0).settled().idle_s) == (600.0, 60.0)
    text = StartProgress(EXPECTED, 0.0).overdue(905.0, 905.0)["text"]
    assert text == "it did not advance for 15 min while starting"


# What is usual


def test_lengths_are_taken_from_the_journal_of_a_start_that_became_ready() -> None:
    def at(elapsed: float, kind: str, **details: Any) -> Event:
        return Event(1000 + elapsed, kind, 0, elapsed, details)

    events = [
        at(0, "state", state="starting", attempt=1), at(50, "phase", phase="compiling"),
        at(60, "restart", attempt=1), at(61, "state", state="starting", attempt=2),
        at(71, "phase", phase="initialising"), at(75, "state", state="loading"),
        at(76, "phase", phase="loading", done=1, total=2), at(80, "phase", phase="compiling"),
        at(95, "phase", phase="warming"), at(100, "state", state="ready"), at(500, "state", state="draining"),
    ]  # fmt: skip
    assert durations(events) == {"starting": 10, "initialising": 4, "loading": 5, "compiling": 15, "warming": 5}
    assert course_of(events[:6])[-1].since_s == 1075
    assert durations(events[:-2]) == {}


def test_what_is_remembered_is_the_middle_of_the_last_few(clean_home: Any) -> None:
    kind = starts.kind_of("m", {"a": 1})
    assert starts.usual(kind) == {}
    for seconds in (10.0, 100.0, 12.0, 11.0, 13.0, 14.0):
        starts.remember_start(kind, {"loading": seconds})
    assert starts.usual(kind) == {"loading": Expected(13.0, True)}
    assert starts.usual(starts.kind_of("m", {"a": 2})) == {}
    for number in range(starts.MOST_KINDS + 5):
        starts.remember_start(f"kind {number}", {"loading": 1.0})
    assert starts.usual(kind) == {}  # the oldest are forgotten
    starts.starts_path().write_text("{")
    assert starts.usual("kind 300") == {}  # damaged: begin anew
    starts.remember_start("kind 300", {"loading": 2.0})
    assert starts.usual("kind 300")["loading"].seconds == 2.0


@pytest.mark.parametrize("gpus", [None, "8xH100"])
def test_without_a_memory_the_plan_says_what_to_expect(gpus: str | None, clean_home: Any) -> None:
    inventory = parse_gpus(gpus) if gpus else Inventory(None, 1, 1, 0, 2, 24 << 30, 20 << 30)
    plan = make_plan(read_facts("llama-3.1-8b" if gpus else "smollm2", offline=True), inventory, Goal(), {})
    found = planned_start(plan)
    assert set(found) >= {"installing engine", "fetching model", "starting", "initialising", "loading", "compiling"}
    assert all(1 <= one.seconds <= 1000 for one in found.values())
    expected = starts.expectation("nothing known", plan)
    assert not any(one.remembered for one in expected.values())
    starts.remember_start("known", {"loading": 3.0})
    assert starts.expectation("known", plan)["loading"] == Expected(3.0, True)


def test_what_is_usual_in_words() -> None:
    assert Expected(24.2, True).text == "usually 24 s here"
    assert Expected(90).text == "about 1 min 30 s expected"
    assert [Expected(10).is_overdue(seconds) for seconds in (19, 21)] == [False, True]
    assert [Expected(1).is_overdue(seconds) for seconds in (5, 7)] == [False, True]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.036, "36 ms"), (0.9996, "1.0 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min"),
     (190, "3 min 10 s"), (3600, "1 h"), (3670, "1 h 1 min"), (3 * 86400, "3 d"), (86400 * 3 + 4 * 3600, "3 d 4 h")],
)  # fmt: skip
def test_a_length_of_time_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# What is likely wrong

LINES = [
    (ONEDNN, "reference loop", "--set weights=fp32"),
    ("WARNING Waiting for 1 local, 0 remote core engine proc(s) to start.", "waits for another", "corral logs d"),
    ("INFO Waiting for creating a placement group of specs for 10 seconds.", "Ray cannot place", "corral doctor"),
    ("[c10d] The client socket has failed to connect to [n1]:29501", "cannot reach the others", "--interface"),
    ("INFO Filesystem type for checkpoints: NFS4. Checkpoint size: 700 GiB", "(NFS4)", "corral pull"),
    ("INFO flashinfer.jit: compiling JIT module", "for the first time", "Wait"),
]


@pytest.mark.parametrize(("line", "cause", "remedy"), LINES)
def test_slow_starts_are_explained(line: str, cause: str, remedy: str) -> None:
    found = explain_slow(["nothing of note", line], "d")
    assert found is not None
    assert cause in found.cause
    assert remedy in found.remedy
    assert len(SLOW) == len(LINES)


def test_a_late_phase_is_told_with_the_engines_words_and_the_likely_cause() -> None:
    details = {"phase": "compiling", "lasted_s": 130, "usual_s": 24, "line": "Warming up …", "lines": [ONEDNN]}
    text = slow_text(details, {"compiling": Expected(24, True)}, "d")
    assert text.startswith(
        "compiling has lasted 2 min 10 s (usually 24 s here). The engine's last line: Warming up …"
    )
    assert "reference loop" in text
    assert "--set weights=fp32" in text
    assert "first start of its kind" in slow_text({**details, "lines": []}, {}, "d")
    assert explain_slow([], "d", "loading") is None


# What people see


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lines_of(screen: PhaseScreen, clock: Clock, seconds: int) -> list[str]:
    error, sys.stderr = sys.stderr, io.StringIO()
    try:
        for _ in range(seconds):
            clock.now += 1
            screen.remind()
        return sys.stderr.getvalue().splitlines()
    finally:
        sys.stderr = error


def test_a_pipe_gets_a_line_a_minute_and_not_more() -> None:
    clock = Clock()
    screen = PhaseScreen(clock=clock)
    screen.phase(Phase.COMPILING, Expected(45, True))
    for _ in range(100):
        screen.detail("", 99, 200)
    assert lines_of(screen, clock, 180) == [
        "[   60.0 s] compiling, for 1 min, usually 45 s here, 99/200 (50%)",
        "[  120.0 s] compiling, for 2 min, usually 45 s here, past twice that, 99/200 (50%)",
        "[  180.0 s] compiling, for 3 min, usually 45 s here, past twice that, 99/200 (50%)",
    ]


# A whole start


def test_a_start_that_computes_but_does_not_advance_is_given_up(corral: Corral) -> None:
    up = corral("up", str(corral.model), "--name", "late", "--stall", "10", "--restart", "3", STUB_OPTIONS="spin")
    assert up.code == 8, up.err
    assert "it did not advance for 1" in up.err
    assert "fallback to torch linear" in up.err  # the engine's last words
    assert "--set weights=fp32" in up.err
    found = corral("status", "late", "--json").json()
    assert (found["state"], found["reason"], found["restarts"]) == ("failed", "not_advancing", 0)
    left = corral("ps", "--json").json()
    assert [one["state"] for one in left] == ["failed"]


def test_a_second_start_knows_what_is_usual(corral: Corral) -> None:
    first = corral("up", str(corral.model), "--name", "one")
    assert first.code == 0, first.err
    assert "loading … (about " in first.err
    assert corral("down", "one").code == 0
    again = corral("up", str(corral.model), "--name", "two")
    assert again.code == 0, again.err
    assert "starting … (usually " in again.err
    other = corral("up", str(corral.model), "--name", "three", "--context", "64")  # another plan
    assert "starting … (about " in other.err


def test_what_was_remembered_counts_where_its_compiled_code_is(corral: Corral, tmp_path: Path) -> None:
    def expected(**env: str) -> Any:
        return corral("up", str(corral.model), "--dry-run", "--json", **env).json()["expected"]

    assert corral("up", str(corral.model), "--name", "one").code == 0
    assert corral("down", "one").code == 0
    assert expected()["starting"]["remembered"]
    shutil.copytree(corral.home / "corral", tmp_path / "copy", symlinks=True)  # vLLM keys its code by paths
    copied = expected(CORRAL_HOME=str(tmp_path / "copy"))
    assert copied["compiling"] == {"seconds": 100.0, "remembered": False}
    assert not any(one["remembered"] for one in copied.values())
    shutil.rmtree(corral.home / "corral" / "cache")
    assert not any(one["remembered"] for one in expected().values())


def test_the_agents_get_what_is_expected(corral: Corral) -> None:
    spec = corral("up", str(corral.model), "--dry-run", "--json").json()
    assert spec["expected"]["compiling"] == {"seconds": 100.0, "remembered": False}


def test_only_phases_of_a_known_kind_are_remembered(
    clean_home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "WORTH_KEEPING_S", -1.0)
    folder = DeploymentFolder(tmp_path)
    folder.record.touch()
    staging = Staging(Silent(), folder, {})
    staging.phase(Phase.INSTALLING, "engine")
    staging.phase(Phase.MEASURING)
    staging.phase(Phase.FETCHING, "model")
    staging.phase(Phase.STARTING)
    assert set(starts.usual("engine")) == {Phase.INSTALLING}
    assert set(starts.usual("model")) == {Phase.FETCHING}
    assert starts.usual("") == {}


def test_a_measurement_says_how_long_its_server_has_answered_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    line = CountLine(lambda: now[0])
    line("concurrency 1, warm-up", 0, 1)
    now[0] = 59.0
    line.tick()
    assert capsys.readouterr().err == ""
    now[0] = 61.0
    line.tick()
    line.tick()
    assert capsys.readouterr().err == "concurrency 1, warm-up …  1 min 1 s\n"
    line("concurrency 1", 2, 0)  # how many there will be, time decides
    assert capsys.readouterr().err == "concurrency 1: 2 answered\n"
