"""The load of every ready deployment, from two looks at its `/metrics`. What `corral top` draws."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from corral import engine_metrics
from corral.client import Client
from corral.endpoint import Endpoint
from corral.engine_metrics import Load, Reading
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
        self.set(servers)

    def set(self, servers: Sequence[tuple[str, Endpoint]]) -> None:
        """The servers to look at from now on."""
        for name, endpoint in servers:
            if name not in self._clients or self._clients[name].endpoint != endpoint:
                self._clients[name] = Client(endpoint, stall_s=10)
                self._before.pop(name, None)
        names = {name for name, _ in servers}
        for name in [name for name in self._clients if name not in names]:
            del self._clients[name]
            self._before.pop(name, None)

    async def look(self) -> list[Line]:
        """One line for each server, in the order given."""
        return list(await asyncio.gather(*(self._line(name, client) for name, client in self._clients.items())))

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

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
