"""A gateway with one source, as `corral proxy` runs it, in front of fake servers that drain, die and come.

A request that could be answered is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from corral.client.client import CHAT, Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import CutStreamError, KeyRefusedError, OverloadedError, RequestError
from corral.deploy.deployment.state import State
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.node import guard
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.keys import digest_of
from corral.serve.gateway.member import Member, MemberReading
from corral.serve.gateway.policies import NEWEST
from corral.serve.gateway.relay import GatewayLimits
from corral.serve.gateway.usage import KeyGrant

ENGINE = Path(__file__).parent.parent / "streaming_engine.py"
KEY = "a-key-of-sufficient-length"
READY, DRAINING, STOPPED, LOADING = State.READY, State.DRAINING, State.STOPPED, State.LOADING
Answer = Callable[[bytes, bytes], bytes]


def in_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        run(asyncio.wait_for(work(), 60))

    test.__name__ = work.__name__
    return test


class Proxy(Gateway):
    """A gateway whose members and clients have no keys, unless a test says otherwise."""

    def __init__(self, limits: GatewayLimits) -> None:
        super().__init__(NEWEST, limits, title="corral proxy")
        self.grants = [KeyGrant("m", digest_of(b""))]

    def see(self, readings: list[MemberReading]) -> None:
        self.update(readings, self.grants)

    def member(self, name: str) -> Member:
        return next(one for one in self.members if one.name == name)


@contextlib.asynccontextmanager
async def proxy_to(*urls: str, key: str = "", **limits: Any) -> AsyncIterator[Proxy]:
    proxy = Proxy(GatewayLimits(**limits))
    proxy.grants = [KeyGrant("m", digest_of(key.encode()))]
    await proxy.listen("127.0.0.1", 0)
    proxy.see(ready(*urls, key=key))
    try:
        yield proxy
    finally:
        await proxy.close()


def seen(name: str, state: State, url: str = "", text: str = "", key: str = "") -> MemberReading:
    return MemberReading(name, state, url, text, model="fake", source="m", key=key)


def ready(*urls: str, key: str = "") -> list[MemberReading]:
    return [seen(f"m{number}", READY, url, key=key) for number, url in enumerate(urls)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def upstream(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server of the test's own making; what it still does at the end is cut short."""
    running: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await answer(reader, writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(handle(reader, writer))
        running.add(task)
        task.add_done_callback(lambda _: writer.close())

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close in the loop's next rounds


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return head, await reader.readexactly(int(length[1]) if length else 0)


async def exchange(url: str, request: bytes) -> bytes:
    """Send bytes; all that comes back until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request)
    try:
        return await reader.read(-1)
    finally:
        writer.close()


def post(body: bytes, extra: bytes = b"connection: close\r\n", path: bytes = b"/v1/completions") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (path, extra, len(body), body)


def chat(number: int, tokens: int = 12) -> dict[str, Any]:
    message = {"role": "user", "content": f"question {number}"}
    return {"messages": [message], "stream": True, "max_tokens": tokens, "ignore_eos": True}


class Load:
    """Streams without pause through the proxy, and what became of them."""

    def __init__(self, proxy: Proxy, streams: int, key: Path | None = None) -> None:
        self.replies: list[str] = []
        self.failures: list[RequestError] = []
        self._client = Client(Endpoint(proxy.url, "fake", str(key) if key else None))
        self._stop = False
        self._tasks = [asyncio.ensure_future(self._ask(number)) for number in range(streams)]

    async def _ask(self, number: int) -> None:
        while not self._stop:
            try:
                reply = await self._client.request(CHAT, chat(number))
                self.replies.append(reply.text)
            except RequestError as error:
                self.failures.append(error)
            number += 1000

    async def more(self, count: int) -> None:
        wanted = len(self.replies) + count
        await until(lambda: len(self.replies) >= wanted or bool(self.failures))

    async def end(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)
        await self._client.close()


PACED = FakeOptions(pace=Pace(ttft_s=0.01, itl_s=0.004))


async def stop(server: FakeServer) -> None:
    await asyncio.get_running_loop().run_in_executor(None, server.stop)


@in_loop
async def test_moves_to_a_successor_that_is_ready_before_the_end() -> None:
    with FakeServer(PACED) as a, FakeServer(PACED) as b:
        async with proxy_to(a.url) as proxy:
            load = Load(proxy, 16)
            await load.more(40)
            proxy.see([seen("m0", READY, a.url), seen("m1", LOADING)])
            proxy.see(ready(a.url, b.url))
            await load.more(40)
            proxy.see([seen("m0", DRAINING, a.url), seen("m1", READY, b.url)])
            await until(lambda: not proxy.member("m0").active)
            await stop(a)
            proxy.see([seen("m0", STOPPED), seen("m1", READY, b.url)])
            await load.more(40)
            await load.end()
    assert not load.failures
    assert proxy.figures.failed == 0
    assert proxy.figures.requests == len(load.replies) == proxy.figures.answered
    assert proxy.figures.switch_overs == 1
    assert proxy.figures.held == 0


@in_loop
async def test_moves_to_a_successor_that_is_ready_only_after_the_end() -> None:
    with FakeServer(PACED) as a, FakeServer(PACED) as b:
        async with proxy_to(a.url) as proxy:
            load = Load(proxy, 16)
            await load.more(40)
            proxy.see([seen("m0", DRAINING, a.url)])
            await until(lambda: proxy.figures.held >= 16)
            await stop(a)
            proxy.see([seen("m0", STOPPED), seen("m1", LOADING)])
            proxy.see([seen("m0", STOPPED), seen("m1", READY, b.url)])
            await load.more(40)
            await load.end()
    assert not load.failures
    assert proxy.figures.failed == 0
    assert proxy.figures.requests == len(load.replies)
    assert proxy.figures.longest_hold_s > 0


@in_loop
async def test_a_server_that_drops_requests_before_the_first_byte_costs_nobody_an_answer() -> None:
    """It is said to be ready all the time: only what the proxy meets tells."""
    with FakeServer(PACED) as a, FakeServer(PACED) as b:
        async with proxy_to(b.url, a.url) as proxy:
            load = Load(proxy, 8)
            await load.more(20)
            a.set_faults("reset:when=before")
            await load.more(40)
            await until(lambda: proxy.member("m1").down_until_s > 0)
            a.set_faults()
            await load.more(100)
            await load.end()
            assert not load.failures
            assert proxy.figures.failed == 0
            assert proxy.figures.retried > 0


@in_loop
async def test_a_refused_connection_is_tried_elsewhere_and_an_ended_server_is_given_up() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await asyncio.sleep(60)

    with FakeServer() as b:
        async with proxy_to(b.url, "http://127.0.0.1:1") as proxy, Client(Endpoint(proxy.url, "fake")) as client:
            assert (await client.request(CHAT, chat(1))).text
            assert proxy.figures.retried == 1
        async with (
            upstream(silent) as url,
            proxy_to(b.url, url) as proxy,
            Client(Endpoint(proxy.url, "fake")) as client,
        ):
            waiting = asyncio.ensure_future(client.request(CHAT, chat(1)))
            await until(lambda: bool(proxy.member("m1").active))
            proxy.see([seen("m0", READY, b.url), seen("m1", STOPPED)])
            for relay in list(proxy.member("m1").active):
                relay.give_up(time.monotonic() + 1)  # what the sweep does after some seconds
            assert (await waiting).text


@in_loop
async def test_a_draining_servers_503_goes_to_another_and_any_other_503_to_the_client() -> None:
    heads: list[bytes] = []

    async def draining(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await read_request(reader)
            heads.append(head + body)
            writer.write(
                b"HTTP/1.1 503 Service Unavailable\r\nx-corral-state: draining\r\ncontent-length: 2\r\n\r\n{}"
            )

    body = json.dumps(chat(1)).encode()
    with FakeServer() as b:
        async with upstream(draining) as url, proxy_to(b.url, url) as proxy:
            for _ in range(3):
                answer = await exchange(proxy.url, post(body, path=b"/v1/chat/completions"))
                assert answer.startswith(b"HTTP/1.1 200 OK")
                assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert len(heads) == 1  # said once, believed for good
            assert heads[0].endswith(body)
        b.set_faults("status:code=503,message=overloaded")
        async with proxy_to(b.url) as proxy:
            answer = await exchange(proxy.url, post(body, path=b"/v1/chat/completions"))
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"overloaded" in answer
            assert proxy.figures.refused == 1
            assert proxy.figures.failed == 0


def test_the_real_guard_of_a_draining_server_costs_nobody_an_answer(tmp_path: Path) -> None:
    """Nobody tells the proxy that the newer one drains: only its answers do."""
    (tmp_path / "corral_guard.py").write_bytes(Path(guard.__file__).read_bytes())
    key, drain = tmp_path / "key", tmp_path / "drain"
    key.write_text(KEY)
    key.chmod(0o600)

    async def drained(urls: list[str]) -> tuple[int, int]:
        async with proxy_to(*urls, key=KEY) as proxy:
            load = Load(proxy, 8, key)
            await load.more(30)
            drain.touch()
            await until(lambda: proxy.member("m1").declined)
            await load.more(30)
            await load.end()
            assert not load.failures
            assert (proxy.current or proxy.member("m1")).name == "m0"
            return proxy.figures.failed, proxy.figures.retried

    with contextlib.ExitStack() as stack:
        urls = []
        for drain_file in ("", str(drain)):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            env = {"PYTHONPATH": str(tmp_path), "CORRAL_KEY_FILE": str(key), "CORRAL_DRAIN_FILE": drain_file}
            env |= {"STREAM_ITL_MS": "4", "LOAD_S": "0"}
            command = [sys.executable, str(ENGINE), "--port", str(port)]
            server = stack.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
            stack.callback(server.kill)
            assert server.stdout
            assert any("Starting vLLM server" in line for line in server.stdout)
            urls.append(f"http://127.0.0.1:{port}")
        failed, retried = run(asyncio.wait_for(drained(urls), 60))
    assert failed == 0
    assert retried > 0


@in_loop
async def test_held_requests_get_one_clear_error_when_nobody_comes() -> None:
    async with proxy_to(hold_s=0.05) as proxy:
        proxy.see([seen("m0", LOADING)])
        answer = await exchange(proxy.url, post(b"{}"))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 10" in head
        error = json.loads(body)["error"]
        assert error["type"] == "service_unavailable_error"
        assert "no server was ready within 0.05 s: m0 is loading" in error["message"]
        health = await exchange(proxy.url, b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert health.startswith(b"HTTP/1.1 503")
        assert (proxy.figures.failed, proxy.figures.refused) == (1, 1)
        assert proxy.held.total == 0


@in_loop
async def test_when_all_have_failed_the_answer_is_the_diagnosis_at_once() -> None:
    async with proxy_to(hold_s=10_000) as proxy:
        proxy.see([seen("m0", LOADING)])
        held = asyncio.create_task(exchange(proxy.url, post(b"{}")))
        while not proxy.figures.held:
            await asyncio.sleep(0.01)
        text = "out of memory: 3 GiB are missing"
        proxy.see([seen("m0", State.FAILED, text=text), seen("m1", State.STOPPED)])
        await asyncio.sleep(0.05)
        assert not held.done()  # somebody stopped it, and may start it again
        proxy.see([seen("m0", State.FAILED, text=text)])
        for answer in (await held, await exchange(proxy.url, post(b"{}"))):
            assert answer.startswith(b"HTTP/1.1 503")
            assert text.encode() in answer
        assert proxy.held.total == 0


@in_loop
async def test_said_to_be_ready_and_never_accepting_is_held_no_longer_than_others() -> None:
    async with proxy_to("http://127.0.0.1:1", hold_s=0.3) as proxy:
        answer = await exchange(proxy.url, post(b"{}"))
        assert answer.startswith(b"HTTP/1.1 503")


@in_loop
async def test_a_request_that_ends_servers_is_not_given_to_all_of_them() -> None:
    asked = []

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await read_request(reader))
        writer.close()

    async with upstream(dies) as url, proxy_to(url) as proxy:
        answer = await exchange(proxy.url, post(b"{}"))
        assert answer.startswith(b"HTTP/1.1 502")
        assert b"dropped the request 3 times" in answer
        assert len(asked) == 3


@in_loop
async def test_an_answer_that_breaks_off_is_never_taken_for_whole() -> None:
    with FakeServer() as a:
        for fault in ("reset:when=mid", "cut"):
            a.set_faults(fault)
            async with proxy_to(a.url) as proxy, Client(Endpoint(proxy.url, "fake")) as client:
                with pytest.raises(CutStreamError):
                    await client.request(CHAT, chat(1))
                assert proxy.figures.failed == 1
                old = post(json.dumps(chat(1)).encode(), b"", b"/v1/chat/completions").replace(
                    b"HTTP/1.1", b"HTTP/1.0"
                )
                with pytest.raises(ConnectionResetError):  # without chunks the end of the connection is the end
                    await exchange(proxy.url, old)


@in_loop
async def test_a_client_that_leaves_is_seen_by_the_server() -> None:
    gone = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await reader.read(-1)
        gone.set()

    async with upstream(endless) as url, proxy_to(url) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        writer.write(post(b"{}"))
        await reader.readuntil(b"hello")
        writer.close()
        await gone.wait()
        await until(lambda: proxy.figures.left == 1)
        assert proxy.figures.running == 0
        assert proxy.figures.failed == 0
        proxy.see([seen("m0", LOADING)])
        _, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        writer.write(post(b"{}"))  # leaves while it is held
        await until(lambda: proxy.figures.held == 1)
        writer.close()
        await until(lambda: proxy.figures.left == 2)
        assert proxy.held.total == 0


@in_loop
async def test_events_are_passed_on_as_they_come_and_kept_connections_are_used_again() -> None:
    goes_on, connections = asyncio.Event(), []

    async def stepwise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while True:
            await read_request(reader)
            writer.write(
                b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5\r\nX-A: b\r\ntransfer-encoding: chunked\r\n\r\n"
                b"3\r\none\r\n"
            )
            await goes_on.wait()
            for sign in b"3\r\ntwo\r\n0\r\n\r\n":
                writer.write(bytes([sign]))
                await writer.drain()

    async with upstream(stepwise) as url, proxy_to(url) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        for _ in range(3):
            goes_on.clear()
            writer.write(post(b"{}", b""))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"x-a: b\r\n" in head
            assert b"keep-alive" not in head.lower()
            await reader.readuntil(b"one\r\n")  # although the server has not gone on
            goes_on.set()
            assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\ntwo\r\n0\r\n\r\n"
        writer.close()
        assert len(connections) == 1


@in_loop
async def test_what_is_sent_on_is_the_request_without_what_was_for_the_proxy() -> None:
    heads: list[bytes] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await read_request(reader)
            heads.append(head)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async with upstream(echo) as url, proxy_to(url) as proxy:
        proxy.grants = [KeyGrant("client", digest_of(b"secret"))]
        proxy.see(ready(url, key="member-key"))
        part = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n'
        large = part + bytes(range(256)) * 80_000 + b"\r\n--b--\r\n"  # 20 MB
        own = b"authorization: Bearer secret\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        hop = b"connection: close, x-mine\r\nx-mine: 1\r\nte: trailers\r\n"
        answer = await exchange(proxy.url, post(large, own + hop + b"expect: 100-continue\r\n"))
        assert answer.endswith(large)
        low = heads[0].lower()
        assert b"authorization: bearer member-key\r\n" in low
        assert b"secret" not in low  # the client's key goes no further
        assert b"host: " + url.removeprefix("http://").encode() in low
        assert not [word for word in (b"x-mine", b"te:", b"expect", b"connection") if word in low]
        own = b"authorization: Bearer secret\r\n"
        chunked = b"POST / HTTP/1.1\r\nhost: x\r\n%bconnection: close\r\ntransfer-encoding: chunked\r\n\r\n" % own
        answer = await exchange(proxy.url, chunked + b'3;x=y\r\n{"a\r\n4\r\n":1}\r\n0\r\nt: u\r\n\r\n')
        assert answer.endswith(b'\r\n\r\n{"a":1}')
        assert b"content-length: 7" in heads[1].lower()
        two = post(b'{"first": 1}', own) + post(b'{"second": 2}', own + b"connection: close\r\n")  # sent at once
        answer = await exchange(proxy.url, two)
        assert answer.index(b"first") < answer.index(b"second")
        assert not [word for word in ("secret", "member-key") if word in json.dumps(proxy.status())]


@in_loop
async def test_an_answer_without_a_length_gets_one_that_clients_can_check() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with upstream(plain) as url, proxy_to(url) as proxy:
        answer = await exchange(proxy.url, post(b"{}"))
        assert b"transfer-encoding: chunked" in answer
        assert answer.endswith(b"5\r\nhello\r\n0\r\n\r\n")
        head = await exchange(proxy.url, b"HEAD / HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")


@in_loop
async def test_a_slow_reader_slows_the_server_down_instead_of_filling_memory() -> None:
    written = [0]

    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (200 << 20))
        for _ in range(200):
            writer.write(bytes(1 << 20))
            await writer.drain()
            written[0] += 1

    async with upstream(pours) as url, proxy_to(url) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        writer.write(post(b"{}"))
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while before != written[0]:  # until nothing moves any more
            before = written[0]
            await asyncio.sleep(0.2)
        assert written[0] < 100
        left = 200 << 20
        while left:
            left -= len(await reader.read(1 << 20))
        writer.close()


@in_loop
async def test_two_thousand_requests() -> None:
    with FakeServer() as a, FakeServer() as b:
        async with proxy_to(a.url, b.url) as proxy, Client(Endpoint(proxy.url, "fake")) as client:
            replies = await asyncio.gather(*(client.request(CHAT, chat(number)) for number in range(2000)))
            assert len({reply.text for reply in replies}) > 1900
            assert proxy.figures.answered == 2000
            assert proxy.figures.failed == 0
            page = await client.page("/proxy/status")
            assert page.json()["figures"]["requests"] == 2000
            assert page.json()["current"] == "m1"


def test_a_wrong_key_is_refused_and_a_server_that_refuses_its_own_is_not_ready(tmp_path: Path) -> None:
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    key.write_text(KEY)
    wrong.write_text("another-key-of-length")
    for path in (key, wrong):
        path.chmod(0o600)

    async def ask() -> None:
        async with proxy_to(server.url, key=KEY) as proxy:
            async with Client(Endpoint(proxy.url, "fake", str(wrong))) as client:
                with pytest.raises(KeyRefusedError):
                    await client.request(CHAT, chat(1))
            async with Client(Endpoint(proxy.url, "fake", str(key))) as client:
                assert (await client.request(CHAT, chat(1))).text
                assert proxy.figures.failed == 0
                assert proxy.figures.refused == 1
                proxy.see(ready(server.url, key="no-longer-the-servers-key"))
                with pytest.raises(OverloadedError, match="m0 does not accept its key now"):
                    await client.request(CHAT, chat(1))
                assert proxy.figures.refused == 1

    with FakeServer(FakeOptions(key_file=key)) as server:
        run(ask())


@in_loop
async def test_clients_that_send_too_slowly_or_too_much_are_ended() -> None:
    async with proxy_to(connections=3, body_bytes=1000, held_bytes=1500) as proxy:
        port = int(proxy.url.rpartition(":")[2])
        _, idle = await asyncio.open_connection("127.0.0.1", port)
        for start in (b"POST / HTTP/1.1\r\nx: ", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            await until(lambda: any(connection._reader.receiving for connection in proxy.connections.all()))
            for connection in proxy.connections.all():
                connection.sweep(connection.progress._since_s + 31)
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 408")
            writer.close()
            await until(lambda: len(proxy.connections) <= 1)
        for connection in proxy.connections.all():
            connection.sweep(connection.progress._since_s + 301)  # idle
        await until(lambda: not len(proxy.connections))
        idle.close()
        assert (await exchange(proxy.url, post(bytes(2000)))).startswith(b"HTTP/1.1 413")
        chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n7d0\r\n" + bytes(2000)
        assert (await exchange(proxy.url, chunked)).startswith(b"HTTP/1.1 413")
        assert (await exchange(proxy.url, b"GET /" + b"a" * 70_000)).startswith(b"HTTP/1.1 431")
        await until(lambda: not len(proxy.connections))
        proxy.see([seen("m0", LOADING)])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in held:
            writer.write(post(b"{%b}" % (b" " * 698), b""))
        await until(lambda: proxy.figures.held == 2)
        assert b"has too many connections" in await exchange(proxy.url, b"GET / HTTP/1.1\r\n\r\n")
        assert proxy.held.total == 1400
        for _, writer in held:
            writer.close()
        await until(lambda: proxy.held.total == 0)


@pytest.mark.parametrize(
    "request_text",
    [
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: +3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\ncontent-length : 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\na: b\r\n folded\r\n\r\n",
        b"POST / HTTP/1.1\r\na: b\nc: d\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\n\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_ambiguous_requests_are_refused(request_text: bytes) -> None:
    async def ask() -> None:
        async with proxy_to() as proxy:
            assert (await exchange(proxy.url, request_text)).startswith(b"HTTP/1.1 400")

    run(asyncio.wait_for(ask(), 20))
