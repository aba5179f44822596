"""Another machine takes the place of a keeper and its gateway; what cannot be known is not taken for dead."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from corral import __version__
from corral.base.errors import ConflictError
from corral.base.files import write_atomic
from corral.base.lock import FileLock, Stillness, lock_holder
from corral.base.processes import Identity, own_identity
from corral.base.record import dump_json
from corral.console.statuses import fleet_row
from corral.deploy.deployment.state import State
from corral.serve.fleet import keeper, processes, status
from corral.serve.fleet.keeper import keep
from corral.serve.fleet.processes import ensure_gateway, runs_elsewhere
from corral.serve.fleet.record import (
    SILENT_S,
    Fleet,
    FleetFolder,
    FleetMember,
    GatewayAddress,
    GatewayLoad,
    change_fleet,
    create_fleet,
    is_over,
    read_fleet,
)
from corral.serve.fleet.status import fleet_status
from corral.serve.gateway.process import _end_with_fleets
from tests.unit.conftest import in_this_process

ELSEWHERE = Identity(77, "login1", "its boot", 5, "its processes")
GONE = replace(own_identity(), pid=2**22 + 1, start_ticks=1)


@pytest.fixture
def herd(clean_home: Path, monkeypatch: pytest.MonkeyPatch) -> FleetFolder:
    monkeypatch.setattr(processes, "_WRITTEN", {})
    monkeypatch.setattr(processes, "_STARTED_S", {})
    return create_fleet(Fleet("herd", "m", 1, 1, 1, time.time()))


def hold(path: Path, holder: Identity = ELSEWHERE) -> None:
    path.write_text(dump_json(holder))


@contextmanager
def beating(path: Path) -> Iterator[None]:
    """Another machine touches the file."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            os.utime(path, (time.time(), time.time()))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_value_is_still_by_the_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, still = [100.0], Stillness()
    monkeypatch.setattr("corral.base.lock.time.monotonic", lambda: clock[0])
    assert still.of("a") == 0
    clock[0] += 5
    assert still.of("a") == 5
    assert still.of("b") == 0


def test_a_clock_that_jumps_kills_nobody(tmp_path: Path) -> None:
    """Its last touch seems to be an hour old, and it goes on touching."""
    lock = tmp_path / "lock"
    hold(lock)
    calls = 0

    def held(_: Identity) -> None:
        nonlocal calls
        os.utime(lock, (calls, calls))  # an hour ago and more, and yet a sign
        calls += 1
        if calls == 5:
            raise ConflictError("it lives", "wait")

    with pytest.raises(ConflictError), FileLock(lock, held, 0.01, watched=True):
        pass
    assert lock_holder(lock) == ELSEWHERE


def test_who_is_silent_is_replaced(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    hold(lock)
    with FileLock(lock, None, 0.05, watched=True) as mine:
        assert mine.is_held()
        lock.unlink()  # by whoever cleans up: taken again
        assert mine.is_held()
        lock.unlink()
        hold(lock)
        assert not mine.is_held()
    assert lock_holder(lock) == ELSEWHERE  # it is not ours to remove


def test_a_keeper_by_hand_waits_for_a_sign_of_the_other(herd: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "INTERVAL_S", 0.05)
    said: list[str] = []
    hold(herd.keeper)
    with beating(herd.keeper), pytest.raises(ConflictError, match="process 77 on login1"):
        keep(herd, said.append)
    assert "taking its place if it is silent" in said[0]


def test_a_keeper_takes_the_place_of_a_silent_one(herd: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "INTERVAL_S", 0.05)
    monkeypatch.setattr(keeper, "SILENT_S", 0.2)
    checked: list[object] = []
    monkeypatch.setattr(keeper.Keeper, "check", lambda self, fleet: checked.append(lock_holder(herd.keeper)))
    hold(herd.keeper)
    assert keep(herd, lambda _: None, lambda: not checked) == keeper.STOPPED
    assert checked == [own_identity()]


def test_one_that_lost_its_place_does_nothing_more(herd: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "INTERVAL_S", 0.01)
    checks = 0

    def check(*_: object) -> bool:
        nonlocal checks
        checks += 1
        herd.keeper.unlink()
        hold(herd.keeper)
        return False

    monkeypatch.setattr(keeper.Keeper, "check", check)
    assert keep(herd, lambda _: None) == "another keeper has taken its place"
    assert checks == 1
    assert lock_holder(herd.keeper) == ELSEWHERE


def test_a_lock_that_cannot_be_read_stops_no_keeper(herd: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done meanwhile: another keeper may be at work."""
    monkeypatch.setattr(keeper, "INTERVAL_S", 0.01)
    events: list[str] = []
    truth = FileLock.is_held

    def is_held(self: FileLock) -> bool:
        events.append("asked")
        if len(events) < 3:
            raise OSError(116, "Stale file handle")
        return truth(self)

    monkeypatch.setattr(FileLock, "is_held", is_held)
    monkeypatch.setattr(keeper.Keeper, "check", lambda *_: events.append("checked"))
    said: list[str] = []
    keep(herd, said.append, lambda: "checked" not in events)
    assert events == ["asked", "asked", "asked", "checked"]
    assert "Stale file handle" in said[0]


def own_gateways(herd: FleetFolder, *own: Identity) -> None:
    change_fleet(herd, lambda one: replace(one, gateways=own))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    argvs: list[list[str]] = []

    def spawn(argv: list[str], _: Path) -> SimpleNamespace:
        argvs.append(argv)
        return SimpleNamespace(pid=os.getpid())

    monkeypatch.setattr(processes, "_spawn", spawn)
    return argvs


def test_a_gateway_is_started_once_and_stands_in_the_record(herd: FleetFolder, started: list[list[str]]) -> None:
    for _ in range(2):
        ensure_gateway(herd, lambda _: None)
    assert [argv[argv.index("corral") + 1 :] for argv in started] == [
        ["gateway", "--bind", "127.0.0.1", "--route", "prefix", "--while-open", "herd"]
    ]
    (own,) = read_fleet(herd).gateways
    assert (own.pid, own.is_here(), own.is_gone()) == (os.getpid(), True, False)


def test_a_gateway_of_another_machine_is_enough_while_it_writes(
    herd: FleetFolder, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("corral.base.lock.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("corral.serve.fleet.processes.time.monotonic", lambda: clock[0])
    own_gateways(herd, ELSEWHERE)
    for turn in range(5):
        write_atomic(herd.gateway_load("a"), dump_json(GatewayLoad(turn)))
        os.utime(herd.gateway_load("a"), (turn, turn))
        ensure_gateway(herd, lambda _: None)
        clock[0] += SILENT_S
    assert started == []
    real = Path.iterdir
    with monkeypatch.context() as patch:  # unknown is not silent
        patch.setattr(Path, "iterdir", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        for _ in range(3):
            ensure_gateway(herd, lambda _: None)
            clock[0] += SILENT_S
    assert Path.iterdir is real
    assert started == []
    ensure_gateway(herd, lambda _: None, stands_by=True)  # it has watched them before it takes its place
    clock[0] += SILENT_S + 1
    ensure_gateway(herd, lambda _: None, stands_by=True)
    assert started == []
    ensure_gateway(herd, lambda _: None)
    assert len(started) == 1
    assert {one.host for one in read_fleet(herd).gateways} == {"login1", socket.gethostname()}


def test_who_stands_by_keeps_the_address_of_its_own_machine(herd: FleetFolder, started: list[list[str]]) -> None:
    ensure_gateway(herd, lambda _: None, stands_by=True)
    assert started == []
    own_gateways(herd, ELSEWHERE, GONE)
    ensure_gateway(herd, lambda _: None, stands_by=True)
    assert len(started) == 1
    assert read_fleet(herd).gateways[0] == ELSEWHERE


def test_a_gateway_that_an_earlier_version_started_is_known(herd: FleetFolder, started: list[list[str]]) -> None:
    write_atomic(herd.own_gateway, dump_json(own_identity()))
    ensure_gateway(herd, lambda _: None)
    assert started == []


def test_a_gateway_of_an_earlier_version_is_replaced(
    herd: FleetFolder, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def runs(version: str) -> list[list[str]]:
        started.clear()
        monkeypatch.setattr(processes, "_STARTED_S", {})
        address = GatewayAddress("127.0.0.1", 18001, own_identity(), (), version)
        write_atomic(herd.gateway("a"), dump_json(address))
        ensure_gateway(herd, told.append)
        ensure_gateway(herd, told.append)
        return started

    change_fleet(herd, lambda one: replace(one, gateways=(own_identity(),)))
    assert runs("") == []  # it has no socket to ask at: it stays until it ends
    herd.gateway_socket("a").touch()
    for version in ("", "0.0.12", "0"):
        (words,) = runs(version)
        assert words[-4:] == ["gateway", "--take-over", "--while-open", "herd"]
    assert "Corral 0.0.12" in told[1]
    for version in (__version__, "99.0", "99.0.1rc1"):
        assert runs(version) == []
    change_fleet(herd, lambda one: replace(one, gateways=()))
    assert not [words for words in runs("0.0.1") if "--take-over" in words]  # somebody runs it by hand


def test_a_gateway_that_cannot_be_replaced_is_named_first(herd: FleetFolder) -> None:
    """Of a version that had no socket to hand over: it cannot read the records of members that this one starts."""
    hold(herd.keeper, own_identity())
    for version, warns in (("", True), (__version__, False)):
        write_atomic(herd.gateway("a"), dump_json(GatewayAddress("127.0.0.1", 18001, own_identity(), (), version)))
        told = in_this_process("ps").out.splitlines()[0]
        assert told.startswith(f"the gateway of herd (process {os.getpid()}) is of an earlier version") is warns
        assert (f"`kill {os.getpid()}` ends it" in in_this_process("status", "herd").out) is warns


def test_a_fleets_gateway_ends_with_it_from_anywhere(herd: FleetFolder) -> None:
    async def run() -> None:
        ending = asyncio.Event()
        task = asyncio.ensure_future(_end_with_fleets([herd], ending))
        await asyncio.sleep(0)
        assert not ending.is_set()
        change_fleet(herd, lambda one: replace(one, closed="ended by `corral down`"))
        await asyncio.wait_for(ending.wait(), 30)
        await task

    asyncio.run(run())


def test_a_keeper_in_a_job_makes_room_before_its_job_ends(herd: FleetFolder) -> None:
    change_fleet(herd, lambda one: replace(one, members=(FleetMember("herd-1"), FleetMember("herd-2", leaving=True))))
    assert not keeper.is_leaving(herd, "herd-1")
    assert keeper.is_leaving(herd, "herd-2")
    assert keeper.is_leaving(herd, "herd-3")  # forgotten
    herd.record.write_text("{")
    assert not keeper.is_leaving(herd, "herd-2")  # unknown is not leaving


def test_over_is_what_is_known_to_be(herd: FleetFolder) -> None:
    assert not is_over(herd)
    record = herd.record.read_text()
    herd.record.write_text("{")
    assert not is_over(herd)
    herd.record.unlink()
    assert not is_over(herd)  # its folder is there
    herd.record.write_text(record)
    change_fleet(herd, lambda one: replace(one, closed="x"))
    assert is_over(herd)
    herd.set_aside()
    assert is_over(herd)


def seen_from_here(herd: FleetFolder, host: str) -> status.FleetStatus:
    write_atomic(herd.gateway("a"), dump_json(GatewayAddress(host, 18001, ELSEWHERE)))
    write_atomic(herd.gateway_load("a"), dump_json(GatewayLoad(time.time())))
    return fleet_status(herd)


def test_status_says_where_to_go_from_elsewhere(herd: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "member_of", lambda *_: None)
    one = SimpleNamespace(state=State.READY, leaving=False, stuck=False, load=None, name="herd-1", status=object())
    monkeypatch.setattr(status, "member_of", lambda *_: one)
    change_fleet(herd, lambda fleet: replace(fleet, members=(FleetMember("herd-1"),)))
    found = seen_from_here(herd, "127.0.0.1")
    assert found.endpoint is None
    assert "Its gateway listens on login1 only" in found.text
    assert "ssh -N -L 18001:127.0.0.1:18001 login1" in found.text
    found = seen_from_here(herd, "0.0.0.0")
    assert found.endpoint is not None
    assert found.endpoint.base_url == "http://login1:18001/v1"


def test_what_runs_on_other_machines_is_named(herd: FleetFolder) -> None:
    assert runs_elsewhere(herd) == []
    hold(herd.keeper)
    own_gateways(herd, ELSEWHERE)
    seen_from_here(herd, "127.0.0.1")
    assert runs_elsewhere(herd) == ["the keeper on login1 (process 77)", "a gateway on login1 (process 77)"]


def test_a_dead_keeper_is_the_first_line(herd: FleetFolder) -> None:
    hold(herd.keeper, GONE)
    shown = in_this_process("ps")
    assert shown.out.startswith("no keeper runs for herd (the last one, process ")
    assert "`corral fleet keep herd` starts one" in shown.out.splitlines()[0]
    assert in_this_process("status", "herd").out.startswith("warning")
    assert str(fleet_row(herd)["warning"]).startswith("no keeper runs for herd")  # of the console
    hold(herd.keeper, own_identity())
    assert "no keeper" not in in_this_process("ps").out
    assert fleet_status(herd).kept is True
    assert fleet_row(herd)["warning"] is None
    herd.keeper.unlink()
    assert fleet_status(herd).kept is False
    herd.keeper.mkdir()  # reading it fails: whether there is one is unknown
    assert fleet_status(herd).kept is None
    assert "no keeper" not in in_this_process("ps").out
