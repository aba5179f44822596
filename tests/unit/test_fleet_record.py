"""A fleet's files: its record, its key, its gateways and their loads."""

from __future__ import annotations

import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from corral.base.errors import ConflictError, DataError, NotFoundError
from corral.base.files import write_atomic
from corral.base.processes import Identity, own_identity
from corral.base.record import dump_json, from_json, to_json
from corral.console.play import servers
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.serve.fleet.record import (
    Fleet,
    FleetFolder,
    FleetMember,
    GatewayAddress,
    GatewayLoad,
    Judgement,
    MemberLoad,
    all_fleets,
    change_fleet,
    create_fleet,
    find_fleet,
    held_gateways,
    living_fleets,
    new_gateway_id,
    open_fleet,
    read_fleet,
    read_fleets,
    read_loads,
    refuse_fleet_name,
)
from corral.serve.fleet.status import fleet_status
from tests.unit.conftest import Corral


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def fleet(name: str = "small") -> Fleet:
    return Fleet(
        name, "the-model", 1, 4, 2, 1000.0, (FleetMember(f"{name}-1"), FleetMember(f"{name}-2", leaving=True))
    )


def test_a_member_that_could_not_be_started_says_why(corral: Corral) -> None:
    folder = create_fleet(fleet())
    append_event(folder.events, "failed", text="small-1: an older refusal", member="small-1")
    append_event(folder.events, "failed", text="small-1: sbatch refused the job", member="small-1")
    first, second = fleet_status(folder).members
    assert first.text == "not started yet: sbatch refused the job"
    assert second.text == "not started yet"
    told = corral("ps")
    assert told.err == "corral: small-1: not started yet: sbatch refused the job\n"
    assert "small-1" in told.out


def test_a_fleet_is_made_read_and_changed() -> None:
    folder = create_fleet(fleet())
    assert read_fleet(folder) == fleet()
    assert stat.S_IMODE(folder.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert len(folder.key.read_text().strip()) > 30
    change_fleet(folder, lambda one: replace(one, wanted=4))
    assert read_fleet(open_fleet("small")).wanted == 4
    assert read_fleet(folder).serving() == ("small-1",)
    assert [one.name for one in all_fleets()] == ["small"]


def test_changes_come_one_after_the_other() -> None:
    folder = create_fleet(replace(fleet(), wanted=0))

    def add() -> None:
        for _ in range(5):
            change_fleet(folder, lambda one: replace(one, wanted=one.wanted + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_fleet(folder).wanted == 20


def test_a_name_belongs_to_one_fleet_or_one_deployment() -> None:
    create_fleet(fleet())
    with pytest.raises(ConflictError):
        create_fleet(fleet())
    with pytest.raises(ConflictError):
        refuse_fleet_name("small")
    refuse_fleet_name("other")
    deployment = DeploymentFolder.of("taken")
    deployment.create()
    write_atomic(deployment.record, "{}")
    with pytest.raises(ConflictError, match="deployment"):
        create_fleet(fleet("taken"))


def test_an_ended_fleet_makes_room_and_is_kept_for_reading(home: Path) -> None:
    folder = create_fleet(fleet())
    key = folder.key.read_text()
    change_fleet(folder, lambda one: replace(one, closed="asked for"))
    again = create_fleet(fleet())
    assert again.key.read_text() != key
    assert (home / "fleets" / ".ended" / "small" / "key").read_text() == key
    assert [one.name for one in all_fleets()] == ["small"]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(NotFoundError) as none:
        open_fleet("small")
    assert "--replicas" in none.value.remedy
    create_fleet(fleet())
    with pytest.raises(NotFoundError) as caught:
        open_fleet("smal")
    assert "small" in caught.value.remedy
    assert find_fleet("smal") is None
    assert find_fleet("") is None
    assert find_fleet("small") == FleetFolder.of("small")


@pytest.mark.parametrize("name", ["a b", "..", "x/y", "ü'", ".hidden"])
def test_names_with_odd_characters_have_one_folder(name: str, home: Path) -> None:
    folder = create_fleet(fleet(name))
    assert folder.path.parent == home / "fleets"
    assert folder.name == name
    assert read_fleet(open_fleet(name)).name == name


def test_gateways_that_run_are_found_with_their_loads() -> None:
    folder = create_fleet(fleet())
    gone = replace(own_identity(), pid=2**22 + 1, start_ticks=1)
    elsewhere = Identity(1, "another-machine", "boot", 1)
    write_atomic(folder.gateway("a"), dump_json(GatewayAddress("127.0.0.1", 18001, own_identity(), ("m",))))
    write_atomic(folder.gateway("b"), dump_json(GatewayAddress("127.0.0.1", 18002, gone)))
    write_atomic(folder.gateway("c"), dump_json(GatewayAddress("127.0.0.1", 18003)))
    write_atomic(folder.gateway("d"), dump_json(GatewayAddress("10.0.0.9", 18004, elsewhere)))
    write_atomic(folder.gateway("e"), "{")
    assert list(held_gateways(folder)) == ["a"]
    load = GatewayLoad(time.time(), 3, 1, members={"small-1": MemberLoad(2, judged=Judgement.HUNG)})
    write_atomic(folder.gateway_load("a"), dump_json(load))
    assert from_json(GatewayLoad, to_json(load)) == load
    assert read_loads(folder) == {"a": load}
    write_atomic(folder.gateway_load("d"), dump_json(GatewayLoad(time.time(), 1)))  # it writes: it is believed
    assert set(held_gateways(folder)) == {"a", "d"}
    write_atomic(folder.gateway_load("a"), dump_json(replace(load, time_s=time.time() - 60)))
    assert set(read_loads(folder)) == {"d"}


def test_addresses_and_ids() -> None:
    assert GatewayAddress("::1", 80).url == "http://[::1]:80"
    assert GatewayAddress("127.0.0.1", 80).url == "http://127.0.0.1:80"
    assert new_gateway_id() != new_gateway_id()


def test_an_unreadable_fleet_is_not_left_out_of_a_choice(corral: Corral) -> None:
    create_fleet(fleet("known"))
    later = create_fleet(fleet("later"))
    write_atomic(later.record, '{"file_format": 99, "written_by": "9.9"}')
    known, unreadable = read_fleets()
    assert [one.name for one in known] == ["known"]
    assert "Corral 9.9" in unreadable["later"]
    with pytest.raises(DataError, match="'later'"):
        living_fleets()
    for verb in ("down", "status"):
        done = corral(verb)  # which is the only one is not known
        assert done.code == 10
        assert str(later.record) in done.err
    assert not read_fleet(open_fleet("known")).closed
    assert {one["name"]: one["state"] for one in corral("ps", "--json").json()}["later"] == "unknown"
    assert {one["name"]: one["state"] for one in servers()} == {"known": "no member is ready", "later": "unknown"}
    chat = corral("complete", "hello")
    assert chat.code == 3
    assert "later (a fleet: " in chat.err
    every = corral("down", "--all")  # the others are ended
    assert every.code == 10
    assert read_fleet(open_fleet("known")).closed
