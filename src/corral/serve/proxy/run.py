"""A proxy for a deployment's chain: its port is chosen once, a thread looks how the chain stands, signals end it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from corral.base.errors import ConflictError, CorralError, UsageError
from corral.base.files import write_atomic
from corral.base.processes import Identity, own_identity, port_refused
from corral.base.record import dump_json, load_json
from corral.client.client import run as run_loop
from corral.client.http1 import http_url
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle.tunnel import ensure_tunnel
from corral.serve.fleet.chain import ChainMember, all_standings
from corral.serve.proxy.figures import Figures
from corral.serve.proxy.host import ProxyLimits
from corral.serve.proxy.members import MemberReading
from corral.serve.proxy.relay_server import calm_collector
from corral.serve.proxy.server import Proxy

FIRST_PORT, PORTS = 18_000, 2_000
LOOK_S = 1.0
ENDING_S = 10.0  # for running requests when the proxy is told to end


@dataclass(frozen=True)
class ProxyAddress:
    """Where the proxy listens, as written in the deployment's folder."""

    host: str
    port: int
    holder: Identity | None = None

    @property
    def url(self) -> str:
        return http_url(self.host, self.port)


def _saved(folder: DeploymentFolder) -> ProxyAddress | None:
    with contextlib.suppress(OSError, CorralError):
        return load_json(ProxyAddress, folder.proxy)
    return None


def held_proxy(folder: DeploymentFolder) -> ProxyAddress | None:
    """The proxy that runs on this machine, if one does."""
    saved = _saved(folder)
    return saved if saved and saved.holder and saved.holder.is_here() and not saved.holder.is_gone() else None


def port_of(folder: DeploymentFolder, host: str, wanted: int | None) -> int:
    """The port: as asked, as before, or one that depends on the name only, so that it comes back after a new `up`."""
    saved = _saved(folder)
    if (held := held_proxy(folder)) and held.holder:
        raise ConflictError(
            f"a proxy for {folder.name!r} is already running: {held.url} (process {held.holder.pid}).",
            f"Use it, or end it: kill {held.holder.pid}",
        )
    if wanted is not None:
        return wanted
    if saved and saved.host == host:
        return saved.port
    return free_port(host, folder.name)


def free_port(host: str, name: str) -> int:
    """A port that depends on the name only, or the next that is free."""
    start = zlib.crc32(name.encode())
    for step in range(PORTS):
        port = FIRST_PORT + (start + step) % PORTS
        if is_free(host, port):
            return port
    raise ConflictError(f"no free port from {FIRST_PORT} on.", "Name one with --port.")


def is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise UsageError(f"{host} is not an address of this machine.", "Use 127.0.0.1.") from None
    return True


def readings(standings: list[ChainMember], last: dict[str, str]) -> list[MemberReading]:
    """What the proxy needs of a chain; one that cannot be asked keeps the address it had (`last`, by name)."""
    found = []
    for one in standings:
        status = one.status
        if status is not None:
            last[one.folder.name] = status.endpoint.root if status.endpoint else ""
        text = status.text if status else one.text
        found.append(MemberReading(one.folder.name, one.state, last.get(one.folder.name, ""), text))
    return found


class Watcher(threading.Thread):
    """Looks how a chain stands, every second or so, and tells it to the proxy's loop."""

    def __init__(self, folder: DeploymentFolder, tell: Callable[[list[MemberReading]], None]) -> None:
        super().__init__(name="corral-proxy-watcher", daemon=True)
        self._folder, self._tell = folder, tell
        self._stop = threading.Event()
        self._known: dict[str, ChainMember] = {}
        self._last: dict[str, str] = {}
        self._tunnelled: set[str] = set()

    def run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(CorralError, OSError):  # a folder being replaced: the next look sees the new one
                self._look()
            self._stop.wait(LOOK_S)

    def _look(self) -> None:
        standings = all_standings(self._folder, self._known)
        self._known = {one.folder.name: one for one in standings}
        for one in standings:
            if one.state is State.READY and one.folder.name not in self._tunnelled:
                with contextlib.suppress(CorralError):
                    ensure_tunnel(one.folder)
                    self._tunnelled.add(one.folder.name)
        self._tell(readings(standings, self._last))

    def stop(self) -> None:
        self._stop.set()


def run_proxy(
    folder: DeploymentFolder,
    host: str,
    port: int | None,
    limits: ProxyLimits,
    ready: Callable[[str], None],
    say: Callable[[str], None],
) -> Figures:
    """Serve until a signal; `ready` is told the URL once it listens."""
    chosen = port_of(folder, host, port)
    return run_loop(_serve(folder, host, chosen, limits, ready, say))


async def _serve(
    folder: DeploymentFolder,
    host: str,
    port: int,
    limits: ProxyLimits,
    ready: Callable[[str], None],
    say: Callable[[str], None],
) -> Figures:
    calm_collector()
    loop = asyncio.get_running_loop()
    proxy, ending = Proxy(limits, say), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    try:
        await proxy.listen(host, port)
    except OSError as error:
        raise port_refused(port, host, error, "End it, or move the proxy for good with --port.") from None
    write_atomic(folder.proxy, dump_json(ProxyAddress(host, port, own_identity())))
    watcher = Watcher(folder, lambda found: _tell(loop, proxy, found))
    watcher.start()
    try:
        ready(proxy.url)
        await ending.wait()
    finally:
        watcher.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await proxy.close(ENDING_S)
        with contextlib.suppress(OSError):  # the port stays the chain's; the folder may be gone
            if (saved := _saved(folder)) and saved.holder == own_identity():
                write_atomic(folder.proxy, dump_json(ProxyAddress(host, port)))
    return proxy.figures


def _tell(loop: asyncio.AbstractEventLoop, proxy: Proxy, found: list[MemberReading]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(proxy.members.update, found)
