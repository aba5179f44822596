"""`corral gateway` as a process: over a deployment and over a fleet's folder; its files, its end, its return."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import UnreachableError
from corral.base.files import make_private_dir, write_atomic
from corral.base.home import deployments_dir, gateway_dir
from corral.base.processes import Identity, own_identity
from corral.base.record import dump_json, load_json
from corral.client.client import Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import KeyRefusedError, RequestError
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import deployments
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from corral.serve.fleet.record import (
    Fleet,
    FleetFolder,
    FleetMember,
    GatewayAddress,
    create_fleet,
    held_gateways,
    read_fleet,
    read_loads,
    write_fleet,
)
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.keys import add_key, keys_file
from corral.serve.gateway.process import gateway_process
from corral.serve.gateway.watcher import GatewaySnapshot, Watcher, open_source
from tests.storage_faults import unreadable
from tests.unit.conftest import Corral
from tests.until import LIMIT_S, until


@contextlib.contextmanager
def gateway(corral: Corral, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = corral.start("gateway", *words, "--json")
    assert process.stderr
    try:
        first = process.stderr.readline()
        assert "Ctrl-C ends it" in first, first + process.stderr.read()
        yield first.split("/v1")[0], process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)


def ask(url: str, key_file: Path) -> str:
    body = {"prompt": "hello", "max_tokens": 4}
    return Client(Endpoint(url, "served", str(key_file))).request_sync("/v1/completions", body).text


def test_a_deployment_behind_a_gateway(answering: Corral) -> None:
    up = answering("up", str(answering.model), "--name", "a", "--served-name", "served", "--json")
    assert up.code == 0, up.err
    folder = DeploymentFolder.of("a")
    client = add_key("alice")
    alice = answering.home / "alice"
    alice.write_text(client)
    alice.chmod(0o600)
    with gateway(answering, "a") as (url, process):
        assert ask(url, folder.key)
        assert ask(url, alice)
        wrong = answering.home / "wrong"
        wrong.write_text("no-such-key")
        wrong.chmod(0o600)
        with pytest.raises(KeyRefusedError):
            ask(url, wrong)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
        assert json.loads(out)["answered"] == 2


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, clean_home: Path) -> Iterator[tuple[FleetFolder, dict[str, Any]]]:
    """A fleet of two fake servers, known to `deployments.status` without any process."""
    states: dict[str, Any] = {}
    folder = create_fleet(Fleet("f", "fake", 1, 4, 2, time.time(), (FleetMember("f-1"), FleetMember("f-2"))))
    with FakeServer(FakeOptions()) as a, FakeServer(FakeOptions()) as b:
        for name, server in (("f-1", a), ("f-2", b)):
            member = DeploymentFolder.of(name)
            make_private_dir(member.path)
            write_atomic(member.key, f"the-key-of-{name}\n")
            write_atomic(
                member.record,
                dump_json(deployments.Record(name, "x", "fake", "fake", "local", time.time(), own_identity())),
            )
            states[name] = Endpoint(server.url, "fake", str(member.key))

        def status(found: DeploymentFolder) -> deployments.Status:
            endpoint = states[found.name]
            state = State.READY if endpoint else State.FAILED
            return deployments.Status(
                found.name, state, None, "", "", "", None, None, "fake", "", "local", 0.0, 0.0, endpoint,
                deployments.Timings(),
            )  # fmt: skip

        monkeypatch.setattr(deployments, "status", status)
        monkeypatch.setattr("corral.serve.gateway.watcher.needs_tunnel", lambda _: False)
        yield folder, states


def test_what_a_gateway_sees_of_a_fleet(fleet: tuple[FleetFolder, dict[str, Any]]) -> None:
    folder, states = fleet
    watcher = Watcher([open_source("f")], lambda _: None)
    found = watcher.read()
    assert [(one.name, one.state, one.key, one.model, one.source) for one in found.readings] == [
        ("f-1", State.READY, "the-key-of-f-1", "fake", "f"),
        ("f-2", State.READY, "the-key-of-f-2", "fake", "f"),
    ]
    assert [one.name for one in found.grants] == ["f"]
    assert "the-key-of" not in repr(found)
    states["f-2"] = None
    write_fleet(
        folder, Fleet("f", "fake", 1, 4, 2, time.time(), (FleetMember("f-1", leaving=True), FleetMember("f-2")))
    )
    add_key("alice", tpm=7)
    found = watcher.read()
    assert [(one.state, one.leaving) for one in found.readings] == [(State.READY, True), (State.FAILED, False)]
    assert [(one.name, one.tpm) for one in found.grants] == [("f", None), ("alice", 7)]


class Tunnels:
    """Tunnels that are opened and held without ssh."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[str] = []
        self.held: set[str] = set()
        self.refused: set[str] = set()
        for name in ("needs_tunnel", "tunnel_holder", "ensure_tunnel"):
            monkeypatch.setattr(f"corral.serve.gateway.watcher.{name}", getattr(self, name))

    def needs_tunnel(self, folder: DeploymentFolder) -> bool:
        return True

    def tunnel_holder(self, folder: DeploymentFolder) -> Identity | None:
        return own_identity() if folder.name in self.held else None

    def ensure_tunnel(self, folder: DeploymentFolder) -> None:
        self.opened.append(folder.name)
        if folder.name in self.refused:
            raise UnreachableError("ssh said nothing", "")
        self.held.add(folder.name)


def test_another_deployment_of_the_same_name_gets_a_tunnel_of_its_own(
    fleet: tuple[FleetFolder, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`down` closes the tunnel; the `up --no-wait` after it opens none."""
    tunnels = Tunnels(monkeypatch)
    watcher = Watcher([open_source("f")], lambda _: None)
    for _ in range(2):
        watcher.read()
    assert tunnels.opened == ["f-1", "f-2"]
    tunnels.held.remove("f-2")
    record = DeploymentFolder.of("f-2").record
    write_atomic(record, record.read_text())
    assert watcher.read().readings[1].state is State.READY
    assert tunnels.opened == ["f-1", "f-2", "f-2"]


def test_a_tunnel_whose_holder_was_killed_is_opened_again(
    fleet: tuple[FleetFolder, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tunnels = Tunnels(monkeypatch)
    watcher = Watcher([open_source("f")], lambda _: None)
    watcher.read()
    tunnels.held.remove("f-1")
    tunnels.refused.add("f-1")
    for _ in range(2):
        assert len(watcher.read().readings) == 2  # one that cannot be opened hides no other member
    tunnels.refused.clear()
    for _ in range(2):
        watcher.read()
    assert tunnels.opened == ["f-1", "f-2", "f-1", "f-1", "f-1"]
    assert tunnels.held == {"f-1", "f-2"}


def test_a_server_that_needs_no_tunnel_is_asked_about_it_once(
    fleet: tuple[FleetFolder, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def needs_tunnel(folder: DeploymentFolder) -> bool:
        asked.append(folder.name)
        return False

    monkeypatch.setattr("corral.serve.gateway.watcher.needs_tunnel", needs_tunnel)
    watcher = Watcher([open_source("f")], lambda _: None)
    for _ in range(3):
        watcher.read()
    assert asked == ["f-1", "f-2"]


def test_a_source_that_cannot_be_read_for_a_moment_keeps_its_servers_and_its_key(
    fleet: tuple[FleetFolder, dict[str, Any]],
) -> None:
    folder, _ = fleet
    watcher = Watcher([open_source("f")], lambda _: None)
    before = watcher.read()
    text = folder.record.read_text()
    folder.record.unlink()
    without = watcher.read()
    assert (without.readings, without.grants) == (before.readings, before.grants)
    assert len(without.unknown) == 1
    write_atomic(folder.record, text)
    member = DeploymentFolder.of("f-1").record
    member.unlink()  # it is being replaced: it keeps the address that it had
    now = watcher.read()
    assert [one.state for one in now.readings] == [State.UNKNOWN, State.READY]
    assert [one.url for one in now.readings] == [one.url for one in before.readings]
    assert (now.grants, now.unknown) == (before.grants, ())


@contextlib.asynccontextmanager
async def watched(watcher: Watcher) -> AsyncIterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """A gateway in this process, and what lets it read its files again."""
    box = Gateway()
    await box.listen("127.0.0.1", 0)

    async def look() -> None:
        snapshot = await asyncio.to_thread(watcher.read)
        box.update(snapshot.readings, snapshot.grants, snapshot.unknown)

    try:
        yield box.url, look
    finally:
        await box.close()


async def status_of(url: str, key: str) -> tuple[int, str]:
    """The status of a request with that key, and its Retry-After."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    try:
        body = b'{"model": "fake", "prompt": "a", "max_tokens": 1}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        again = [line.partition(": ")[2] for line in lines if line.startswith("retry-after")]
        return int(lines[0].split()[1]), again[0] if again else ""
    finally:
        writer.close()


def test_no_good_key_is_refused_while_files_cannot_be_read(fleet: tuple[FleetFolder, dict[str, Any]]) -> None:
    folder, _ = fleet
    told: list[str] = []
    watcher = Watcher([open_source("f")], lambda _: None, told.append)
    own, alice = folder.key.read_text().strip(), add_key("alice")

    async def through() -> None:
        async with watched(watcher) as (url, look):
            await look()
            assert (await status_of(url, own))[0] == (await status_of(url, alice))[0] == 200
            assert await status_of(url, "wrong") == (401, "")
            for path in (folder.record, folder.key, keys_file(), folder.path, gateway_dir(), deployments_dir()):
                for number in (errno.ESTALE, errno.EIO):
                    with unreadable(path, number=number):
                        await look()
                        assert (await status_of(url, own))[0] == (await status_of(url, alice))[0] == 200, path
                        unknown = 401 if path == deployments_dir() else 503
                        assert (await status_of(url, "wrong"))[0] == unknown  # it may be a new one
                    await look()
            write_atomic(keys_file(), json.dumps({"file_format": 7, "written_by": "9.9", "keys": []}))
            await look()
            assert (await status_of(url, alice))[0] == 200
            write_atomic(keys_file(), json.dumps({"keys": []}))  # revoked: known, and at once
            await look()
            assert await status_of(url, alice) == (401, "")
            shutil.rmtree(folder.path)
            await look()
            assert await status_of(url, own) == (401, "")

    asyncio.run(through())
    assert any("Corral 9.9" in line and str(keys_file()) in line for line in told)
    assert len([line for line in told if "read again" in line]) == len([line for line in told if "now:" in line])


def test_a_gateway_without_a_good_reading_asks_clients_to_wait(fleet: tuple[FleetFolder, dict[str, Any]]) -> None:
    folder, _ = fleet
    watcher = Watcher([open_source("f")], lambda _: None)
    own, alice = folder.key.read_text().strip(), add_key("alice")

    async def through() -> None:
        async with watched(watcher) as (url, look):
            assert await status_of(url, own) == (503, "1")  # it has not looked yet
            with unreadable(folder.path):
                await look()
                assert await status_of(url, own) == (503, "1")
                assert await status_of(url, alice) == (503, "1")  # good, but whose model it is is not known
            await look()
            assert (await status_of(url, own))[0] == (await status_of(url, alice))[0] == 200

    asyncio.run(through())


def test_files_are_told_before_any_member_is_asked(fleet: tuple[FleetFolder, dict[str, Any]]) -> None:
    """A scheduler that answers late delays requests, and refuses none."""
    told: list[GatewaySnapshot] = []
    watcher = Watcher([open_source("f")], told.append)
    watcher.start()
    until(lambda: len(told) > 1)
    watcher.stop()
    assert [one.state for one in told[0].readings] == [State.UNKNOWN, State.UNKNOWN]
    assert [one.model for one in told[0].readings] == ["fake", "fake"]
    assert [one.state for one in told[1].readings] == [State.READY, State.READY]
    assert told[0].grants == told[1].grants


def test_a_gateway_comes_back_where_it_was_and_a_second_one_goes_elsewhere(
    fleet: tuple[FleetFolder, dict[str, Any]],
) -> None:
    folder, _ = fleet
    sources = [open_source("f")]
    first = gateway_process(sources, "127.0.0.1", None, "prefix")
    make_private_dir(folder.gateways)
    write_atomic(folder.gateway(first.id), dump_json(GatewayAddress("127.0.0.1", first.port, own_identity())))
    assert list(held_gateways(folder)) == [first.id]
    assert gateway_process(sources, "127.0.0.1", None, "prefix").id != first.id
    write_atomic(folder.gateway(first.id), dump_json(GatewayAddress("127.0.0.1", first.port)))  # it has ended
    assert gateway_process(sources, "127.0.0.1", None, "prefix") == first
    assert gateway_process(sources, "127.0.0.1", 45_678, "prefix").port == 45_678


def test_a_fleet_behind_a_gateway_process(answering: Corral) -> None:
    """Two deployments with engines that answer, as a fleet; the gateway leaves its address and its load in files."""
    for name in ("f-1", "f-2"):
        up = answering("up", str(answering.model), "--name", name, "--served-name", "served", "--json")
        assert up.code == 0, up.err
    folder = create_fleet(Fleet("f", "served", 1, 4, 2, time.time(), (FleetMember("f-1"), FleetMember("f-2"))))
    with gateway(answering, "f") as (url, process):
        assert [one.url for one in held_gateways(folder).values()] == [url]
        for _ in range(4):
            assert ask(url, folder.key)
        for _ in range(400):
            loads = read_loads(folder)
            if loads and sum(sum(one.arrivals) for one in loads.values()) == 4:
                break
            time.sleep(0.05)
        (load,) = read_loads(folder).values()
        assert sorted(load.members) == ["f-1", "f-2"]
        process.kill()  # and another takes its place
        process.wait()
        with gateway(answering, "f") as (again, second):
            assert again == url
            assert ask(again, folder.key)
            second.send_signal(signal.SIGTERM)
            second.communicate(timeout=120)
        assert held_gateways(folder) == {}
        (path,) = folder.gateways.glob("*.json")
        assert load_json(GatewayAddress, path).holder is None


class Streams:
    """Clients that ask again and again, each on connections of its own, and what became of their requests."""

    def __init__(self, url: str, key_file: Path, count: int) -> None:
        self.whole, self.over = 0, threading.Event()
        self.failures: list[str] = []
        self._endpoint = Endpoint(url, "served", str(key_file))
        self._threads = [threading.Thread(target=lambda: run(self._ask())) for _ in range(count)]

    async def _ask(self) -> None:
        body = {"prompt": "hello", "max_tokens": 8, "stream": True}
        async with Client(self._endpoint) as client:
            while not self.over.is_set():
                try:
                    await client.request("/v1/completions", body)
                    self.whole += 1
                except RequestError as error:
                    self.failures.append(f"{type(error).__name__}: {error.message}")
                await asyncio.sleep(0.01)

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()


def test_another_process_takes_the_address_over_and_no_request_fails(answering: Corral) -> None:
    up = answering("up", str(answering.model), "--name", "f-1", "--served-name", "served", "--json")
    assert up.code == 0, up.err
    folder = create_fleet(Fleet("f", "served", 1, 4, 1, time.time(), (FleetMember("f-1"),)))
    assert answering("gateway", "f", "--take-over").code == 4  # none runs
    with gateway(answering, "f") as (url, first), Streams(url, folder.key, 4) as streams:
        until(lambda: streams.whole > 8, "answers")
        (before,) = held_gateways(folder).values()
        assert before.holder
        write_fleet(folder, replace(read_fleet(folder), gateways=(before.holder,)))
        wrong = answering.apart("gateway", "f", "f-1", "--take-over")
        assert wrong.code == 4
        assert "serves f, not f f-1" in wrong.err
        with gateway(answering, "f", "--take-over") as (again, second):
            assert again == url
            whole = streams.whole
            until(lambda: streams.whole > whole + 8, "answers go on")
            assert first.wait(LIMIT_S) == 0
            assert second.poll() is None
            (after,) = held_gateways(folder).values()
            assert after.holder in read_fleet(folder).gateways  # the fleet's own one, as the first was
            streams.over.set()
    assert streams.failures == []
