"""Homes that earlier versions wrote are listed, shown, used and ended; what is written into them those can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.slurm import commands
from corral.serve.fleet.chain import read_chain
from corral.serve.fleet.record import open_fleet, read_fleet
from corral.serve.fleet.start import load_request
from corral.serve.gateway.keys import add_key, keys_file, read_keys
from corral.serve.gateway.watcher import Watcher, open_source
from tests.homes import commits as old_commits
from tests.homes import unpack
from tests.unit.conftest import Corral


@pytest.fixture(params=old_commits())
def old(request: pytest.FixtureRequest, corral: Corral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corral:
    """`corral` in a home that another version wrote; its job still waits in the queue."""
    commands.forget_answers()  # of another test's queue
    home = corral.home / "corral"
    unpack(request.param, home)
    for name, body in {
        "squeue": "[ -e cancelled ] || echo '77|PENDING|Priority|N/A|N/A|4:00:00||0|0:0|'",
        "sacct": "exit 1",
        "scancel": "touch cancelled",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{corral.env['PATH']}"
    monkeypatch.setenv("PATH", path)
    corral.env["PATH"] = path
    return corral


def test_an_old_home_is_listed_shown_and_ended(old: Corral, tmp_path: Path) -> None:
    listed = {one["name"]: one for one in old("ps", "--all", "--json").json()}
    assert {"alone", "over", "herd", "herd-1", "night"} <= set(listed)
    assert listed["alone"]["reason"] == "machine_restarted"
    assert listed["over"]["reason"] == "requested"
    assert [one["name"] for one in listed["herd"]["members"]] == ["herd-1"]
    for name in ("alone", "over", "herd", "herd-1", "night"):
        done = old("status", name)
        assert done.code in (0, 8), done
        assert name in done.out
    assert read_chain(DeploymentFolder.of("night")) is not None
    for name in ("alone", "herd", "night"):
        done = old("down", name)
        assert done.code == 0, done
    assert read_fleet(open_fleet("herd")).closed
    assert (tmp_path / "cancelled").exists()  # the job of the chain


def test_a_gateway_and_a_keeper_read_an_old_home(old: Corral) -> None:
    folder = open_fleet("herd")
    assert load_request(folder).model
    snapshot = Watcher([open_source("herd"), open_source("alone")], lambda _: None).read()
    assert snapshot.unknown == ()
    assert [one.name for one in snapshot.grants] == ["herd", "alone", "alice"]
    assert [one.name for one in snapshot.readings] == ["herd-1", "alone"]


def keys_of(value: Any) -> Any:
    """All keys of objects, by their places."""
    if isinstance(value, dict):
        return {key: keys_of(one) for key, one in value.items()}
    return [keys_of(one) for one in value] if isinstance(value, list) else None


def test_the_version_that_wrote_a_home_can_read_on(old: Corral) -> None:
    """It refuses unknown keys: a command of this version adds none that it does not use."""
    folder = open_fleet("herd")
    before = {path: keys_of(json.loads(path.read_text())) for path in (folder.record, keys_file())}
    assert old("scale", "herd", "1..2").code == 0
    add_key("bob", tpm=9)
    assert [one.name for one in read_keys()] == ["alice", "bob"]
    assert keys_of(json.loads(folder.record.read_text())) == before[folder.record]
    after = json.loads(keys_file().read_text())
    assert set(after) == set(before[keys_file()])
    assert set(after["keys"][1]) <= set(after["keys"][0])
