"""What a keeper does when the wall clock is set by hours, or the machine was suspended: the same as without that."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import pytest

from corral.base.record import save_record
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import Reason, State
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.deployments import Status, Timings
from corral.serve.fleet import keeper
from corral.serve.fleet.keeper import LEASE_S, Keeper
from corral.serve.fleet.record import (
    Fleet,
    FleetFolder,
    FleetMember,
    GatewayAddress,
    GatewayLoad,
    MemberLoad,
    create_fleet,
    read_fleet,
    read_loads,
)
from corral.serve.fleet.steps import DRAIN_MOST_S, SEEN_S, Act, FleetStep

HOURS = [3600.0 * 5, -3600.0 * 5]
NAME = "herd-1"


@dataclass
class Clocks:
    """Both clocks of a machine; only the test moves them."""

    wall_s: float = 1.8e9
    monotonic_s: float = 1e6

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(time, "time", lambda: made.wall_s)
    monkeypatch.setattr(time, "monotonic", lambda: made.monotonic_s)
    return made


class Herd:
    """A fleet of one member, its keeper, and what the keeper decides."""

    def __init__(self, clocks: Clocks, patch: pytest.MonkeyPatch) -> None:
        self.clocks, self.state, self.running = clocks, State.READY, 1
        self.since_s = clocks.wall_s
        self.steps: list[tuple[str, str]] = []
        self.scaled_at_s: list[float] = []
        self.leases = 0
        patch.setattr(keeper, "ensure_gateway", lambda *_: None)
        patch.setattr(deployments, "status", self._status)
        patch.setattr(keeper, "read_loads", lambda _: {"g": self._load()})
        patch.setattr(Keeper, "_in_thread", lambda *_: None)
        folder = DeploymentFolder.of(NAME)
        folder.path.mkdir(parents=True)
        folder.record.write_text("{}")
        self.folder: FleetFolder = create_fleet(
            Fleet("herd", "m", 1, 1, 1, clocks.wall_s, (FleetMember(NAME),), keep=True)
        )
        self.keeper = Keeper(self.folder, lambda _: None)
        act = self.keeper._act

        def told(fleet: Fleet, step: FleetStep) -> None:
            self.steps.append((step.act.value, step.member))
            act(fleet, step)

        patch.setattr(self.keeper, "_act", told)

    def _status(self, folder: DeploymentFolder) -> Status:
        reason = Reason.ENGINE_EXITED if self.state is State.FAILED else None
        return Status(folder.name, self.state, reason, "", "", "", None, None, "m", "", "local", self.since_s,
                      self.since_s, None, Timings())  # fmt: skip

    def _load(self) -> GatewayLoad:
        return GatewayLoad(self.clocks.wall_s, members={NAME: MemberLoad(running=self.running)})

    def due(self) -> list[tuple[str, str]]:
        before = len(self.steps)
        self.keeper.check(read_fleet(self.folder))
        return self.steps[before:]


@pytest.fixture
def herd(clean_home: object, clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> Herd:
    return Herd(clocks, monkeypatch)


@pytest.mark.parametrize("step_s", HOURS)
def test_a_member_that_leaves_keeps_its_time_to_drain(herd: Herd, clocks: Clocks, step_s: float) -> None:
    fleet = read_fleet(herd.folder)
    herd.keeper._act(fleet, FleetStep(Act.LEAVE, NAME, "fewer are wanted"))
    herd.due()
    clocks.wall_s += step_s
    clocks.pass_s(SEEN_S)
    assert ("stop", NAME) not in herd.due()  # its requests run on
    clocks.pass_s(DRAIN_MOST_S - SEEN_S)
    assert ("stop", NAME) in herd.due()


@pytest.mark.parametrize("step_s", HOURS)
def test_a_keeper_that_starts_anew_lets_a_member_drain(herd: Herd, clocks: Clocks, step_s: float) -> None:
    herd.keeper._act(read_fleet(herd.folder), FleetStep(Act.LEAVE, NAME, "fewer are wanted"))
    clocks.pass_s(100.0)
    herd.keeper.memories.clear()
    assert ("stop", NAME) not in herd.due()
    clocks.wall_s += step_s
    clocks.pass_s(DRAIN_MOST_S - 101)
    assert ("stop", NAME) not in herd.due()
    clocks.pass_s(1)
    assert ("stop", NAME) in herd.due()


@pytest.mark.parametrize("step_s", HOURS)
def test_the_pause_after_a_failure_is_as_long_as_before(herd: Herd, clocks: Clocks, step_s: float) -> None:
    herd.state = State.FAILED
    assert herd.due() == [("start", NAME)]  # at once
    clocks.pass_s(10.0)
    herd.since_s = clocks.wall_s  # it failed again
    assert herd.due() == []
    pause_s = herd.keeper.memories[NAME].retry_s - clocks.monotonic_s
    assert pause_s > 0
    clocks.wall_s += step_s
    assert herd.due() == []
    clocks.pass_s(pause_s)
    assert herd.due() == [("start", NAME)]


@pytest.mark.parametrize("step_s", HOURS)
def test_the_end_of_a_job_is_asked_again_after_a_step(
    herd: Herd, clocks: Clocks, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(keeper, "load_json", lambda *_: asked.append(clocks.wall_s))
    monkeypatch.setattr(deployments, "target_of", lambda _: None)
    herd.due()
    clocks.pass_s(LEASE_S / 2)
    herd.due()
    assert len(asked) == 1
    clocks.wall_s += step_s
    herd.due()
    assert len(asked) == 2
    clocks.pass_s(LEASE_S + 1)
    herd.due()
    assert len(asked) == 3


@pytest.mark.parametrize("step_s", HOURS)
def test_sizes_are_decided_by_a_clock_that_nobody_sets(
    herd: Herd, clocks: Clocks, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(herd.keeper.pacer, "decide", lambda *given: seen.append(given[2]))
    herd.due()
    clocks.wall_s += step_s
    clocks.pass_s(1.0)
    herd.due()
    assert math.isclose(seen[1] - seen[0], 1.0)


@pytest.mark.parametrize("step_s", HOURS)
def test_a_load_counts_only_while_it_is_written(
    herd: Herd, clocks: Clocks, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """One that was written before the clock was set back is no news for hours otherwise."""
    gateway = GatewayAddress("127.0.0.1", 1)
    monkeypatch.setattr("corral.serve.fleet.record.held_gateways", lambda _: {"g": gateway})
    save_record(herd.folder.gateway_load("g"), herd._load())
    assert read_loads(herd.folder)
    clocks.wall_s += step_s
    assert not read_loads(herd.folder)
    save_record(herd.folder.gateway_load("g"), herd._load())
    assert read_loads(herd.folder)
