"""The survey of a node: run for real on this machine, and its answers read back, however broken."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from corral.base.bundle import bundle
from corral.base.errors import CorralError, UnreachableError
from corral.base.shell import Completed
from corral.node import network
from corral.node.survey import __main__ as whole
from corral.node.survey import usage as gpus
from corral.node.survey import usage as processes
from corral.plan.hardware.inventory import parse_cpuinfo, read_cpu
from corral.plan.hardware.survey import Asked, Here, NodeFacts, read_answer, survey, survey_host


def test_this_machine_tells_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").write_bytes(b"x" * 100_000)
    (tmp_path / "model" / "b.json").write_text("{}")
    (tmp_path / "nonce").write_text("words\n")
    model = str(tmp_path / "model")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        asked = Asked(
            disks=("~", str(tmp_path / "not" / "there")),
            paths=(model, "/not/there"),
            nonces=(str(tmp_path / "nonce"), "/not/there"),
            ports=(port,),
            free_ports=3,
            read=(f"{model}-not-there", model),
        )
        facts = survey_host(Here(), "here", asked)
    assert facts.errors == {}
    assert facts.hostname == socket.gethostname()
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.cores >= 1
    assert parse_cpuinfo(facts.cpuinfo, facts.machine) == read_cpu()
    assert 0 < facts.memory_available_bytes <= facts.memory_bytes
    assert [row.port for row in facts.taken_ports] == [port]
    assert facts.taken_ports[0].pid == os.getpid()
    assert len(set(facts.free_ports)) == 3
    assert all(15000 <= free < 32000 for free in facts.free_ports)
    loopback = facts.interface("lo")
    assert loopback is not None
    assert loopback.kind == "loopback"
    assert "127.0.0.1/8" in loopback.ipv4
    assert facts.paths[model].size_bytes == 100_002
    assert facts.paths[model].files == 2
    assert not facts.paths["/not/there"].exists
    assert facts.nonces == {str(tmp_path / "nonce"): "words", "/not/there": ""}
    assert facts.disks["~"].free_bytes > 0
    assert facts.disks[str(tmp_path / "not" / "there")].total_bytes > 0
    assert facts.read_speed is not None
    assert facts.read_speed.read_bytes == 100_000
    assert facts.shm is not None
    assert abs(facts.clock_ahead_s) <= facts.clock_error_s + 0.5


def test_a_part_that_fails_or_hangs_hides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    stuck = threading.Event()
    monkeypatch.setitem(whole.PARTS, "gpus", lambda asked: stuck.wait(120))
    monkeypatch.setitem(whole.PARTS, "rdma", lambda asked: 1 // 0)
    report = whole.survey({}, 4.0)
    stuck.set()
    assert report["hostname"] == socket.gethostname()
    assert report["errors"] == {
        "gpus": "no answer within 4 s",
        "rdma": "ZeroDivisionError: integer division or modulo by zero",
    }
    text = json.dumps(report)
    facts = read_answer("a", Completed(("python3",), 0, text, ""), report["began_s"], 4.5)
    assert facts.gpus == ()


SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) printf '0, NVIDIA H100 80GB HBM3, GPU-a, 81559, 4, 550.54.15\\n1, NVIDIA H100 80GB HBM3, GPU-b, 81559, [N/A], 550.54.15\\n' ;;
  --query-compute-apps*) printf 'GPU-b, {pid}, 70000, python3\\nGPU-b, 4194399, 12, [Not Found]\\n' ;;
  *) echo '| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4 |' ;;
esac
"""  # noqa: E501


def test_gpus_and_those_who_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI.format(pid=os.getpid()))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = gpus.gpus({})
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA H100 80GB HBM3"] * 2
    assert found["gpus"][0]["memory_bytes"] == 81559 << 20
    assert found["cuda_driver"] == "12.4"
    ours, gone = found["gpu_processes"]
    assert (ours["gpu"], ours["pid"], ours["used_bytes"]) == (1, os.getpid(), 70000 << 20)
    assert ours["user"]
    assert gone["command"] == "[Not Found]"


def test_a_broken_driver_is_an_error_of_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'it failed: no communication with the driver'; exit 9\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = survey_host(Here(), "here", Asked())
    assert "no communication with the driver" in facts.errors["gpus"]


def test_a_token_is_told_but_not_its_value(clean_home: Path) -> None:
    assert not survey_host(Here(), "here", Asked()).hf_token
    place = clean_home / ".cache" / "huggingface" / "token"
    place.parent.mkdir(parents=True)
    place.write_text("hf_secretvalue")
    done = subprocess.run([sys.executable, "-I", "-c", bundle("node/survey")], capture_output=True, text=True)
    assert json.loads(done.stdout)["hf_token"] is True
    assert "secretvalue" not in done.stdout


def test_commands_are_shown_without_their_options() -> None:
    script = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, "--api-key", "hush"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # only then has it become the command
        assert "hush" not in processes.command_of(process.pid)
        assert processes.command_of(process.pid).startswith("python")
        assert process.stdin is not None
        process.stdin.close()


def test_a_process_that_wrote_its_own_title_shows_no_options_either(monkeypatch: pytest.MonkeyPatch) -> None:
    title = "/opt/engine/bin/python -m launch /models/tiny --api-key hush --url http://x/y\0"
    monkeypatch.setattr(processes, "read", lambda path: title)
    assert processes.command_of(1) == "python -m launch /models/tiny"


@pytest.mark.parametrize(
    ("name", "kind", "driver", "expected"),
    [
        ("lo", "772", "", "loopback"),
        ("docker0", "1", "bridge", "docker"),
        ("br-0123456789ab", "1", "bridge", "docker"),
        ("ib0", "32", "ib_ipoib", "infiniband"),
        ("eth0", "1", "veth", "veth"),
        ("tap0", "1", "tun", "tun"),
        ("wg0", "65534", "", "tun"),
        ("dummy0", "1", "dummy", "virtual"),
        ("eno1", "1", "mlx5_core", "ethernet"),
    ],
)
def test_kinds_of_interface(tmp_path: Path, name: str, kind: str, driver: str, expected: str) -> None:
    (tmp_path / "type").write_text(kind)
    assert network.kind_of(name, str(tmp_path), driver) == expected


@pytest.mark.parametrize("folder", ["bonding", "bridge"])
def test_kinds_by_folder(tmp_path: Path, folder: str) -> None:
    (tmp_path / "type").write_text("1")
    (tmp_path / folder).mkdir()
    assert network.kind_of("x0", str(tmp_path), "") == {"bonding": "bond", "bridge": "bridge"}[folder]


@pytest.mark.parametrize(
    ("done", "kind", "words"),
    [
        (Completed(("python3",), 127, "", "bash: python3: command not found"), CorralError, "has no python3"),
        (Completed(("python3",), 1, "", "SyntaxError: invalid syntax"), CorralError, "SyntaxError"),
        (Completed(("python3",), 0, "Welcome!\n", ""), CorralError, "Welcome!"),
        (Completed(("python3",), 0, '{"began_s": 1', ""), UnreachableError, "cut off"),
    ],
)
def test_answers_that_are_none(done: Completed, kind: type[CorralError], words: str) -> None:
    with pytest.raises(kind, match=words):
        read_answer("a", done, 0.0, 1.0)


def test_a_shell_that_greets_is_read_past_and_the_clock_is_told() -> None:
    text = 'Welcome to the cluster!\n{"began_s": 1060.2, "ended_s": 1060.4, "hostname": "x"}\n'
    facts = read_answer("a", Completed(("python3",), 0, text, ""), asked_at_s=1000.0, took_s=0.6)
    assert facts.clock_ahead_s == pytest.approx(60.0)
    assert facts.clock_error_s == pytest.approx(0.2)


def test_many_hosts_at_once() -> None:
    found = survey(Here(), ["a", "b"], Asked())
    assert list(found) == ["a", "b"]
    assert all(isinstance(facts, NodeFacts) for facts in found.values())
