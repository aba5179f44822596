"""Names that were used before: what ended under a member's name is not the member, and who lives there keeps it."""

from __future__ import annotations

import pytest

from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import Reason, State
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.deployments import Status, Timings
from corral.serve.fleet import keeper
from corral.serve.fleet import status as standing
from corral.serve.fleet.keeper import Keeper
from corral.serve.fleet.record import Fleet, FleetFolder, FleetMember, create_fleet, read_fleet


@pytest.fixture
def herd(clean_home: object, monkeypatch: pytest.MonkeyPatch) -> FleetFolder:
    monkeypatch.setattr(keeper, "ensure_gateway", lambda *_: None)
    monkeypatch.setattr(keeper, "start_member", lambda *_: None)
    return create_fleet(Fleet("herd", "m", 1, 1, 1, 0.0))


def deployed(monkeypatch: pytest.MonkeyPatch, state: State, created_s: float) -> None:
    """There is a deployment called herd-1."""
    reason = Reason.REQUESTED if state is State.STOPPED else None
    found = Status("herd-1", state, reason, "", "", "", None, None, "m", "", "local", created_s, created_s, None,
                   Timings())  # fmt: skip
    monkeypatch.setattr(deployments, "status", lambda _: found)
    folder = DeploymentFolder.of("herd-1")
    folder.path.mkdir(parents=True)
    folder.record.write_text("{}")


@pytest.mark.parametrize(
    ("state", "created_s", "found"),
    [
        (State.STOPPED, 90.0, None),
        (State.FAILED, 90.0, None),
        (State.STOPPED, 110.0, State.STOPPED),
        (State.READY, 90.0, State.READY),
    ],
)
def test_what_ended_before_a_member_came_is_not_the_member(
    state: State, created_s: float, found: State | None, herd: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed(monkeypatch, state, created_s)
    member = FleetMember("herd-1", added_s=100.0)
    seen = standing.member_of(member, standing.read_statuses([member])["herd-1"])
    assert seen.state is found
    assert (seen.text == "not started yet") == (found is None)


def test_a_member_under_a_used_name_is_told_as_wanted(herd: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed(monkeypatch, State.STOPPED, 90.0)
    one = Keeper(herd, lambda _: None)
    for _ in range(2):
        one.check(read_fleet(herd))
    one.finish()
    told = [(event.kind, event.get("text")) for event in read_events(herd.events)]
    assert [kind for kind, _ in told] == ["add", "start"]
    assert told[1] == ("start", "herd-1: it is wanted")


def test_a_name_that_somebody_else_has_is_passed_over(herd: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed(monkeypatch, State.READY, 90.0)
    one = Keeper(herd, lambda _: None)
    for _ in range(2):
        one.check(read_fleet(herd))
    one.finish()
    assert [member.name for member in read_fleet(herd).members] == ["herd-2"]
    assert [event.kind for event in read_events(herd.events)] == ["add", "refused", "add"]
