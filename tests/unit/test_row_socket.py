"""Rows to the engine's own process without HTTP: the socket alone, and whole batches with `--in-process`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corral.base.processes import processor_s
from corral.client.client import COMPLETIONS, run
from corral.client.endpoint import Absence, Endpoint
from corral.client.errors import BadRequestError, KeyRefusedError, OverloadedError, ServerGoneError, TimedOutError
from corral.client.pool import Page
from corral.client.row_socket import RowSocketClient, RowSocketEndpoint, has_row_socket, row_processes
from corral.deploy.deployment.folder import DeploymentFolder
from corral.engines import environments as engines
from corral.node.guard import Guard
from corral.node.row_socket import RowSocket
from corral.use.batch import in_process as front_ends
from corral.use.batch.core.run import Quiet
from corral.use.batch.core.runner import Counts
from corral.use.batch.in_process import FrontEndWatch, InProcessServer, http_advice
from corral.use.batch.inspect import inspect
from tests.unit.conftest import Corral
from tests.until import until

ENGINE = Path(__file__).parent.parent / "streaming_engine.py"


def completion(text: str) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
    return json.dumps({"id": "x", "model": "m", "choices": [choice], "usage": {"prompt_tokens": 1}}).encode()


class App:
    """An application behind the socket: echoes prompts, in the reverse order of their arrival."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cancelled = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        prompt = body.get("prompt", "")
        self.asked.append(prompt)
        if prompt == "never":
            try:
                await receive()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if prompt == "raise":
            raise ValueError("a bug")
        status = 400 if prompt == "bad" else 200
        await asyncio.sleep(0.001 * (5 - len(self.asked) % 5))
        await send({"type": "http.response.start", "status": status, "headers": []})
        text = (
            completion(f"to {prompt}") if status == 200 else b'{"error": {"message": "no such thing", "code": 400}}'
        )
        await send({"type": "http.response.body", "body": text[:9], "more_body": True})
        await send({"type": "http.response.body", "body": text[9:]})


def through(
    folder: Path, app: Any, use: Callable[[RowSocketClient], Awaitable[None]], owner: Any = None, stall_s: float = 60
) -> None:
    """Use a client of a socket in this process."""

    async def both() -> None:
        rows = RowSocket(app, owner, lambda path: (403, b"{}") if path == "/sleep" else None)
        await rows.listen(str(folder))
        client = RowSocketClient(RowSocketEndpoint("http://127.0.0.1:9", "m", None, str(folder)), stall_s=stall_s)
        try:
            await use(client)
        finally:
            await client.close()
            await rows.close()

    run(both())


def test_answers_come_back_to_their_requests_in_any_order(tmp_path: Path) -> None:
    async def use(client: RowSocketClient) -> None:
        asked = [client.send(COMPLETIONS, {"prompt": f"{n}" + "x" * 70_000 * (n % 3)}) for n in range(40)]
        for number, reply in enumerate(await asyncio.gather(*asked)):
            assert reply.text.rstrip("x") == f"to {number}"
            assert reply.finish_reason == "length"
            assert reply.status == 200

    through(tmp_path, App(), use)


def test_errors_are_those_of_http(tmp_path: Path) -> None:
    async def use(client: RowSocketClient) -> None:
        with pytest.raises(BadRequestError, match="no such thing"):
            await client.send(COMPLETIONS, {"prompt": "bad"})
        with pytest.raises(Exception, match="ValueError: a bug"):
            await client.send(COMPLETIONS, {"prompt": "raise"})
        with pytest.raises(KeyRefusedError):
            await client.post("/sleep", {})
        page = await client.post("/tokenize", {"prompt": "words"})
        assert isinstance(page, Page)
        assert page.status == 200

    through(tmp_path, App(), use)


def test_a_request_nobody_waits_for_is_taken_from_the_engine(tmp_path: Path) -> None:
    app = App()

    async def use(client: RowSocketClient) -> None:
        with pytest.raises(TimedOutError):
            await client.send(COMPLETIONS, {"prompt": "never"})
        while not app.cancelled:
            await asyncio.sleep(0.01)
        lost = client.send(COMPLETIONS, {"prompt": "never"})
        while len(app.asked) < 2:
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(ServerGoneError):
            await lost
        while app.cancelled < 2:
            await asyncio.sleep(0.01)

    through(tmp_path, app, use, stall_s=0.2)


class _Request:
    """As pydantic's models are, as far as it matters."""

    stream = False

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    @classmethod
    def model_validate(cls, given: dict[str, Any]) -> _Request:
        return cls(given["prompt"])


class _Completions:
    """As vLLM's object behind the route is."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def create_completion(self, request: _Request, raw_request: Any = None) -> Any:
        self.asked.append(request.prompt)
        if request.prompt == "bad":
            return SimpleNamespace(error=SimpleNamespace(code=400))
        if request.prompt == "raise":
            raise RuntimeError("only the application knows how to say this")
        return SimpleNamespace(model_dump_json=lambda: completion(f"straight to {request.prompt}").decode())


def test_completions_go_straight_to_the_engines_object_and_refusals_are_the_applications(tmp_path: Path) -> None:
    app, serving = App(), _Completions()
    owner = SimpleNamespace(state=SimpleNamespace(openai_serving_completion=serving))

    async def use(client: RowSocketClient) -> None:
        assert (await client.send(COMPLETIONS, {"prompt": "you"})).text == "straight to you"
        assert not app.asked
        with pytest.raises(BadRequestError, match="no such thing"):
            await client.send(COMPLETIONS, {"prompt": "bad"})
        assert (await client.send("/v1/chat/completions", {"prompt": "chat"})).text == "to chat"

    through(tmp_path, app, use, owner)
    assert serving.asked == ["you", "bad"]
    assert app.asked == ["bad", "chat"]


def test_a_deep_folder_and_sockets_of_dead_processes(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead:
        opened = os.open(deep, os.O_RDONLY)
        dead.bind(f"/proc/self/fd/{opened}/rows-1.sock")
        os.close(opened)
    assert not has_row_socket(str(deep))

    async def use(client: RowSocketClient) -> None:
        assert not (deep / "rows-1.sock").exists()
        assert (deep / f"rows-{os.getpid()}.sock").stat().st_mode & 0o077 == 0
        assert has_row_socket(str(deep))
        assert (await client.send(COMPLETIONS, {"prompt": "deep"})).text == "to deep"

    through(deep, App(), use)
    assert not has_row_socket(str(deep))
    assert not has_row_socket(str(tmp_path / "nowhere"))


def test_nobody_there_is_told_as_a_server_that_cannot_be_reached(tmp_path: Path) -> None:
    async def use() -> None:
        client = RowSocketClient(RowSocketEndpoint("http://127.0.0.1:9", "m", None, str(tmp_path)))
        with pytest.raises(ServerGoneError) as caught:
            await client.send(COMPLETIONS, {"prompt": "x"})
        assert not caught.value.reached
        await client.close()

    run(use())


def test_the_guard_opens_it_and_closes_what_it_closes_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("k" * 43)
    monkeypatch.setenv("CORRAL_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("CORRAL_DRAIN_FILE", str(tmp_path / "drain"))
    monkeypatch.setenv("CORRAL_ROW_SOCKETS", str(tmp_path))
    monkeypatch.setitem(sys.modules, "corral_row_socket", sys.modules[RowSocket.__module__])

    over = asyncio.Event()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await (over.wait() if scope["type"] == "lifespan" else App()(scope, receive, send))

    async def use() -> None:
        lifespan = asyncio.ensure_future(Guard(app)({"type": "lifespan", "app": None}, None, None))  # type: ignore[arg-type]
        while not has_row_socket(str(tmp_path)):
            await asyncio.sleep(0.01)
        client = RowSocketClient(RowSocketEndpoint("http://127.0.0.1:9", "m", None, str(tmp_path)))
        assert (await client.send(COMPLETIONS, {"prompt": "you"})).text == "to you"
        with pytest.raises(KeyRefusedError):
            await client.post("/collective_rpc", {})
        (tmp_path / "drain").touch()
        while True:
            try:
                await client.send(COMPLETIONS, {"prompt": "late"})
            except OverloadedError:
                break
        await client.close()
        over.set()
        await lifespan
        assert not has_row_socket(str(tmp_path))

    run(use())


# Whole batches


@pytest.fixture
def guarded(corral: Corral) -> Corral:
    """`corral` with an engine that answers behind the real guard."""
    python = Path(engines.expected("cpu").path) / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ENGINE}" "$@"\n')
    return corral


def rows(tmp_path: Path, count: int, *prompts: str) -> tuple[str, Path]:
    path = tmp_path / "rows.jsonl"
    lines = [*(f"Row {n}" for n in range(count)), *prompts]
    path.write_text("".join(json.dumps({"id": n, "prompt": text}) + "\n" for n, text in enumerate(lines)))
    return str(path), tmp_path / "out.jsonl"


def ids(output: Path) -> list[int]:
    return sorted(json.loads(line)["id"] for line in output.read_text().splitlines())


def test_a_batch_in_process_gives_the_rows_of_http(guarded: Corral, tmp_path: Path) -> None:
    given, output = rows(tmp_path, 60, "refuse this")
    assert guarded("up", str(guarded.model), "--name", "one").code == 0
    offline = guarded("batch", given, "-o", str(output), "--in-process", "--ordered")
    assert offline.code == 1, offline.err
    over_http = guarded("batch", given, "-o", str(tmp_path / "http.jsonl"), "--ordered")
    assert over_http.code == 1, over_http.err
    assert output.read_text() == (tmp_path / "http.jsonl").read_text()
    assert (tmp_path / "out.errors.jsonl").read_text() == (tmp_path / "http.errors.jsonl").read_text()
    assert ids(output) == list(range(60))


def test_a_model_that_a_batch_starts_here_gets_its_rows_in_process_by_itself(
    guarded: Corral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Any] = []
    give = RowSocketClient._give

    def counted(self: RowSocketClient, exchange: Any) -> None:
        handed.append(exchange)
        give(self, exchange)

    monkeypatch.setattr(RowSocketClient, "_give", counted)
    given, output = rows(tmp_path, 40)
    done = guarded("batch", given, "-o", str(output), "--start", str(guarded.model))
    assert done.code == 0, done.err
    assert ids(output) == list(range(40))
    assert len(handed) == 40


def test_without_a_socket_a_started_model_gets_its_rows_over_http(tmp_path: Path) -> None:
    """As on nodes elsewhere, and behind engines that an older Corral started."""

    class Elsewhere:
        name = "elsewhere"

        def find(self) -> Endpoint:
            return Endpoint("http://127.0.0.1:9/v1", "m", str(tmp_path / "key"))

        def absence(self) -> Absence:
            return Absence("it is away")

        def seats(self) -> None:
            return None

    assert InProcessServer(Elsewhere(), over_http=True).find() == Elsewhere().find()
    assert InProcessServer(Elsewhere(), over_http=True).absence().ending is None
    assert InProcessServer(Elsewhere()).find() is None
    assert InProcessServer(Elsewhere()).absence().ending is not None


def test_a_killed_runner_in_process_is_continued_and_loses_nothing(guarded: Corral, tmp_path: Path) -> None:
    given, output = rows(tmp_path, 300)
    assert guarded("up", str(guarded.model), "--name", "one", WHOLE_S="1").code == 0
    first = guarded.start("batch", given, "-o", str(output), "--in-process", "--concurrency", "8")
    until(lambda: output.exists() and inspect(str(output)).fine, "first results that count")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    done = len(ids(output))
    assert 0 < done < 300
    again = guarded("batch", "resume", str(output), "--concurrency", "200")
    assert again.code == 0, again.err
    assert "from before" in again.err
    assert ids(output) == list(range(300))
    assert json.loads((tmp_path / "out.jsonl.corral" / "job.json").read_text())["in_process"] is True


def test_a_row_that_kills_every_engine_ends_with_the_deployments_own_reason(guarded: Corral, tmp_path: Path) -> None:
    given, output = rows(tmp_path, 40, "die now")
    assert guarded("up", str(guarded.model), "--name", "one", "--restart", "1", LOAD_S="0").code == 0
    ended = guarded("batch", given, "-o", str(output), "--in-process")
    assert ended.code == 8, ended.err  # the deployment gives up after a restart, as it would over HTTP
    assert "Everything up to here is kept" in ended.err
    status = guarded("batch", "status", str(output), "--json").json()
    assert status["rows"] == 41
    assert status["failed"] == 0


def test_the_batch_starts_and_stops_the_engine_it_hands_rows_to(guarded: Corral, tmp_path: Path) -> None:
    given, output = rows(tmp_path, 30)
    done = guarded("batch", given, "-o", str(output), "--in-process", "--start", str(guarded.model))
    assert done.code == 0, done.err
    assert ids(output) == list(range(30))
    assert [entry["state"] for entry in guarded("ps", "--json").json()] in ([], ["stopped"])


def test_what_has_no_engine_here_is_refused(guarded: Corral, answering: Corral, tmp_path: Path) -> None:
    given, output = rows(tmp_path, 3)
    refused = guarded("batch", given, "-o", str(output), "--in-process", "--url", "http://127.0.0.1:9")
    assert refused.code == 2, refused.err
    assert "--url names another" in refused.err
    ray = guarded("batch", given, "-o", str(output), "--in-process", "--engine", "ray-data", "--start", "m")
    assert ray.code == 2, ray.err
    assert answering("up", str(answering.model), "--name", "bare", FAKE_BARE="1").code == 0
    bare = answering("batch", given, "-o", str(output), "--in-process")
    assert bare.code == 2, bare.err
    assert "bare takes no rows in process" in bare.err
    assert answering("batch", given, "-o", str(output)).code == 0


def test_http_is_called_the_limit_only_where_the_api_servers_were_busy() -> None:
    assert http_advice(0.79, 1) == ""
    assert "the engine's API server was busy 92% of the time: --in-process" in http_advice(0.92, 1)
    assert "4 API servers were busy" in http_advice(0.92, 4)


def test_how_busy_the_api_servers_were_is_measured(clean_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DeploymentFolder.of("one").rank(0).path
    folder.mkdir(parents=True)
    over_http, in_process = Endpoint("http://127.0.0.1:9", "m"), RowSocketEndpoint("http://127.0.0.1:9", "m")
    up, away, inside = (
        SimpleNamespace(lanes=[SimpleNamespace(up=there, client=SimpleNamespace(endpoint=one))])
        for there, one in ((True, over_http), (False, over_http), (True, in_process))
    )

    async def use(client: RowSocketClient) -> None:
        assert row_processes(str(folder)) == [os.getpid()]
        watch = FrontEndWatch(Quiet(), ("one",))
        watch.tick(Counts(), away)  # type: ignore[arg-type]
        assert watch.advice() == ""  # nothing was under way
        watch.tick(Counts(), up)  # type: ignore[arg-type]
        assert watch.advice() == ""  # too short to tell
        monkeypatch.setattr(front_ends, "LEAST_S", 0.01)
        monkeypatch.setattr(front_ends, "BUSY", 0.0)
        began = processor_s(os.getpid())
        while processor_s(os.getpid()) - began < 0.05:
            sum(range(10_000))
        assert "--in-process" in watch.advice()
        watch = FrontEndWatch(Quiet(), ("one",))
        watch.tick(Counts(), inside)  # type: ignore[arg-type]
        assert watch.advice() == ""  # there is no HTTP to leave out

    through(folder, App(), use)
