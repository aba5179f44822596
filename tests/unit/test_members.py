"""Who belongs to a deployment, as `corral status` shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import deployments as found
from corral.deploy.lifecycle.deployments import HeldJob, RankMember
from corral.lab.report import status as shown


def test_nodes_of_a_job_have_their_names_once_they_met(tmp_path: Path) -> None:
    folder = DeploymentFolder(tmp_path)
    assert found.members(folder) == ()
    folder.launch.write_text(json.dumps({"ranks": [{"node": "rank0"}, {"node": "rank1"}]}))
    assert [one.node for one in found.members(folder)] == ["rank0", "rank1"]
    (tmp_path / "rendezvous.json").write_text(json.dumps({"names": ["holygpu8a15303", "holygpu8a15304"]}))
    folder.rank(0).path.mkdir()
    folder.rank(0).agent.write_text("{}")
    head, worker = found.members(folder)
    assert (head.node, head.joined, worker.node, worker.joined) == ("holygpu8a15303", True, "holygpu8a15304", False)


def test_who_has_joined_of_those_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = shown._node_rows([RankMember(0, "holygpu8a15303", 4, True), RankMember(1, "holygpu8a15304", 4, False)])
    assert rows == [
        ("nodes", "1 of 2 joined, 4 of 8 GPUs"),
        ("", "rank 0 holygpu8a15303 (head), 4 GPUs"),
        ("", "rank 1 holygpu8a15304, 4 GPUs, not there yet"),
    ]
    monkeypatch.setattr("time.time", lambda: 1000.0)
    assert shown._job_row(HeldJob("17", 1000.0 + 7200), State.READY)[1].startswith("17, 2 h")
    assert shown._job_row(HeldJob("17", 8200.0), State.STOPPED) == ("job", "17")
    assert shown._job_row(HeldJob("17"), State.QUEUED) == ("job", "17")
