"""A fleet behind its own gateway, with stand-in engines: one name for everything, and a rolling change of size."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

from corral.client.client import CHAT, Client, run
from corral.client.errors import RequestError
from corral.deploy.deployment.events import read_events
from corral.serve.fleet.record import held_gateways, open_fleet
from corral.serve.fleet.status import fleet_status
from corral.serve.resolve import FleetServer, find_servers, resolve
from tests.unit.conftest import Corral
from tests.until import LIMIT_S, polled, until

STREAMS = 12  # 64, and from four members to one and six: tests/cluster/fleet_faults.py
REST_S = 0.2  # between two requests of one: what starts beside them needs the processor


def ready(count: int) -> bool:
    found = fleet_status(open_fleet("herd"))
    return len(found.members) == count and found.ready == count


def come(count: int) -> None:
    """As many are ready; if not, what became of the fleet is told."""
    if not polled(lambda: ready(count), LIMIT_S):
        told = [event.get("text") for event in read_events(open_fleet("herd").events)]
        raise AssertionError(f"never {count} members: {fleet_status(open_fleet('herd'))}; {told}")


class Streams:
    """Clients that ask again and again, and what became of each request."""

    def __init__(self) -> None:
        self.whole, self.over = 0, False
        self.failures: list[str] = []

    async def run(self, client: Client, during: list[tuple[list[str], int]], corral: Corral) -> None:
        running = [asyncio.ensure_future(self._stream(client, number)) for number in range(STREAMS)]
        try:
            for words, count in during:
                done = await asyncio.to_thread(corral, *words)
                assert done.code == 0, done.err
                await asyncio.to_thread(come, count)
                before = self.whole
                await asyncio.to_thread(until, lambda before=before: self.whole > before + STREAMS, "answers go on")
        finally:
            self.over = True
            await asyncio.gather(*running)

    async def _stream(self, client: Client, number: int) -> None:
        turn = 0
        while not self.over:
            turn += 1
            body = {"messages": [{"role": "user", "content": f"{number} {turn}"}], "stream": True, "max_tokens": 6}
            try:
                await client.request(CHAT, body)
                self.whole += 1
            except RequestError as error:
                self.failures.append(f"{type(error).__name__}: {error.message}")
            await asyncio.sleep(REST_S)


def test_a_fleet_has_one_name_and_changes_its_size_under_streams(answering: Corral, tmp_path: Path) -> None:
    up = ("up", str(answering.model), "--name", "herd", "--replicas", "2", "--context", "128")
    done = answering(*up, FAKE_RATE="40")
    assert done.code == 0, done.err
    assert "herd is ready: 2 members behind one address" in done.out
    assert done.out.index("corral chat herd") < done.out.index("corral console") < done.out.index("curl:")
    endpoint = resolve("herd")
    assert endpoint.key() == open_fleet("herd").key.read_text().strip()
    assert resolve().base_url == endpoint.base_url  # its members do not make it ambiguous
    assert isinstance(find_servers(["herd"], [], None)[0], FleetServer)
    assert (find_servers(["herd"], [], None)[0].seats() or 0) >= 2
    assert answering("complete", "-d", "herd", "Hello").code == 0
    variables = answering("env", "herd", "--json").json()
    assert variables["OPENAI_BASE_URL"] == f"{endpoint.root}/v1"
    lines = answering("top", "--json").json()
    assert [line["name"] for line in lines] == ["herd", *(f"herd-{n}" for n in (1, 2))]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"row {n}"}) + "\n" for n in range(20)))
    batch = answering("batch", str(rows), "-o", str(tmp_path / "out.jsonl"), "-d", "herd")
    assert batch.code == 0, batch.err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 20

    streams = Streams()

    async def through() -> None:
        async with Client(endpoint) as client:
            await streams.run(client, [(["scale", "herd", "1"], 1), (["scale", "herd", "3"], 3)], answering)

    run(through())
    assert streams.failures == []

    (gateway,) = held_gateways(open_fleet("herd")).values()
    assert gateway.holder is not None
    os.kill(gateway.holder.pid, signal.SIGKILL)  # the keeper starts it again, where it was

    def back() -> bool:
        found = held_gateways(open_fleet("herd"))
        return any(one.holder != gateway.holder and one.port == gateway.port for one in found.values())

    until(back, "the gateway again")
    assert answering("down", "herd").code == 0
    assert held_gateways(open_fleet("herd")) == {}
