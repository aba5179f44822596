"""The doctor: judgements of facts, and whole runs over simulated hosts of which some hang, refuse or are slow."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from corral.base.errors import UsageError
from corral.base.record import to_json
from corral.base.shell import Completed
from corral.base.ssh import Ssh
from corral.cli.doctor import command
from corral.deploy.doctor.engine import judge_all_reduce, read_all_reduce
from corral.deploy.doctor.examination import SURVEY_S, Question, examine, quick_check
from corral.deploy.doctor.finding import Finding, Level, Report
from corral.deploy.doctor.judge import judge_facts, judge_model, judge_versions, judge_writing
from corral.deploy.doctor.network import NetworkResult, Peer, judge_network, stream_time_s
from corral.lab.report.doctor import report_lines
from corral.node.survey import storage
from corral.plan.hardware.fabric import choose_fabric
from corral.plan.hardware.inventory import GIB
from corral.plan.hardware.survey import (
    Disk,
    GpuFacts,
    GpuProcess,
    Interface,
    NodeFacts,
    NodeLimits,
    PathFacts,
    RdmaPort,
    ReadSpeed,
    TakenPort,
)
from tests.unit.machines import lambda_1cc
from tests.until import LIMIT_S

H100 = "NVIDIA H100 80GB HBM3"


def well(host: str, number: int = 1, **more: Any) -> NodeFacts:
    """A node with which nothing is wrong."""
    facts = NodeFacts(
        host,
        hostname=host,
        python="3.11.7",
        home="/home/u",
        user="u",
        cores=96,
        memory_bytes=1000 * GIB,
        memory_available_bytes=900 * GIB,
        interfaces=(Interface("eth0", ipv4=(f"10.0.{number // 250}.{number % 250 + 1}/16",), speed_mbps=100_000),),
        default_interface="eth0",
        free_ports=(15001, 15002),
        gpus=tuple(GpuFacts(i, H100, f"GPU-{host}-{i}", 80 * GIB, 0, "570.1") for i in range(8)),
        cuda_driver="12.8",
        disks={"~": Disk(900 * GIB, 800 * GIB), "/tmp": Disk(90 * GIB, 80 * GIB)},
        shm=Disk(500 * GIB, 500 * GIB),
        asked_s=0.3,
    )
    return dataclasses.replace(facts, **more)


def only(findings: list[Finding], what: str) -> Finding:
    (found,) = [finding for finding in findings if finding.what == what]
    return found


def test_nodes_that_are_well() -> None:
    findings = judge_facts([well("a", 1), well("b", 2)], (8000,))
    assert {finding.level for finding in findings} == {Level.OK}
    assert only(findings, "gpus").text == f"8 × {H100}, driver 570.1, CUDA 12.8"


@pytest.mark.parametrize(
    ("more", "what", "level", "words"),
    [
        ({"python": "3.6.8"}, "python", Level.FATAL, "3.6.8"),
        ({"errors": {"gpus": "nvidia-smi: no driver"}, "gpus": ()}, "gpus", Level.FATAL, "no driver"),
        ({"errors": {"rdma": "OSError: x"}}, "rdma", Level.WARNING, "OSError: x"),
        ({"memory_available_bytes": GIB}, "memory", Level.WARNING, "1.0 GiB"),
        ({"disks": {"~": Disk(90 * GIB, GIB)}}, "disk", Level.FATAL, "1.0 GiB free at ~"),
        ({"disks": {"~": Disk(90 * GIB, 9 * GIB)}}, "disk", Level.WARNING, "9.0 GiB free at ~"),
        ({"disks": {"/tmp": Disk(90 * GIB, 9 * GIB)}}, "disk", Level.OK, "9.0 GiB"),
        ({"shm": Disk(64 << 20, 64 << 20)}, "shm", Level.FATAL, "0.1 GiB free in /dev/shm"),
        ({"limits": NodeLimits(nofile=1024)}, "limits", Level.WARNING, "1024 open files"),
        (
            {"limits": NodeLimits(memlock_bytes=65536), "rdma": (RdmaPort("mlx5_0"),)},
            "limits",
            Level.WARNING,
            "64 KiB of memory may be locked",
        ),
        (
            {"taken_ports": (TakenPort(8000, 77, "eve", "python -m http.server"),)},
            "ports",
            Level.OK,
            "python -m http.server of eve (process 77); `corral up` takes a free one",
        ),
        ({"clock_ahead_s": 120.0, "clock_error_s": 0.2}, "clock", Level.WARNING, "b is 120 s ahead of a"),
        ({"clock_ahead_s": 6.0, "clock_error_s": 3.0}, "clock", Level.OK, "within 6.0 s"),
        (
            {"gpu_processes": (GpuProcess(3, 4321, "eve", "python train.py", 70 * GIB),)},
            "gpu use",
            Level.WARNING,
            "GPU 3: process 4321 (python train.py of eve) holds 70 GiB",
        ),
        ({"gpus": ()}, "gpus", Level.FATAL, f"8 × {H100} on a; no GPU on b"),
        ({"gpus": (GpuFacts(0, "NVIDIA A100", "x", 1, 0, "1"),) * 8}, "gpus", Level.FATAL, "8 × NVIDIA A100 on b"),
        ({"gpus": (GpuFacts(0, H100, "x", 1, 0, "550.9"),) * 8}, "gpus", Level.WARNING, "570.1 on a; 550.9 on b"),
    ],
)
def test_what_is_wrong_is_named(more: dict[str, Any], what: str, level: Level, words: str) -> None:
    findings = [f for f in judge_facts([well("a", 1), well("b", 2, **more)], (8000,)) if f.what == what]
    worst = next(f for f in findings if f.level == level)
    assert words in worst.text
    assert worst.remedy or level == Level.OK


def test_a_port_that_was_asked_for_must_be_free() -> None:
    node = well("a", taken_ports=(TakenPort(9000, 0, "eve", ""),))
    finding = only(judge_facts([node], (9000,), ports_needed=True), "ports")
    assert finding.level == Level.FATAL
    assert "a process of eve" in finding.text


def test_versions_must_be_equal() -> None:
    same = {"a": {"vllm": "0.32.0", "ray": ""}, "b": {"vllm": "0.32.0", "ray": ""}}
    assert [f.text for f in judge_versions(same)] == ["vllm 0.32.0"]
    (finding,) = judge_versions({**same, "c": {"vllm": "0.31.0", "ray": ""}})
    assert finding.level == Level.FATAL
    assert finding.text == "vllm differs: 0.32.0 on a, b; 0.31.0 on c"


def test_a_model_must_be_the_same_everywhere() -> None:
    whole, part = PathFacts(True, size_bytes=140 * 10**9, files=40), PathFacts(True, size_bytes=7, files=2)
    gone = PathFacts(False, readable=False)
    speed = ReadSpeed("x", 10**9, 1.0)

    def judged(*rows: PathFacts) -> list[Finding]:
        nodes = [well(f"n{i}", i, paths={"/m": row}, read_speed=speed) for i, row in enumerate(rows)]
        return judge_model(nodes, "/m")

    assert [f.level for f in judged(whole, whole)] == [Level.OK, Level.OK]
    assert "40 files, 140,000,000,000 bytes on n0; 2 files, 7 bytes on n1" in judged(whole, part)[0].text
    assert judged(whole, part)[0].level == Level.FATAL
    assert judged(whole, gone)[0].text == "/m is not there on n1"
    assert judged(gone, gone)[0].text == "/m is on no node"
    slow = [well("a", paths={"/m": whole}, read_speed=ReadSpeed("x", 10**8, 1.0))]
    assert judge_model(slow, "/m")[1].text.endswith("about 23 min to load")


def wire(pairs: dict[tuple[str, str], dict[str, Any]]) -> NetworkResult:
    rows: dict[str, dict[str, Peer]] = {}
    for (first, second), row in pairs.items():
        rows.setdefault(first, {})[second] = Peer(**{"reach": "ok", **row})
    return NetworkResult(rows, {})


def test_the_network_is_judged() -> None:
    nodes = [well(name, i) for i, name in enumerate("abc")]
    fabric = choose_fabric(nodes)
    good = {"rtt_s": 5e-5, "there_bps": 9e9, "back_bps": 9.4e9}
    everyone: dict[tuple[str, str], dict[str, Any]] = {
        ("a", "b"): good,
        ("a", "c"): good,
        ("b", "c"): good,
        ("c", "a"): {},
    }
    findings, pairs = judge_network(wire(everyone), fabric)
    assert {f.level for f in findings} == {Level.OK}
    assert len(pairs) == 3
    assert only(findings, "bandwidth").text == "9.0 to 9.0 Gb/s over TCP, slowest a ↔ b"

    slow = {**everyone, ("b", "c"): {**good, "back_bps": 9e8, "rtt_s": 4e-3}}
    findings, _ = judge_network(wire(slow), fabric)
    assert only(findings, "bandwidth").text.startswith("only 0.9 Gb/s between b and c, 9.0 between others")
    assert only(findings, "latency").level == Level.WARNING

    walled = {**everyone, ("a", "c"): {"reach": "timeout"}, ("b", "c"): {"reach": "timeout"}}
    findings, _ = judge_network(wire(walled), fabric)
    blocked = only(findings, "firewall")
    assert blocked.level == Level.FATAL
    assert blocked.text == "a, b cannot connect to c at 10.0.0.3 (eth0): no answer"


def test_all_pairs_get_their_turn() -> None:
    for nodes in (2, 8, 64):
        assert 3 * (nodes - 1) * stream_time_s(nodes, 20) <= 20


NCCL = """node:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eno1:172.26.135.124<0>
node:1:1 [0] NCCL INFO Using network {network}
{{"ok": true, "small_s": 0.0001, "large_s": 0.002, "bytes_per_s": 8000000000.0}}
"""


def test_all_reduce_says_over_what_it_went() -> None:
    fabric = choose_fabric(lambda_1cc())
    by_ib = read_all_reduce(Completed((), 0, NCCL.format(network="IB"), ""), "nccl")
    assert by_ib["adapters"] == ["[0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]"]
    (finding,) = judge_all_reduce({"a": by_ib, "b": by_ib}, fabric)
    assert finding.level == Level.OK
    assert finding.text == "nccl over IB: 16 MiB in 2 ms (8.00 GB/s), 4 KiB in 0.10 ms"
    by_socket = read_all_reduce(Completed((), 0, NCCL.format(network="Socket"), ""), "nccl")
    assert judge_all_reduce({"a": by_socket}, fabric)[0].level == Level.WARNING
    broken = read_all_reduce(Completed((), 1, "", "ImportError: no torch"), "gloo")
    (finding,) = judge_all_reduce({"a": by_ib, "b": broken}, fabric)
    assert finding.level == Level.FATAL
    assert "b: ImportError: no torch" in finding.text


# --- whole runs over a stand-in for ssh ---------------------------------------------------------------------------

SSH = """#!/bin/sh
# a stand-in for ssh: answers by the host's name
for word; do
    [ "$word" = -G ] && exit 0
    [ "$word" = -- ] && break
    host=$word
done
case "$host" in
    hung*) exec sleep 600 ;;
    denied*) echo "u@$host: Permission denied (publickey)." >&2; exit 255 ;;
    changed*) echo "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @" >&2
              echo "Host key verification failed." >&2; exit 255 ;;
    gone*) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255 ;;
    slow*) sleep 0.5 ;;
esac
asked=$(cat)
case "$asked" in
    *"The survey: facts about a node"*) cat "$FAKE/$host.json" ;;
    *"How well nodes reach"*) case "$host" in half*) exec sleep 600 ;; esac; cat "$FAKE/$host.wire" ;;
    *) echo 0.32.0 ;;
esac
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "ssh"
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("CORRAL_SSH", str(program))
    monkeypatch.setenv("FAKE", str(tmp_path))
    return tmp_path


def simulate(folder: Path, hosts: list[str]) -> None:
    """Write what each simulated host answers."""
    for number, host in enumerate(hosts):
        body = to_json(well(host, number))
        for field in ("host", "clock_ahead_s", "clock_error_s", "asked_s"):
            del body[field]
        (folder / f"{host}.json").write_text(json.dumps(body) + "\n")
        good = {"reach": "ok", "rtt_s": 5e-5, "there_bps": 9e9, "back_bps": 9e9}
        peers = {other: good if j > number else {"reach": "ok"} for j, other in enumerate(hosts) if j != number}
        (folder / f"{host}.wire").write_text(json.dumps({"peers": peers}) + "\n")


class Patience:
    """The examination's clock, which only hosts that hang move on; and how long each command was given."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.granted_s: dict[str, list[float]] = {}

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Patience:
    """One that hangs is given up after a second, and has then taken all that it was given; others have all day."""
    clock, run = Patience(), Ssh.run

    def granted(self: Ssh, host: str, argv: Any, stdin: bytes = b"", timeout_s: float = 60, **more: Any) -> Any:
        clock.granted_s.setdefault(host, []).append(timeout_s)
        hangs = host.startswith("hung") or (host.startswith("half") and b"How well nodes reach" in stdin)
        try:
            return run(self, host, argv, stdin, 1.0 if hangs else LIMIT_S, **more)
        finally:
            if hangs:
                clock.now_s = max(clock.now_s, timeout_s)

    monkeypatch.setattr(Ssh, "run", granted)
    monkeypatch.setattr("corral.deploy.doctor.examination.time", clock)
    return clock


def test_sixty_four_hosts_of_which_some_are_not_well(fake: Path, patience: Patience) -> None:
    bad = ["hung-1", "hung-2", "hung-3", "denied-1", "changed-1", "gone-1"]
    good = [f"node-{i:02}" for i in range(56)] + ["slow-1", "half-1"]
    hosts = good[:30] + bad + good[30:]
    simulate(fake, good)
    report = examine(Question(tuple(hosts), timeout_s=60.0))
    assert [patience.granted_s[host] for host in bad[:3]] == [[SURVEY_S]] * 3  # and it is not asked again
    assert patience.granted_s["half-1"][-1] <= 60.0 - SURVEY_S
    said = {finding.host: finding.text for finding in report.fatal if finding.what == "ssh"}
    assert set(said) == set(bad)
    assert all("did not answer within" in said[host] for host in bad[:3])
    assert "refused the ssh key" in said["denied-1"]
    assert "the host key of" in said["changed-1"]
    assert "cannot be reached" in said["gone-1"]
    assert len(report.nodes) == len(good)
    assert report.fabric is not None
    assert len(report.fabric.addresses) == len(good)
    others = len(good) - 1  # all pairs, but perhaps those of the one that broke off half-way
    assert len(report.pairs) >= others * (others - 1) // 2
    assert any(f.host == "half-1" and "did not run" in f.text for f in report.findings)
    assert report.level == Level.FATAL
    text = "\n".join(report_lines(report))
    assert all(host in text for host in bad)


def test_a_wrong_interface_is_refused_with_what_there_is(fake: Path, clean_home: Path) -> None:
    (clean_home / "corral").mkdir()  # a mark is left there for a moment; these nodes do not see it
    simulate(fake, ["a", "b"])
    report = quick_check(Question(("a", "b"), interface="eth9"))
    (finding,) = report.fatal
    assert "no such interface on a, b" in finding.text
    assert "a: eth0 10.0.0.1/16" in finding.remedy
    assert [path for path in (clean_home / "corral").iterdir() if not path.name.startswith(".ssh-sockets")] == []


def test_the_command_and_its_exit_codes(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(fake, ["a", "b"])
    done = subprocess.run(
        [sys.executable, "-m", "corral", "doctor", "--hosts", "a,b", "--quick", "--json"],
        capture_output=True, text=True, env=dict(os.environ),
    )  # fmt: skip
    body = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert body["states"] == {"a": "ok", "b": "ok"}
    assert body["fabric"]["addresses"] == {"a": "10.0.0.1", "b": "10.0.0.2"}
    done = subprocess.run(
        [sys.executable, "-m", "corral", "doctor", "--hosts", "a,denied", "--quick"], capture_output=True, text=True
    )
    assert done.returncode == 8
    assert "denied refused the ssh key" in done.stdout
    assert "ssh-add" in done.stdout
    with pytest.raises(UsageError, match="twice"):
        CliRunner().invoke(command, ["--hosts", "a,a"], catch_exceptions=False)


def test_this_machine() -> None:
    report = examine(Question(timeout_s=30))
    assert report.hosts == ("here",)
    assert [node.host for node in report.nodes] == ["here"]
    assert any(f.what == "runtime" for f in report.findings)  # not installed in a clean home: said, and not fatal
    assert not [f for f in report.fatal if f.what == "runtime"]


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_report_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    nodes = [well(f"holygpu8a1{i}.rc.example.edu", i) for i in range(3)]
    nodes[1] = dataclasses.replace(nodes[1], gpu_processes=(GpuProcess(0, 1, "eve", "python train.py", GIB),))
    hosts = (*(node.host for node in nodes), "lost")
    findings = (
        *judge_facts(nodes, (8000,)),
        Finding(Level.FATAL, "ssh", "lost cannot be reached.", "lost", "Is the node up? " * 9),
    )
    lines = list(report_lines(Report(hosts, findings, tuple(nodes), choose_fabric(nodes), seconds=3.2)))
    assert max(len(click.unstyle(line)) for line in lines) <= columns
    assert "1 problem to fix before anything can start  (3.2 s)" in click.unstyle(lines[-1])


def test_time_that_is_up_is_said(fake: Path, patience: Patience) -> None:
    simulate(fake, ["a", "b"])
    report = examine(Question(("a", "b", "hung-1"), timeout_s=8.0))
    assert sum(patience.granted_s["hung-1"]) < 8.0
    assert "network" in [f.what for f in report.findings if "time limit was reached" in f.text]


def test_what_up_will_write_is_tried_and_nothing_of_it_stays(tmp_path: Path) -> None:
    home = tmp_path / "a" / "home"
    assert storage.try_writing(str(home)) == ""
    assert not list(tmp_path.iterdir())  # what was made for the trial is gone
    home.mkdir(parents=True)
    (home / "nodes").write_text("")  # not a folder
    assert storage.try_writing(str(home)) == f"{home}/nodes: Not a directory"
    assert [path.name for path in home.iterdir()] == ["nodes"]
    (tmp_path / "file").write_text("")
    assert "Not a directory" in storage.try_writing(str(tmp_path / "file" / "home"))
    assert storage.try_writing("/dev/full/x").endswith("Not a directory")


def test_a_folder_that_cannot_be_written_is_fatal_and_named() -> None:
    told = {"/home": "/home: Read-only file system", "/tmp": ""}
    facts = [NodeFacts("a", written={"/home": "", "/tmp": ""}), NodeFacts("b", written=told)]
    found = judge_writing(facts, ("/home", "/tmp"))
    assert [(one.level, one.host) for one in found] == [(Level.FATAL, "b")]
    assert found[0].text == "/home cannot be written to: /home: Read-only file system"
    assert judge_writing(facts[:1], ("/home", "/tmp"))[0].level is Level.OK
