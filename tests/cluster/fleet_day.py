"""A fleet's day, compressed, on a real controller: jobs that come and go with the load. As root, on simulated hosts.

    python -m tests.cluster.fleet_day [--seconds 240] [--seed 7] [--most 4]
    python -m tests.cluster.fleet_day --keep     two members of three minutes each, kept beyond that by --keep

Each member is a job with a stand-in engine of eight seats that takes a second for an answer. First more is asked than
one member can do, so that the fleet has seen what one does, as a fleet has that was there the day before.
Then requests arrive by chance, few at night and most in the afternoon, however many still wait. What the jobs cost,
seen in `squeue`, stands beside a schedule that knows the trace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from corral.client.client import CHAT, Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError
from corral.client.trace import TracedRequest
from corral.lab.simulate.fleet_trace import ReplaySetting, clairvoyant_s
from tests.cluster.test_slurm_handover import SMALL, Cluster
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm
from tests.until import until

TOKENS, ITL_MS, SEATS = 20, 50, 8
PER_MEMBER = SEATS / (TOKENS * ITL_MS / 1000)  # requests per second
NIGHT = 0.1  # of the peak


@contextlib.contextmanager
def open_cluster(folder: Path) -> Iterator[Cluster]:
    """A controller on a login host and two nodes."""
    with Hosts(folder / "hosts", ("login", "n1", "n2"), shared=[folder]) as hosts, Slurm(hosts) as slurm:
        found = Cluster(hosts, slurm, folder)
        yield found
        found.corral("down", "--all")


def start_fleet(cluster: Cluster, replicas: str, *options: str, time: str = "30:00") -> Endpoint:
    """A fleet called `day`."""
    up = cluster.corral(
        "up", str(cluster.model), "--name", "day", "--replicas", replicas, *SMALL, "--time", time,
        "--bind", cluster.hosts.address("login"), "--set", f"max_num_seqs={SEATS}", "--env",
        f"STREAM_TOKENS={TOKENS}", "--env", f"STREAM_ITL_MS={ITL_MS}", "--json", *options,
    )  # fmt: skip
    assert up.returncode == 0, up.stderr
    told = json.loads(up.stdout)["endpoint"]
    return Endpoint(told["base_url"], told["model"], told["key_file"])


def steps(*parts: tuple[float, float]) -> list[float]:
    """Arrivals at an even pace: for so many seconds, so many a second."""
    found, began = [], 0.0
    for seconds, rate in parts:
        found += [began + number / rate for number in range(int(seconds * rate))]
        began += seconds
    return found


def day(seconds: float, peak: float, seed: int) -> list[float]:
    """Arrivals of a day by chance; `peak` requests per second at its height."""
    dice, now_s = random.Random(seed), 0.0
    found: list[float] = []
    while True:
        part = NIGHT + (1 - NIGHT) * (1 - math.cos(2 * math.pi * now_s / seconds)) / 2
        now_s += dice.expovariate(peak * part)
        if now_s >= seconds:
            return found
        found.append(now_s)


@dataclass
class Load:
    """Requests sent when they are due, what became of them, and how many jobs there were meanwhile."""

    cluster: Cluster
    due: Sequence[float]
    waits: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)  # of the sender itself
    failures: list[str] = field(default_factory=list)
    jobs: list[tuple[float, int]] = field(default_factory=list)  # when, how many run

    async def run(self, endpoint: Endpoint) -> None:
        began = time.monotonic()
        async with Client(endpoint, connections=2048) as client:
            counting = asyncio.ensure_future(self._count(began))
            asking = []
            try:
                for number, at in enumerate(self.due):
                    await asyncio.sleep(max(0.0, at - (time.monotonic() - began)))
                    self.late.append(time.monotonic() - began - at)
                    asking.append(asyncio.ensure_future(self._ask(client, number)))
                await asyncio.gather(*asking)
            finally:
                counting.cancel()

    async def _ask(self, client: Client, number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"{number}"}], "stream": True, "max_tokens": TOKENS}
        try:
            reply = await client.request(CHAT, body)
            self.waits.append((reply.timing.chunk_ns[0] - reply.timing.sent_ns) / 1e9 - ITL_MS / 1000)
        except RequestError as error:
            self.failures.append(f"{type(error).__name__}: {error.message}")

    async def _count(self, began: float) -> None:
        while True:
            found = await asyncio.to_thread(self.cluster.slurm.run, "squeue", "-h", "-t", "R", "-o", "%i")
            self.jobs.append((time.monotonic() - began, len(found.stdout.split())))
            await asyncio.sleep(1)

    @property
    def most_jobs(self) -> int:
        return max(count for _, count in self.jobs)

    @property
    def job_s(self) -> float:
        pairs = zip(self.jobs, self.jobs[1:], strict=False)
        return sum((after - at) * count for (at, count), (after, _) in pairs)


def learn(cluster: Cluster, endpoint: Endpoint) -> Load:
    """More than one member can do, until the fleet knows what that is; then back to one member."""
    load = Load(cluster, steps((20.0, 1.6 * PER_MEMBER)))
    run(load.run(endpoint))
    assert measured(cluster), "requests waited, and nothing was measured"
    until(lambda: wanted(cluster) == 1, "one member again", 240)
    return load


def fleet_file(cluster: Cluster, name: str) -> Any:
    with contextlib.suppress(OSError):
        return json.loads((cluster.home / "fleets" / "day" / name).read_text())
    return {}


def wanted(cluster: Cluster) -> int:
    return int(fleet_file(cluster, "fleet.json")["wanted"])


def measured(cluster: Cluster) -> Any:
    """What the fleet knows of its members."""
    return fleet_file(cluster, "measured.json")


def decisions(cluster: Cluster) -> list[dict[str, Any]]:
    """What was decided about the fleet's size."""
    done = cluster.corral("events", "day", "--json")
    return [event for event in map(json.loads, done.stdout.splitlines()) if event["kind"] == "scale"]


def keep(cluster: Cluster) -> None:
    """Requests without pause past the time limit of the first jobs, which others replace."""
    endpoint = start_fleet(cluster, "2", "--keep", "--slurm", "signal_s=25", time="3:00")
    load = Load(cluster, steps((220.0, PER_MEMBER)))
    run(load.run(endpoint))
    done = cluster.corral("events", "day", "--json")
    for event in map(json.loads, done.stdout.splitlines()):
        print(f"  {event.get('text', event['kind'])}")
    print(f"{len(load.due):,} requests, {len(load.failures)} failed {load.failures[:2] or ''}; longest wait"
          f" {max(load.waits):.1f} s; {load.most_jobs} jobs at most, {load.jobs[-1][1]} at the end")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    with TemporaryDirectory() as name, open_cluster(Path(name)) as cluster:
        if given.keep:
            keep(cluster)
            return
        endpoint = start_fleet(cluster, f"1..{given.most}")
        learn(cluster, endpoint)
        before = len(decisions(cluster))
        load = Load(cluster, day(given.seconds, 0.85 * given.most * PER_MEMBER, given.seed))
        run(load.run(endpoint))
        told, known = decisions(cluster)[before:], measured(cluster)
    trace = [TracedRequest(at, TOKENS, 0) for at in load.due]
    best = clairvoyant_s(trace, ReplaySetting(1, given.most, PER_MEMBER * TOKENS, known["load_s"], known["queue_s"]))
    waits = sorted(load.waits)
    print(f"{len(load.due):,} requests in {given.seconds:g} s, {len(load.failures)} failed {load.failures[:1] or ''}")
    print(
        f"a member comes in {known['queue_s']:.1f} + {known['load_s']:.1f} s; the most jobs at once {load.most_jobs}"
    )
    for event in told:
        print(f"  {event['wanted']} members: {event['text']}")
    late = waits[int(0.99 * len(waits))]
    print(f"waits: median {median(waits):.2f} s, P99 {late:.1f} s, longest {waits[-1]:.1f} s;"
          f" the sender was up to {max(load.late):.2f} s late")  # fmt: skip
    print(f"job time {load.job_s:.0f} s, a clairvoyant's {best:.0f} s: {load.job_s / best:.2f}")


if __name__ == "__main__":
    main()
