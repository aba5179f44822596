"""An address that takes requests from clients and passes them on: what the proxy and the gateway have in common.

Headers and bodies are never logged. Not covered: TLS, HTTP/2, changes of protocol (WebSocket).
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable

from corral.client.http1 import http_url
from corral.client.pool import open_files
from corral.deploy.deployment.state import ENDED
from corral.serve.proxy.figures import Figures
from corral.serve.proxy.front import Front
from corral.serve.proxy.host import ProxyLimits
from corral.serve.proxy.member import Member
from corral.serve.proxy.request import Request
from corral.serve.proxy.route import MemberChooser

SWEEP_S = 1.0
ENDED_SILENCE_S = 5.0  # a server that has ended sends nothing more: what still waits on it is given up


class RelayServer:
    """Everything inside one event loop."""

    title = "corral"

    def __init__(self, limits: ProxyLimits | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.limits = limits or ProxyLimits()
        self.figures = Figures()
        self.fronts: set[Front] = set()
        self.held_bytes = 0
        self.ending = False
        self.url = ""
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    def take(self, request: Request, from_here: bool) -> MemberChooser | bytes:
        raise NotImplementedError

    def every_member(self) -> Iterable[Member]:
        raise NotImplementedError

    async def listen(self, host: str, port: int) -> None:
        """Accept clients; port 0 takes a free one."""
        open_files(2 * self.limits.connections + 64)
        self._server = await self.loop.create_server(lambda: Front(self), host, port, backlog=1024)
        number = self._server.sockets[0].getsockname()[1]
        self.url = http_url(host, number)
        self._sweep()

    def _sweep(self) -> None:
        now = time.monotonic()
        for front in list(self.fronts):
            front.sweep(now)
        for member in self.every_member():
            if member.state in ENDED:
                for waiter in list(member.active):
                    waiter.give_up(now - ENDED_SILENCE_S)
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    async def close(self, patience_s: float = 0.0) -> None:
        """Accept nobody any more; running requests have some time to end, then they are told."""
        self.ending = True
        if self._server:
            self._server.close()
        until = self.loop.time() + patience_s
        while self.figures.running and self.loop.time() < until:
            await asyncio.sleep(0.05)
        if self._sweeper:
            self._sweeper.cancel()
        for front in list(self.fronts):
            front.end()
        for member in self.every_member():
            member.close_idle()
        await asyncio.sleep(0)


def calm_collector() -> None:
    """Look for circles of objects seldom: requests leave none, and a look costs more the more streams are open."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
