"""The load of every ready server, from two readings of its `/metrics`: what `corral top` and the console show.

Fleets come before their members, as their gateways see them; then the other deployments.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from corral.base.errors import CorralError
from corral.client import metrics as engine_metrics
from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.client.metrics import Latencies, Load, Reading, percentile, read_latencies
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle.deployments import Status, statuses
from corral.serve.fleet.record import FleetFolder, read_fleets
from corral.serve.resolve import fleet_endpoint


@dataclass(frozen=True)
class ReadyServer:
    """A server under the name that people know it by."""

    name: str
    endpoint: Endpoint
    fleet: str = ""  # the one it is a member of
    members: int = 0  # ready ones, for the gateway of a fleet


def ready_servers(known: Sequence[Status] | None = None) -> list[ReadyServer]:
    """The ready servers; `known` are the states of deployments, if the caller has just read them."""
    ready = [status for status in (statuses() if known is None else known) if status.state is State.READY]
    left = {status.name: status.endpoint for status in ready if status.endpoint is not None}
    found = []
    for fleet in read_fleets()[0]:
        members = [
            ReadyServer(member.name, left.pop(member.name), fleet.name)
            for member in fleet.members
            if member.name in left
        ]
        with contextlib.suppress(CorralError, OSError):  # no gateway of it runs
            found.append(ReadyServer(fleet.name, fleet_endpoint(FleetFolder.of(fleet.name)), members=len(members)))
        found += members
    return found + [ReadyServer(name, endpoint) for name, endpoint in left.items()]


MINUTE_S = 60.0
Pair = tuple[float | None, float | None]
NONE: Pair = (None, None)


@dataclass(frozen=True)
class Line:
    """One server at one moment; `problem` says why there are no numbers."""

    name: str
    model: str
    url: str
    reading: Reading | None
    load: Load | None
    problem: str = ""
    ttft_s: tuple[float | None, float | None] = (None, None)  # median and 95th percentile of the last minute
    tpot_s: tuple[float | None, float | None] = (None, None)


class Watch:
    """Reads the metrics of servers again and again; each reading is compared with the one before."""

    def __init__(self, servers: Sequence[tuple[str, Endpoint]] = (), latencies: bool = False) -> None:
        self._clients: dict[str, Client] = {}
        self._before: dict[str, Reading] = {}
        self._minute: dict[str, deque[tuple[float, Latencies]]] = {}
        self._latencies = latencies
        self._dropped: list[Client] = []
        self.set(servers)

    def set(self, servers: Sequence[tuple[str, Endpoint]]) -> None:
        """Set the servers to read from now on."""
        wanted = dict(servers)
        for name in [name for name, client in self._clients.items() if client.endpoint != wanted.get(name)]:
            self._dropped.append(self._clients.pop(name))
            self._before.pop(name, None)
            self._minute.pop(name, None)
        for name, endpoint in wanted.items():
            self._clients.setdefault(name, Client(endpoint, stall_s=10))

    async def read(self) -> list[Line]:
        """Read all servers; one line for each."""
        await self._close_dropped()
        return list(await asyncio.gather(*(self._line(name, client) for name, client in self._clients.items())))

    async def close(self) -> None:
        """Close every connection."""
        self.set(())
        await self._close_dropped()

    async def _close_dropped(self) -> None:
        while self._dropped:
            await self._dropped.pop().close()

    async def _line(self, name: str, client: Client) -> Line:
        endpoint = client.endpoint
        try:
            page = await engine_metrics.read_page(client)
        except CorralError as error:
            self._before.pop(name, None)
            return Line(name, endpoint.model, endpoint.base_url, None, None, error.message)
        reading = engine_metrics.parse(page, time.monotonic())
        before, self._before[name] = self._before.get(name), reading
        load = Load.between(before, reading) if before is not None else None
        ttft, tpot = self._percentiles(name, page, reading.at_s) if self._latencies else (NONE, NONE)
        return Line(name, endpoint.model, endpoint.base_url, reading, load, ttft_s=ttft, tpot_s=tpot)

    def _percentiles(self, name: str, page: bytes, now_s: float) -> tuple[Pair, Pair]:
        """Median and 95th percentile of the last minute's times to the first token, and between tokens."""
        kept = self._minute.setdefault(name, deque())
        kept.append((now_s, read_latencies(page)))
        while len(kept) > 2 and kept[1][0] <= now_s - MINUTE_S:
            kept.popleft()
        old, new = kept[0][1], kept[-1][1]
        ttft = (percentile(old.ttft, new.ttft, 0.5), percentile(old.ttft, new.ttft, 0.95))
        return ttft, (percentile(old.tpot, new.tpot, 0.5), percentile(old.tpot, new.tpot, 0.95))
