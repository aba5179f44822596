"""A node that lies: nothing it says writes outside a rank's folder, ends in a traceback, or takes all memory."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import CorralError, DataError, UsageError
from corral.base.processes import own_identity
from corral.base.record import dump_json
from corral.base.shell import Completed, capture
from corral.base.ssh import Ssh
from corral.base.untrusted import parse_json, plain
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder, RankFolder
from corral.deploy.doctor.engine import read_all_reduce
from corral.deploy.doctor.network import read_measurements
from corral.deploy.lifecycle.deployments import Record, Status, statuses
from corral.deploy.targets.ssh_reports import MIRRORED, mirror, read_report, read_started, read_stopped
from corral.deploy.transfer.courier import ask_courier
from corral.deploy.transfer.courier_events import read_event
from corral.plan.hardware.survey import NodeFacts, read_answer


def piece(data: bytes, offset: object = 0) -> dict[str, object]:
    return {"offset": offset, "data": base64.b64encode(data).decode()}


def report(**changed: object) -> dict[str, object]:
    agent = {"pid": 7, "host": "n", "boot_id": "b", "start_ticks": 9}
    found: dict[str, object] = {"alive": True, "boot_id": "b", "files": {"engine.log": piece(b"hello\n")}}
    found |= {"agent.json": agent, "agent.json_age_s": 1.5, "host": "n"}
    found |= {"heartbeat.json": {"t": 1.0, "state": "ready", "phase": "ready"}, "heartbeat.json_age_s": 0.5}
    return {**found, **changed}


# ------------------------------------------------------------------------------------------------- the whole attack
@pytest.fixture
def lying_node(clean_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Status]:
    """A deployment on a node whose every answer is the one given; returns what `corral ps` then shows."""
    folder = DeploymentFolder.of("prey")
    folder.create()
    record = Record("prey", "ab" * 16, "m", "m", "ssh", 1.0, own_identity(), "0.32.0", {"hosts": ["a"], "home": "/h"})
    folder.record.write_text(dump_json(record))
    folder.launch.write_text(json.dumps({"launch_id": "ab" * 16}))

    def answer(body: Any) -> Status:
        script = tmp_path / "ssh"
        text = body if isinstance(body, str) else json.dumps(body)
        (tmp_path / "answer").write_text(text)
        script.write_text(f'#!/bin/sh\ncase "$1" in -G) exit;; esac\ncat >/dev/null\ncat "{tmp_path}/answer"\n')
        script.chmod(0o755)
        monkeypatch.setenv("CORRAL_SSH", str(script))
        (found,) = statuses()
        return found

    return answer


def test_the_harness_shows_an_honest_node(lying_node: Callable[[Any], Status]) -> None:
    line = json.dumps({"t": 5.0, "kind": "state", "state": "ready"}).encode() + b"\n"
    found = lying_node(report(files={"events.jsonl": piece(line)}))
    assert found.state == "ready"


@pytest.mark.parametrize("name", ["{home}/.bashrc", "../../../../.bashrc", "agent.json", "sub/dir", "", ".", "key"])
def test_a_report_cannot_choose_a_file(
    lying_node: Callable[[Any], Status], clean_home: Path, name: str, tmp_path: Path
) -> None:
    (clean_home / ".bashrc").write_text("mine\n")
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    found = lying_node(report(files={name.format(home=clean_home): piece(b"owned\n")}))
    assert "was not asked for" in found.text
    assert (clean_home / ".bashrc").read_text() == "mine\n"
    after = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("ssh", "answer"))
    assert [path for path in after if path not in before] == []


SENSELESS = [  # what a node answers, and what is wrong with it
    ("", "no answer"),
    ("no answer at all", "no answer"),
    ("{", "not valid JSON"),
    ("[]", "no answer"),
    ("{}" * 3, "not valid JSON"),
    ("null\n", "no answer"),
    ("[" * 200_000, "no answer"),
    ('{"a":' * 200_000, "nested more than 64 levels deep"),
    ('{"alive": NaN}', "NaN"),
    ('{"alive": ' + "9" * 5000 + "}", "5000 digits"),
    ('{"alive": 1e999}', "1e999"),
    (report(files=[1]), "files must be an object"),
    (report(files={"engine.log": 5}), "engine.log must have an offset and data"),
    (report(files={"engine.log": {"offset": "0", "data": ""}}), "engine.log must have an offset and data"),
    (report(files={"engine.log": {"offset": True, "data": ""}}), "engine.log must have an offset and data"),
    (report(files={"engine.log": {"offset": 0, "data": "*"}}), "engine.log is not base64"),
    (report(files={"engine.log": piece(b"x", -1)}), "do not continue its engine.log"),
    (report(files={"engine.log": piece(b"x" * ((4 << 20) + 1))}), "do not continue its engine.log"),
    (report(files={"events.jsonl": piece(b"x", 7)}), "do not continue its events.jsonl"),
    (report(alive="yes"), "alive must be true or false"),
    (report(boot_id=5), "boot_id must be text"),
    (report(**{"agent.json": {"pid": "7"}}), "agent.pid must be a whole number"),
    (report(**{"agent.json": [1]}), "agent must be an object"),
    (report(**{"agent.json_age_s": -5}), "-5 s old"),
    (report(**{"agent.json_age_s": 1e300}), "1e+300 s old"),
    (report(**{"heartbeat.json": "x"}), "heartbeat must be an object"),
    (report(surprise=1), "unknown key 'surprise'"),
]


@pytest.mark.parametrize(("body", "wrong"), SENSELESS, ids=range(len(SENSELESS)))
def test_a_senseless_answer_is_one_sentence_that_names_the_node_and_the_fault(
    lying_node: Callable[[Any], Status], body: Any, wrong: str
) -> None:
    found = lying_node(body)
    assert found.state == "unknown"
    assert found.text.startswith("the answer of a")
    assert wrong in found.text
    assert len(found.text) < 300
    assert "\n" not in found.text


def test_a_far_offset_makes_no_endless_file(tmp_path: Path) -> None:
    here = RankFolder(tmp_path / "rank0")
    found = read_report(json.dumps(report(files={"engine.log": piece(b"x", 1 << 50)})), "a", {"engine.log": 0})
    mirror(here, found)
    assert not here.log.exists()
    near = read_report(json.dumps(report(files={"engine.log": piece(b"x", 5)})), "a", {"engine.log": 0})
    mirror(here, near)
    assert here.log.stat().st_size == 6 < MIRRORED["engine.log"]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    here = RankFolder(tmp_path / "rank0")
    here.path.mkdir()
    (tmp_path / "prey").write_text("mine")
    here.log.symlink_to(tmp_path / "prey")
    with pytest.raises(OSError):
        mirror(here, read_report(json.dumps(report()), "a", {}))
    assert (tmp_path / "prey").read_text() == "mine"


# ------------------------------------------------------------------------------------------------------ the journal
LINES = [
    {"kind": "state", "state": "owned"}, {"kind": "state", "state": ["ready"]}, {"kind": "state"},
    {"kind": "state", "state": "unknown"}, {"kind": 5, "state": "ready"},
    {"kind": "state", "state": "ready", "t": 1e300},
    {"kind": "state", "state": "ready", "rank": -1}, {"kind": "state", "state": "ready", "elapsed_s": "x"},
]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_events_that_no_agent_writes_are_passed_over(
    lying_node: Callable[[Any], Status], line: dict[str, Any]
) -> None:
    good = {"t": 5.0, "kind": "state", "state": "loading"}
    data = b"".join(json.dumps({"t": 6.0, **row}).encode() + b"\n" for row in (good, line))
    assert lying_node(report(files={"events.jsonl": piece(data)})).state == "loading"


def test_details_of_the_wrong_type_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    body = {"t": 5.0, "kind": "state", "state": "failed", "reason": "magic", "text": ["x"], "failed_rank": "../..",
            "log_from": -1, "done": 1.5, "exit_code": "x", "other": 5}  # fmt: skip
    path.write_text(json.dumps(body) + "\n" + json.dumps({"t": 6, "kind": "observed", "kv_tokens": "x", "load_s": 2}))
    with path.open("a") as file:
        file.write("\n" + '{"t":5,"kind":"x","deep":' + "[" * 5000 + "]" * 5000 + "}\n")
    state, observed = read_events(path)
    assert state.details == {"state": "failed", "other": 5}
    assert observed.details == {"load_s": 2}


# --------------------------------------------------------------------------------------------------- other answers
@pytest.mark.parametrize("text", ['{"left": 5}', '{"left": [[1]]}', "{}", '{"left": [], "containers": "x"}', ""])
def test_a_stop_that_says_nonsense_is_an_error(text: str) -> None:
    with pytest.raises(DataError):
        read_stopped(text, "a")


def test_a_start_that_says_nonsense_is_an_error() -> None:
    assert read_started('{"pid": 5, "host": "n"}', "a").pid == 5
    with pytest.raises(DataError):
        read_started('{"pid": {}}', "a")


SURVEYS: list[dict[str, Any]] = [
    {"free_ports": [70000]}, {"free_ports": ["x"]}, {"home": "relative"}, {"home": "/x/../../etc"}, {"cores": -1},
    {"memory_bytes": 1 << 70}, {"interfaces": [{"name": "eth0", "ipv4": ["not an address"]}]}, {"interfaces": {}},
    {"read_speed": {"file": "f", "read_bytes": 1, "seconds": 0}}, {"rdma": [{"device": "m", "rate_gbps": -1}]},
    {"began_s": "x"}, {"gpus": [{"index": 0}]}, {"disks": {"/": {"total_bytes": -5, "free_bytes": 0}}},
]  # fmt: skip


@pytest.mark.parametrize("body", SURVEYS, ids=[next(iter(body)) for body in SURVEYS])
def test_a_survey_that_cannot_be_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(CorralError):
        read_answer("a", Completed(("python3",), 0, json.dumps(body), ""), 0.0, 1.0)


def test_names_that_are_no_names_of_interfaces_are_left_out() -> None:
    body = {"interfaces": [{"name": "eth0\nLD_PRELOAD=x"}, {"name": "eth0"}], "rdma": [{"device": "a b"}]}
    facts = read_answer("a", Completed(("python3",), 0, json.dumps(body), ""), 0.0, 1.0)
    assert isinstance(facts, NodeFacts)
    assert [row.name for row in facts.interfaces] == ["eth0"]
    assert facts.rdma == ()


def test_a_host_that_never_stops_talking_is_cut_off() -> None:
    with pytest.raises(DataError, match="cut off"):
        capture([sys.executable, "-c", "while True: print('x' * 65536)"], b"", 60, 1 << 20)


def test_capture_hears_both_and_speaks() -> None:
    script = "import sys; data = sys.stdin.buffer.read(); print(len(data)); print('e', file=sys.stderr); sys.exit(3)"
    assert capture([sys.executable, "-c", script], b"x" * 3_000_000, 60, 1 << 20) == (3, b"3000000\n", b"e\n")
    with pytest.raises(subprocess.TimeoutExpired):
        capture([sys.executable, "-c", "import time; time.sleep(60)"], b"", 0.2, 1 << 20)


def test_words_of_a_node_do_not_speak_to_the_terminal(lying_node: Callable[[Any], Status]) -> None:
    text = "\x1b]0;title\x07\x1b[2Jgone \ud800 \u202e"
    line = json.dumps({"t": 5.0, "kind": "state", "state": "loading", "text": text}).encode() + b"\n"
    found = lying_node(report(files={"events.jsonl": piece(line)}))
    assert found.text.encode()  # no lone surrogates either
    assert not any(character < " " or character == "\u202e" for character in found.text)
    assert plain("a\tb\nc\x1b[31m") == "a\tb\nc�[31m"


@pytest.mark.parametrize("data", [b"\xff", b"[" * 100_000, b'{"a":' * 100, b"1" * 50, b"NaN", b"-Infinity", b"1e400"])
def test_json_that_is_none_is_one_sentence(data: bytes) -> None:
    with pytest.raises(DataError, match="the text"):
        parse_json(data, "the text")


def test_json_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(DataError, match="at most"):
        parse_json(b" " * 100, "the text", 99)


def test_the_mirrored_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        mirror(RankFolder(tmp_path / "rank0"), read_report(json.dumps(report()), "a", {}))
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "rank0").iterdir())


# ------------------------------------------------------------------------------------------------------- couriers
@pytest.mark.parametrize(
    "event",
    [
        {"event": "listening", "address": "1.2.3.4", "port": 0},
        {"event": "listening", "address": "x/../y @evil", "port": 5},
        {"event": "listening", "address": "1.2.3.4"},
        {"event": "manifest", "files": [{"path": "a"}]},
        {"event": "manifest", "files": [{"path": "a", "kind": "file", "size": -5}]},
        {"event": "manifest", "files": [], "url": "file:///etc/passwd"},
        {"event": "hashes", "hashes": {"0": "x"}},
        {"event": "hashes", "hashes": {"-1": "0" * 64}},
        {"event": "held", "held": [[-1, 0]]},
        {"event": "held", "held": [[0, 0, 0]]},
        {"event": "progress", "done": "x", "total": 1},
        {"event": "progress", "done": 1 << 70, "total": 1},
        {"event": "done", "bytes": 1, "seconds": -1},
        {"event": "failed", "text": "x" * 3000},
        {"event": "failed", "text": ["x"]},
        {"event": "owned"},
        {"event": ["x"]},
    ],
    ids=lambda event: str(event)[:40],
)
def test_events_that_no_courier_says_are_errors(event: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        read_event(json.dumps(event).encode() + b"\n")


@pytest.mark.parametrize("line", [b"Welcome!\n", b"{\n", b'{"a": 1}\n', b"[1]\n", b"\xff\n", b"[" * 100_000])
def test_lines_that_are_no_events_are_read_past(line: bytes) -> None:
    assert read_event(line) is None


@pytest.mark.parametrize(
    "said",
    [
        '{"event": "manifest", "files": 5}',
        '{"event": "read-speed", "bytes": 1, "seconds": 1}',
        '{"event": "read-speed", "bytes": 1, "seconds": 1, "bytes_per_s": NaN}',
    ],
)
def test_a_lying_courier_is_one_error(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "ssh"
    script.write_text(f"#!/bin/sh\ncase \"$1\" in -G) exit;; esac\necho '{said}'\ncat >/dev/null\n")
    script.chmod(0o755)
    monkeypatch.setenv("CORRAL_SSH", str(script))
    with pytest.raises(CorralError):
        ask_courier(Ssh(), "a", "read-speed", {"folder": "/"}, ["read-speed", "manifest"])


WIRES = [
    '{"peers": {"stranger": {"reach": "ok"}}}', '{"peers": {"b": {"reach": "ok", "rtt_s": -1}}}', '{"peers": 5}',
    '{"peers": {"b": {"reach": 5}}}', '{"peers": {"b": {"reach": "ok", "there_bps": 1e300}}}', "",
]  # fmt: skip


@pytest.mark.parametrize("text", WIRES, ids=range(len(WIRES)))
def test_measurements_that_cannot_be_are_errors(text: str) -> None:
    with pytest.raises(DataError):
        read_measurements(text, "a", {"b"})


def test_an_all_reduce_that_says_nonsense_has_failed() -> None:
    for text in ('{"ok": true, "large_s": "x"}', '{"ok": true, "small_s": -1.0}', '{"ok": 5}', "x" * 100_000):
        assert not read_all_reduce(Completed((), 0, text, ""), "gloo")["ok"]


@pytest.mark.parametrize("name", ["ü" * 80, "漢" * 40, "\udcff"])
def test_names_that_no_folder_can_have_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a deployment"):
        DeploymentFolder.of(name)
