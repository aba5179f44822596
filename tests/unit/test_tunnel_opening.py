"""Two that open one deployment's tunnel at once: the port is the first one's, and both have a tunnel."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from corral.base.files import write_atomic
from corral.base.processes import own_identity
from corral.base.record import dump_json
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle import tunnel
from corral.deploy.lifecycle.tunnel import HeldTunnel, opened


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeploymentFolder:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "home"))
    found = DeploymentFolder(tmp_path / "home" / "deployments" / "one")
    found.path.mkdir(parents=True)
    return found


def test_a_tunnel_that_was_refused_the_port_waits_for_the_one_that_has_it(
    folder: DeploymentFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "RECORD_S", 60.0)
    near = tmp_path / "near"

    def say() -> None:
        write_atomic(folder.tunnel, dump_json(HeldTunnel(own_identity(), str(near))))

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(near))
        listening.listen()
        later = threading.Timer(0.3, say)
        later.start()
        assert opened(folder, lambda: True)
        later.join()


def test_one_that_ended_and_left_nobody_is_given_up_soon(
    folder: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "RECORD_S", 0.2)
    monkeypatch.setattr(tunnel, "OPEN_S", 3600.0)
    assert not opened(folder, lambda: True)
