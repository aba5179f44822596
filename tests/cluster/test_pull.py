"""Pulling over real ssh onto hosts with disks of their own: shared storage, lost hosts, full disks."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.errors import DataError
from corral.ssh import Ssh
from corral.transfer.spread import Origin, Progress, spread
from tests.testbed import missing
from tests.testbed.hosts import Hosts

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
NAMES = ("node1", "node2", "node3", "node4")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("pull")
    with Hosts(folder, NAMES, private=(folder / "disk",)) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def over_ssh(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_SSH", shlex.join(hosts.ssh_command))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(os.urandom(20_000_000))
    return folder


def sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def sums_on(hosts: Hosts, host: str, folder: Path) -> dict[str, str]:
    lines = hosts.exec(host, ["sh", "-c", f"cd {folder} && sha256sum *"]).stdout.splitlines()
    return {line.split()[1]: line.split()[0] for line in lines}


def couriers(hosts: Hosts) -> list[str]:
    return [line for host in NAMES if hosts.pid(host) for _, line in hosts.processes(host) if "courier" in line]


def test_onto_every_nodes_own_disk(hosts: Hosts, model: Path) -> None:
    place = hosts.folder / "disk" / "one"
    command = [sys.executable, "-m", "corral", "pull", str(model), "--hosts", ",".join(NAMES), "--to", str(place)]
    done = subprocess.run([*command, "--local-disk", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [host["state"] for host in json.loads(done.stdout)["hosts"]] == ["arrived"] * 4
    assert all(sums_on(hosts, host, place) == sums(model) for host in NAMES)
    assert not couriers(hosts)


def test_onto_shared_storage_once(hosts: Hosts, model: Path) -> None:
    place = hosts.folder / "shared"
    outcomes = spread(Ssh(), NAMES, Origin(str(model)), str(place), {}, lambda step: None, storage="shared")
    assert [outcome.state for outcome in outcomes.values()] == ["arrived", "shared", "shared", "shared"]
    assert sum(outcome.moved_bytes for outcome in outcomes.values()) == 40_000_002
    assert sums_on(hosts, "node4", place) == sums(model)


def test_a_disk_that_is_too_small_is_told_before_anything_moves(hosts: Hosts, model: Path) -> None:
    place = hosts.folder / "disk" / "small"
    hosts.exec("node3", ["mkdir", "-p", str(place)])
    hosts.limit_disk("node3", place, 10_000_000)
    with pytest.raises(DataError, match=r"node3 needs 0.04 GB and has 0.01 GB free"):
        spread(Ssh(), NAMES, Origin(str(model)), str(place), {}, lambda step: None)
    assert hosts.exec("node1", ["sh", "-c", f"ls {place}"]).stdout == ""


@pytest.mark.parametrize("from_here", [True, False])
def test_a_host_without_power_in_the_middle(hosts: Hosts, model: Path, from_here: bool) -> None:
    place = hosts.folder / "disk" / f"lost-{from_here}"
    off = threading.Event()

    def report(step: Progress) -> None:
        if step.host == "node2" and step.what == "receiving" and step.done_bytes > 2_000_000 and not off.is_set():
            off.set()
            hosts.power_off("node2")

    source = Origin(str(model))
    if not from_here:
        source = Origin(str(hosts.folder / "disk" / "one"), host="node1")
    try:
        outcomes = spread(Ssh(), NAMES, source, str(place), {}, report, uplink_bytes_per_s=10e6)
        assert off.is_set()
        assert [host for host in NAMES if not outcomes[host].ok] == ["node2"]
        assert all(sums_on(hosts, host, place) == sums(model) for host in NAMES if host != "node2")
    finally:
        if not hosts.pid("node2"):
            hosts.power_on("node2")
    assert all(outcome.ok for outcome in spread(Ssh(), NAMES, source, str(place), {}, lambda step: None).values())
    assert sums_on(hosts, "node2", place) == sums(model)
    assert not couriers(hosts)
