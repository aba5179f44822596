"""Ports that Corral's own reserve among themselves, before anything listens there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from corral.base.errors import ConflictError
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.targets.local import LocalTarget
from corral.deploy.targets.ssh import near_port
from corral.node import sockets as ports
from corral.node.survey.usage import RESERVED
from corral.node.survey.usage import ports as look
from tests.until import free_port


def test_a_reservation_is_one_processs_and_ends_with_it() -> None:
    port = free_port()
    code = f"from corral.node.sockets import reserve; held = reserve({port}); print(bool(held), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "True\n"
        assert port in ports.reserved_ports()
        assert ports.reserve(port) is None
        assert ports.free_ports(1, first=port) != [port]
        other.kill()
    held = ports.reserve(port)
    assert held
    held.close()
    assert ports.free_ports(1, first=port) == [port]


def test_who_looks_at_a_node_sees_what_is_reserved_there() -> None:
    port = free_port()
    held = ports.reserve(port)
    assert held
    with held:
        rows = look({"ports": [port, free_port()]})["taken_ports"]
    assert [(row["port"], row["command"]) for row in rows] == [(port, RESERVED)]


def test_on_this_machine_a_reserved_port_is_refused_or_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr("corral.deploy.targets.local.DEFAULT_PORT", port)
    held = ports.reserve(port)
    assert held
    with held:
        with pytest.raises(ConflictError, match=f"port {port} is held by another deployment that is starting"):
            LocalTarget.from_options({}).choose_ports("127.0.0.1", port)
        chosen = LocalTarget.from_options({}).choose_ports("127.0.0.1", None)
    assert chosen.ports.serve != port
    assert chosen.note.startswith(f"port {port} is held by another deployment that is starting; using ")


def test_two_tunnels_that_open_later_get_two_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path))
    port = free_port()
    first, second = near_port(port), near_port(port)
    assert (first, second != port) == (port, True)
    promised = free_port()  # by a deployment whose command has ended: its endpoint says so
    folder = DeploymentFolder.of("one")
    folder.create()
    folder.record.write_text("{}")
    folder.endpoint.write_text(f'{{"base_url": "http://127.0.0.1:{promised}/v1"}}')
    assert near_port(promised) != promised
    folder.rank(0).path.mkdir(exist_ok=True)
    folder.rank(0).events.write_text('{"t": 1, "kind": "state", "rank": 0, "elapsed_s": 1, "state": "stopped"}\n')
    assert near_port(promised) == promised


def test_a_promise_that_cannot_be_read_now_may_be_for_any_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path))
    folder = DeploymentFolder.of("one")
    folder.create()
    folder.record.write_text("{}")
    folder.endpoint.mkdir()  # as a stale handle: it is there, and reading it fails
    port = free_port()
    assert near_port(port) != port


def test_a_port_held_for_a_tunnel_is_let_go_without_a_warning(tmp_path: Path) -> None:
    script = "from corral.deploy.targets.ssh import near_port; print(near_port(0))"
    command = [sys.executable, "-X", "dev", "-c", script]
    done = subprocess.run(command, env={**os.environ, "CORRAL_HOME": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    held = ports.reserve(int(done.stdout), ports.NEAR)
    assert held
    held.close()
