"""The load of every ready deployment, from two looks at its `/metrics`. What `corral top` draws."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from corral.client import metrics as engine_metrics
from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.client.metrics import Load, Reading
from corral.errors import CorralError

__all__ = ["Line", "Watch"]


@dataclass(frozen=True)
class Line:
    """One server at one moment; `problem` says why there are no numbers."""

    name: str
    model: str
    url: str
    reading: Reading | None
    load: Load | None
    problem: str = ""


class Watch:
    """Looks at servers again and again; each look is compared with the one before."""

    def __init__(self, servers: Sequence[tuple[str, Endpoint]] = ()) -> None:
        self._clients: dict[str, Client] = {}
        self._before: dict[str, Reading] = {}
        self._dropped: list[Client] = []
        self.set(servers)

    def set(self, servers: Sequence[tuple[str, Endpoint]]) -> None:
        """The servers to look at from now on."""
        wanted = dict(servers)
        for name in [name for name, client in self._clients.items() if client.endpoint != wanted.get(name)]:
            self._dropped.append(self._clients.pop(name))
            self._before.pop(name, None)
        for name, endpoint in wanted.items():
            self._clients.setdefault(name, Client(endpoint, stall_s=10))

    async def look(self) -> list[Line]:
        """One line for each server."""
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
            reading = await engine_metrics.read(client)
        except CorralError as error:
            self._before.pop(name, None)
            return Line(name, endpoint.model, endpoint.base_url, None, None, error.message)
        before, self._before[name] = self._before.get(name), reading
        load = Load.between(before, reading) if before is not None else None
        return Line(name, endpoint.model, endpoint.base_url, reading, load)
