"""The node agent against a stand-in engine: phases, readiness, every way of ending, and no orphan ever."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral.base.bundle import bundle
from corral.base.record import to_json
from corral.deploy.deployment.events import Event, read_events
from corral.deploy.deployment.state import Patience, State, may_follow
from corral.node import processes
from corral.node.agent import journal, start_progress
from corral.node.agent.container import Container
from corral.node.agent.probe import LoadLog, Probe, Server
from tests.until import free_port, until

STUB = Path(__file__).parent.parent / "stub_engine.py"
AGENT = bundle("node/agent")


class Run:
    """One agent with a stand-in engine."""

    def __init__(
        self, folder: Path, options: list[str], patience: dict[str, Any] | None = None, **changes: Any
    ) -> None:
        self.folder = folder
        self.launch_id = secrets.token_hex(8)
        key = folder / "key"
        key.write_text("k" * 32)
        self.port = free_port()
        self.events_file = folder / "events.jsonl"
        spec = {
            "launch_id": self.launch_id,
            "deployment": "d",
            "rank": 0,
            "argv": [sys.executable, str(STUB), str(self.port), str(key), *options],
            "env": {},
            "unset_env": [],
            "cwd": str(folder),
            "serve": {"host": "127.0.0.1", "port": self.port, "model": "m", "key_file": str(key)},
            "events": str(self.events_file),
            "log": str(folder / "engine.log"),
            "heartbeat": str(folder / "heartbeat.json"),
            "agent_file": str(folder / "agent.json"),
            "engine_file": str(folder / "engine.json"),
            "stop_file": str(folder / "stop"),
            "patience": to_json(Patience(**{"hung_s": 600, "grace_s": 5, **(patience or {})})),
            **changes,
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        (folder / "agent.py").write_text(AGENT)
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(folder / "agent.py"), "run", str(folder / "spec.json")], start_new_session=True
        )

    def events(self) -> list[Event]:
        return read_events(self.events_file)

    def states(self) -> list[str]:
        return [event.get("state") for event in self.events() if event.kind == "state"]

    def wait_for(self, what: Callable[[], Any]) -> Any:
        try:
            return until(what)
        except AssertionError as error:
            raise AssertionError(f"{error}; events: {self.events()}") from None

    def wait_state(self, state: str) -> Event:
        found: list[Event] = self.wait_for(
            lambda: [event for event in self.events() if event.kind == "state" and event.get("state") == state]
        )
        return found[-1]

    def left(self) -> set[int]:
        return processes.marked(self.launch_id, [str(self.folder / "engine.json")])

    def wait_gone(self) -> None:
        self.process.wait(120)
        assert not self.left()
        assert not Path(journal.private_tmp(self.launch_id)).exists()


@pytest.fixture
def run(tmp_path: Path):
    runs: list[Run] = []

    def start(*options: str, patience: dict[str, Any] | None = None, **changes: Any) -> Run:
        runs.append(Run(tmp_path, list(options), patience, **changes))
        return runs[-1]

    yield start
    for each in runs:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
        processes.end_all(each.left, 0.2)


def test_phases_and_figures_then_ready_then_stop(run) -> None:
    one = run()
    one.wait_state("ready")
    observed: dict[str, Any] = {}
    for event in one.events():
        if event.kind == "observed":
            observed |= event.details
    assert observed["weights_gib"] == 14.99
    assert observed["kv_tokens"] == 914304
    assert observed["graph_gib"] == 0.99
    shards = [(e.get("done"), e.get("total")) for e in one.events() if e.kind == "phase" and e.get("total")]
    assert shards == [(1, 2), (2, 2)]
    one.wait_for(lambda: json.loads((one.folder / "heartbeat.json").read_text())["state"] == "ready")
    one.process.terminate()
    stopped = one.wait_state("stopped")
    assert stopped.get("reason") == "requested"
    one.wait_gone()
    walked = [State(name) for name in one.states()]
    assert all(may_follow(before, after) for before, after in itertools.pairwise(walked))


@pytest.mark.parametrize(
    ("task", "path"),
    [("embed", "/v1/embeddings"), ("classify", "/classify"), ("rerank", "/rerank"),
     ("transcribe", "/v1/audio/transcriptions"), ("generate", "/v1/completions")],
)  # fmt: skip
def test_readiness_is_a_request_of_the_models_task(run, tmp_path: Path, task: str, path: str) -> None:
    port, key = free_port(), tmp_path / "key"
    serve = {"host": "127.0.0.1", "port": port, "model": "m", "key_file": str(key), "task": task}
    one = run(serve=serve, argv=[sys.executable, str(STUB), str(port), str(key), f"only={path}"])
    one.wait_state("ready")
    one.process.terminate()
    one.wait_gone()


def test_a_model_that_embeds_is_not_ready_by_a_completion(run) -> None:
    one = run("only=/v1/embeddings")
    failed = one.wait_state("failed")
    assert "(generate) was answered 404" in failed.get("text")
    one.wait_gone()


def test_a_drain_ends_it_when_nothing_runs(run, tmp_path: Path) -> None:
    one = run(drain_file=str(tmp_path / "drain"))
    one.wait_state("ready")
    (tmp_path / "drain").write_text("60\n")
    one.wait_state("draining")
    stopped = one.wait_state("stopped")
    assert stopped.get("reason") == "walltime"
    assert "all running requests had ended" in stopped.get("text")
    one.wait_gone()
    walked = [State(name) for name in one.states()]
    assert all(may_follow(before, after) for before, after in itertools.pairwise(walked))


def test_a_drain_waits_for_requests_but_not_for_ever(run, tmp_path: Path) -> None:
    one = run("busy", drain_file=str(tmp_path / "drain"))
    one.wait_state("ready")
    (tmp_path / "drain").write_text("4\n")
    stopped = one.wait_state("stopped")
    assert stopped.get("reason") == "walltime"
    assert "before all running requests had ended" in stopped.get("text")


def test_a_drain_before_it_is_ready_ends_it(run, tmp_path: Path) -> None:
    (tmp_path / "drain").write_text("60\n")
    one = run("silent", drain_file=str(tmp_path / "drain"), patience={"restarts": 3})
    stopped = one.wait_state("stopped")
    assert "before it was ready" in stopped.get("text")
    assert not [event for event in one.events() if event.kind == "restart"]


def test_a_stop_file_stops_it(run) -> None:
    one = run()
    one.wait_state("ready")
    (one.folder / "stop").touch()
    one.wait_state("stopped")
    one.wait_gone()


@pytest.mark.parametrize("code", [0, 1, 77])
def test_any_unrequested_exit_is_a_failure(run, code: int) -> None:
    one = run(f"exit={code}")
    failed = one.wait_state("failed")
    assert failed.get("reason") == "engine_exited"
    assert failed.get("exit_code") == code
    one.wait_gone()


def test_exit_code_zero_after_ready_is_a_failure(run) -> None:
    one = run("die-after-ready=0")
    failed = one.wait_state("failed")
    assert failed.get("exit_code") == 0
    assert one.states() == ["starting", "loading", "ready", "draining", "failed"]
    one.wait_gone()


def test_engine_killed_by_signal(run) -> None:
    one = run()
    pid = one.wait_state("starting").get("pid")
    one.wait_state("ready")
    os.kill(pid, signal.SIGKILL)
    assert one.wait_state("failed").get("signal") == 9
    one.wait_gone()


def test_restarts_are_bounded(run) -> None:
    one = run("die-after-ready=0", patience={"restarts": 1})
    one.wait_state("failed")
    once = ["starting", "loading", "ready", "draining"]
    assert one.states() == [*once, "starting", *once, "failed"]  # between them it is starting, never ready
    assert sum(event.kind == "restart" for event in one.events()) == 1
    one.wait_gone()


def test_a_silent_start_is_a_stall(run) -> None:
    one = run("silent", patience={"idle_s": 2})
    failed = one.wait_state("failed")
    assert failed.get("reason") == "stalled"
    one.wait_gone()


def test_a_server_that_stops_answering_is_hung(run) -> None:
    one = run("hang", patience={"hung_s": 3})
    one.wait_state("ready")
    assert one.wait_state("failed").get("reason") == "engine_hung"
    one.wait_gone()


def test_a_server_without_its_guard_is_taken_down(run) -> None:
    one = run("open")
    failed = one.wait_state("failed")
    assert failed.get("reason") == "not_guarded"
    assert "ready" not in one.states()
    one.wait_gone()


def test_a_child_in_a_session_of_its_own_does_not_escape(run) -> None:
    one = run("daemon")
    one.wait_state("ready")
    assert len(one.left()) >= 2
    one.process.terminate()
    one.wait_gone()


@pytest.mark.parametrize("which", ["supervisor", "worker"])
def test_killing_the_agent_takes_the_engine_down(run, which: str) -> None:
    one = run("daemon")
    one.wait_state("ready")
    supervisor = one.process.pid
    worker = next(pid for pid, row in processes.process_table().items() if row[0] == supervisor)
    os.kill(supervisor if which == "supervisor" else worker, signal.SIGKILL)
    failed = one.wait_state("failed")
    assert failed.get("reason") == "agent_killed"
    one.wait_for(lambda: not one.left())


def test_sweep_ends_what_a_double_kill_left(run) -> None:
    one = run("daemon")
    one.wait_state("ready")
    worker = next(pid for pid, row in processes.process_table().items() if row[0] == one.process.pid)
    os.kill(worker, signal.SIGSTOP)
    os.kill(one.process.pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    one.process.wait()
    command = [sys.executable, str(one.folder / "agent.py"), "sweep", one.launch_id, str(one.folder / "engine.json")]
    subprocess.run(command, check=True, capture_output=True)
    assert not one.left()


def test_processes_without_their_environment_are_found_by_their_session(run) -> None:
    """vLLM's processes write their titles over their environment."""
    one = run("retitled")
    one.wait_state("ready")
    child = int((one.folder / "child").read_text())
    worker = next(pid for pid, row in processes.process_table().items() if row[0] == one.process.pid)
    engine = one.wait_state("starting").get("pid")
    os.kill(worker, signal.SIGSTOP)
    for pid in (one.process.pid, worker, engine):
        os.kill(pid, signal.SIGKILL)
    one.process.wait()
    one.wait_for(lambda: processes.marked(one.launch_id) == set())  # the environment alone finds nothing
    assert one.left() == {child}
    processes.end_all(one.left, 0.2)
    assert not one.left()


def test_an_engine_that_cannot_start_is_said(run) -> None:
    one = run(argv=["/does/not/exist"])
    failed = one.wait_state("failed")
    assert failed.get("reason") == "engine_broken"
    one.wait_gone()


def test_the_key_is_in_no_event_and_no_argument(run) -> None:
    one = run()
    one.wait_state("ready")
    key = (one.folder / "key").read_text()
    assert key not in one.events_file.read_text()
    pid = one.wait_state("starting").get("pid")
    assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize(
    ("line", "phase", "values"),
    [
        ("(EngineCore pid=1) INFO Loading weights took 0.19 seconds", "loading", {"weights_read_s": 0.19}),
        ("INFO CPU KV cache size: 46,592 tokens", "warming", {"kv_tokens": 46592}),
        (
            "CPU KV cache size: 524,288 tokens, Maximum concurrency for 2,048 tokens per request: 256.00x",
            "warming",
            {"kv_tokens": 524288, "context": 2048, "concurrency": 256.0},
        ),
        (
            "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  43%|####  | 29/67 [00:01<00:01, 25.4it/s]",
            "warming",
            {"percent": 43, "done": 29, "total": 67},
        ),
    ],
)
def test_log_lines(line: str, phase: str, values: dict[str, Any]) -> None:
    assert start_progress.read_line(line) == (phase, values)


def test_lines_that_only_wait_are_no_progress() -> None:
    assert start_progress.WAITING.search(
        "INFO shm_broadcast: No available shared memory broadcast block found in 60 seconds."
    )
    assert start_progress.WAITING.search("Waiting for 1 local, 0 remote core engine proc(s) to start.")
    assert not start_progress.WAITING.search("Loading safetensors checkpoint shards: 1% Completed | 1/191")


class OddServer(Server):
    """Answers as one that is ready; what its figures are, the test says: a number, or what goes wrong."""

    def __init__(self, figures: list[float | Exception], ends_dead: bool) -> None:
        super().__init__({"host": "127.0.0.1", "port": 1, "model": "m", "key_file": ""})
        self.figures, self.ends_dead = figures, ends_dead

    def accepts(self) -> bool:
        return True

    def counters(self) -> tuple[float, float]:
        found = self.figures.pop(0) if len(self.figures) > 1 else self.figures[0]
        if isinstance(found, Exception):
            raise found
        return 1.0, found

    def call(self, method: str, path: str, body: Any = None, key: bool = True, timeout_s: float = 10):
        if path == "/health" and self.ends_dead and len(self.figures) == 1:
            return 503, ""
        return (401, "") if path == "/v1/models" else (200, "")


def watched(figures: list[float | Exception], hung_s: float, ends_dead: bool = False) -> tuple[Probe, list[str]]:
    told: list[str] = []
    probe = Probe(OddServer(figures, ends_dead), {"hung_s": hung_s}, Container({}), told.append, False, LoadLog(""))
    probe.probe_every_s = 0.001
    probe.start()
    probe.join(30)
    return probe, told


def test_a_look_that_fails_is_told_and_the_next_ones_come() -> None:
    probe, told = watched([ValueError("half"), ValueError("half"), 1.0, 2.0], 600, ends_dead=True)
    assert told == ["ValueError: half"]  # once, not at every look
    assert probe.ready
    assert probe.fault is not None
    assert (probe.fault.reason, probe.fault.explained) == ("engine_exited", True)


def test_a_server_whose_figures_cannot_be_read_does_not_go_unwatched() -> None:
    probe, told = watched([KeyError("running")], 0.05)
    assert told
    assert probe.fault is not None
    assert probe.fault.reason == "engine_hung"
    assert "the last probe failed: KeyError" in probe.fault.text


def test_a_file_system_that_hung_during_a_look_is_no_hung_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("corral.node.agent.probe.time.monotonic", lambda: clock[0])
    server = OddServer([1.0], False)
    probe = Probe(server, {"hung_s": 300}, Container({}), lambda text: None, False, LoadLog(""))
    probe._probe()
    assert probe.ready

    def slow_counters() -> tuple[float, float]:  # the key is read from a file, and that takes its time
        clock[0] += 400
        return 0.0, 1.0

    server.counters = slow_counters  # type: ignore[method-assign]
    probe._probe()
    assert probe.fault is None


def test_a_first_look_that_fails_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([KeyError("pid")])

    def strangers(*_: object) -> set[str]:
        for failure in failures:
            raise failure
        return set()

    monkeypatch.setattr("corral.node.agent.probe.listeners", strangers)
    probe, told = watched([1.0, 2.0], 600, ends_dead=True)
    assert told == ["KeyError: 'pid'"]
    assert probe.ready
