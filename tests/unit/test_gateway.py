"""The gateway in front of fake servers: keys, models, routing, queues, and members that die or hang."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import ConflictError, NotFoundError
from corral.client.client import CHAT, Client, run
from corral.client.endpoint import HeldKeyEndpoint
from corral.client.errors import KeyRefusedError, RequestError
from corral.client.metrics import parse
from corral.deploy.deployment.state import State
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.serve.fleet.record import Judgement
from corral.serve.gateway import member
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.health import HealthMonitor, update_from_metrics
from corral.serve.gateway.keys import add_key, digest_of, keys_file, read_keys, remove_key
from corral.serve.gateway.member import MemberReading
from corral.serve.gateway.origins import AllowedOrigins
from corral.serve.gateway.process import fleet_load
from corral.serve.gateway.prompt import read_prompt
from corral.serve.gateway.request import ForwardedRequest
from corral.serve.gateway.usage import Bucket, KeyGrant

KEY, OTHER, MEMBERS = "a-clients-key-of-length", "another-clients-key", "the-members-own-key"
GRANTS = [KeyGrant("own", digest_of(KEY.encode()), frozenset(("fake", "fleet")))]
PACED = Pace(ttft_s=0.01, itl_s=0.004)


def in_loop(work: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def test(tmp_path: Path) -> None:
        run(asyncio.wait_for(work(tmp_path), 60))

    test.__name__ = work.__name__
    return test


def reading(number: int, url: str, **given: Any) -> MemberReading:
    given = {"state": State.READY, "model": "fake", "key": MEMBERS, "source": "fleet", **given}
    return MemberReading(f"fleet-{number}", url=url, **given)


@contextlib.asynccontextmanager
async def gateway_to(*urls: str, grants: list[KeyGrant] = GRANTS, **given: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway()
    await gateway.listen("127.0.0.1", 0)
    gateway.update([reading(number + 1, url, **given) for number, url in enumerate(urls)], grants)
    try:
        yield gateway
    finally:
        await gateway.close()


@contextlib.contextmanager
def servers(tmp_path: Path, count: int, **options: Any) -> Any:
    key = tmp_path / "member-key"
    key.write_text(MEMBERS)
    key.chmod(0o600)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeServer(FakeOptions(key_file=key, **options))) for _ in range(count)]


def client_of(gateway: Gateway, key: str = KEY) -> Client:
    return Client(HeldKeyEndpoint(gateway.url, "fake", key))


def chat(subject: str, number: int = 0, tokens: int = 8) -> dict[str, Any]:
    text = f"{subject} " * 300 + f"question {number}"
    return {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": tokens, "ignore_eos": True}


async def exchange(url: str, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request)
    try:
        return await reader.read(-1)
    finally:
        writer.close()


def post(body: dict[str, Any], key: str = KEY, path: str = "/v1/chat/completions") -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n%b" % (len(raw), raw)


def get(path: str, key: str = KEY) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\r\n".encode()


def who(answer: bytes) -> str:
    return answer.partition(b"x-corral-member: ")[2].partition(b"\r\n")[0].decode()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


# Keys and models


@in_loop
async def test_a_clients_key_opens_the_gateway_and_goes_no_further(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as (a,):
        async with gateway_to(a.url) as gateway, client_of(gateway) as client:
            assert (await client.request(CHAT, chat("x"))).text
            for wrong in ("", "wrong", MEMBERS):  # the member's own key is no client's
                async with client_of(gateway, wrong or "none") as stranger:
                    with pytest.raises(KeyRefusedError):
                        await stranger.request(CHAT, chat("x"))
            answer = await exchange(gateway.url, get("/metrics", "wrong"))
            assert answer.startswith(b"HTTP/1.1 401")
            assert b"www-authenticate: Bearer" in answer
            assert (await exchange(gateway.url, get("/health", "wrong"))).startswith(b"HTTP/1.1 200")
            assert gateway.unknown_keys == 4


@in_loop
async def test_models_are_told_apart_and_refusals_have_openais_form(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as (a,), servers(tmp_path, 1, model="second") as (b,):
        async with gateway_to(a.url) as gateway:
            both = [reading(1, a.url), reading(2, b.url, model="second", source="solo")]
            grants = [*GRANTS, KeyGrant("all", digest_of(OTHER.encode()))]
            gateway.update(both, grants)
            for model, member in (("fake", "fleet-1"), ("second", "fleet-2")):
                answer = await exchange(gateway.url, post({"model": model, "prompt": "x"}, OTHER, "/v1/completions"))
                assert who(answer) == member
            listed = json.loads((await exchange(gateway.url, get("/v1/models", OTHER))).partition(b"\r\n\r\n")[2])
            assert {one["id"] for one in listed["data"]} == {"fake", "second"}
            listed = json.loads((await exchange(gateway.url, get("/v1/models"))).partition(b"\r\n\r\n")[2])
            assert [one["id"] for one in listed["data"]] == ["fake"]  # what this key is good for
            for body, status, words in (
                ({"model": "second", "prompt": "x"}, 404, "'second' is not served here for this key. Known: fake."),
                ({"model": "fakee", "prompt": "x"}, 404, "Did you mean 'fake'?"),
                ({"prompt": "x"}, 200, ""),  # the only one that the key is for
            ):
                answer = await exchange(gateway.url, post(body, path="/v1/completions"))
                assert answer.startswith(b"HTTP/1.1 %d" % status)
                assert words in answer.decode()
                if status != 200:
                    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
                    assert set(error) == {"message", "type", "param", "code"}
            answer = await exchange(gateway.url, post({"prompt": "x"}, OTHER, "/v1/completions"))
            assert answer.startswith(b"HTTP/1.1 400")
            broken = post({}).replace(b"content-length: 2\r\n\r\n{}", b"content-length: 2\r\n\r\n{]")
            assert b"the request body is not valid JSON" in await exchange(gateway.url, broken)


@in_loop
async def test_limits_of_a_key_are_kept_and_counted(tmp_path: Path) -> None:
    grants = [*GRANTS, KeyGrant("small", digest_of(OTHER.encode()), None, rpm=3)]
    with servers(tmp_path, 1) as (a,):
        async with gateway_to(a.url, grants=grants) as gateway:
            body = {"model": "fake", "prompt": "x", "max_tokens": 4, "ignore_eos": True}
            for _ in range(3):
                assert (await exchange(gateway.url, post(body, OTHER, "/v1/completions"))).startswith(b"HTTP/1.1 200")
            refused = await exchange(gateway.url, post(body, OTHER, "/v1/completions"))
            assert refused.startswith(b"HTTP/1.1 429")
            assert b"retry-after: " in refused
            assert b"3 requests per minute" in refused
            assert (await exchange(gateway.url, post(body, KEY, "/v1/completions"))).startswith(b"HTTP/1.1 200")
            small = next(one for one in gateway.status()["keys"] if one["name"] == "small")
            assert (small["answered"], small["limited"], small["output_tokens"]) == (3, 1, 12)
            gateway.update([reading(1, a.url)], GRANTS)  # the key was removed
            assert (await exchange(gateway.url, post(body, OTHER, "/v1/completions"))).startswith(b"HTTP/1.1 401")


def test_a_bucket_fills_again_and_takes_debts() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.spend(60)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 2.0) == 0
    bucket.spend(90)  # an answer that was longer than thought
    assert bucket.wait_s(1, 2.0) == pytest.approx(89.0)
    assert bucket.wait_s(1000, 200.0) == 0  # more than a minute's worth waits for a full bucket only


def test_keys_are_kept_as_hashes_only(clean_home: Path) -> None:
    key = add_key("alice", rpm=5, models=("llama",))
    assert key not in keys_file().read_text()
    assert keys_file().stat().st_mode & 0o077 == 0
    assert [one.name for one in read_keys()] == ["alice"]
    assert bytes.fromhex(read_keys()[0].digest) == digest_of(key.encode())
    with pytest.raises(ConflictError):
        add_key("alice")
    with pytest.raises(NotFoundError) as missing:
        remove_key("alicia")
    assert "alice" in missing.value.remedy
    remove_key("alice")
    assert read_keys() == ()


# Routing


@in_loop
async def test_prompts_that_begin_alike_go_to_one_member_as_text_and_as_ids(tmp_path: Path) -> None:
    with servers(tmp_path, 4) as found:
        async with gateway_to(*(one.url for one in found)) as gateway:
            for kind in ("text", "ids"):
                homes: dict[int, set[str]] = {}
                for number in range(24):
                    subject = number % 6
                    ids = [100 + subject] * 400 + [number + 1]
                    body = (
                        chat(f"{kind} {subject}", number, 2) if kind == "text" else {"prompt": ids, "max_tokens": 2}
                    )
                    path = CHAT if kind == "text" else "/v1/completions"
                    answer = await exchange(gateway.url, post({"model": "fake", **body}, path=path))
                    homes.setdefault(subject, set()).add(who(answer))
                assert all(len(one) == 1 for one in homes.values())
                assert len({name for one in homes.values() for name in one}) == 4


@in_loop
async def test_who_leaves_or_drains_gets_no_new_requests_and_ends_what_it_has(tmp_path: Path) -> None:
    with servers(tmp_path, 2, pace=PACED) as (a, b):
        async with gateway_to(a.url, b.url) as gateway, client_of(gateway) as client:
            running = [asyncio.ensure_future(client.request(CHAT, chat(str(n), n, 60))) for n in range(8)]
            await until(lambda: all(one.active for one in gateway.members))
            gateway.update([reading(1, a.url), reading(2, b.url, leaving=True)], GRANTS)
            more = await asyncio.gather(*(client.request(CHAT, chat(f"y{n}", n)) for n in range(8)))
            assert all(one.text for one in more)
            assert all(one.text for one in await asyncio.gather(*running))
            assert gateway.figures.failed == 0
            assert not gateway.members[1].active


# Queues


@in_loop
async def test_more_than_a_member_seats_waits_here_and_keys_share_fairly(tmp_path: Path) -> None:
    grants = [KeyGrant("batch", digest_of(KEY.encode())), KeyGrant("chat", digest_of(OTHER.encode()))]
    with servers(tmp_path, 1, pace=Pace(ttft_s=0.01)) as (a,):
        async with gateway_to(a.url, grants=grants, seats=2) as gateway:
            async with client_of(gateway) as batch, client_of(gateway, OTHER) as other:
                order: list[str] = []

                async def ask(client: Client, name: str) -> None:
                    await client.request(CHAT, chat(name))
                    order.append(name)

                many = [asyncio.ensure_future(ask(batch, f"b{n}")) for n in range(40)]
                await until(lambda: len(gateway.pools["fake"].queue) >= 30)
                assert gateway.members[0].width == 2
                load = fleet_load(gateway, "fleet")
                assert (load.running, load.members["fleet-1"].running) == (2, 2)
                assert load.waiting >= 30
                assert sum(load.arrivals) == 40
                await ask(other, "chat")
                assert len(order) < 30  # not behind the batch
                await asyncio.gather(*many)
            assert len(order) == 41
            assert gateway.figures.failed == 0
            assert fleet_load(gateway, "fleet").outstanding_tokens == 0


# Failures


class Streams:
    """Requests without pause, and what became of them; a cut after the first byte is counted apart."""

    def __init__(self, gateway: Gateway, count: int, tokens: int = 12) -> None:
        self.done = self.broken = 0
        self.failures: list[RequestError] = []
        self._client, self._tokens, self._stop = client_of(gateway), tokens, False
        self._tasks = [asyncio.ensure_future(self._ask(number)) for number in range(count)]

    async def _ask(self, number: int) -> None:
        while not self._stop:
            events: list[bytes] = []

            def note(event: bytes, _: int, to: list[bytes] = events) -> None:
                to.append(event)

            try:
                await self._client.request(CHAT, chat(f"s{number % 7}", number, self._tokens), on_event=note)
                self.done += 1
            except RequestError as error:
                if events:
                    self.broken += 1
                else:
                    self.failures.append(error)
            number += 1000

    async def more(self, count: int) -> None:
        wanted = self.done + count
        await until(lambda: self.done >= wanted)

    async def end(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)
        await self._client.close()


@in_loop
async def test_a_request_that_was_dropped_goes_to_whoever_has_not_had_it(tmp_path: Path) -> None:
    async with gateway_to(*(f"http://127.0.0.1:{port}" for port in (1, 2, 3))) as gateway:
        pool, user = gateway.pools["fake"], gateway.keys.all()[0]
        prompt = read_prompt(json.dumps({"prompt": "alpha " * 500}).encode(), lambda _: pool.scale)
        for _ in range(5):
            request, asked = ForwardedRequest(pool, user, prompt), []
            for _ in range(4):
                member = request.choose(0.0)
                assert member is not None
                asked.append(member)
                request.leave(member)
            assert len(set(asked[:3])) == 3  # none is avoided for long enough to say so
            assert asked[3] in asked[:3]  # and nobody else is left


@in_loop
async def test_a_member_that_dies_costs_nobody_an_answer_that_had_not_begun(tmp_path: Path) -> None:
    with servers(tmp_path, 3, pace=PACED) as found:
        async with gateway_to(*(one.url for one in found)) as gateway:
            load = Streams(gateway, 32)
            await load.more(60)
            found[0].set_faults("reset:when=before")
            await load.more(100)
            await asyncio.get_running_loop().run_in_executor(None, found[1].stop)
            await load.more(100)
            await load.end()
            assert not load.failures
            assert gateway.figures.retried > 0


DYING = {
    "whole": b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 61\r\n\r\n"
    b'{"error":{"message":"EngineCore died","type":"x","code":500}}',
    "stream": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b'4b\r\ndata: {"error": {"message": "EngineCore died", "type": "x", "code": 500}}\n\n\r\n'
    b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("how", list(DYING))
def test_what_an_engine_says_when_it_dies_is_not_the_answer_while_another_is_ready(how: str, tmp_path: Path) -> None:
    """vLLM answers with 500, and streams that have not begun with an error event, until its server ends."""
    asked = []

    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                asked.append(head)
                writer.write(DYING[how])

    async def ask() -> None:
        ill = await asyncio.start_server(dying, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{ill.sockets[0].getsockname()[1]}"
        body = {"model": "fake", **chat("x", 0, 8), "stream": how == "stream"}
        with servers(tmp_path, 1) as (well,):
            async with ill, gateway_to(url, well.url) as gateway:
                gateway.members[1].work_tokens = 1e9  # the ill one is chosen first
                async with client_of(gateway) as client:
                    answer = await client.request(CHAT, body)
                    assert answer.text
                    assert len(asked) == 1
                    gateway.update([reading(1, url)], GRANTS)  # nobody else is left: it is told what the server said
                    with pytest.raises(RequestError, match="EngineCore died"):
                        await client.request(CHAT, body)

    run(ask())


@in_loop
async def test_a_member_that_refuses_its_key_is_not_the_clients_fault(tmp_path: Path) -> None:
    key = tmp_path / "another-key"
    key.write_text("another")
    key.chmod(0o600)
    with servers(tmp_path, 1) as (a,), FakeServer(FakeOptions(key_file=key)) as b:
        body = {"model": "fake", "prompt": "x", "max_tokens": 4, "ignore_eos": True}
        async with gateway_to(b.url) as gateway:
            refused = await exchange(gateway.url, post(body, path="/v1/completions"))
            assert refused.startswith(b"HTTP/1.1 503")
            assert b"retry-after: " in refused
            assert b"fleet-1 does not accept its key now" in refused
            gateway.update([reading(1, b.url), reading(2, a.url)], GRANTS)
            for _ in range(4):
                answer = await exchange(gateway.url, post(body, path="/v1/completions"))
                assert who(answer) == "fleet-2"


@in_loop
async def test_what_a_request_did_wrong_is_told_by_the_first_who_says_so(tmp_path: Path) -> None:
    with servers(tmp_path, 2) as found:
        for one in found:
            one.set_faults("status:code=400,message=too long")
        async with gateway_to(*(one.url for one in found)) as gateway:
            answer = await exchange(gateway.url, post({"model": "fake", **chat("x", 0, 8)}))
            assert answer.startswith(b"HTTP/1.1 400")
            assert gateway.figures.retried == 0


@in_loop
async def test_an_adapter_that_was_unloaded_is_unknown_at_once(tmp_path: Path) -> None:
    async with gateway_to("http://127.0.0.1:1") as gateway:
        member = gateway.members[0]
        member.models = ("fake", "adapter")
        gateway.regroup()
        assert set(gateway.pools) == {"fake", "adapter"}
        member.models = ("fake",)
        gateway.regroup()
        assert set(gateway.pools) == {"fake"}
        gateway.update([], GRANTS)  # a fleet between two members
        assert set(gateway.pools) == {"fake"}


@in_loop
async def test_tokens_of_a_request_that_nobody_took_are_given_back(tmp_path: Path) -> None:
    grants = [KeyGrant("alice", digest_of(KEY.encode()), tpm=1000)]
    async with gateway_to("http://127.0.0.1:1", grants=grants, state=State.LOADING) as gateway:
        user = gateway.keys.all()[0]
        assert user.tokens_bucket
        before = user.tokens_bucket._level
        async with client_of(gateway) as client:
            asking = asyncio.ensure_future(client.request(CHAT, chat("x", 0, 64)))
            await until(lambda: gateway.pools["fake"].queue.count == 1)
            assert user.tokens_bucket._level < before - 60
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: gateway.pools["fake"].queue.count == 0)
        assert user.tokens_bucket._level == pytest.approx(before)


@in_loop
async def test_a_prompt_that_is_refused_costs_its_key_nothing(tmp_path: Path) -> None:
    grants = [KeyGrant("alice", digest_of(KEY.encode()), tpm=100_000)]
    with servers(tmp_path, 1, max_model_len=256) as (a,):
        async with gateway_to(a.url, grants=grants) as gateway:
            user = gateway.keys.all()[0]
            assert user.tokens_bucket
            before = user.tokens_bucket._level
            answer = await exchange(gateway.url, post({"model": "fake", **chat("word " * 40_000, 0, 64)}))
            assert answer.startswith(b"HTTP/1.1 400")
            assert user.tokens_bucket._level == pytest.approx(before, abs=64)
            assert [row[2:] for row in user.served.values()] == [[0.0, 0.0]]


@in_loop
async def test_a_request_for_very_many_answers_does_not_wait_for_an_empty_server(tmp_path: Path) -> None:
    async with gateway_to("http://127.0.0.1:1", seats=8) as gateway:
        member = gateway.members[0]
        member.width = 4
        assert member.has_seats(1000)
        member.width = 5
        assert not member.has_seats(1000)
        assert member.has_seats(3)


@in_loop
async def test_a_stream_that_breaks_off_says_so_in_an_event_of_its_own(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as (a,):
        a.set_faults("reset:when=mid")
        async with gateway_to(a.url) as gateway:
            answer = await exchange(gateway.url, post({"model": "fake", **chat("x", 0, 64)}))
            events = [line for line in answer.decode().split("\n") if line.startswith("data: ")]
            error = json.loads(events[-1].removeprefix("data: "))["error"]
            assert "fleet-1 broke off" in error["message"]
            assert not answer.endswith(b"0\r\n\r\n")  # and is no whole answer
            assert b"[DONE]" not in answer


@in_loop
async def test_a_stream_that_the_gateways_own_end_cuts_says_so(tmp_path: Path) -> None:
    with servers(tmp_path, 1, pace=Pace(ttft_s=0.01, itl_s=1.0)) as (a,):
        async with gateway_to(a.url) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
            writer.write(post({"model": "fake", **chat("x", 0, 64)}))
            await reader.readuntil(b"data: ")
            await gateway.close()
            answer = (await reader.read()).decode()
            writer.close()
    events = [line for line in answer.split("\n") if line.startswith("data: ")]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["message"] == "corral gateway: it was shut down before the answer was whole"
    assert not answer.endswith("0\r\n\r\n")  # and is no whole answer
    assert "[DONE]" not in answer
    assert (gateway.figures.failed, gateway.figures.left, gateway.figures.running) == (1, 0, 0)


@in_loop
async def test_a_request_that_waits_when_the_gateway_ends_is_answered(tmp_path: Path) -> None:
    async with gateway_to("http://127.0.0.1:1", state=State.LOADING) as gateway:
        asking = asyncio.ensure_future(exchange(gateway.url, post({"model": "fake", **chat("x")})))
        await until(lambda: gateway.pools["fake"].queue.count == 1)
        await gateway.close()
        answer = await asking
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"shut down before there was an answer" in answer


def test_a_member_that_hangs_loses_its_requests_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and answers /health and /metrics all the time."""
    monkeypatch.setattr(member, "FIRST_STALL_S", 0.3)
    monkeypatch.setattr(member, "LEAST_STALL_S", 0.3)

    async def hang() -> None:
        said: list[str] = []
        with servers(tmp_path, 2) as (a, b):
            async with gateway_to(a.url, b.url) as gateway, client_of(gateway) as client:
                gateway.say = said.append
                looking = asyncio.ensure_future(HealthMonitor(gateway, 0.05).run())
                a.set_faults("hang:when=before")
                replies = await asyncio.gather(*(client.request(CHAT, chat(str(n), n)) for n in range(12)))
                assert all(one.text for one in replies)
                assert gateway.figures.failed == 0
                assert gateway.members[0].judged is Judgement.HUNG
                assert any("fleet-1 is hung" in text for text in said)
                await client.request(CHAT, chat("later"))  # to the other one
                a.set_faults()
                await until(lambda: gateway.members[0].judged is Judgement.OK)  # it answers again
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)

    run(asyncio.wait_for(hang(), 60))


@in_loop
async def test_nobody_ready_is_said_with_who_and_why(tmp_path: Path) -> None:
    async with gateway_to() as gateway:
        failed = reading(1, "", state=State.FAILED, text="out of memory")
        gateway.update([failed], GRANTS)
        answer = await exchange(gateway.url, post({"model": "fake", **chat("x")}))
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"out of memory" in answer
        assert (await exchange(gateway.url, get("/health"))).startswith(b"HTTP/1.1 503")
        gateway.update([reading(1, "", state=State.LOADING)], GRANTS)
        waiting = asyncio.ensure_future(exchange(gateway.url, post({"model": "fake", **chat("x")})))
        await until(lambda: len(gateway.pools["fake"].queue) == 1)
        with servers(tmp_path, 1) as (a,):
            gateway.update([reading(1, a.url)], GRANTS)
            assert (await waiting).startswith(b"HTTP/1.1 200")


# What it tells


@in_loop
async def test_metrics_can_be_added_up_beside_the_engines(tmp_path: Path) -> None:
    with servers(tmp_path, 2) as (a, b):
        async with gateway_to(a.url, b.url) as gateway, client_of(gateway) as client:
            bodies = [{"prompt": f"{n} " * 200, "max_tokens": 5, "ignore_eos": True} for n in range(10)]
            replies = await asyncio.gather(*(client.request("/v1/completions", body) for body in bodies))
            monitor = HealthMonitor(gateway, 0.01)
            monitor.check()
            await asyncio.gather(*monitor._tasks.values())
            page = await client.page("/metrics")
            found = parse(page.body, 0.0)
            assert found.generated_tokens == 50
            assert found.prompt_tokens == sum(one.usage.prompt_tokens for one in replies if one.usage)
            assert (found.running, found.waiting, found.finished) == (0, 0, 10)
            assert found.ttft_count == 0  # none was a stream
            assert b"vllm:" not in page.body
            assert b"# HELP corral_gateway_time_to_first_token_seconds Time from a request" in page.body
            assert found.prefix_queries == found.prompt_tokens  # as the members told it
            text = page.body.decode()
            assert 'key="own"' in text
            assert 'member="fleet-2"' in text
            for word in ("# TYPE", "# HELP"):
                names = [line.split()[2] for line in text.splitlines() if line.startswith(word)]
                assert len(names) == len(set(names))
            for one in monitor._clients.values():
                await one.close()


STREAMS = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"Paris"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":" is"}}]}\n\n',
]


@pytest.mark.parametrize(("kind", "counted"), [(b"text/event-stream", 1), (b"application/json", 0)])
def test_the_time_to_the_first_token_ends_with_content(kind: bytes, counted: int) -> None:
    async def measure() -> None:
        sent = asyncio.Event()

        async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: %b\r\n\r\n" % kind)
                for event in STREAMS:
                    writer.write(event)
                    await sent.wait()
                    sent.clear()

        server = await asyncio.start_server(stream, "127.0.0.1", 0)
        async with server, gateway_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as gateway:
            counts = lambda: sum(gateway.pools["fake"].ttft.counts)  # noqa: E731
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
            writer.write(post({"model": "fake", "stream": True, "messages": []}))
            for content, seen in ((b'"content":""', 0), (b"Paris", counted), (b" is", counted)):
                await reader.readuntil(content)
                assert counts() == seen
                sent.set()
            writer.close()

    run(asyncio.wait_for(measure(), 60))


@pytest.mark.parametrize(("status", "works"), [(200, True), (500, False), (404, False)])
def test_a_server_that_only_embeds_shows_so_that_it_works(status: int, works: bool) -> None:
    asked: list[bytes] = []

    async def embeds(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                asked.append(head.split()[1])
                code = status if asked[-1] == b"/v1/embeddings" else 404
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\n{}" % code)

    async def probe() -> None:
        server = await asyncio.start_server(embeds, "127.0.0.1", 0)
        async with server, gateway_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as gateway:
            monitor, member = HealthMonitor(gateway), gateway.members[0]
            member.progress.hung = True
            await monitor._probe(member)
            assert asked == [b"/v1/completions", b"/v1/embeddings"]
            assert member.progress.hung is not works
            for one in monitor._clients.values():
                await one.close()

    run(probe())


@in_loop
async def test_a_member_that_is_still_loading_is_not_out_of_reach(tmp_path: Path) -> None:
    async with gateway_to("http://127.0.0.1:1", state=State.LOADING) as gateway:
        monitor, member = HealthMonitor(gateway), gateway.members[0]
        member.unreachable = 10
        monitor.check()
        assert (member.judged, member.unreachable) == (Judgement.OK, 0)
        assert not monitor._tasks  # it is not asked yet
        gateway.update([reading(1, "http://127.0.0.1:1")], GRANTS)
        member.unreachable = 10
        monitor.check()
        assert member.judged is Judgement.GONE
        await asyncio.gather(*monitor._tasks.values())
        for one in monitor._clients.values():
            await one.close()


def paced(at_s: float, gaps: int, each_s: float) -> bytes:
    name = "vllm:inter_token_latency_seconds"
    return b"%s_sum %f\n%s_count %d\n" % (name.encode(), gaps * each_s, name.encode(), gaps)


@in_loop
async def test_a_member_is_slow_by_many_times_between_tokens_and_not_by_one_second(tmp_path: Path) -> None:
    """Seen on equal servers with short answers: one was called slow because its second was spent on prefill."""
    async with gateway_to("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3") as gateway:
        said: list[str] = []
        gateway.say = said.append
        monitor, slow = HealthMonitor(gateway), gateway.members[0]

        def look(at_s: float, gaps: int, each_s: float, rest: bytes = b"") -> None:
            for member in gateway.members:
                own = each_s if member is slow else 0.05
                update_from_metrics(member, parse(paced(at_s, gaps, own) + rest, at_s))
            for member in gateway.members:
                monitor._judge(member, time.monotonic())

        for second in range(5):  # one token a second, each after somebody else's prefill
            rest = b"vllm:num_requests_running 1\nvllm:generation_tokens_total %d\n" % second
            look(float(second), second, 1.0, rest)
        for second in range(5, 60):
            look(float(second), second * 40, 0.11)  # half as fast: its requests may be other ones
        assert (slow.judged, slow.speed, said) == (Judgement.OK, 1.0, [])
        for second in range(60, 90):
            look(float(second), second * 40, 0.5)
        assert slow.judged is Judgement.SLOW
        assert 0.05 <= slow.speed < 0.25
        assert [one.speed for one in gateway.members[1:]] == [1.0, 1.0]


@in_loop
async def test_a_prompt_that_is_still_being_computed_says_nothing_about_the_size_of_a_cache(tmp_path: Path) -> None:
    async with gateway_to("http://127.0.0.1:1") as gateway:
        pool, member = gateway.pools["fake"], gateway.members[0]
        member.holdings.capacity_tokens = 20_000.0
        prompt = read_prompt(json.dumps({"prompt": "alpha " * 500}).encode(), lambda _: pool.scale)
        user = gateway.keys.all()[0]
        missed = b'{"usage":{"prompt_tokens":750,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":0}}}'

        def answer(request: ForwardedRequest) -> None:
            request.answer_began(member, [])
            request.answer_advanced(0.0, [missed])
            request.leave(member)
            request.finish(200, whole=True)

        both = [ForwardedRequest(pool, user, prompt) for _ in range(2)]
        for request in both:
            assert request.choose(0.0) is member
        for request in both:
            answer(request)
        assert member.holdings.capacity_tokens == 20_000.0
        member.holdings.clock += 10_000
        late = ForwardedRequest(pool, user, prompt)
        assert late.choose(0.0) is member
        answer(late)
        assert member.holdings.capacity_tokens < 20_000.0  # nobody was computing it then


@in_loop
async def test_requests_of_others_take_seats_too(tmp_path: Path) -> None:
    async with gateway_to("http://127.0.0.1:1", seats=4) as gateway:
        member = gateway.members[0]
        page = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 0\n"
        for at in (0.0, 1.0):
            update_from_metrics(member, parse(page, at))
        assert member.outside == 3
        assert member.has_seats(1)
        assert not member.has_seats(2)


@in_loop
async def test_head_has_no_body_and_a_model_is_found_by_its_name(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as (a,):
        async with gateway_to(a.url) as gateway:

            async def asked(method: str, path: str) -> tuple[bytes, bytes]:
                lines = (
                    f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n\r\n"
                )
                answer = await exchange(gateway.url, lines.encode())
                head, _, body = answer.partition(b"\r\n\r\n")
                return head, body

            head, body = await asked("HEAD", "/v1/models")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"content-length: 0" not in head
            assert body == b""
            head, body = await asked("HEAD", "/version?model=fake")  # of a member
            assert head.startswith(b"HTTP/1.1 405")  # as the stand-in says
            assert body == b""
            head, body = await asked("GET", "/v1/models/fake")
            assert json.loads(body)["id"] == "fake"
            head, body = await asked("GET", "/v1/models/fale")
            assert head.startswith(b"HTTP/1.1 404")
            assert "Did you mean 'fake'?" in json.loads(body)["error"]["message"]
            head, body = await asked("GET", "/tokenizer_info?model=fake")
            assert json.loads(body)["bos_token"] == "<s>"


@in_loop
async def test_pages_of_a_named_origin_may_ask_and_read_every_answer(tmp_path: Path) -> None:
    ours, evil = "https://chat.example.org", "https://evil.example.org"
    with servers(tmp_path, 1) as (a,):
        async with gateway_to(a.url) as gateway:
            assert b"access-control" not in await exchange(gateway.url, preflight(ours))  # closed by default
            gateway.origins = AllowedOrigins([ours])
            answer = await exchange(gateway.url, preflight(ours))
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"access-control-allow-headers: authorization\r\n" in answer
            refused = await exchange(gateway.url, preflight(evil))
            assert refused.startswith(b"HTTP/1.1 401")
            assert b"access-control" not in refused
            for key, status in ((KEY, b"200"), ("wrong" * 8, b"401")):
                for origin, count in ((ours, 1), (evil, 0)):
                    request = post({"model": "fake", **chat("x")}, key).replace(
                        b"host: x", b"host: x\r\norigin: " + origin.encode()
                    )
                    answer = await exchange(gateway.url, request)
                    assert answer.startswith(b"HTTP/1.1 " + status)
                    assert answer.count(b"access-control-allow-origin: ") == count


def preflight(origin: str) -> bytes:
    lines = ("OPTIONS /v1/chat/completions HTTP/1.1", "host: x", f"origin: {origin}", "connection: close",
             "access-control-request-method: POST", "access-control-request-headers: authorization")  # fmt: skip
    return "\r\n".join((*lines, "", "")).encode()
