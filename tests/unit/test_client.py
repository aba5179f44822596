"""The client against the fake server: answers, times, every failure with its own error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from corral.base.errors import (
    AccessError,
    CorralError,
    DataError,
    EngineError,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from corral.client.client import CHAT, COMPLETIONS, Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import (
    AbortedError,
    BadRequestError,
    CutStreamError,
    KeyRefusedError,
    MalformedReplyError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
    ServerFailedError,
    ServerGoneError,
    TimedOutError,
    UnknownModelError,
    UnknownPathError,
    error_from_status,
)
from corral.client.fanout import retried
from corral.client.http1 import EventSplitter
from corral.client.reply import Piece, Reply
from corral.client.wire import Exchange, Wire
from corral.fake.app import FakeOptions
from corral.fake.faults import parse_fault
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from tests.skips import NO_OPENSSL

ASK = {"prompt": "San Francisco is a", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture(autouse=True)
def no_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").set_faults()


def using(server: FakeServer, work: Callable[[Client], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """Run some work with a client of the server."""

    async def main() -> Any:
        async with Client(Endpoint(server.url, "fake"), **options) as client:
            return await work(client)

    return run(main())


def get(server: FakeServer, body: dict[str, Any] | None = None, path: str = COMPLETIONS, **options: Any) -> Reply:
    async def work(client: Client) -> Reply:
        return await client.request(path, {**ASK, **(body or {})})

    reply: Reply = using(server, work, **options)
    return reply


def test_whole_and_streamed_answers_are_the_same(server: FakeServer) -> None:
    whole, streamed = get(server), get(server, {"stream": True, "stream_options": {"include_usage": True}})
    assert whole.text == streamed.text
    assert whole.finish_reason == streamed.finish_reason == "length"
    assert whole.usage
    assert streamed.usage
    assert whole.usage.completion_tokens == streamed.usage.completion_tokens == len(streamed.timing.chunk_ns) == 8
    assert whole.id == streamed.id
    assert whole.json()["choices"][0]["text"] == whole.text
    assert len(streamed.json()) == 9


def test_chat_and_several_choices(server: FakeServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "ignore_eos": True, "n": 3}
    for more in ({}, {"logprobs": True, "top_logprobs": 2}):
        whole = get(server, {**body, **more}, CHAT)
        streamed = get(server, {**body, **more, "stream": True}, CHAT)
        assert len(set(whole.texts)) == 3
        assert whole.texts == streamed.texts
        assert [c.tokens for c in whole.choices] == [c.tokens for c in streamed.choices]
    single = get(server, {**body, "n": 1, "stream": True}, CHAT)
    assert single.text == whole.texts[0]
    assert len(single.timing.chunk_ns) == 20  # the chunk that names the role has no token
    assert (
        get(server, {"prompt": ["a b", "c d"], "stream": True}).texts == get(server, {"prompt": ["a b", "c d"]}).texts
    )


def test_unicode_both_ways(server: FakeServer) -> None:
    prompt = 'é "東京"\n\t\\ 🎉 \u2028'
    assert get(server, {"prompt": prompt, "echo": True}).text.startswith(prompt)
    assert get(server, {"prompt": prompt, "echo": True, "stream": True}).text.startswith(prompt)
    long = get(server, {"max_tokens": 400, "stream": True}).text
    assert not long.isascii()
    assert long == get(server, {"max_tokens": 400}).text


def test_tokens_are_typed(server: FakeServer) -> None:
    for stream in (False, True):
        reply = get(server, {"logprobs": 3, "stream": stream})
        assert "".join(t.text for t in reply.tokens) == reply.text
        assert [t.rank for t in reply.tokens] == [1] * 8  # greedy
        for token in reply.tokens:
            assert len(token.top) == 3
            assert token.top[0].logprob == token.logprob
            assert [t.rank for t in token.top] == [1, 2, 3]
    warm = get(server, {"logprobs": 1, "temperature": 1, "max_tokens": 40})
    assert {t.rank for t in warm.tokens} == {1, None}  # beyond the first: not known
    reply = get(server, {"prompt_logprobs": 2, "logprobs": 0})
    assert [t.text for t in reply.prompt_tokens[1:]] == [" Fra", "ncis", "co", " is", " a"]
    assert reply.prompt_tokens[0].logprob is None
    second = reply.prompt_tokens[1]
    assert second.rank is not None
    assert second.id is not None
    assert all(
        a.logprob >= b.logprob for a, b in zip(second.top, second.top[1:], strict=False) if a.logprob and b.logprob
    )
    chat = get(
        server,
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0},
        CHAT,
    )
    assert bytes(chat.tokens[0].bytes or ()).decode() == chat.tokens[0].text
    assert len(chat.tokens[0].top) == 2
    assert len(chat.prompt_tokens) > 2
    assert get(server).tokens == get(server).prompt_tokens == ()


def test_times_are_true(tmp_path: Path) -> None:
    pace = Pace(ttft_s=0.04, itl_s=0.005)
    with FakeServer(FakeOptions(pace=pace, log=tmp_path / "log")) as server:

        async def work(client: Client) -> list[Reply]:
            asks = [
                client.request(COMPLETIONS, {**ASK, "stream": True, "prompt": f"p {i}"}, request_id=f"r{i}")
                for i in range(20)
            ]
            return await asyncio.gather(*asks)

        replies = using(server, work)
    truth = {row["id"]: row for row in map(json.loads, (tmp_path / "log").read_text().splitlines())}
    for reply in replies:
        row, timing = truth[reply.id], reply.timing
        assert timing.asked_ns <= timing.sent_ns <= row["arrival_ns"] <= timing.first_byte_ns
        assert row["first_ns"] <= timing.first_token_ns
        assert row["last_ns"] <= timing.last_token_ns
        assert timing.first_byte_ns < timing.first_token_ns  # headers come at once, the token does not
        assert len(timing.chunk_ns) == 8


def test_pieces_come_as_they_are_made() -> None:
    with FakeServer(FakeOptions(pace=Pace(ttft_s=0.02, itl_s=0.02))) as server:

        async def work(client: Client) -> list[Piece | Reply]:
            return [piece async for piece in client.stream(COMPLETIONS, ASK)]

        *pieces, reply = using(server, work)
        assert isinstance(reply, Reply)
        assert "".join(p.text for p in pieces) == reply.text
        assert pieces[-1].finish_reason == "length"
        assert (pieces[-1].at_ns - pieces[0].at_ns) / 1e9 > 0.1

        async def leave(client: Client) -> None:
            stream = client.stream(COMPLETIONS, {**ASK, "max_tokens": 4000})
            async for _ in stream:
                break
            await cast("Any", stream).aclose()

        using(server, leave)
        with Client(Endpoint(server.url, "fake")) as client:
            *pieces, reply = client.stream_sync(COMPLETIONS, ASK)
            assert "".join(p.text for p in pieces) == reply.text
            for _ in client.stream_sync(COMPLETIONS, {**ASK, "max_tokens": 4000}):
                break
        deadline = time.monotonic() + 60
        assert server.app
        while server.app.engine.running_jobs and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.app.engine.running_jobs == 0  # leaving a stream frees the server


STREAM, EITHER = (True,), (True, False)  # where a fault can strike: in streams only, or in any answer
FAULTS: list[tuple[str, tuple[bool, ...], type[RequestError], type[CorralError]]] = [
    ("status:code=500", EITHER, ServerFailedError, EngineError),
    ("status:code=502", EITHER, ServerFailedError, EngineError),
    ("status:code=429,retry_after=1.5", EITHER, OverloadedError, UnreachableError),
    ("status:code=503", EITHER, OverloadedError, UnreachableError),
    ("status:code=400,message=nonsense", EITHER, BadRequestError, UsageError),
    ("status:code=422", EITHER, BadRequestError, UsageError),
    ("status:code=401", EITHER, KeyRefusedError, AccessError),
    ("status:code=403", EITHER, KeyRefusedError, AccessError),
    ("status:code=302", EITHER, MalformedReplyError, EngineError),
    ("reset", EITHER, ServerGoneError, UnreachableError),
    ("reset:when=mid", EITHER, CutStreamError, UnreachableError),
    ("cut", EITHER, CutStreamError, UnreachableError),
    ("cut:clean=1", STREAM, CutStreamError, UnreachableError),
    ("cut:at=0", STREAM, CutStreamError, UnreachableError),
    ("cut:at=0,clean=1", STREAM, CutStreamError, UnreachableError),
    ("error", EITHER, ServerFailedError, EngineError),
    ("error:at=0", STREAM, ServerFailedError, EngineError),
    ("abort", EITHER, AbortedError, EngineError),
    ("abort:at=0", EITHER, AbortedError, EngineError),
    ("garbage", EITHER, MalformedReplyError, EngineError),
    ("hang", EITHER, TimedOutError, UnreachableError),
    ("hang:when=mid", EITHER, TimedOutError, UnreachableError),
]


@pytest.mark.parametrize(
    ("fault", "stream", "error", "base"),
    [(fault, stream, error, base) for fault, where, error, base in FAULTS for stream in where],
)
def test_every_failure_has_its_error(
    server: FakeServer, fault: str, stream: bool, error: type[RequestError], base: type[CorralError]
) -> None:
    server.set_faults(fault)

    async def work(client: Client) -> None:
        with pytest.raises(error) as failed:
            await client.request(COMPLETIONS, {**ASK, "stream": stream})
        assert isinstance(failed.value, base)
        assert failed.value.retryable == (error not in (BadRequestError, KeyRefusedError))
        assert failed.value.remedy
        assert server.url in failed.value.message
        server.set_faults()
        client.limits = replace(client.limits, stall_s=60)
        assert (await client.request(COMPLETIONS, {**ASK, "stream": stream})).finish_reason == "length"

    using(server, work, stall_s=patience_s(fault))


def patience_s(fault: str) -> float:
    """Short only for what hangs: any other answer may take its time on a busy machine."""
    return 0.3 if fault.startswith("hang") else 60.0


@pytest.mark.parametrize(("fault", "only", "error", "base"), [f for f in FAULTS if ":" not in f[0]])
def test_long_streams_fail_as_short_ones_do(
    server: FakeServer, fault: str, only: bool | None, error: type[RequestError], base: type[CorralError]
) -> None:
    server.set_faults(f"{fault}:at=150,when=mid")
    expected = CutStreamError if fault == "reset" else error

    async def work(client: Client) -> None:
        asks = [client.request(COMPLETIONS, {**ASK, "max_tokens": 300, "n": n, "stream": True}) for n in (1, 1, 2)]
        for done in await asyncio.gather(*asks, return_exceptions=True):
            assert type(done) is expected

    using(server, work, stall_s=patience_s(fault))


def test_retry_after_is_kept(server: FakeServer) -> None:
    server.set_faults("status:code=429,retry_after=1.5")
    with pytest.raises(OverloadedError) as failed:
        get(server)
    assert failed.value.retry_after_s == 1.5
    assert failed.value.status == 429
    assert failed.value.to_json()["error"]["retry_after_s"] == 1.5


def test_slow_split_and_odd_answers_still_count(server: FakeServer) -> None:
    good = get(server, {"stream": True}).text
    for fault in ("split:bytes=1", "split:bytes=3", "slow"):
        server.set_faults(fault)
        assert get(server, {"stream": True}).text == get(server).text == good
    server.set_faults("zero")
    for stream in (True, False):
        reply = get(server, {"stream": stream})
        assert (reply.text, reply.finish_reason) == ("", "stop")


def test_refusals_by_the_server(server: FakeServer) -> None:
    with pytest.raises(UnknownModelError, match="other") as unknown:
        get(server, {"model": "other"})
    assert isinstance(unknown.value, NotFoundError)
    with pytest.raises(PromptTooLongError, match="18000 tokens, and the context holds 8192") as long:
        get(server, {"prompt": "word " * 9000})
    assert (long.value.prompt_tokens, long.value.limit_tokens) == (18000, 8192)
    with pytest.raises(BadRequestError, match="temperature must be in"):
        get(server, {"temperature": 9})
    with pytest.raises(UnknownPathError):
        get(server, path="/v1/nothing")


@pytest.mark.parametrize(
    ("words", "prompt", "limit"),
    [
        (
            "This model's maximum context length is 8192 tokens. However, you requested 9100 tokens "
            "(9000 in the messages, 100 in the completion).",
            9000,
            8192,
        ),
        ("The decoder prompt (length 9000) is longer than the maximum model length of 8192.", 9000, 8192),
        (
            "This model's maximum context length is 8192 tokens. However, your prompt contains 99999 characters",
            None,
            8192,
        ),
        ("Input length (9000) exceeds model's maximum context length (8192).", 9000, 8192),
    ],
)
def test_too_long_in_other_words(words: str, prompt: int | None, limit: int) -> None:
    error = error_from_status(400, json.dumps({"error": {"message": words}}).encode(), None, "here")
    assert isinstance(error, PromptTooLongError)
    assert (error.prompt_tokens, error.limit_tokens) == (prompt, limit)


def test_an_error_chunk_keeps_its_code(server: FakeServer) -> None:
    from corral.client.errors import error_from_chunk

    refused = error_from_chunk(b'{"error": {"message": "bad", "code": 400}}', "here")
    assert isinstance(refused, BadRequestError)
    assert isinstance(error_from_chunk(b'{"object": "error", "message": "x"}', "here"), ServerFailedError)
    assert isinstance(error_from_chunk(b"\xff", "here"), ServerFailedError)


def test_nobody_there() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with Client(Endpoint(url, "x")) as client, pytest.raises(ServerGoneError, match="cannot be reached") as gone:
            client.request_sync(COMPLETIONS, ASK)
        assert not gone.value.reached
    with Client(Endpoint("http://no-such-host.invalid:1", "x")) as client, pytest.raises(ServerGoneError):
        client.request_sync(COMPLETIONS, ASK)


def test_something_else_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for reply in (b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: nonsense\r\n\r\n"):
                to, _ = listener.accept()
                with to:
                    to.recv(65536)
                    to.sendall(reply)
                    to.recv(65536)

        thread = threading.Thread(target=answer)
        thread.start()
        with Client(Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", "x")) as client:
            for _ in range(2):
                with pytest.raises(MalformedReplyError):
                    client.request_sync(COMPLETIONS, ASK)
        thread.join(5)


def test_two_thousand_at_once() -> None:
    with FakeServer(FakeOptions(pace=Pace(ttft_s=0.2))) as server:

        async def work(client: Client) -> None:
            bodies = [{**ASK, "prompt": f"prompt {i}", "stream": i % 2 == 0} for i in range(2000)]
            replies = await asyncio.gather(*(client.request(COMPLETIONS, body) for body in bodies))
            again = await asyncio.gather(*(client.request(COMPLETIONS, body) for body in bodies))
            assert [r.text for r in replies] == [r.text for r in again]
            assert len({r.text for r in replies}) == 2000
            assert server.app
            assert len(server.app.connections) <= 2000

        using(server, work, connections=2000, connect_s=120)


def test_few_connections_are_shared(server: FakeServer) -> None:
    async def work(client: Client) -> None:
        replies = await asyncio.gather(*(client.request(COMPLETIONS, {**ASK, "prompt": f"{i}"}) for i in range(100)))
        assert len(replies) == 100
        assert server.app
        assert len(server.app.connections) <= 4

    using(server, work, connections=4)


def test_waiting_requests_survive_failures_before_them(server: FakeServer) -> None:
    server.set_faults("reset:every=2", "cut:every=3")

    async def work(client: Client) -> None:
        asks = [client.request(COMPLETIONS, {**ASK, "prompt": f"{i}"}) for i in range(60)]
        done = await asyncio.gather(*asks, return_exceptions=True)
        kinds = [type(d).__name__ for d in done]
        assert kinds.count("ServerGoneError") == 30
        assert kinds.count("CutStreamError") == 10
        assert kinds.count("Reply") == 20

    using(server, work, connections=3)


def test_limits_of_time() -> None:
    with FakeServer(FakeOptions(pace=Pace(itl_s=0.1))) as server:

        async def work(client: Client) -> None:
            with pytest.raises(TimedOutError, match=r"did not finish within 0.2 s"):
                await client.request(COMPLETIONS, {**ASK, "max_tokens": 2000, "stream": True}, timeout_s=0.2)
            reply = await client.request(COMPLETIONS, {**ASK, "max_tokens": 25, "stream": True})
            assert reply.timing.total_s > 2  # longer than the stall limit, but never silent for as long

        using(server, work, stall_s=2)


def test_cancelling_frees_the_server() -> None:
    with FakeServer(FakeOptions(pace=Pace(itl_s=0.05))) as server:

        async def work(client: Client) -> None:
            task = asyncio.create_task(client.request(COMPLETIONS, {**ASK, "max_tokens": 4000}))
            assert server.app
            async with asyncio.timeout(60):
                while not server.app.engine.running_jobs:
                    await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                while server.app.engine.running_jobs:
                    await asyncio.sleep(0.02)

        using(server, work)


def test_closing_fails_what_is_under_way() -> None:
    with FakeServer(FakeOptions(pace=Pace(ttft_s=5))) as server:

        async def main() -> None:
            client = Client(Endpoint(server.url, "fake"), connections=1)
            futures = [client.send(COMPLETIONS, ASK) for _ in range(3)]
            await asyncio.sleep(0.05)
            await client.close()
            for future in futures:
                with pytest.raises(ServerGoneError, match="closed"):
                    await future

        run(main())


def test_a_stale_connection_is_replaced() -> None:
    """A server that closes idle connections, as uvicorn does, must not cost a request."""
    body = b'{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            first, _ = listener.accept()
            with first:
                first.recv(65536)
                first.sendall(answer)
                first.recv(65536)  # the second request arrives, and is answered by closing
            second, _ = listener.accept()
            with second:
                second.recv(65536)
                second.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with Client(Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", "x")) as client:
            assert client.request_sync(COMPLETIONS, ASK).text == "x"
            time.sleep(1.1)
            assert client.request_sync(COMPLETIONS, ASK).text == "x"
        thread.join(5)


def test_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("top-secret\n")
    key.chmod(0o600)
    wrong = tmp_path / "wrong"
    wrong.write_text("nonsense")
    wrong.chmod(0o600)
    with FakeServer(FakeOptions(key_file=key)) as server:
        right = Endpoint(server.url + "/v1", "fake", str(key))
        with Client(right) as client:
            assert client.request_sync(COMPLETIONS, ASK).text
            assert client.models_sync() == ["fake"]
            assert "top-secret" not in repr(client) + repr(right) + repr(vars(right))
        for endpoint in (Endpoint(server.url, "fake"), Endpoint(server.url, "fake", str(wrong))):
            with Client(endpoint) as client:
                with pytest.raises(KeyRefusedError) as failed:
                    client.request_sync(COMPLETIONS, ASK)
                assert "nonsense" not in str(failed.value.to_json())
                with pytest.raises(KeyRefusedError):
                    client.models_sync()
                if endpoint.key_file:
                    wrong.write_text("top-secret")  # a key that was changed is read again
                    assert client.request_sync(COMPLETIONS, ASK).text


def test_endpoint_checks(tmp_path: Path) -> None:
    assert Endpoint("http://host:1/v1/", "m").root == "http://host:1"
    assert Endpoint("https://host/base", "m").root == "https://host/base"
    for url in ("host:8000", "ftp://host", "http://", ""):
        with pytest.raises(UsageError):
            Endpoint(url, "m")
    with pytest.raises(UsageError, match="password"):
        Endpoint("http://me:secret@host", "m")
    with pytest.raises(NotFoundError, match="no file"):
        Endpoint("http://host", "m", str(tmp_path / "none")).key()
    file = tmp_path / "key"
    file.write_text("k")
    file.chmod(0o644)
    with pytest.raises(AccessError, match="others may read"):
        Endpoint("http://host", "m", str(file)).key()
    file.chmod(0o600)
    assert Endpoint("http://host", "m", str(file)).key() == "k"
    for bad in ("", "two words", "new\nline", "ünïcode"):
        file.write_text(bad)
        with pytest.raises(DataError, match="no usable key"):
            Endpoint("http://host", "m", str(file)).key()


def test_pages(server: FakeServer) -> None:
    with Client(Endpoint(server.url, "fake")) as client:
        assert client.page_sync("/health").status == 200
        assert b"vllm:num_requests_running" in client.page_sync("/metrics").body
        assert client.page_sync("/tokenize", {"prompt": "a b"}).json()["count"] == 2
        assert client.page_sync("/none").status == 404


class Owner:
    """Takes what a connection gives."""

    where = "http://test"

    def __init__(self) -> None:
        self.done: list[Exchange] = []
        self.errors: list[RequestError] = []

    def finished(self, wire: Wire, exchange: Exchange, keep: bool) -> None:
        self.done.append(exchange)

    def failed(self, wire: Wire, exchange: Exchange, error: RequestError) -> None:
        self.errors.append(error)

    def lost(self, wire: Wire) -> None:
        pass


class Transport:
    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        pass


def feed(pieces: list[bytes], answers: int = 1) -> list[Exchange]:
    owner = Owner()
    wire = Wire(owner)
    wire.connection_made(cast("asyncio.BaseTransport", Transport()))
    wire.begin(Exchange(b"", b"", cast("Any", None), 1))
    for piece in pieces:
        wire.data_received(piece)
        if owner.done and len(owner.done) < answers and wire.exchange is None:
            wire.begin(Exchange(b"", b"", cast("Any", None), 1))
    assert not owner.errors
    return owner.done


def recorded(server: FakeServer, body: dict[str, Any]) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=60) as to:
        to.sendall(
            b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        got = b""
        while more := to.recv(65536):
            got += more
    return got


def test_every_split_of_the_bytes_gives_the_same_events(server: FakeServer) -> None:
    data = recorded(server, {**ASK, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}})
    (whole,) = feed([data])
    assert len(whole.events) == 7
    assert whole.done
    for size in (1, 2, 3, 5, 7, 16, 100):
        (split,) = feed([data[i : i + size] for i in range(0, len(data), size)])
        assert (split.events, split.done, split.status) == (whole.events, True, 200)
    for at in range(1, len(data)):
        (split,) = feed([data[:at], data[at:]])
        assert split.events == whole.events
    flat = recorded(server, ASK)
    (whole,) = feed([flat])
    for at in range(1, len(flat)):
        (split,) = feed([flat[:at], flat[at:]])
        assert b"".join(split.parts) == b"".join(whole.parts)


def test_events_need_not_match_chunks() -> None:
    events = b'data: {"a":1}\n\n: keep-alive\n\ndata: {"b":\ndata: 2}\n\n'
    events += b'event: x\ndata:{"c":"\xc3\xa9"}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    wanted = [b'{"a":1}', b'{"b":\n2}', b'{"c":"\xc3\xa9"}']
    for text in (events, events.replace(b"\n", b"\r\n"), events.replace(b"\n", b"\r")):
        for size in range(1, 40):
            chunks = [text[i : i + size] for i in range(0, len(text), size)]
            body = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\ntrailer: 1\r\n\r\n"
            for read in (1, 4, 4096):
                data = head + body
                (got,) = feed([data[i : i + read] for i in range(0, len(data), read)])
                assert got.events == wanted
                assert got.done


def test_the_splitter_alone() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata: b") == [b"a"]
    assert not splitter.empty
    assert splitter.feed(b"\n\n") == [b"b"]
    assert splitter.empty
    assert splitter.feed(b"data: x\r") == []
    assert splitter.feed(b"\n\r") == []
    assert splitter.feed(b"\n") == [b"x"]


def test_informational_and_unframed_answers() -> None:
    continued = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    for at in range(1, len(continued)):
        (got,) = feed([continued[:at], continued[at:]])
        assert b"".join(got.parts) == b"ok"
    owner = Owner()
    wire = Wire(owner)
    wire.connection_made(cast("asyncio.BaseTransport", Transport()))
    wire.begin(Exchange(b"", b"", cast("Any", None), 1))
    wire.data_received(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")
    assert not owner.done
    wire.eof_received()
    assert b"".join(owner.done[0].parts) == b"until the end"


def test_sync_calls_from_many_threads(server: FakeServer) -> None:
    with Client(Endpoint(server.url, "fake")) as client:
        texts: dict[int, str] = {}

        def work(i: int) -> None:
            texts[i] = client.request_sync(COMPLETIONS, {**ASK, "prompt": f"p{i}"}).text

        threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(set(texts.values())) == 32


def test_ctrl_c_is_clean() -> None:
    with FakeServer(FakeOptions(faults=(parse_fault("hang"),))) as server:
        script = textwrap.dedent(f"""
            from corral.client.client import Client
            from corral.client.endpoint import Endpoint
            print("ready", flush=True)
            try:
                with Client(Endpoint({server.url!r}, "fake")) as client:
                    client.request_sync("/v1/completions", {{"prompt": "x"}})
            except KeyboardInterrupt:
                print("clean", flush=True)
        """)
        command = [sys.executable, "-W", "error", "-c", script]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stderr
            assert process.stdout.readline() == "ready\n"
            assert server.app
            deadline = time.monotonic() + 60
            while not server.app.requests and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGINT)
            assert process.stdout.read() == "clean\n"
            assert process.stderr.read() == ""
            assert process.wait(120) == 0


def test_no_socket_is_left_open(server: FakeServer) -> None:
    def sockets() -> int:
        count = 0
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += str(link.readlink()).startswith("socket:")
        return count

    async def work(client: Client) -> None:
        await asyncio.gather(*(client.request(COMPLETIONS, ASK) for _ in range(50)))

    using(server, work)
    deadline = time.monotonic() + 60
    assert server.app
    while server.app.connections and time.monotonic() < deadline:
        time.sleep(0.01)
    before = sockets()
    using(server, work)
    while server.app.connections and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sockets() <= before


def test_tls(tmp_path: Path, server: FakeServer) -> None:
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    if not shutil.which("openssl"):
        pytest.skip(NO_OPENSSL)
    subprocess.run(
        [*command.split(), "-keyout", tmp_path / "k.pem", "-out", tmp_path / "c.pem"], capture_output=True, check=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "c.pem", tmp_path / "k.pem")
    body = b'{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}'

    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()

        tls = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        url = f"https://localhost:{tls.sockets[0].getsockname()[1]}"
        async with Client(Endpoint(url, "x")) as client:
            with pytest.raises(ServerGoneError, match="TLS"):
                await client.request(COMPLETIONS, ASK)
        os.environ["SSL_CERT_FILE"] = str(tmp_path / "c.pem")
        try:
            async with Client(Endpoint(url, "x")) as client:
                assert (await client.request(COMPLETIONS, ASK)).text == "x"
        finally:
            del os.environ["SSL_CERT_FILE"]
        tls.close()

    asyncio.run(main())


def test_a_failure_that_may_pass_is_tried_again_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    # not asyncio's own: a fake server in another thread of this process sleeps, too
    monkeypatch.setattr("corral.client.fanout.asyncio", SimpleNamespace(sleep=sleep))

    def asked(*errors: Exception) -> Callable[[], Awaitable[str]]:
        waiting = iter(errors)

        async def ask() -> str:
            for error in waiting:
                raise error
            return "answer"

        return ask

    overloaded = OverloadedError("busy", "wait")
    overloaded.retry_after_s = 3600.0
    assert run(retried(asked(ServerGoneError("x", ""), overloaded))) == "answer"
    assert 0 < pauses[0] <= 0.25
    assert pauses[1] == 15.0  # not the hour that was asked for: somebody waits
    with pytest.raises(BadRequestError):
        run(retried(asked(BadRequestError("no", ""))))
    with pytest.raises(ServerGoneError):
        run(retried(asked(*(ServerGoneError("x", "") for _ in range(3))), retries=2))
    assert len(pauses) == 4


def test_a_reply_is_shown_without_its_bytes(server: FakeServer) -> None:
    reply = get(server, {"max_tokens": 3})
    assert repr(reply).startswith(f"<Reply {reply.text!r}, 3 tokens")
    assert len(repr(reply)) < 200
