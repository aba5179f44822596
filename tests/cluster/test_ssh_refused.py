"""Starts over real sshd that cannot work: each is told with its node, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cluster.ssh_bench import Bench
from tests.testbed import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def test_a_wrong_interface_is_refused_with_those_there_are(bench: Bench) -> None:
    done = bench.up("wrong", "--interface", "eth9")
    assert done.returncode != 0
    assert "eth9" in done.stderr
    assert "eth0" in done.stderr
    assert not bench.engines("node1")


def test_a_taken_port_is_named(bench: Bench) -> None:
    listener = (
        "import socket,time; s=socket.create_server(('127.0.0.1', 18000)); print('', flush=True); time.sleep(99)"
    )
    with bench.hosts.popen("node1", ["python3", "-c", listener], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        holder.stdout.readline()
        try:
            done = bench.up("taken", "--port", "18000")
        finally:
            for pid, line in bench.hosts.processes("node1"):
                if "create_server" in line:
                    os.kill(pid, signal.SIGKILL)
    assert done.returncode == 4, done.stderr
    assert "18000" in done.stderr
    assert "node1" in done.stderr


def test_different_versions_are_named_before_anything_starts(bench: Bench) -> None:
    bench.hosts.exec("node2", ["sh", "-c", "echo 0.31.0 > /run/stub_version"])
    try:
        done = bench.up("skewed")
    finally:
        bench.hosts.exec("node2", ["rm", "/run/stub_version"])
    assert done.returncode == 4, done.stderr
    assert "node1 has 0.32.0, node2 has 0.31.0" in done.stderr
    assert not bench.engines("node1")


def test_a_full_disk_on_one_node_stops_the_start_everywhere(bench: Bench) -> None:
    folder = Path(bench.env["CORRAL_HOME"]) / "nodes"
    folder.mkdir(exist_ok=True)
    bench.hosts.limit_disk("node2", folder, 4096)
    try:
        done = bench.up("full")
        assert done.returncode == 8, done.stderr
        assert "node2" in done.stderr
        assert "No space left" in done.stderr
        bench.nothing_left()
        assert not bench.hosts.exec("node2", ["ls", "-A", str(folder)]).stdout  # neither files nor a key
        assert bench.run("down", "full").returncode == 0  # which knows it
    finally:
        bench.hosts.exec("node2", ["umount", str(folder)])


def test_an_engine_that_ends_at_the_start_is_explained_by_its_rank(bench: Bench) -> None:
    done = bench.up("bad", "--env", "STUB_OPTIONS=slow=20 worker-exit=1")
    assert done.returncode == 8
    assert "rank 1 on node2" in bench.run("events", "bad").stdout
    bench.nothing_left()


def test_a_changed_host_key_is_refused(bench: Bench) -> None:
    subprocess.run([*bench.hosts.ssh_command, "-O", "exit", "node2"], capture_output=True)
    bench.hosts.change_host_key("node2")
    try:
        with TemporaryDirectory() as fresh:  # no connection of earlier tests is shared there
            arguments = ("up", str(bench.model), "--name", "key", "--hosts", "node1,node2")
            done = bench.run(*arguments, XDG_RUNTIME_DIR=fresh)
    finally:
        bench.hosts.trust("node2")
    assert done.returncode == 6, done.stderr
    assert "host key" in done.stderr
    assert "node2" in done.stderr


def test_down_finds_the_hosts_of_a_record_that_cannot_be_read(bench: Bench) -> None:
    assert bench.up("torn").returncode == 0
    record = bench.folder("torn") / "deployment.json"
    record.write_bytes(record.read_bytes()[:40])
    done = bench.run("down", "torn")
    assert done.returncode == 0, done.stderr
    bench.nothing_left()
    assert not list((bench.home / "nodes").glob("torn-*"))
