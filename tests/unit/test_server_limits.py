"""Hostile clients against every HTTP server of Corral's own: each is held to the same limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from corral.client.client import run
from corral.console.server import Console, ConsoleOptions
from corral.serve.connections import (
    ConnectionPhase,
    ConnectionProgress,
    ConnectionTable,
    HeldBytes,
    ServerLimits,
    TimeAway,
)
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.keys import digest_of
from corral.serve.gateway.policies import NEWEST
from corral.serve.gateway.relay import GatewayLimits
from corral.serve.gateway.usage import KeyGrant
from corral.use.batch.service.app import BatchService, ServiceOptions
from tests.unit.test_console_guard import SECRETS, enter
from tests.unit.test_gateway import reading

KEY, SECOND = "the-first-clients-key", "the-second-clients-key"
# a client that trickles, is silent or does not read is ended within seconds
SHORT: dict[str, Any] = {"head_s": 0.2, "idle_s": 0.2, "read_s": 0.2, "unread_s": 0.2, "closing_s": 0.2}
MUCH = 1 << 26  # bytes: many times what the sockets' own buffers hold
KINDS = ("gateway", "proxy", "console", "batch")


@dataclass
class Server:
    """One of the servers, as a client meets it."""

    port: int
    key: bytes  # the header lines by which a client is known
    page: bytes  # what it may then ask for
    posted: bytes  # where it may then post JSON
    table: ConnectionTable[Any]
    large: bytes = b"/metrics"  # a page of many kilobytes
    held: HeldBytes = field(default_factory=lambda: HeldBytes(0, 0))

    def head(self, line: bytes, *more: bytes, key: bool = True) -> bytes:
        lines = [line + b" HTTP/1.1", b"host: 127.0.0.1:%d" % self.port, *more, *([self.key] if key else [])]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def get(self, *more: bytes) -> bytes:
        return self.head(b"GET " + self.page, *more)

    def post(self, *more: bytes, key: bool = True) -> bytes:
        return self.head(b"POST " + self.posted, b"content-type: application/json", *more, key=key)

    def connect(self, receives_bytes: int = 0) -> socket.socket:
        to = socket.socket()
        if receives_bytes:
            to.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives_bytes)
        to.settimeout(60)
        to.connect(("127.0.0.1", self.port))
        return to

    def answer(self, *pieces: bytes) -> bytes:
        """What comes back until the server ends the connection."""
        with self.connect() as to:
            for piece in pieces:
                with contextlib.suppress(ConnectionError):
                    to.sendall(piece)
            return read_all(to)


def read_all(to: socket.socket) -> bytes:
    got = b""
    with contextlib.suppress(ConnectionError):
        while more := to.recv(1 << 16):
            got += more
    return got


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def until(condition: Callable[[], bool]) -> None:
    ended = threading.Event()
    for _ in range(6000):
        if condition():
            return
        ended.wait(0.01)
    raise AssertionError("it did not come to that")


@contextlib.contextmanager
def gateway(limits: GatewayLimits, route: str) -> Iterator[Server]:
    """A gateway in a thread of its own; the server behind it accepts nobody, and its requests wait."""
    made: list[Gateway] = []
    up, ending = threading.Event(), asyncio.Event()

    async def serve() -> None:
        one = Gateway(route, limits)
        await one.listen("127.0.0.1", 0)
        grants = [KeyGrant(name, digest_of(name.encode())) for name in (KEY, SECOND)]
        one.update([reading(1, "http://127.0.0.1:1")], grants)
        made.append(one)
        up.set()
        await ending.wait()
        await one.close()

    thread = threading.Thread(target=lambda: run(serve()))
    thread.start()
    try:
        assert up.wait(60)
        port = int(made[0].url.rpartition(":")[2])
        key = b"authorization: Bearer " + KEY.encode()
        yield Server(port, key, b"/v1/models", b"/v1/completions", made[0].connections, held=made[0].held)
    finally:
        made[0].loop.call_soon_threadsafe(ending.set)
        thread.join(60)


@contextlib.contextmanager
def served(kind: str, folder: Path, **limits: Any) -> Iterator[Server]:
    if kind in ("gateway", "proxy"):
        with gateway(GatewayLimits(**limits), "prefix" if kind == "gateway" else NEWEST) as one:
            yield one
    elif kind == "console":
        with Console(ConsoleOptions(port=0, limits=ServerLimits(**limits))) as console:
            port = int(console.url.rpartition(":")[2])
            cookie = enter(console)
            key = (
                f"cookie: {cookie}\r\nx-corral-secret: {SECRETS[cookie]}\r\norigin: http://127.0.0.1:{port}".encode()
            )
            yield Server(port, key, b"/", b"/api/play/texts", console._hosted.connections, b"/static/runs.js")
    else:
        options = ServiceOptions(folder / "kept", port=0, jobs=1, limits=ServerLimits(**limits))
        with BatchService(options) as service:
            port = int(service.url.rpartition(":")[2])
            identity, path = service.store.new_upload()
            path.write_bytes(bytes(1 << 20))
            service.store.keep_upload(identity, "rows.jsonl", "batch", path)
            large = b"/v1/files/%b/content" % identity.encode()
            key = b"authorization: Bearer " + Path(service.key_file).read_bytes().strip()
            yield Server(port, key, b"/v1/files", b"/v1/batches", service._hosted.connections, large)


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, clean_home: Path) -> Iterator[Server]:
    with served(request.param, clean_home) as one:
        yield one


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def flood(to: socket.socket, piece: bytes, most_bytes: int) -> int:
    """Send on and on until the server ends it; how many bytes of whole pieces it took."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most_bytes:
            to.sendall(piece)
            sent += len(piece)
    return sent


def test_clients_that_do_not_advance_are_ended(kind: str, clean_home: Path) -> None:
    with served(kind, clean_home, **SHORT) as server, contextlib.ExitStack() as stack:
        slow = {
            "silent": b"",
            "half a head": b"GET / HTTP/1.1\r\nx: ",
            "no body": server.post(b"content-length: 100"),
            "half a body": server.post(b"content-length: 100") + b'{"prompt": ',
            "half a chunk": server.post(b"transfer-encoding: chunked") + b"64\r\n{",
            "idle after an answer": server.get(),
        }
        opened = {name: stack.enter_context(server.connect()) for name in slow}
        for name, to in opened.items():
            to.sendall(slow[name])
        for name, to in opened.items():
            answer = read_all(to)  # to its end
            assert not answer or status(answer) == (200 if "idle" in name else 408), name
        until(lambda: len(server.table) == 0)
        assert server.held.total == 0


def test_a_stranger_is_refused_before_a_byte_of_a_body_is_kept(kind: str, clean_home: Path) -> None:
    with served(kind, clean_home, **SHORT) as server, contextlib.ExitStack() as stack:
        opened = []
        for framing in (b"content-length: 1000000000", b"transfer-encoding: chunked") * 4:
            opened.append(stack.enter_context(server.connect()))
            opened[-1].sendall(server.post(framing, key=False) + b"1000000\r\n")
        for to in opened:
            assert status(to.recv(1 << 16)) in (401, 403)
            assert server.held.total == 0
        flood(opened[0], b"x" * (1 << 16), 1 << 40)  # until it is ended
        until(lambda: len(server.table) == 0)


def test_answers_that_nobody_reads_do_not_pile_up(kind: str, clean_home: Path) -> None:
    with served(kind, clean_home, unread_s=0.2, closing_s=0.2) as server:
        with server.connect(receives_bytes=4096) as to:
            requests = server.head(b"GET " + server.large) * 100
            assert flood(to, requests, MUCH) < MUCH  # it stopped reading, and ended the connection
        until(lambda: len(server.table) == 0)


def test_who_has_shown_no_key_makes_room(kind: str, clean_home: Path) -> None:
    with served(kind, clean_home, connections=16) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            for _ in range(40):
                stack.enter_context(server.connect())
            assert status(server.answer(server.get(b"connection: close"))) == 200
            until(lambda: len(server.table) <= 16)
        known = stack.enter_context(server.connect())
        known.sendall(server.get())
        assert status(known.recv(1 << 16)) == 200
        for _ in range(40):
            stack.enter_context(server.connect())
        known.sendall(server.get(b"connection: close"))  # whoever has shown a key stays
        assert b"200 OK" in read_all(known)


AMBIGUOUS = {
    "identity, chunked": b"transfer-encoding: identity, chunked",
    "identity and chunked": b"transfer-encoding: identity\r\ntransfer-encoding: chunked",
    "chunked twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
    "gzip": b"transfer-encoding: gzip, chunked",
    "a length beside chunks": b"content-length: 5\r\ntransfer-encoding: chunked",
    "two lengths": b"content-length: 5\r\ncontent-length: 6",
}


def test_heads_that_are_too_long_or_ambiguous_are_refused(server: Server) -> None:
    for way, line in AMBIGUOUS.items():
        assert status(server.answer(server.post(line) + b"0\r\n\r\n")) == 400, way
    assert status(server.answer(b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000)) == 431
    assert status(server.answer(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000)) == 431
    assert status(server.answer(server.get(b"connection: close"))) == 200


def test_a_client_that_closes_its_side_gets_an_answer(server: Server) -> None:
    for request, good in ((server.get(), (200,)), (server.post(b"content-length: 2") + b"{}", (200, 400))):
        with server.connect() as to:
            to.sendall(request)
            to.shutdown(socket.SHUT_WR)
            assert status(read_all(to)) in good
    until(lambda: len(server.table) == 0)


@pytest.mark.parametrize("route", ["prefix", NEWEST])
def test_a_request_ends_when_its_client_closes_its_side_and_says_so(route: str) -> None:
    """Servers of models take that for leaving, and free the GPU: only a client that is still there can read it."""
    with gateway(GatewayLimits(), route) as server:
        body = b'{"model": "fake", "prompt": "x"}'
        for waiting in (
            server.post(b"content-length: %d" % len(body)) + body,
            server.post(b"content-length: 9") + b"{",
        ):
            with server.connect() as to:
                to.sendall(waiting)
                to.shutdown(socket.SHUT_WR)
                answer = read_all(to)
            assert status(answer) == 400
            assert b"keep it open for both directions" in answer
            until(lambda: len(server.table) == 0)
            assert server.held.total == 0


HOSTILE = {
    "deep": b'{"prompt": ' + b"[" * 200_000,
    "deep and whole": b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a number without end": b'{"prompt": [1e999]}',
    "digits without end": b'{"prompt": [%b]}' % (b"9" * 10_000),
    "not UTF-8": b'{"prompt": ["\xff"]}',
    "a long name": b'{"model": "%b"}' % (b"m" * 500_000),
    "no object": b"[]",
    "not JSON": b"\x00" * 1000,
}


def test_bodies_that_cannot_be_read_are_refused_and_forgotten(server: Server) -> None:
    for way, body in HOSTILE.items():
        post = server.post(b"content-length: %d" % len(body), b"connection: close")
        for _ in range(3):
            assert 400 <= status(server.answer(post + body)) < 500, way
        assert server.held.total == 0
    assert status(server.answer(server.get(b"connection: close"))) == 200


@pytest.mark.parametrize("route", ["prefix", NEWEST])
def test_one_key_takes_neither_all_connections_nor_all_memory(route: str) -> None:
    limits = GatewayLimits(connections=20, held_bytes=40_000, held_bytes_of_key=10_000)
    with gateway(limits, route) as server, contextlib.ExitStack() as stack:
        other = b"authorization: Bearer " + SECOND.encode()
        held = [stack.enter_context(server.connect()) for _ in range(15)]
        for number, to in enumerate(held):
            to.sendall(server.post(b"content-length: 9000") + b"{" * 8000 if number == 0 else server.post())
        until(lambda: server.held.total == 8000)
        assert status(server.answer(server.post(b"content-length: 3000") + b"x" * 3000)) == 429
        server.key = other
        assert status(server.answer(server.get(b"connection: close"))) == 200
        body = b"[" * 9000
        answer = server.answer(server.post(b"content-length: 9000", b"connection: close") + body)
        assert status(answer) == 400  # read whole: the other key's bytes are not its own
        for to in held:
            to.close()
        until(lambda: server.held.total == 0)


# The parts, by themselves


def test_progress_is_judged_by_phase() -> None:
    limits = ServerLimits(head_s=10, idle_s=20, read_s=30, slowest_bytes_per_s=10, unread_s=40, closing_s=5)
    for phase, patience_s in (
        (ConnectionPhase.HEAD, 10),
        (ConnectionPhase.IDLE, 20),
        (ConnectionPhase.BODY, 30),
        (ConnectionPhase.CLOSING, 5),
    ):
        progress = ConnectionProgress(0.0)
        progress.enter(phase, 100.0)
        assert not progress.is_stuck(limits, 100.0 + patience_s, 0)
        assert progress.is_stuck(limits, 100.1 + patience_s, 0)
        progress.excuse(1000.0)  # the server itself was stopped
        assert not progress.is_stuck(limits, 1100.0 + patience_s, 0)
    body = ConnectionProgress(0.0)
    body.enter(ConnectionPhase.BODY, 0.0)
    for moment in range(1, 5):  # fast enough, for ever
        body.received(310)
        assert not body.is_stuck(limits, 31.0 * moment, 0)
    body.received(290)
    assert body.is_stuck(limits, 155.1, 0)
    answer = ConnectionProgress(0.0)
    answer.enter(ConnectionPhase.ANSWER, 0.0)
    assert not answer.is_stuck(limits, 1e6, 0)  # a server may compute for long
    for moment, unread in ((0, 500), (30, 400), (60, 300), (99, 300)):
        assert not answer.is_stuck(limits, 1e6 + moment, unread)
    assert answer.is_stuck(limits, 1e6 + 101, 300)


def test_time_away_is_what_is_beyond_the_usual_delay() -> None:
    away = TimeAway(1.0)
    assert [away.since_last(now) for now in (5.0, 6.0, 7.9, 20.0, 21.0)] == [0.0, 0.0, 0.0, pytest.approx(11.1), 0.0]


class Connected:
    """A connection of the table's."""

    def __init__(self, table: ConnectionTable[Connected], address: str) -> None:
        self.address, self.owner, self.ended = address, None, False
        self.progress, self._table = ConnectionProgress(0.0), table
        self.had_room = table.add(self)

    def sweep(self, now_s: float) -> None: ...

    def end_for_room(self) -> None:
        self.ended = True
        self._table.discard(self)


def test_room_is_made_by_the_address_that_has_most_and_never_by_a_running_request() -> None:
    table: ConnectionTable[Connected] = ConnectionTable(ServerLimits(connections=12))
    many = [Connected(table, "10.0.0.1") for _ in range(8)]
    few = [Connected(table, "10.0.0.2") for _ in range(4)]
    assert Connected(table, "10.0.0.3").had_room
    assert [one.ended for one in many] == [True] + [False] * 7
    for one in table.all():
        table.show_key(one, one.address)
        one.progress.enter(ConnectionPhase.ANSWER, 0.0)
    assert not Connected(table, "10.0.0.4").had_room  # all are at work
    table.discard(table.all()[-1])
    few[0].progress.enter(ConnectionPhase.IDLE, 0.0)
    assert Connected(table, "10.0.0.4").had_room
    assert few[0].ended
