"""`corral doctor --orphans`: what runs and belongs to no deployment; nothing that cannot be asked counts as none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import UnreachableError
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle import orphans
from corral.deploy.slurm import commands
from corral.node.processes import MARKER, launches
from corral.node.survey import usage
from corral.plan.hardware.survey import NodeFacts, RunningContainer, RunningLaunch
from tests.fake_slurm import FakeSlurm
from tests.unit.conftest import Corral
from tests.unit.test_slurm_intent import LAUNCH, begin
from tests.until import until

OTHER = "f" * 16
Answers = dict[str, Any]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answers:
    """What hosts answer, by their names; there is no SLURM."""
    given: Answers = {orphans.HERE: NodeFacts(orphans.HERE)}
    monkeypatch.setattr(orphans, "survey", lambda _, hosts, *__: {host: given[host] for host in hosts})
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return given


def found(*hosts: str) -> list[tuple[str, str]]:
    return [(one.what, one.text) for one in orphans.find_orphans(hosts, 5.0).findings]


def test_what_has_a_deployment_is_no_orphan(answers: Answers) -> None:
    begin()
    mine, strange = RunningLaunch(LAUNCH, (7,), "vllm"), RunningLaunch(OTHER, (8, 9), "vllm serve")
    answers["n1"] = NodeFacts("n1", launches=(mine,), containers=(RunningContainer("docker", "a" * 64, LAUNCH),))
    assert [what for what, _ in found("n1")] == ["orphans"]
    container = RunningContainer("podman", "b" * 64, OTHER)
    answers["n1"] = NodeFacts("n1", launches=(mine, strange), containers=(container,))
    first, second = orphans.find_orphans(["n1"], 5.0).findings
    assert "processes 8, 9 (vllm serve) are of launch ffff" in first.text
    assert "container bbbbbbbbbbbb of podman" in second.text
    assert second.remedy.endswith("ssh n1 podman rm -f bbbbbbbbbbbb")


def test_the_hosts_of_this_homes_deployments_are_asked(answers: Answers) -> None:
    begin(hosts=["n1", "n2"])
    answers["n1"] = NodeFacts("n1", errors={"containers": "docker: the daemon does not answer"})
    answers["n2"] = UnreachableError("n2 cannot be reached.", "Is it up?")
    assert found() == [
        ("orphans", "n1: its containers are not known: docker: the daemon does not answer"),
        ("orphans", "n2: n2 cannot be reached."),
    ]


def test_an_agent_of_another_home_is_not_this_ones_business(answers: Answers, tmp_path: Path) -> None:
    (tmp_path / "deployment.json").write_text(f'{{"launch_id": "{OTHER}"}}')
    answers[orphans.HERE] = NodeFacts(orphans.HERE, launches=(RunningLaunch(OTHER, (8,), "python3", str(tmp_path)),))
    assert [text.partition(" ")[0] for _, text in found()] == ["every"]


@pytest.fixture
def marked() -> Iterator[int]:
    """A process with a launch id that nobody has."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, env={**os.environ, MARKER: OTHER}) as process:
        yield process.pid
        process.kill()


def test_processes_are_found_by_their_environment(marked: int) -> None:
    until(lambda: marked in launches().get(OTHER, set()))  # it has become another program
    (row,) = [row for row in usage.launches({"launches": True})["launches"] if row["id"] == OTHER]
    assert marked in row["pids"]
    assert usage.launches({}) == {}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    commands._cache.clear()
    commands._silent.clear()
    made = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    return made


def test_doctor_lists_jobs_without_a_deployment(slurm: FakeSlurm, corral: Corral, marked: int) -> None:
    mine, lost = begin("mine"), begin("lost", OTHER)
    for folder, launch_id in ((mine, LAUNCH), (lost, OTHER)):
        commands.submit(folder.script, launch_id=launch_id)
    until(lambda: marked in launches().get(OTHER, set()))
    assert "scancel" not in corral("doctor", "--orphans").out
    DeploymentFolder.of("lost").delete()
    done = corral("doctor", "--orphans")
    assert "job 2 (pending) is of launch ffffffffffffffff" in " ".join(done.out.split())
    assert "scancel 2" in done.out
    assert str(marked) in done.out
    assert "job 1" not in done.out
    slurm.silent(True)
    commands.forget_answers()
    assert "SLURM's jobs are not known" in " ".join(corral("doctor", "--orphans").out.split())
