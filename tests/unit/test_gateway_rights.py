"""What a key and a server may do at the gateway: what the records say, whatever a request or a server claims.

And what time may do to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from corral.client.client import run
from corral.deploy.launch.adapters import adapters
from corral.serve.fleet.record import Judgement
from corral.serve.gateway.form import BadFormError, FormReader
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.health import HealthMonitor
from corral.serve.gateway.keys import digest_of
from corral.serve.gateway.large_json import BadBodyError
from corral.serve.gateway.prompt import TokenScale, read_prompt
from corral.serve.gateway.usage import KeyGrant
from tests.unit.test_gateway import exchange, gateway_to, get, in_loop, post, reading, servers, until, who

ALL, ALPHA, BETA, ONE = "good-for-all", "alphas-own-key", "betas-own-key", "good-for-one-model"


def own(source: str, key: str, model: str = "fake") -> KeyGrant:
    return KeyGrant(source, digest_of(key.encode()), frozenset((model, source)), source=source)


def client(key: str, *models: str) -> KeyGrant:
    return KeyGrant(key, digest_of(key.encode()), frozenset(models) or None)


async def ask(gateway: Gateway, model: str | None, key: str) -> bytes:
    body = {"prompt": "x", "max_tokens": 1} | ({} if model is None else {"model": model})
    return await exchange(gateway.url, post(body, key, "/v1/completions"))


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


@in_loop
async def test_a_server_gets_no_requests_for_a_model_that_it_only_claims(tmp_path: Path) -> None:
    async def hostile(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        claims = {"data": [{"id": name} for name in ("beta", "own-adapter", "alpha", "gamma")]}
        raw = json.dumps(claims).encode()
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw))

    server = await asyncio.start_server(hostile, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with servers(tmp_path, 1, model="beta") as (honest,):
        async with server, gateway_to() as gateway:
            readings = [
                reading(1, url, model="alpha", source="alpha", adapters=("own-adapter",)),
                reading(2, honest.url, model="beta", source="beta"),
            ]
            gateway.update(readings, [client(ALL), own("alpha", ALPHA, "alpha"), own("beta", BETA, "beta")])
            monitor = asyncio.ensure_future(HealthMonitor(gateway, 0.01).run())
            await until(lambda: len(gateway.members[0].models) > 1)
            monitor.cancel()
            assert gateway.members[0].models == ("alpha", "own-adapter")
            assert set(gateway.pools) == {"alpha", "beta", "own-adapter"}
            assert {who(await ask(gateway, "beta", ALL)) for _ in range(20)} == {"fleet-2"}
            assert status(await ask(gateway, "beta", ALPHA)) == 404  # its own key opens no other's server
            assert status(await ask(gateway, "own-adapter", BETA)) == 404


@in_loop
async def test_of_two_deployments_of_one_name_a_key_opens_only_its_own(tmp_path: Path) -> None:
    with servers(tmp_path, 2) as (a, b):
        async with gateway_to() as gateway:
            grants = [own("alpha", ALPHA), own("beta", BETA), client(ALL), client(ONE, "beta")]
            gateway.update([reading(1, a.url, source="alpha"), reading(2, b.url, source="beta")], grants)
            for key, reached in ((ALPHA, {"fleet-1"}), (BETA, {"fleet-2"}), (ONE, {"fleet-2"})):
                assert {who(await ask(gateway, "fake", key)) for _ in range(12)} == reached
            assert {who(await ask(gateway, "fake", ALL)) for _ in range(24)} == {"fleet-1", "fleet-2"}


@in_loop
async def test_a_key_whose_servers_are_full_keeps_nobody_elses_waiting(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as (b,):
        async with gateway_to() as gateway:
            grants = [own("alpha", ALPHA), own("beta", BETA)]
            readings = [reading(1, "http://127.0.0.1:1", source="alpha", seats=1), reading(2, b.url, source="beta")]
            gateway.update(readings, grants)
            gateway.members[0].outside = 1  # all its seats are taken by others
            waiting = [asyncio.ensure_future(ask(gateway, "fake", ALPHA)) for _ in range(3)]
            await until(lambda: gateway.pools["fake"].queue.count == 3)
            assert who(await ask(gateway, "fake", BETA)) == "fleet-2"
            assert not any(one.done() for one in waiting)
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


@in_loop
async def test_a_key_for_a_model_or_a_fleet_is_not_one_for_its_adapters(tmp_path: Path) -> None:
    async with gateway_to() as gateway:
        grants = [own("fleet", ALPHA), client(ONE, "fleet"), client(BETA, "adapter"), client(ALL, "fake")]
        gateway.update([reading(1, "http://127.0.0.1:1", adapters=("adapter",))], grants)
        gateway.members[0].models = ("fake", "adapter")
        gateway.regroup()
        for key, models in ((ALPHA, {"fake", "adapter"}), (ONE, {"fake"}), (ALL, {"fake"}), (BETA, {"adapter"})):
            listed = json.loads((await exchange(gateway.url, get("/v1/models", key))).partition(b"\r\n\r\n")[2])
            assert {one["id"] for one in listed["data"]} == models
        assert status(await ask(gateway, None, BETA)) == 400  # the server would take its base model


@in_loop
async def test_json_is_decoded_up_to_a_length_that_no_stream_notices(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("corral.serve.gateway.gateway.LARGEST_JSON_BYTES", 1000)
        async with gateway_to(grants=[client(ALL)]) as gateway:
            answer = await exchange(gateway.url, post({"model": "x" * 2000}, ALL))
            assert status(answer) == 400
            assert b"longer than 1,000 bytes" in answer


BYPASSES: dict[str, tuple[str, bytes]] = {
    "content type in capitals": ("Application/JSON", b'{"model": "second", "x": NaN}'),
    "another type": ("text/plain", b'{"model": "second", "x": NaN}'),
    "no type": ("", b'{"model": "second", "x": NaN}'),
    "a form only by name": ("multipart/form-data", b'{"model": "second"}'),
    "infinity": ("application/json", b'{"model": "second", "x": Infinity}'),
    "a byte order mark": ("application/json", b'\xef\xbb\xbf{"model": "second"}'),
    "UTF-16": ("application/json", '{"model": "second"}'.encode("utf-16")),
    "UTF-32": ("application/json", '{"model": "second"}'.encode("utf-32-be")),
    "a lone surrogate": ("application/json", b'{"model": "second", "model": "\\ud800"}'),
    "a surrogate elsewhere": ("application/json", b'{"model": "second", "prompt": ["\\ud800"]}'),
    "no text": ("application/json", b'{"model": ["second"]}'),
    "a list": ("application/json", b'[{"model": "second"}]'),
    "a very long name": ("application/json", b'{"model": "%b"}' % (b"second" * 10_000)),
    "a number without end": ("application/json", b'{"model": "fake", "prompt": [1e999]}'),
    "not UTF-8": ("application/json", b'{"model": "fake", "prompt": ["\xff"]}'),
    "deep": ("application/json", b'{"model": "fake", "prompt": ' + b"[" * 100_000),
    "deep and whole": ("application/json", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
}


@pytest.mark.parametrize("way", BYPASSES)
def test_a_body_that_cannot_be_read_is_refused_and_given_back(way: str, tmp_path: Path) -> None:
    async def attack() -> None:
        kind, body = BYPASSES[way]
        with servers(tmp_path, 1) as (a,), servers(tmp_path, 1, model="second") as (b,):
            async with gateway_to() as gateway:
                readings = [reading(1, a.url), reading(2, b.url, model="second", source="solo")]
                gateway.update(readings, [client(ONE, "fake"), client(ALL)])
                head = f"POST /v1/completions HTTP/1.1\r\nconnection: close\r\nauthorization: Bearer {ONE}\r\n"
                head += f"content-type: {kind}\r\n" if kind else ""
                answer = await exchange(gateway.url, head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
                assert status(answer) == 400, answer
                assert gateway.held.total == 0
                assert status(await ask(gateway, "fake", ONE)) == 200

    run(asyncio.wait_for(attack(), 60))


def form(*parts: tuple[str, str]) -> bytes:
    made = "".join(f"--b\r\ncontent-disposition: form-data; {head}\r\n\r\n{value}\r\n" for head, value in parts)
    return made.encode() + b"--b--\r\n"


class Searched(bytearray):
    """A body that counts the bytes in which something was looked for."""

    searched = 0

    def find(self, sub: Any, start: Any = 0, end: Any = None) -> int:
        stop = len(self) if end is None else min(end, len(self))
        self.searched += stop - start
        return super().find(sub, start, stop)


def form_model(kind: bytes, body: bytes, step: int = 0) -> str | None:
    """The model of a form that arrives in pieces."""
    arrived = Searched()
    reader = FormReader(kind, arrived)
    for at in range(0, len(body), step or len(body)):
        arrived += body[at : at + (step or len(body))]
        reader.advance()
    found = reader.model()
    assert arrived.searched < 3 * len(body) + 2 * 4096 * len(body) // (step or len(body))
    return found


def test_a_long_form_is_searched_once_while_it_arrives() -> None:
    audio = ('name="file"; filename="a.wav"', "\r\n--" * 100_000)
    body = form(audio, ('name="model"', "whisper"))
    for step in (999, 65_536):
        assert form_model(b"multipart/form-data; boundary=b", body, step) == "whisper"


@in_loop
async def test_no_form_is_searched_at_once_when_it_has_arrived(tmp_path: Path) -> None:
    steps: list[int] = []

    class Reader(FormReader):
        def advance(self) -> None:
            steps.append(1)
            super().advance()

    with servers(tmp_path, 1) as (a,), pytest.MonkeyPatch.context() as patch:
        patch.setattr("corral.serve.gateway.client_connection.FormReader", Reader)
        async with gateway_to(a.url, grants=[client(ALL)]) as gateway:
            body = form(("name=file", "x" * 2_000_000), ('name="model"', "unheard-of"))
            head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nauthorization: Bearer {ALL}\r\nconnection: close\r\n"
            head += f"content-type: multipart/form-data; boundary=b\r\ncontent-length: {len(body)}\r\n\r\n"
            answer = await exchange(gateway.url, head.encode() + body)
            assert status(answer) == 404
            assert b"'unheard-of'" in answer
            assert len(steps) > 2


def test_the_model_of_a_form_is_read() -> None:
    kind = b"Multipart/Form-Data; boundary=b"
    audio = ('name="file"; filename="a.wav"', "name=model\r\n\r\nx")
    for step in (0, 1, 2, 3, 7):
        assert form_model(kind, form(audio, ('name="model"', "whisper")), step) == "whisper"
        assert form_model(kind, form(audio), step) is None
    for bad in (
        form(('name="model"', "a"), ('name="model"', "b")),
        form(('name="model"', "\udcff".encode("utf-8", "surrogatepass").decode("latin-1"))).replace(b"\xc3", b"\xff"),
        form(("x=y", "model")),
        form(('name="x"\r\ncontent-disposition: form-data; name="model"', "a")),
        form(('name="x";\r\n name="model"', "a")),
        b"preamble\r\n" + form(audio),
        form(audio)[:-6],
        form(*[audio] * 300),
        b"--b\r\n" + b"x" * 10_000,
    ):
        for step in (0, 11):
            with pytest.raises(BadFormError):
                form_model(kind, bad, step)
    for other in (b"multipart/form-data", kind + b"; charset=utf-7"):
        with pytest.raises(BadFormError):
            form_model(other, form(audio))


@in_loop
async def test_a_key_sees_only_itself_and_what_it_may_use(tmp_path: Path) -> None:
    async with gateway_to() as gateway:
        grants = [own("fleet", ALPHA), client(ONE, "fake"), client(BETA, "second")]
        readings = [reading(1, "http://127.0.0.1:1"), reading(2, "http://127.0.0.1:1", model="second", source="solo")]
        gateway.update(readings, grants)
        for user in gateway.keys.all():
            user.count("fake", "fleet-1", 1, 1, whole=True)
        waiting = asyncio.ensure_future(ask(gateway, "second", BETA))
        gateway.members[1].leaving = True
        gateway.regroup()
        await until(lambda: gateway.pools["second"].queue.count == 1)
        for path in ("/metrics", "/gateway/status"):
            seen = (await exchange(gateway.url, get(path, ONE))).decode()
            assert ONE in seen
            assert "fleet-1" in seen
            for hidden in (BETA, '"second"', "fleet-2"):
                assert hidden not in seen
            seen = (await exchange(gateway.url, get(path, ALPHA))).decode()  # the owner's
            assert all(name in seen for name in (ONE, BETA, "second", "fleet-2"))
        no_such, other = await ask(gateway, "secret", ONE), await ask(gateway, "second", ONE)
        assert no_such.replace(b"secret", b"second") == other  # a name tells nobody whether it exists
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


def test_the_adapters_of_a_launch_are_those_that_its_owner_named() -> None:
    def named(*argv: str) -> tuple[str, ...]:
        rank = type("Rank", (), {"argv": argv})()
        spec: Any = type("Spec", (), {"ranks": (rank,), "adapters": ""})()
        return adapters(spec)

    assert named("vllm", "serve", "--lora-modules", "a=/x", '{"name": "b", "path": "/y"}', "--port", "c=d") == (
        "a",
        "b",
    )
    assert named("vllm", "--lora-modules=a=/x", "b=/y", "--enable-lora") == ("a", "b")
    assert named("bash", "-c", "exec vllm serve m --lora-modules a=/x b=/y --enable-lora") == ("a", "b")
    assert named("vllm", "serve", "m", "x=y") == ()


def test_what_is_read_of_a_prompt_is_bounded() -> None:
    scale = TokenScale()
    ids = json.dumps({"model": "m", "prompt": list(range(400_000))}).encode()
    prompt = read_prompt(ids, lambda _: scale)  # longer than is decoded: compared as text
    assert prompt.model == "m"
    assert prompt.tokens > 100_000
    with pytest.raises(BadBodyError, match="nested too deep"):
        read_prompt(b'{"prompt": ' + b"[" * 100_000, lambda _: scale)


@pytest.mark.parametrize("name", ["model", "n", "max_tokens", "stream", "tools"])
def test_an_array_in_place_of_a_name_or_a_number_is_not_decoded(name: str) -> None:
    body = b'{"%b": [%b]}' % (name.encode(), b"[]," * 100_000 + b"[]")  # half a minute for 64 MiB, as Python lists
    tracemalloc.start()
    try:
        with pytest.raises(BadBodyError) if name == "model" else contextlib.nullcontext():
            read_prompt(body, lambda _: TokenScale())
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()


# Time


class Given:
    """A request that a member has, as its judge sees it."""

    def __init__(self) -> None:
        self.given_up = 0

    def give_up(self, silent_since_s: float, reason: str = "") -> None:
        self.given_up += 1


@in_loop
async def test_time_in_which_the_judge_was_away_does_not_count(tmp_path: Path) -> None:
    """SIGSTOP, or a loop that was held: what arrived meanwhile could not be seen."""
    now = 1000.0
    async with gateway_to("http://127.0.0.1:1") as gateway:
        member, stream = gateway.members[0], Given()
        monitor = HealthMonitor(gateway, clock=lambda: now)
        member.active.add(stream)
        member.progress.busy(now)
        for _ in range(5):
            now += 1.0
            member.progress.moved(now)
            monitor.check()
        for away_s in (12.0, 3600.0):
            now += away_s
            monitor.check()
            assert (member.judged, stream.given_up) == (Judgement.OK, 0)
            now += 1.0
            member.progress.moved(now)
            monitor.check()
        while member.judged is Judgement.OK:  # time in which it does look counts as before
            now += 1.0
            monitor.check()
        assert member.judged is Judgement.HUNG
        assert stream.given_up == 1


@in_loop
async def test_no_step_of_the_wall_clock_changes_what_a_client_gets(tmp_path: Path) -> None:
    real, step = time.time, [0.0]
    with servers(tmp_path, 1) as (a,), pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + step[0])
        async with gateway_to(a.url, grants=[KeyGrant("k", digest_of(ALL.encode()), rpm=60)]) as gateway:
            monitor = HealthMonitor(gateway)
            for step[0] in (0.0, 86_400.0, -86_400.0, 3600.0, 0.0):
                monitor.check()
                gateway._sweep()
                assert status(await ask(gateway, "fake", ALL)) == 200
            bucket = gateway.keys.all()[0].requests_bucket
            assert bucket is not None
            assert bucket._level < 60  # no minute has passed
