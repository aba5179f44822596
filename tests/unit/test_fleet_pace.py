"""From the loads that gateways write to decisions: what counts as a member's capacity, and what is kept of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from corral.base.files import write_atomic
from corral.base.processes import own_identity
from corral.base.record import dump_json
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import deployments
from corral.deploy.targets.base import Lease
from corral.serve.fleet import pace
from corral.serve.fleet.pace import FULL_S, Pacer, backlog_of, summed
from corral.serve.fleet.record import (
    Fleet,
    FleetFolder,
    GatewayAddress,
    GatewayLoad,
    Judgement,
    MemberLoad,
    create_fleet,
)
from corral.serve.fleet.steps import MemberFacts

FLEET = Fleet("f", "m", 1, 6, 1, 0.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetFolder:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path))
    return create_fleet(FLEET)


def say(folder: FleetFolder, id: str = "a", **load: Any) -> None:
    write_atomic(folder.gateway(id), dump_json(GatewayAddress("127.0.0.1", 1, own_identity())))
    write_atomic(folder.gateway_load(id), dump_json(GatewayLoad(time.time(), **load)))


def full(finished: int, judged: Judgement = Judgement.OK) -> dict[str, Any]:
    """A gateway with more to do than its member can: four requests of 1,000 tokens arrive every second."""
    return {
        "waiting": 50, "arrivals": (20,) * 12, "arrived_tokens": (20_000,) * 12, "running": 4, "finished": finished,
        "members": {"f-1": MemberLoad(4, 4000, 17.0, judged=judged)},
    }  # fmt: skip


def test_a_capacity_is_believed_once_requests_have_waited(folder: FleetFolder) -> None:
    pacer = Pacer(folder)
    pacer.leads = {"f-1": (0.0, 60.0)}
    say(folder, **full(100))
    assert pacer.decide(FLEET, {}, 0.0) is None  # they may only just have begun
    say(folder, **full(104))
    assert pacer.decide(FLEET, {}, FULL_S - 1) is None
    say(folder, **full(109))
    decision = pacer.decide(FLEET, {}, FULL_S)
    assert decision is not None
    assert decision.wanted == 5  # 4,000 tokens/s and 52,000 to be done, at 900 each, for nine minutes
    assert "another takes 60 s to start" in decision.why
    later = Pacer(folder)  # a keeper that was started again knows it
    assert later.capacity == pytest.approx(900.0)
    assert later.lead_s == 60.0


def test_the_time_to_become_ready_follows_the_last_launches(
    folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a member comes under a name used before."""
    pacer, took = Pacer(folder), [0.0]

    def status(_: object) -> deployments.Status:
        return deployments.Status("f-1", State.READY, None, "", "", "", None, None, "m", "", "local", 0.0, 0.0, None,
                                  deployments.Timings(ready_s=took[0]))  # fmt: skip

    monkeypatch.setattr(deployments, "status", status)
    monkeypatch.setattr(pace, "_queue_s", lambda _: 0.0)
    for launch in range(40):
        took[0] = 10.0 if launch < 20 else 100.0
        for _ in range(2):
            pacer._measure({"f-1": MemberFacts("f-1", State.READY, created_s=float(launch))})
    assert pacer.lead_s == 100.0
    assert len(pacer.leads) == pace.LAST_LAUNCHES


def test_members_that_started_at_once_do_not_hide_how_long_the_queue_is_now(folder: FleetFolder) -> None:
    pacer = Pacer(folder)
    pacer.leads = {f"f-{number}": (0.0, 60.0) for number in range(1, 6)}
    assert pacer.parts() == (0.0, 60.0)
    pacer.leads |= {"f-6": (300.0, 60.0), "f-7": (None, 80.0)}  # the last was put back into the queue meanwhile
    assert pacer.parts() == (300.0, 60.0)
    pacer.leads |= {f"f-{number}": (5.0, 60.0) for number in range(8, 8 + pace.LAST_QUEUES)}
    assert pacer.parts() == (5.0, 60.0)


def test_a_wait_that_is_not_known_is_not_none() -> None:
    assert Lease(100.0, 130.0).queue_s == 30.0
    assert Lease(100.0).queue_s is None  # it still waits
    assert Lease(100.0, 5000.0, requeued=True).queue_s is None  # most of that it ran


def test_a_gateway_that_began_anew_finished_nothing_before(folder: FleetFolder) -> None:
    pacer = Pacer(folder)
    say(folder, **full(100))
    pacer.decide(FLEET, {}, 0.0)
    say(folder, **full(3))
    assert pacer.decide(FLEET, {}, FULL_S) is None
    assert pacer.capacity == 0.0


def test_a_member_that_hangs_says_nothing_about_the_others(folder: FleetFolder) -> None:
    pacer = Pacer(folder)
    say(folder, **full(100, Judgement.HUNG))
    assert pacer.decide(FLEET, {}, 0.0) is None
    say(folder, **full(109, Judgement.HUNG))
    assert pacer.decide(FLEET, {}, FULL_S) is None
    assert pacer.capacity == 0.0


def test_a_fleet_of_one_size_and_a_fleet_without_gateways_stay_as_they_are(folder: FleetFolder) -> None:
    pacer = Pacer(folder)
    assert pacer.decide(FLEET, {}, 0.0) is None
    say(folder, **full(100))
    fixed = Fleet("f", "m", 2, 2, 2, 0.0)
    assert pacer.decide(fixed, {}, 0.0) is None
    assert pacer.decide(fixed, {}, 100.0) is None


def test_loads_of_several_gateways_are_one() -> None:
    one = GatewayLoad(1.0, 2, 3, 100, (1, 2), (10, 20), 0.5, {"f-1": MemberLoad(2, 100, 50.0)})
    other = GatewayLoad(2.0, 1, 0, 10, (5,), (7,), 0.1, {"f-1": MemberLoad(1, 10, 5.0, 9.0, Judgement.SLOW)})
    both = summed({"a": one, "b": other})
    assert (both.time_s, both.running, both.waiting, both.outstanding_tokens) == (2.0, 3, 3, 110)
    assert both.arrivals == (1, 7)
    assert both.arrived_tokens == (10, 27)
    assert both.members == {"f-1": MemberLoad(3, 110, 55.0, 9.0, Judgement.SLOW)}
    assert backlog_of(both) == pytest.approx((3 / 2 + 3) * 37 / 8)
