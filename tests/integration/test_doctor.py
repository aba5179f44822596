"""The doctor on real hosts: three machines with sshd on a network of their own, and the real engine's torch."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import KEPT, Corral
from tests.testbed import missing
from tests.testbed.hosts import Hosts

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "ready")
NAMES = ("head", "node1", "node2")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, corral: Corral) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("doctor")
    with Hosts(folder, NAMES, shared=[corral.home, KEPT]) as found:
        found.add_network("fast0", NAMES)
        yield found


def doctor(hosts: Hosts, corral: Corral, *words: str, names: str = ",".join(NAMES)) -> tuple[int, Any, str]:
    env = {**corral.env, "CORRAL_SSH": shlex.join(hosts.ssh_command)}
    command = [sys.executable, "-m", "corral", "doctor", "--hosts", names, "--json", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    return done.returncode, json.loads(done.stdout), done.stderr


def said(body: Any, what: str) -> list[str]:
    return [f["text"] for f in body["findings"] if f["what"] == what]


@pytest.mark.engine
def test_three_hosts_that_are_well(hosts: Hosts, corral: Corral, tiny_model: Path) -> None:
    code, body, _ = doctor(hosts, corral, "--deadline", "120", "--interface", "eth0")
    fatal = [f for f in body["findings"] if f["level"] == "fatal"]
    assert (code, fatal) == (0, [])
    assert body["fabric"]["addresses"] == {host: hosts.address(host) for host in NAMES}
    measured = {(pair["first"], pair["second"]) for pair in body["pairs"]}
    assert measured == {("head", "node1"), ("head", "node2"), ("node1", "node2")}
    assert all(min(pair["there_bits_per_s"], pair["back_bits_per_s"]) > 1e6 for pair in body["pairs"])
    assert said(body, "firewall") == ["every node reaches every other one"]
    assert said(body, "all-reduce")[0].startswith("gloo: 16 MiB in ")
    assert "vllm 0.32.0+cpu" in said(body, "versions")[0]
    for host in NAMES:
        assert hosts.processes(host) == []  # nothing is left behind


def test_a_wrong_interface_is_told_with_those_there_are(hosts: Hosts, corral: Corral) -> None:
    hosts.add_interface("node1", "lonely0", "10.77.0.2")
    code, body, _ = doctor(hosts, corral, "--interface", "lonely0")
    assert code == 8
    (finding,) = [f for f in body["findings"] if f["level"] == "fatal"]
    assert finding["text"] == "--interface lonely0 cannot be used: no such interface on head, node2."
    for host in NAMES:
        assert f"eth0 {hosts.address(host)}/24" in finding["remedy"]
        assert f"fast0 {hosts.address(host, 'fast0')}/24" in finding["remedy"]
    assert body["seconds"] < 30  # told from the survey, not after waiting for a network that cannot work


def test_a_second_network_may_be_chosen(hosts: Hosts, corral: Corral) -> None:
    code, body, _ = doctor(hosts, corral, "--interface", "fast0", "--quick")
    assert code == 0
    assert body["fabric"]["addresses"] == {host: hosts.address(host, "fast0") for host in NAMES}


def test_a_wall_between_two_hosts_is_found(hosts: Hosts, corral: Corral) -> None:
    wall = ["route", "add", "unreachable", f"{hosts.address('node2')}/32"]
    hosts.exec("node1", ["ip", *wall])
    try:
        code, body, _ = doctor(hosts, corral, "--interface", "eth0", "--deadline", "60")
    finally:
        hosts.exec("node1", ["ip", "route", "del", *wall[2:]])
    assert code == 8
    walls = said(body, "firewall")
    assert any(text.startswith("node1 cannot connect to node2 at") for text in walls)
    assert not any("head" in text for text in walls)


HOLD = "import socket, sys; s = socket.create_server(('', 15123)); print('up', flush=True); sys.stdin.read()"


def test_a_port_and_its_owner(hosts: Hosts, corral: Corral) -> None:
    pipe = subprocess.PIPE
    with hosts.popen("node2", ["python3", "-c", HOLD], stdin=pipe, stdout=pipe) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        code, body, _ = doctor(hosts, corral, "--quick", "--port", "15123")
        holder.stdin.close()
    assert code == 8
    (text,) = [f["text"] for f in body["findings"] if f["level"] == "fatal"]
    assert text.startswith("port 15123 is held by python3 -c … of root (process ")


def test_a_host_that_is_off_one_with_a_new_key_and_one_that_is_well(tmp_path: Path, corral: Corral) -> None:
    with Hosts(tmp_path, NAMES) as hosts:  # of its own: no connection that is still open may know them
        hosts.power_off("node1")
        hosts.change_host_key("node2")
        code, body, _ = doctor(hosts, corral, "--deadline", "40")
    assert code == 8
    why = {f["host"]: f["text"] for f in body["findings"] if f["level"] == "fatal" and f["what"] == "ssh"}
    assert set(why) == {"node1", "node2"}
    assert "the host key of" in why["node2"]
    assert body["seconds"] < 40
    assert body["states"]["head"] != "fatal"
