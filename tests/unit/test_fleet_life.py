"""A fleet from `up` to `down` with stand-in engines: members, the keeper, changes of size, the verbs that know it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from corral.base.files import write_atomic
from corral.base.lock import holder_of
from corral.base.processes import own_identity
from corral.base.record import dump_json
from corral.deploy.deployment.events import Event, read_events
from corral.deploy.deployment.folder import DeploymentFolder
from corral.serve.fleet.record import (
    FleetFolder,
    GatewayAddress,
    GatewayLoad,
    MemberLoad,
    all_fleets,
    open_fleet,
    read_fleet,
)
from corral.serve.fleet.status import fleet_status
from tests.unit.conftest import Corral
from tests.until import until


def states() -> dict[str, str]:
    """The members and their states, leaving ones marked."""
    found = fleet_status(open_fleet("herd"))
    return {one.name: ("leaving " if one.leaving else "") + str(one.state) for one in found.members}


def ready(count: int) -> Callable[[], bool]:
    return lambda: list(states().values()) == ["ready"] * count


def events(kind: str) -> list[Event]:
    return [event for event in read_events(open_fleet("herd").events) if event.kind == kind]


@pytest.fixture
def herd(answering: Corral) -> Corral:
    done = answering("up", str(answering.model), "--name", "herd", "--replicas", "2", "--no-wait", "--context", "128")
    assert done.code == 0, done.err
    until(ready(2), "two members ready")
    return answering


def test_a_fleet_lives_grows_shrinks_and_ends(herd: Corral) -> None:
    folder = open_fleet("herd")
    keys = {folder.key.read_text(), *(DeploymentFolder.of(f"herd-{n}").key.read_text() for n in (1, 2))}
    assert len(keys) == 3  # one for clients; each member keeps its own
    assert "herd" in herd("ps").out
    assert "  herd-2" in herd("ps").out

    assert herd("scale", "herd", "3").out.strip() == "herd: 2 → 3 members"
    until(ready(3), "three members ready")
    gateway_says(folder, {"herd-1": 1, "herd-2": 1, "herd-3": 0})
    assert herd("scale", "herd", "1").code == 0
    # the one without requests goes; of the two others, the newer one waits for its last request
    until(lambda: states() == {"herd-1": "ready", "herd-2": "leaving ready"}, "one stays, one leaves")
    gateway_says(folder, {"herd-1": 1, "herd-2": 0})
    until(ready(1), "one member left")
    assert DeploymentFolder.of("herd-2").record.is_file()
    assert herd("status", "herd-2", "--json").json()["reason"] == "requested"
    told = [event.get("text") for kind in ("add", "leave", "stop") for event in events(kind)]
    assert len(told) >= 5
    assert all(text.startswith("herd-") and ": " in text for text in told)  # each with its reason
    assert "wanted" in herd("events", "herd").out

    assert herd("down", "herd").code == 0
    assert holder_of(folder.keeper) is None
    assert read_fleet(folder).closed
    assert herd("status", "herd-1", "--json").json()["state"] == "stopped"
    assert "herd" not in herd("ps").out
    again = herd("up", str(herd.model), "--name", "herd", "--no-wait", "--context", "128")  # the name is free again
    assert again.code == 0, again.err
    assert herd("status", "herd", "--json").json()["name"] == "herd"
    assert "endpoint" in herd("status", "herd", "--json").json()


def gateway_says(folder: FleetFolder, running: dict[str, int]) -> None:
    """What a gateway of this process would write: how many requests it has on each member."""
    stop = _SAYING.pop(folder.name, None)
    if stop:
        stop.set()
    write_atomic(folder.gateway("test"), dump_json(GatewayAddress("127.0.0.1", 1, own_identity())))
    over = _SAYING[folder.name] = threading.Event()

    def say() -> None:
        while not over.wait(0.5) and folder.gateways.is_dir():
            loads = {name: MemberLoad(running=count) for name, count in running.items()}
            write_atomic(folder.gateway_load("test"), dump_json(GatewayLoad(time.time(), members=loads)))

    threading.Thread(target=say, daemon=True).start()


_SAYING: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def silence() -> Any:
    yield
    for over in _SAYING.values():
        over.set()
    _SAYING.clear()


def test_a_member_that_dies_is_started_again_with_its_reason(herd: Corral) -> None:
    agent = json.loads(DeploymentFolder.of("herd-2").rank(0).engine.read_text())
    launch = json.loads(DeploymentFolder.of("herd-2").record.read_text())["launch_id"]
    os.kill(agent["pid"], signal.SIGKILL)

    def again() -> bool:
        with contextlib.suppress(FileNotFoundError):  # while one takes the other's place
            record = json.loads(DeploymentFolder.of("herd-2").record.read_text())
            return bool(record["launch_id"] != launch and ready(2)())
        return False

    until(again, "a new herd-2")
    why = [event.get("text") for event in events("start") if event.get("member") == "herd-2"]
    assert any("it has ended: " in text for text in why)


def test_a_keeper_that_was_killed_is_taken_over(herd: Corral) -> None:
    folder = open_fleet("herd")
    holder = holder_of(folder.keeper)
    assert holder is not None
    os.kill(holder.pid, signal.SIGKILL)
    until(lambda: holder_of(folder.keeper) is None, "no keeper")
    assert set(states().values()) == {"ready"}  # the members do not need it
    assert herd("scale", "herd", "3").code == 0
    until(ready(3), "three members ready")
    done = herd("fleet", "keep", "herd")
    assert done.code == 4
    assert "already has a keeper" in done.err


def test_names_are_shared_between_fleets_and_deployments(answering: Corral) -> None:
    herd = answering
    up = ("up", str(herd.model), "--name", "herd", "--replicas", "1", "--no-wait", "--context", "128")
    assert herd(*up).code == 0
    done = herd("up", str(herd.model), "--name", "herd", "--no-wait")
    assert done.code == 4
    assert "a fleet is called 'herd'" in done.err
    done = herd("up", str(herd.model), "--name", "herd", "--replicas", "2")
    assert done.code == 4
    assert herd("up", str(herd.model), "--name", "single", "--no-wait", "--context", "128").code == 0
    done = herd("up", str(herd.model), "--name", "single", "--replicas", "2", "--context", "128")
    assert done.code == 4
    assert "there is already a deployment called 'single'" in done.err


def test_a_first_member_that_cannot_start_ends_the_fleet(corral: Corral) -> None:
    done = corral(
        "up", str(corral.model), "--name", "herd", "--replicas", "2", "--context", "128", STUB_OPTIONS="exit=3"
    )
    assert done.code == 8
    assert "herd-" in done.err
    assert "something the engine did not like" in done.err
    assert read_fleet(open_fleet("herd")).closed
    assert corral("ps").out.count("ready") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "0"], "a fleet cannot have"),
        (["--replicas", "4..2"], "a fleet cannot have"),
        (["--replicas", "many"], "not a number of replicas"),
        (["--keep"], "--replicas N"),
        (["--replicas", "2", "--keep"], "time limit"),
        (["--keeper", "job"], "--replicas N"),
        (["--replicas", "2", "--keeper", "job"], "for SLURM"),
        (["--replicas", "2", "--attach", "x"], "single deployments"),
    ],
)
def test_what_cannot_be_meant_is_refused(corral: Corral, words: list[str], said: str) -> None:
    done = corral("up", str(corral.model), "--context", "128", *words)
    assert done.code == 2
    assert said in done.err
    assert all_fleets() == []


def test_scale_needs_a_fleet(corral: Corral) -> None:
    done = corral("scale", "herd", "3")
    assert done.code == 3
    assert "no fleet is called 'herd'" in done.err
