"""Members that run and do not serve: they are replaced, one at a time, with pauses, and on good evidence only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.base.errors import LaunchError
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.deployments import Status, Timings
from corral.serve.fleet import keeper
from corral.serve.fleet.keeper import Keeper
from corral.serve.fleet.record import (
    Fleet,
    FleetFolder,
    FleetMember,
    FleetNode,
    GatewayLoad,
    Judgement,
    MemberLoad,
    change_fleet,
    create_fleet,
    read_fleet,
)
from corral.serve.fleet.status import fleet_status, judgement_of
from corral.serve.fleet.steps import PATIENCE_S, Act, MemberFacts, next_steps

NOW = 1000.0
OK, SLOW, HUNG, GONE = Judgement.OK, Judgement.SLOW, Judgement.HUNG, Judgement.GONE


def member(number: int, judged: Judgement = OK, for_s: float = 1e6, state: State | None = State.READY) -> MemberFacts:
    return MemberFacts(f"f-{number}", state, running=0, judged=judged, judged_for_s=for_s)


def due(wanted: int, *facts: MemberFacts, rests: bool = False, leaving: str = "", gpus: int = 0) -> list[str]:
    members = tuple(FleetMember(one.name, one.name == leaving, NOW) for one in facts)
    one = Fleet("f", "m", 1, 8, wanted, 0.0, members, nodes=(FleetNode("n", gpus),))
    return [f"{step.act} {step.member}" for step in next_steps(one, {f.name: f for f in facts}, NOW, 1, (), rests)]


@pytest.mark.parametrize("judged", [HUNG, GONE, SLOW])
def test_a_member_that_does_not_serve_is_replaced_after_a_while(judged: Judgement) -> None:
    assert due(2, member(1, judged, PATIENCE_S[judged] - 1), member(2)) == []
    assert due(2, member(1, judged, PATIENCE_S[judged]), member(2)) == ["replace f-1"]
    assert due(1, member(1, judged)) == ["replace f-1"]


def test_one_at_a_time_and_only_while_nothing_else_is_due() -> None:
    assert due(3, member(1, HUNG, 40), member(2, HUNG, 50), member(3, SLOW, 301)) == ["replace f-2"]
    assert due(2, member(1, HUNG), member(2, HUNG), rests=True) == []
    assert due(2, member(1, HUNG), member(2, state=State.LOADING)) == []
    assert due(2, member(1, HUNG), member(2, HUNG), leaving="f-2") == ["add f-3"]
    assert due(1, member(1, HUNG), member(2)) == ["leave f-1"]  # one too many: it goes first


def test_who_shares_gpus_gets_a_successor_once_they_are_free() -> None:
    assert due(2, member(1, HUNG), member(2), leaving="f-1", gpus=2) == []
    assert due(2, member(1, HUNG), member(2), leaving="f-1") == ["add f-3"]
    assert due(2, member(2), gpus=2) == ["add f-1"]


@given(facts=st.lists(st.tuples(st.sampled_from(Judgement), st.floats(0, 1e4)), max_size=8), wanted=st.integers(0, 8))
def test_never_two_at_once(facts: list[tuple[Judgement, float]], wanted: int) -> None:
    steps = due(wanted, *(member(number, *one) for number, one in enumerate(facts, 1)))
    assert sum(step.startswith(Act.REPLACE) for step in steps) <= 1


def test_a_gateway_that_sees_nothing_well_says_little() -> None:
    def load(**judged: Judgement) -> GatewayLoad:
        return GatewayLoad(NOW, members={name: MemberLoad(judged=one) for name, one in judged.items()})

    assert judgement_of({"a": load(x=HUNG, y=OK), "b": load(x=OK, y=OK)}, "x") is HUNG
    assert judgement_of({"a": load(x=GONE, y=GONE), "b": load(x=OK, y=OK)}, "x") is OK
    assert judgement_of({"a": load(x=GONE, y=GONE)}, "x") is OK  # its own network may be to blame
    assert judgement_of({"a": load(x=GONE, y=OK)}, "x") is GONE
    assert judgement_of({"a": load(x=HUNG)}, "x") is HUNG
    assert judgement_of({"a": load(x=HUNG)}, "y") is OK
    assert judgement_of({}, "x") is OK


@pytest.fixture
def herd(clean_home: object, monkeypatch: pytest.MonkeyPatch) -> FleetFolder:
    monkeypatch.setattr(keeper, "ensure_gateway", lambda *_: None)
    monkeypatch.setattr(keeper, "start_member", lambda *_: None)

    def found(folder: DeploymentFolder) -> Status:
        return Status(folder.name, State.READY, None, "", "", "", None, None, "m", "", "local", NOW, NOW, None,
                      Timings())  # fmt: skip

    monkeypatch.setattr(deployments, "status", found)
    members = tuple(FleetMember(f"herd-{n}") for n in (1, 2, 3))
    for one in members:
        folder = DeploymentFolder.of(one.name)
        folder.path.mkdir(parents=True)
        folder.record.write_text("{}")
    return create_fleet(Fleet("herd", "m", 3, 3, 3, NOW, members))


def test_a_keeper_replaces_hung_members_with_pauses(herd: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1e6]
    monkeypatch.setattr("corral.serve.fleet.keeper.time.monotonic", lambda: clock[0])
    loads = {"g": GatewayLoad(NOW, members={f"herd-{n}": MemberLoad(judged=HUNG) for n in range(1, 9)})}
    monkeypatch.setattr(keeper, "read_loads", lambda _: loads)
    one = Keeper(herd, lambda _: None)

    def replaced(seconds: float) -> list[str]:
        clock[0] += seconds
        before = len(read_events(herd.events))
        one.check(read_fleet(herd))
        return [str(event.get("member")) for event in read_events(herd.events)[before:] if event.kind == "replace"]

    assert replaced(0) == []
    assert replaced(PATIENCE_S[HUNG] - 1) == []
    assert replaced(1) == ["herd-1"]
    members = read_fleet(herd).members
    change_fleet(herd, lambda fleet: replace(fleet, members=(*members[1:], FleetMember("herd-1"))))
    assert replaced(1) == []  # the next is hung as well, and waits
    assert replaced(60) == ["herd-2"]


def test_a_hung_member_is_not_counted_as_ready(herd: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    load = GatewayLoad(NOW, members={"herd-1": MemberLoad(judged=HUNG), "herd-2": MemberLoad(judged=SLOW)})
    monkeypatch.setattr("corral.serve.fleet.status.read_loads", lambda _: {"g": load})
    status = fleet_status(herd)
    assert status.ready == 2
    assert "2 of 3 ready, 1 hung" in status.text


def test_a_start_that_fails_counts_once(herd: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(folder: DeploymentFolder) -> Status:
        return replace(ready(folder), state=State.FAILED)

    def start(*_: object) -> None:
        monkeypatch.setattr(deployments, "status", failed)
        raise LaunchError("no GPU is free.", "Wait.")

    ready = deployments.status
    monkeypatch.setattr(keeper, "start_member", start)
    monkeypatch.setattr(keeper, "next_steps", lambda *_: [])
    one = Keeper(herd, lambda _: None)
    one._start("herd-1")
    one.check(read_fleet(herd))
    assert one.memories["herd-1"].failures == 1
