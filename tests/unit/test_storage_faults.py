"""What cannot be read for a while is unknown: nothing is stopped, forgotten or started because of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from dataclasses import replace

import pytest

from corral.base.files import write_atomic
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import State
from corral.serve.fleet.record import Fleet, FleetFolder, FleetMember, create_fleet, read_fleet
from corral.serve.fleet.status import MemberStatus, member_of, read_statuses
from corral.serve.fleet.steps import MemberFacts, next_steps
from tests.storage_faults import unreadable
from tests.unit.conftest import Corral


def member_status(member: FleetMember) -> MemberStatus:
    return member_of(member, read_statuses([member]).get(member.name))


def test_no_unreadable_file_of_a_member_makes_a_step(answering: Corral) -> None:
    up = answering("up", str(answering.model), "--name", "herd-1", "--served-name", "m", "--context", "128", "--json")
    assert up.code == 0, up.err
    folder = DeploymentFolder.of("herd-1")
    member = FleetMember("herd-1", added_s=1.0)
    fleet = Fleet("herd", "m", 1, 1, 1, 1.0, (member,))
    leaving = replace(fleet, members=(replace(member, leaving=True, leaving_s=2.0),))
    assert member_status(member).state is State.READY
    paths = [folder.path.parent, folder.path, folder.rank(0).path]
    for at, _, names in os.walk(folder.path):
        paths += [folder.path / at / name for name in names]
    seen = set()
    for path in paths:
        for number in (errno.ESTALE, errno.EIO):
            with unreadable(path, number=number):
                found = member_status(member)
                assert found.state in (State.READY, State.UNKNOWN), (path, found)
                seen.add(found.state)
                facts = {"herd-1": MemberFacts("herd-1", found.state, running=None)}
                assert next_steps(fleet, facts, time.time(), 60.0) == [], path
                assert next_steps(replace(leaving, wanted=0), facts, 10.0, 60.0) == [], path
    assert State.UNKNOWN in seen
    assert answering("down", "herd-1").code == 0


def test_a_leaving_member_of_unknown_state_is_neither_stopped_nor_forgotten() -> None:
    member = FleetMember("f-1", leaving=True, leaving_s=1.0)
    fleet = Fleet("f", "m", 1, 1, 0, 1.0, (member,))
    for running in (None, 0, 3):
        facts = {"f-1": MemberFacts("f-1", State.UNKNOWN, running=running)}
        assert next_steps(fleet, facts, 1e6, 60.0) == []


@pytest.fixture
def two_fleets(corral: Corral) -> tuple[Corral, FleetFolder]:
    """One whose record a later version wrote, and one that can be read."""
    create_fleet(Fleet("seen", "m", 1, 1, 1, 1.0))
    refused = create_fleet(Fleet("refused", "m", 1, 1, 1, 1.0))
    body = json.loads(refused.record.read_text())
    write_atomic(refused.record, json.dumps({**body, "file_format": 2, "written_by": "9.8.7"}))
    return corral, refused


def test_a_later_format_is_named_and_hides_nothing(two_fleets: tuple[Corral, FleetFolder]) -> None:
    corral, refused = two_fleets
    listed = corral("ps")
    assert listed.code == 0
    assert "seen" in listed.out
    assert "unknown" in next(line for line in listed.out.splitlines() if line.startswith("refused"))
    assert str(refused.record) in listed.err
    assert "Corral 9.8.7" in listed.err
    states = {one["name"]: one["state"] for one in corral("ps", "--json").json()}
    assert states["refused"] == "unknown"
    for words in (["status", "refused"], ["down", "refused"], ["scale", "refused", "2"]):
        done = corral(*words)
        assert done.code == 10, done
        assert str(refused.record) in done.err
        assert "Corral 9.8.7" in done.err
    before = refused.record.read_bytes()
    done = corral("down", "--all")
    assert done.code == 10
    assert read_fleet(FleetFolder.of("seen")).closed  # the others are ended
    assert refused.record.read_bytes() == before
    shutil.rmtree(refused.path)


def test_an_unknown_key_of_a_newer_version_changes_nothing(corral: Corral) -> None:
    folder = create_fleet(Fleet("herd", "m", 1, 1, 1, 1.0))
    body = json.loads(folder.record.read_text())
    write_atomic(folder.record, json.dumps({**body, "rout": "x"}))
    assert "herd" in corral("ps").out
    assert corral("status", "herd").code == 0
    assert corral("down", "herd").code == 0
    after = json.loads(folder.record.read_text())
    assert after["rout"] == "x"
    assert after["closed"]


def test_an_unreadable_fleet_hides_no_other(corral: Corral) -> None:
    create_fleet(Fleet("seen", "m", 1, 1, 1, 1.0))
    stale = create_fleet(Fleet("stale", "m", 1, 1, 1, 1.0))
    for path in (stale.record, stale.path):
        with unreadable(path):
            states = {one["name"]: one["state"] for one in corral("ps", "--json").json()}
        assert states["stale"] == "unknown"
        assert states["seen"] != "unknown"
    with unreadable(stale.path.parent):
        assert corral("ps").code != 0  # not "No deployments."
