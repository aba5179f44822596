"""`corral down` where files of the deployment cannot be read: what runs is found by its launch id, and ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corral.base.errors import DataError
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import expected_of
from corral.deploy.lifecycle.status import traces_of
from corral.deploy.targets.base import load_target
from corral.node.processes import marked
from tests.unit.conftest import Corral

DAMAGE = {
    "empty": b"",
    "cut off": b'{"pid": 5, "ho',
    "another type": b"[5]",
    "deep": b"[" * 20000,
    "bytes": b"\xff\0",
}
FILES = [
    "deployment.json",
    "launch.json",
    "endpoint.json",
    "rank0/agent.json",
    "rank0/engine.json",
    "rank0/spec.json",
]


def launched(corral: Corral) -> tuple[DeploymentFolder, str]:
    assert corral("up", str(corral.model), "--name", "one").code == 0
    folder = DeploymentFolder.of("one")
    launch_id = str(json.loads(folder.record.read_text())["launch_id"])
    assert marked(launch_id)
    return folder, launch_id


@pytest.mark.parametrize(("name", "how"), [*zip(FILES, ["cut off", "another type"] * 3, strict=True)])
def test_any_file_may_be_damaged_and_the_engine_is_ended(corral: Corral, name: str, how: str) -> None:
    folder, launch_id = launched(corral)
    whole = (folder.path / name).read_bytes()
    (folder.path / name).write_bytes(DAMAGE[how])
    engines = marked(launch_id)
    down = corral("down", "one")
    assert down.code == 0, down.err
    assert "unexpected error" not in down.err
    assert not marked(launch_id)
    if name in ("deployment.json", "rank0/agent.json", "endpoint.json"):
        assert f"launch id {launch_id}" in down.out
        assert all(str(pid) in down.out for pid in engines)
    (folder.path / name).write_bytes(whole)


def test_all_of_them_but_one_may_be_damaged(corral: Corral) -> None:
    folder, launch_id = launched(corral)
    for name, data in zip(FILES[:-1], DAMAGE.values(), strict=True):
        (folder.path / name).write_bytes(data)
    down = corral("down", "one", "--purge")
    assert down.code == 0, down.err
    assert not marked(launch_id)
    assert not folder.path.exists()


def test_where_no_file_tells_the_launch_nothing_is_claimed(corral: Corral) -> None:
    folder, launch_id = launched(corral)
    kept = {name: (folder.path / name).read_bytes() for name in FILES}
    for name in FILES:
        (folder.path / name).write_bytes(b"{")
    down = corral("down", "one")
    assert down.code == 10
    assert "records its launch id" in down.err
    assert marked(launch_id)
    for name, data in kept.items():
        (folder.path / name).write_bytes(data)


def test_a_record_of_other_machines_that_is_lost_is_said(corral: Corral) -> None:
    folder, _ = launched(corral)
    launch = json.loads(folder.launch.read_text())
    launch["target"] = "ssh"
    launch["ranks"][0]["node"] = "far"
    folder.launch.write_text(json.dumps(launch))
    whole = folder.record.read_bytes()
    folder.record.write_bytes(b"")
    down = corral("down", "one")
    assert down.code == 9  # its launch still names its nodes, and they are tried
    assert "the host name far does not resolve" in down.err
    assert "On far, end the processes with CORRAL_LAUNCH=" in down.err
    folder.record.write_bytes(whole)


def test_half_a_file_still_tells_the_launch(clean_home: Path) -> None:
    folder = DeploymentFolder.of("one")
    folder.path.mkdir(parents=True)
    folder.record.write_bytes(b'{"name": "one", "launch_id": "abc-1", "target": "ssh", "pla')
    found = traces_of(folder)
    assert (found.launch_id, found.target, found.target_options) == ("abc-1", "ssh", {})


@pytest.mark.parametrize("body", [[5], 5, {}, {"ranks": 5}, {"launch_id": 5, "ranks": [{"serve": []}]}, None])
def test_wrong_types_in_a_launch_are_one_clear_error(clean_home: Path, body: object) -> None:
    folder = DeploymentFolder.of("one")
    folder.path.mkdir(parents=True)
    folder.launch.write_text(json.dumps(body))
    target = load_target("ssh", {"hosts": ["far"]})
    with pytest.raises(DataError):
        target.forward(folder)
    target.refresh(folder)  # nothing more can come
    assert expected_of(folder) == {}
    assert traces_of(folder).nodes == ()
