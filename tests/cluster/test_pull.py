"""Pulling over real ssh onto hosts with own disks: shared storage, lost hosts, full disks, changing sources."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.base.errors import DataError
from corral.base.ssh import Ssh
from corral.deploy.transfer import courier as near_end
from corral.deploy.transfer.courier import ChangedSourceError
from corral.deploy.transfer.courier_group import Origin, Progress
from corral.deploy.transfer.spread import spread
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


def parts(hosts: Hosts, host: str, folder: Path) -> list[str]:
    found = hosts.exec(host, ["find", str(folder), "-name", ".*.corral-part"]).stdout.split()
    return [name.rpartition("/")[2] for name in found]


@pytest.mark.parametrize(
    ("from_here", "name"),
    [(True, "model-1.safetensors"), (True, "model-2.safetensors"), (False, "model-1.safetensors")],
)
def test_a_source_that_changes_is_told_once_and_nothing_is_sent_in_vain(
    hosts: Hosts, model: Path, tmp_path: Path, from_here: bool, name: str
) -> None:
    """While it is sent, and before its turn; from this machine, and from a host."""
    place, said = hosts.folder / "disk" / f"changing-{from_here}-{name}", list[str]()
    source, folder = Origin(str(tmp_path / "model")), tmp_path / "model"
    if not from_here:
        folder = hosts.folder / "disk" / "changes"
        source = Origin(str(folder), host="node1")
        spread(Ssh(), ("node1",), Origin(str(model)), str(folder), {}, lambda step: None)
    else:
        shutil.copytree(model, folder)
    changed = threading.Event()

    def report(step: Progress) -> None:
        said.append(f"{step.host}: {step.what}")
        if step.host == "node2" and step.what == "receiving" and step.done_bytes > 2_000_000 and not changed.is_set():
            changed.set()
            write = ["sh", "-c", f"echo more >> {folder}/{name}"]
            subprocess.run(write, check=True) if from_here else hosts.exec("node1", write)

    receivers = NAMES[1:]
    with pytest.raises(ChangedSourceError) as caught:
        spread(Ssh(), receivers, source, str(place), {}, report, uplink_bytes_per_s=5e6)
    assert changed.is_set()
    assert f"{name} had 20,000,000 bytes and has 20,000,005" in caught.value.message
    assert str(folder) in caught.value.message
    assert not [line for line in said if "damaged" in line or "failed" in line]
    for host in receivers:
        assert not [part for part in parts(hosts, host, place) if name in part]
    assert not couriers(hosts)
    again = spread(Ssh(), receivers, source, str(place), {}, lambda step: None)
    assert all(outcome.ok for outcome in again.values())
    expected = sums(folder) if from_here else sums_on(hosts, "node1", folder)
    assert all(sums_on(hosts, host, place) == expected for host in receivers)
    assert not any(parts(hosts, host, place) for host in receivers)


def test_what_a_pull_left_goes_with_the_next_unless_somebody_uses_it(
    hosts: Hosts, model: Path, tmp_path: Path
) -> None:
    place, folder = hosts.folder / "disk" / "left", tmp_path / "model"
    shutil.copytree(model, folder)

    def interrupt(step: Progress) -> None:
        if step.host == "node3" and step.what == "receiving" and step.done_bytes > 2_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spread(Ssh(), NAMES, Origin(str(folder)), str(place), {}, interrupt, uplink_bytes_per_s=5e6)
    left = {host: parts(hosts, host, place) for host in NAMES}
    assert left["node3"]
    for path in folder.glob("*.safetensors"):
        path.write_bytes(os.urandom(20_000_000))
    holds = f"import fcntl, os, sys; fcntl.flock(os.open({str(place)!r}, 0), 2); print('held', flush=True); input()"
    words = [*hosts.ssh_command, "node3", shlex.join(["python3", "-c", holds])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        outcomes = spread(Ssh(), NAMES, Origin(str(folder)), str(place), {}, lambda step: None)
        assert other.stdin is not None
        other.stdin.close()
    assert [host for host in NAMES if not outcomes[host].ok] == ["node3"]
    assert "another pull is writing" in outcomes["node3"].text
    assert parts(hosts, "node3", place) == left["node3"], "another pull was there"
    assert not any(parts(hosts, host, place) for host in NAMES if host != "node3")
    assert all(sums_on(hosts, host, place) == sums(folder) for host in NAMES if host != "node3")
    assert all(outcome.ok for outcome in spread(Ssh(), NAMES, Origin(str(folder)), str(place), {}, print).values())
    assert not parts(hosts, "node3", place)


def test_behind_a_disk_that_fills_up_nobody_waits(hosts: Hosts, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence would be waited for without end here: only a chain that is mended at once delivers anything more."""
    patient = near_end._source().replace(b"SILENCE_S = 20.0", b"SILENCE_S = 9999.0")
    assert patient != near_end._source()
    monkeypatch.setattr(near_end, "_source", lambda: patient)
    place, full = hosts.folder / "disk" / "fills", threading.Event()
    hosts.exec("node2", ["mkdir", "-p", str(place)])
    hosts.limit_disk("node2", place, 50_000_000)

    def report(step: Progress) -> None:
        if step.host == "node2" and step.what == "receiving" and step.done_bytes > 2_000_000 and not full.is_set():
            full.set()
            hosts.exec("node2", ["sh", "-c", f"dd if=/dev/zero of={place}/filler bs=1M || true"])

    outcomes = spread(Ssh(), NAMES, Origin(str(model)), str(place), {}, report, uplink_bytes_per_s=5e6, stall_s=40)
    assert full.is_set()
    assert [(host, outcomes[host].exit_code) for host in NAMES if not outcomes[host].ok] == [("node2", 10)]
    assert "No space left on device" in outcomes["node2"].text
    assert all(sums_on(hosts, host, place) == sums(model) for host in NAMES if host != "node2")
    assert not couriers(hosts)
