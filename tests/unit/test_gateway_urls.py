"""Servers at a URL behind the gateway: what they get is what their user named, whatever they or a client say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from corral.base.errors import AccessError, UsageError
from corral.base.record import dump_json, load_json
from corral.client.client import run
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from corral.lab.report.status import fleet_lines
from corral.serve.fleet.record import GatewayLoad, Judgement
from corral.serve.fleet.status import fleet_status
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.health import HealthMonitor
from corral.serve.gateway.keys import add_key
from corral.serve.gateway.process import fleet_load
from corral.serve.gateway.url_member import UrlMember, with_one_model
from corral.serve.gateway.watcher import GatewaySnapshot, Watcher
from tests.unit.conftest import Corral
from tests.unit.test_gateway import MEMBERS, exchange, get, in_loop, post, reading, servers, until, who
from tests.unit.test_gateway_process import ask, fleet, gateway
from tests.unit.test_gateway_rights import ALL, ALPHA, client, own, status

__all__ = ["fleet"]


def key_file(folder: Path, key: str = MEMBERS) -> Path:
    path = folder / "member-key"
    path.write_text(key)
    path.chmod(0o600)
    return path


def readings_of(*members: str) -> Any:
    told: list[GatewaySnapshot] = []
    return Watcher([], told.append, urls=[UrlMember.parse(one) for one in members]).read().readings


@contextlib.asynccontextmanager
async def stranger(answer: Any) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that nobody here wrote: `answer` gives status and body for a path; and the heads that it got."""
    heads: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                heads.append(head + await reader.readexactly(int(length or 0)))
                code, body = answer(head.split(b" ")[1])
                raw = json.dumps(body).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (code, len(raw), raw))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watched(*readings: Any, grants: Any = ()) -> AsyncIterator[Gateway]:
    made = Gateway()
    await made.listen("127.0.0.1", 0)
    made.update(list(readings), [client(ALL), *grants])
    monitor = asyncio.ensure_future(HealthMonitor(made, 0.01).run())
    try:
        yield made
    finally:
        monitor.cancel()
        await asyncio.gather(monitor, return_exceptions=True)
        await made.close()


@in_loop
async def test_a_server_at_a_url_gets_its_models_and_its_own_key(tmp_path: Path) -> None:
    def answer(path: bytes) -> tuple[int, Any]:
        return (
            (404, {})
            if path.endswith(b"/metrics")
            else (200, {"data": [{"id": "fake"}, {"id": "third"}], "to": "url"})
        )

    with servers(tmp_path, 1) as (honest,):
        async with stranger(answer) as (url, heads):
            named = readings_of(f"{url}/base/v1,model=one,model=two,key-file={key_file(tmp_path)}")
            mine = reading(1, honest.url, source="alpha")
            async with watched(mine, *named, grants=[own("alpha", ALPHA)]) as made:
                await until(lambda: any(b"/base/v1/models" in one for one in heads))  # it has no metrics
                assert set(made.pools) == {"fake", "one", "two"}  # not what it lists
                listed = json.loads((await exchange(made.url, get("/v1/models", ALL))).partition(b"\r\n\r\n")[2])
                assert [one["id"] for one in listed["data"]] == ["fake", "one", "two"]
                heads.clear()
                for _ in range(8):
                    assert who(await exchange(made.url, post({"model": "fake", "messages": []}, ALL))) == "fleet-1"
                assert not [one for one in heads if one.startswith(b"POST")]
                for model in ("one", "two"):
                    sent = post({"model": model, "Model": "third"}, ALL).replace(
                        b"content-length",
                        b"api-key: mine\r\nx-api-key: mine\r\nopenai-organization: o\r\ncontent-length",
                    )
                    assert b'"to": "url"' in await exchange(made.url, sent)
                    got = next(one for one in heads if one.startswith(b"POST"))
                    assert got.startswith(b"POST /base/v1/chat/completions HTTP/1.1\r\n")
                    assert b"authorization: Bearer %b\r\n" % MEMBERS.encode() in got
                    assert ALL.encode() not in got
                    assert b"mine" not in got
                    assert b"organization" not in got
                    assert json.loads(got.partition(b"\r\n\r\n")[2]) == {"model": model}
                    heads.clear()
                for refused in (
                    post({"model": "one"}, ALL, "/v1/files"),
                    post({"model": "one"}, ALL, "/v1/chat/completions/../files"),
                    get("/v1/organization/admin_api_keys?model=one", ALL),
                    post({"x": 1}, ALL, "/v1/chat/completions?model=one"),
                ):
                    assert status(await exchange(made.url, refused)) == 404
                assert not [one for one in heads if b"models" not in one and b"metrics" not in one]
                assert status(await exchange(made.url, post({"model": "one"}, ALPHA))) == 404  # a fleet's own key


@in_loop
async def test_a_url_that_does_not_answer_or_refuses_the_key_is_unwell(tmp_path: Path) -> None:
    code = 404

    def answer(path: bytes) -> tuple[int, Any]:
        return code, {}

    async with stranger(answer) as (url, _):
        gone, there = readings_of("http://127.0.0.1:9,model=fake", f"{url},model=fake")
        async with watched(gone, there) as made:
            first, second = made.members
            await until(lambda: first.judged is Judgement.GONE)
            await until(lambda: not second.has_metrics)
            assert {who(await exchange(made.url, post({"model": "fake"}, ALL))) for _ in range(5)} == {url}
            code = 401
            await until(lambda: second.judged is Judgement.GONE)
            assert [one["text"] for one in made.status()["members"]][1] == "it answers 401"
            code = 404
            await until(lambda: second.judged is Judgement.OK)


@in_loop
async def test_what_a_url_says_of_its_speed_slows_no_other_server(tmp_path: Path) -> None:
    named = readings_of("http://127.0.0.1:9,model=fake")
    async with watched(reading(1, "http://127.0.0.1:9"), *named) as made:
        made.members[1].tokens_per_s, made.members[0].tokens_per_s = 1e9, 1.0
        HealthMonitor(made).check()
        assert made.members[0].judged is not Judgement.SLOW


@in_loop
async def test_a_path_that_no_url_gets_goes_to_the_fleets_server(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as (honest,):
        named = readings_of(f"{honest.url},model=fake,key-file={key_file(tmp_path)}")
        async with watched(reading(1, honest.url), *named) as made:
            bodies = [post({"model": "fake", "prompt": "x", "max_tokens": 1}, ALL, f"/v1/{path}")
                      for path in ("completions", "unheard-of")]  # fmt: skip
            assert {who(await exchange(made.url, bodies[0])) for _ in range(40)} == {"fleet-1", honest.url}
            assert {who(await exchange(made.url, bodies[1])) for _ in range(20)} == {"fleet-1"}


def test_a_body_names_one_model_however_it_is_read() -> None:
    body = b'{"model":"a","Model":"b","MODEL":1,"x":{"Model":[1.50]},"model":"c"}'
    assert with_one_model(body, "a") == b'{"model":"a","x":{"Model":[1.50]}}'
    with pytest.raises(msgspec.DecodeError):
        with_one_model(b"[]", "a")


def test_what_is_refused_at_the_start(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    found = UrlMember.parse(f"https://api.example.org/v1,model=org/a,b,model=c+d,key-file={file}")
    assert (found.name, found.models) == ("https://api.example.org", ("org/a,b", "c+d"))
    for text, sentence in (
        ("http://h:1", "names no model"),
        (f"http://h:1,key-file={file}", "names no model"),
        ("http://h:1,models=a", "is not known"),
        ("http://h:1,model=", "is not known"),
        ("h:1,model=a", "not the address"),
        ("http://h:99999,model=a", "not the address"),
        ("http://h:1/a?b=c,model=a", "not the address"),
        ("http://me:secret@h:1,model=a", "user name or password"),
    ):
        with pytest.raises(UsageError, match=sentence):
            UrlMember.parse(text)
    file.chmod(0o644)
    with pytest.raises(AccessError, match="others may read the key"):
        UrlMember.parse(f"http://h:1,model=a,key-file={file}")


def test_a_key_file_that_cannot_be_read_later_keeps_the_key(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    watcher = Watcher([], lambda _: None, urls=[UrlMember.parse(f"http://h:1,model=a,key-file={file}")])
    assert watcher.read().readings[0].key == MEMBERS
    file.unlink()
    kept = watcher.read().readings[0]
    assert (kept.key, kept.state.value) == (MEMBERS, "ready")
    assert "there is no file" in kept.text


def test_a_gateway_of_urls_alone(corral: Corral, tmp_path: Path) -> None:
    alice = key_file(tmp_path, add_key("alice"))
    with FakeServer(FakeOptions(model="served")) as server, \
            gateway(corral, "--member", f"{server.url}/v1,model=served") as (url, process):  # fmt: skip
        assert process.stderr
        assert "1 client may use it" in process.stderr.readline()
        assert ask(url, alice)
    done = corral("gateway", "--member", "http://127.0.0.1:9")
    assert done.code == 2
    assert "names no model" in done.err
    assert corral("gateway").code == 2


def test_a_fleets_status_has_the_urls_beside_it(fleet: Any, tmp_path: Path) -> None:
    folder, _ = fleet

    async def load() -> GatewayLoad:
        async with watched(*readings_of("http://127.0.0.1:9,model=a")) as made:
            await until(lambda: made.members[0].judged is Judgement.GONE)
            return fleet_load(made, folder.name)

    found = run(load())
    assert not found.members
    path = tmp_path / "load.json"
    path.write_text(dump_json(found))
    assert load_json(GatewayLoad, path).at_urls["http://127.0.0.1:9"].judged is Judgement.GONE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("corral.serve.fleet.status.read_loads", lambda _: {"a": found})
        shown = "\n".join(fleet_lines(fleet_status(folder)))
    assert "at URLs\n  http://127.0.0.1:9  0 running, gone" in shown


@in_loop
async def test_tls_is_verified(tmp_path: Path) -> None:
    member = readings_of("https://127.0.0.1:9/v1,model=a")[0]
    async with watched(member) as made:
        tls = made.members[0].tls
        assert tls is not None
        assert tls.verify_mode is ssl.CERT_REQUIRED
        assert tls.check_hostname
        assert made.members[0].address == ("127.0.0.1", 9)
