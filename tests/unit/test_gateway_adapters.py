"""Adapters behind a gateway: routed by name to few members, listed, removed; and the paths that stay closed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.fake.pace import Pace
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.health import HealthMonitor
from corral.serve.gateway.keys import digest_of
from corral.serve.gateway.policies import few_for
from corral.serve.gateway.prompt import Holdings, RoutedPrompt
from corral.serve.gateway.usage import KeyGrant
from tests.unit.test_gateway import KEY, exchange, gateway_to, get, in_loop, post, reading, servers, until, who

GRANTS = [KeyGrant("fleet", digest_of(KEY.encode()), frozenset(("fake", "fleet")), source="fleet")]  # the fleet's own
NAMES = tuple(f"adapter-{number}" for number in range(32))


class Server:
    def __init__(self, name: str, work: float = 0.0) -> None:
        self.name, self.work_tokens, self.recent, self.holdings = name, work, 0.0, Holdings()


def folder_of(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / "adapters" / name).mkdir(parents=True)
    return tmp_path / "adapters"


def prompt(tokens: float = 10.0) -> RoutedPrompt:
    return RoutedPrompt("a", [], 1.0, tokens, 0, 1.0, 1, stream=False)


def listed(answer: bytes) -> list[str]:
    return [card["id"] for card in json.loads(answer.partition(b"\r\n\r\n")[2])["data"]]


async def ask(gateway: Gateway, model: str, key: str = KEY) -> bytes:
    body = {"model": model, "prompt": f"words for {model}", "max_tokens": 8, "ignore_eos": True}
    return await exchange(gateway.url, post(body, key, "/v1/completions"))


def test_idle_members_get_an_adapter_each() -> None:
    members = [Server(f"fleet-{number}") for number in range(8)]
    chosen = {name: few_for(name, members, prompt()) for name in NAMES}
    assert all(len(few) == 1 for few in chosen.values())
    assert len({few[0].name for few in chosen.values()}) > 4  # spread over the members
    assert all(few_for(name, members[::-1], prompt()) == few for name, few in chosen.items())  # always the same
    fewer = [one for one in members if one.name != "fleet-0"]
    for name, few in chosen.items():  # of a lost member alone the adapters move
        assert few[0].name == "fleet-0" or few_for(name, fewer, prompt()) == few


def test_a_hot_adapter_gets_more_members() -> None:
    members = [Server(f"fleet-{number}") for number in range(4)]
    first = few_for("hot", members, prompt())[0]
    first.work_tokens = 10_000.0
    few = few_for("hot", members, prompt())
    assert len(few) == 2
    assert few[0] is first
    for one in members:
        one.work_tokens = 10_000.0
    assert few_for("hot", members, prompt()) == [first]


@in_loop
async def test_32_adapters_on_a_fleet_of_two_under_load(tmp_path: Path) -> None:
    pace = Pace(ttft_s=0.002, itl_s=0.001, max_seqs=64)
    with servers(tmp_path, 2, adapters=folder_of(tmp_path, *NAMES), pace=pace) as (a, b):
        async with gateway_to(a.url, b.url, adapters=NAMES, seats=64, grants=GRANTS) as gateway:
            monitor = asyncio.ensure_future(HealthMonitor(gateway, 0.05).run())
            await until(lambda: set(gateway.pools) == {"fake", *NAMES})
            assert set(listed(await exchange(gateway.url, get("/v1/models")))) == {"fake", *NAMES}
            where: dict[str, Counter[str]] = {name: Counter() for name in ("fake", *NAMES)}
            statuses: Counter[int] = Counter()

            async def client(number: int) -> None:
                for turn in range(20):
                    model = ("fake", *NAMES)[(7 * number + turn) % 33]
                    answer = await ask(gateway, model)
                    statuses[int(answer.split(b" ")[1])] += 1
                    where[model][who(answer)] += 1

            await asyncio.gather(*(client(number) for number in range(40)))
            monitor.cancel()
            assert statuses == {200: 800}
            assert gateway.figures.failed == gateway.figures.refused == 0
            most = {name: where[name].most_common(1)[0] for name in NAMES}
            assert sum(count for _, count in most.values()) > 0.75 * sum(where[name].total() for name in NAMES)
            assert {member for member, _ in most.values()} == {"fleet-1", "fleet-2"}
            for path in closed_paths():
                assert b" 403 " in (await exchange(gateway.url, post({"lora_name": "x"}, KEY, path)))[:16], path


def closed_paths() -> list[str]:
    return [f"/v1/{verb}_lora_adapter{end}" for verb in ("load", "unload") for end in ("", "/", "?model=fake")] + [
        "/v1//load_lora_adapter", "/v1/%6coad_lora_adapter", "/v1/load%5Flora_adapter", "/v1/./unload_lora_adapter",
    ]  # fmt: skip


@pytest.mark.parametrize("path", closed_paths())
def test_the_paths_that_load_adapters_are_closed(tmp_path: Path, path: str) -> None:
    async def work(_: Path) -> None:
        async with gateway_to("http://127.0.0.1:1") as gateway:  # no server is asked
            body: dict[str, Any] = {"model": "fake", "lora_name": "x", "lora_path": "/tmp"}
            assert (await exchange(gateway.url, post(body, KEY, path))).startswith(b"HTTP/1.1 403")
            assert (await exchange(gateway.url, get(path))).startswith(b"HTTP/1.1 403")
            assert (await exchange(gateway.url, post(body, "wrong", path))).startswith(b"HTTP/1.1 401")

    in_loop(work)(tmp_path)


@in_loop
async def test_an_adapter_comes_and_goes_with_its_owners_folder(tmp_path: Path) -> None:
    with servers(tmp_path, 1, adapters=folder_of(tmp_path, "old", "new", "claimed")) as (a,):
        async with gateway_to(a.url, adapters=("old",), grants=GRANTS) as gateway:
            monitor = asyncio.ensure_future(HealthMonitor(gateway, 0.01).run())
            await until(lambda: "old" in gateway.pools)
            assert b"HTTP/1.1 404" in await ask(gateway, "new")
            before = reading(1, a.url, adapters=("old",))
            gateway.update([replace(before, adapters=("old", "new"))], GRANTS)
            await until(lambda: "new" in gateway.pools)  # without waiting a minute for the next list
            assert b"HTTP/1.1 200" in await ask(gateway, "new")
            gateway.update([replace(before, adapters=("new",))], GRANTS)
            assert b"HTTP/1.1 404" in await ask(gateway, "old")  # at once, whatever the server still lists
            assert set(gateway.pools) == {"fake", "new"}
            assert b"HTTP/1.1 404" in await ask(gateway, "claimed")
            monitor.cancel()
