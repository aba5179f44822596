"""A day of a fleet, compressed, with a real controller: jobs come and go with the load, and no request fails.

Each member is a job with a stand-in engine that takes two requests at a time. Requests arrive as a trace says,
however many are still waiting. What the jobs cost is held against a schedule that knows the trace.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from corral.client.client import CHAT, Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError
from corral.fleet.simulation import ReplaySetting, TraceRequest, clairvoyant_s
from tests.cluster.test_slurm_handover import SMALL, Cluster
from tests.testbed import missing
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm
from tests.until import until

pytestmark = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))

# seconds and requests per second: a night, a day, an evening; FLEET_DAY stretches it
STRETCH = float(os.environ.get("FLEET_DAY", "1"))
DAY = ((15 * STRETCH, 1.0), (60 * STRETCH, 4.0), (60 * STRETCH, 1.0))
TOKENS = 40
PER_MEMBER = 2.0  # requests per second: two at a time, a second each
MOST = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("fleet")
    with Hosts(folder / "hosts", ("login", "n1", "n2"), shared=[folder]) as hosts, Slurm(hosts) as slurm:
        found = Cluster(hosts, slurm, folder)
        yield found
        found.corral("down", "--all")


class Day:
    """Requests sent when the trace says so, what became of them, and how many jobs there were meanwhile."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sent: list[TraceRequest] = []
        self.waits: list[float] = []
        self.failures: list[str] = []
        self.jobs: list[tuple[float, int]] = []  # when, how many run

    async def run(self, endpoint: Endpoint) -> None:
        began = time.monotonic()
        async with Client(endpoint) as client:
            asking, moment = set(), 0.0
            counting = asyncio.ensure_future(self._count(began))
            try:
                for seconds, rate in DAY:
                    for number in range(int(seconds * rate)):
                        at = moment + number / rate
                        await asyncio.sleep(max(0.0, at - (time.monotonic() - began)))
                        self.sent.append(TraceRequest(at, TOKENS))
                        asking.add(asyncio.ensure_future(self._ask(client, len(self.sent))))
                    moment += seconds
                await asyncio.gather(*asking)
            finally:
                counting.cancel()

    async def _ask(self, client: Client, number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"{number}"}], "stream": True, "max_tokens": TOKENS}
        try:
            reply = await client.request(CHAT, body)
            self.waits.append((reply.timing.chunk_ns[0] - reply.timing.sent_ns) / 1e9)
        except RequestError as error:
            self.failures.append(f"{type(error).__name__}: {error.message}")

    async def _count(self, began: float) -> None:
        while True:
            found = await asyncio.to_thread(self.cluster.slurm.run, "squeue", "-h", "-t", "R", "-o", "%i")
            self.jobs.append((time.monotonic() - began, len(found.stdout.split())))
            await asyncio.sleep(1)

    @property
    def job_s(self) -> float:
        pairs = zip(self.jobs, self.jobs[1:], strict=False)
        return sum((after - at) * count for (at, count), (after, _) in pairs)


def events(cluster: Cluster) -> list[dict[str, Any]]:
    done = cluster.corral("events", "day", "--json")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_jobs_follow_the_load_and_no_request_fails(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    address = cluster.hosts.address("login")
    up = cluster.corral(
        "up", str(cluster.model), "--name", "day", "--replicas", f"1..{MOST}", *SMALL, "--time", "15:00",
        "--bind", address, "--set", "max_num_seqs=2", "--env", f"STREAM_TOKENS={TOKENS}", "--json",
    )  # fmt: skip
    assert up.returncode == 0, up.stderr
    endpoint = json.loads(up.stdout)["endpoint"]
    day = Day(cluster)
    run(day.run(Endpoint(endpoint["base_url"], endpoint["model"], endpoint["key_file"])))
    assert day.failures == []
    until(lambda: wanted(cluster) == 1, "members are handed back", 240)
    told = [event for event in events(cluster) if event["kind"] == "scale"]
    grown = [event["wanted"] for event in told if "would wait" in event["text"]]
    assert grown
    assert max(grown) <= MOST
    assert max(count for _, count in day.jobs) >= 2
    assert all(event["text"] for event in told)
    setting = ReplaySetting(1, MOST, PER_MEMBER * TOKENS, 3.0)
    best = clairvoyant_s(day.sent, setting)
    with capsys.disabled():
        sizes = " ".join(str(event["wanted"]) for event in told)
        print(
            f"\n{len(day.sent)} requests, 0 failed; wanted {sizes}; job time until the last answer {day.job_s:.0f} s,"
            f" a clairvoyant's {best:.0f} s ({day.job_s / best:.2f}); longest wait {max(day.waits):.1f} s"
        )


def wanted(cluster: Cluster) -> int:
    return int(json.loads((cluster.home / "fleets" / "day" / "fleet.json").read_text())["wanted"])
