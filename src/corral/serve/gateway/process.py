"""A gateway as a process: its port, the files that tell where it listens, its end by a signal.

`corral gateway` writes a file into the folder of each fleet that it serves, `corral proxy` one into the folder of its
deployment. Both come back on the port that they had.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corral import __version__
from corral.base.errors import ConflictError, CorralError, UsageError
from corral.base.files import write_atomic
from corral.base.processes import only_lingering, own_identity, port_refused
from corral.base.record import dump_json, load_json
from corral.client.client import run as run_loop
from corral.deploy.deployment.folder import DeploymentFolder
from corral.serve.fleet.record import (
    FleetFolder,
    GatewayAddress,
    GatewayLoad,
    MemberLoad,
    change_fleet,
    held_gateways,
    is_over,
    new_gateway_id,
    read_fleet,
)
from corral.serve.gateway.gateway import Gateway, calm_collector
from corral.serve.gateway.handover import Takeover, handover_listener, offer
from corral.serve.gateway.health import HealthMonitor
from corral.serve.gateway.member import Member
from corral.serve.gateway.pages import Figures
from corral.serve.gateway.policies import NEWEST
from corral.serve.gateway.relay import GatewayLimits
from corral.serve.gateway.url_member import UrlMember
from corral.serve.gateway.watcher import GatewaySnapshot, Source, Watcher

FIRST_PORT, PORTS = 18_000, 2_000
LOAD_S = 1.0
FIRST_LOOK_S = 5.0  # before clients are accepted
ENDING_S = 10.0  # for running requests when the gateway is told to end
LIMITS = GatewayLimits()


@dataclass(frozen=True)
class GatewayProcess:
    """How to run one gateway."""

    sources: Sequence[Source]
    host: str
    port: int
    route: str
    id: str = ""  # the name of its files in the folders of fleets
    proxy: DeploymentFolder | None = None  # it is the proxy of this deployment
    limits: GatewayLimits = LIMITS
    while_open: bool = False  # it ends with its fleets
    urls: tuple[UrlMember, ...] = ()
    origins: tuple[str, ...] = ()  # whose pages may use it, beside those of its fleets
    predecessor: str = ""  # the running gateway whose listening socket it takes over, by its id

    def fleets(self) -> list[FleetFolder]:
        return [one.fleet for one in self.sources if one.fleet is not None]

    def handover(self, id: str) -> Path | None:
        """Where a gateway of these fleets gives its listening socket to its successor."""
        folders = self.fleets()
        return folders[0].gateway_socket(id) if folders else None

    def names(self) -> list[str]:
        return [one.name for one in self.sources]

    def address_files(self) -> list[Path]:
        """The files that tell where it listens; not in folders that are gone."""
        files = [folder.gateway(self.id) for folder in self.fleets() if folder.record.is_file()]
        return [*files, self.proxy.proxy] if self.proxy is not None and self.proxy.record.is_file() else files

    @property
    def title(self) -> str:
        return "corral gateway" if self.proxy is None else "corral proxy"

    @property
    def port_remedy(self) -> str:
        return f"End it, or {'choose another port' if self.proxy is None else 'move the proxy for good'} with --port."


def gateway_process(sources: Sequence[Source], host: str, port: int | None, route: str) -> GatewayProcess:
    """A gateway on the given port; or where an ended gateway of these fleets was; or where the names lead."""
    wanted, before = GatewayProcess(sources, host, port or 0, route), []
    for folder in wanted.fleets():
        held = held_gateways(folder)
        for path in sorted(folder.gateways.glob("*.json")):
            if path.name.endswith(".load.json") or path.stem in held:
                continue
            saved = _read_address(path)
            if saved is None or saved.host != host or (port or saved.port) != saved.port:
                continue
            if saved.machine:  # its files stay its own: it may come back
                before.append(saved.port)
            elif _is_usable(host, saved.port):
                return replace(wanted, id=path.stem, port=saved.port)
    own = [*(read_fleet(folder).port for folder in wanted.fleets()), *before]
    chosen = port or next((one for one in own if one and _is_usable(host, one)), None)
    name = " ".join(one.name for one in sources)
    return replace(wanted, id=new_gateway_id(), port=chosen or free_port(host, name))


def successor_process(sources: Sequence[Source], route: str, only_own: bool) -> GatewayProcess:
    """A gateway that takes the place of one that runs on this machine and serves the same.

    `only_own`: of no other than the one that the fleet's keeper started.
    """
    wanted = GatewayProcess(sources, "", 0, route, id=new_gateway_id())
    for folder in wanted.fleets():
        for id, address in held_gateways(folder).items():
            path = wanted.handover(id)
            if path is not None and path.exists() and not address.machine:
                own = address.holder in read_fleet(folder).gateways
                if only_own and not own:
                    continue
                return replace(wanted, host=address.host, port=address.port, predecessor=id, while_open=own)
    raise ConflictError(
        f"no gateway of {' '.join(wanted.names())} runs on this machine whose address could be taken over.",
        "Start one: `corral gateway NAME`.",
    )


def proxy_process(
    folder: DeploymentFolder, host: str, port: int | None, limits: GatewayLimits = LIMITS
) -> GatewayProcess:
    """The proxy of a deployment: on the given port, on the one that it had, or where the name leads."""
    if (held := held_proxy(folder)) and held.holder:
        raise ConflictError(
            f"a proxy for {folder.name!r} is already running: {held.url} (process {held.holder.pid}).",
            f"Use it, or end it: kill {held.holder.pid}",
        )
    saved = _read_address(folder.proxy)
    chosen = port or (saved.port if saved and saved.host == host else free_port(host, folder.name))
    return GatewayProcess([Source(folder.name)], host, chosen, NEWEST, proxy=folder, limits=limits)


def held_proxy(folder: DeploymentFolder) -> GatewayAddress | None:
    """The proxy of a deployment that runs on this machine, if one does."""
    saved = _read_address(folder.proxy)
    return saved if saved and saved.holder and saved.holder.is_here() and not saved.holder.is_gone() else None


def _read_address(path: Path) -> GatewayAddress | None:
    with contextlib.suppress(OSError, CorralError):
        return load_json(GatewayAddress, path)
    return None


# Ports


def free_port(host: str, name: str) -> int:
    """A port that depends on the name only, so that it comes back; or the next that is free."""
    start = zlib.crc32(name.encode())
    for step in range(PORTS):
        port = FIRST_PORT + (start + step) % PORTS
        if _is_free(host, port):
            return port
    raise ConflictError(f"no free port from {FIRST_PORT} on.", "Name one with --port.")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise UsageError(f"{host} is not an address of this machine.", "Use 127.0.0.1.") from None
    return True


def _is_usable(host: str, port: int) -> bool:
    """Whether nothing listens there; connections of an ended gateway may still linger."""
    return _is_free(host, port) or only_lingering(port)


# The process


def run_gateway(process: GatewayProcess, ready: Callable[[str], None], say: Callable[[str], None]) -> Figures:
    """Serve until a signal; `ready` is told the URL once it listens."""
    return run_loop(_serve(process, ready, say))


async def _serve(process: GatewayProcess, ready: Callable[[str], None], say: Callable[[str], None]) -> Figures:
    calm_collector()
    loop = asyncio.get_running_loop()
    origins = {*process.origins, *(one for fleet in process.fleets() for one in read_fleet(fleet).allowed_origins)}
    gateway = Gateway(process.route, process.limits, say, process.title, origins)
    with _ended_by_signal(loop) as ending:
        before = process.handover(process.predecessor) if process.predecessor else None
        takeover = await asyncio.to_thread(Takeover, before, process.names()) if before else None
        try:
            await gateway.bind(process.host, process.port, takeover.listener if takeover else None)
        except OSError as error:
            raise port_refused(process.port, process.host, error, process.port_remedy) from None
        watcher = Watcher(process.sources, lambda snapshot: _tell(loop, gateway, snapshot), say, process.urls)
        watcher.start()
        with contextlib.suppress(TimeoutError):  # what is not known by then is answered with 503
            await asyncio.wait_for(gateway.has_looked.wait(), FIRST_LOOK_S)
        await gateway.accept()
        await asyncio.to_thread(_write_address, process, gateway)
        if takeover is not None:
            await asyncio.to_thread(_succeed, process)
            takeover.complete()
        tasks = [asyncio.ensure_future(HealthMonitor(gateway).run())]
        tasks.append(asyncio.ensure_future(_write_files(process, gateway)))
        if process.while_open:
            tasks.append(asyncio.ensure_future(_end_with_fleets(process.fleets(), ending)))
        handed_over = False
        try:
            ready(gateway.url)
            handed_over = await _ended_or_handed_over(process, gateway, ending)
        finally:
            watcher.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await gateway.close(ENDING_S)
            await asyncio.to_thread(_release_address, process, handed_over)
    return gateway.figures


async def _ended_or_handed_over(process: GatewayProcess, gateway: Gateway, ending: asyncio.Event) -> bool:
    """Wait for the end; whether another process has taken the address over, and all clients have gone to it."""
    path = process.handover(process.id)
    if path is None or not path.parent.is_dir():
        await ending.wait()
        return False
    ended = asyncio.ensure_future(ending.wait())
    with await asyncio.to_thread(handover_listener, path) as asked:
        offering = asyncio.ensure_future(offer(asked, gateway.listener, process.names()))
        await asyncio.wait([ended, offering], return_when=asyncio.FIRST_COMPLETED)
        offering.cancel()
    path.unlink(missing_ok=True)
    if ended.done():
        return False
    gateway.say("another process has taken the address over; this one ends once its clients have gone")
    draining = asyncio.ensure_future(gateway.drain())
    await asyncio.wait([ended, draining], return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    ended.cancel()
    return True


def _succeed(process: GatewayProcess) -> None:
    """Where the predecessor was a fleet's own gateway, this one is."""
    for folder in process.fleets():
        address = _read_address(folder.gateway(process.predecessor))
        if address is not None and address.holder in read_fleet(folder).gateways:
            change_fleet(folder, lambda one: replace(one, gateways=(*one.gateways, own_identity())))


async def _end_with_fleets(folders: Sequence[FleetFolder], ending: asyncio.Event) -> None:
    """`corral down` may have been typed on another machine, which cannot send a signal to this process."""
    while not all([await asyncio.to_thread(is_over, folder) for folder in folders]):
        await asyncio.sleep(LOAD_S)
    ending.set()


@contextlib.contextmanager
def _ended_by_signal(loop: asyncio.AbstractEventLoop) -> Iterator[asyncio.Event]:
    ending = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, ending.set)
    try:
        yield ending
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _tell(loop: asyncio.AbstractEventLoop, gateway: Gateway, snapshot: GatewaySnapshot) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(gateway.update, snapshot.readings, snapshot.grants, snapshot.unknown)


# Files


def _write_address(process: GatewayProcess, gateway: Gateway, again: bool = False) -> None:
    """Write where it listens; `again`: only where a new deployment of the same name has replaced the folder."""
    address = dump_json(GatewayAddress(process.host, process.port, own_identity(), tuple(gateway.pools), __version__))
    for path in [path for path in process.address_files() if not (again and path.exists())]:
        with contextlib.suppress(OSError):  # its folder may be gone
            if process.proxy is None:
                path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomic(path, address)


def _release_address(process: GatewayProcess, handed_over: bool) -> None:
    """No process holds the port any more; it stays reserved for the next one, unless another has it already."""
    for path in process.address_files():
        saved = _read_address(path)
        if saved and saved.holder == own_identity():
            with contextlib.suppress(OSError):
                path.unlink() if handed_over else write_atomic(path, dump_json(replace(saved, holder=None)))
    for folder in process.fleets():
        with contextlib.suppress(OSError):
            folder.gateway_load(process.id).unlink(missing_ok=True)


async def _write_files(process: GatewayProcess, gateway: Gateway) -> None:
    """The address, and what it has to do for each fleet, while it runs."""
    while True:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(_write_address, process, gateway, True)
        for folder in process.fleets():
            text = dump_json(fleet_load(gateway, folder.name))
            with contextlib.suppress(OSError):
                await asyncio.to_thread(write_atomic, folder.gateway_load(process.id), text)
        await asyncio.sleep(LOAD_S)


def fleet_load(gateway: Gateway, fleet: str) -> GatewayLoad:
    """What a gateway has to do for one fleet, now."""
    own = [one for one in gateway.members if one.source == fleet]
    pools = [pool for pool in gateway.pools.values() if any(one.source == fleet for one in pool.members)]
    now = time.monotonic()
    bins = [pool.arrivals.bins(now) for pool in pools]
    behind_s = time.time() - now
    members = {one.name: _member_load(one, behind_s) for one in own}
    return GatewayLoad(
        time.time(),
        sum(len(one.active) for one in own),
        sum(len(pool.queue) for pool in pools),
        round(sum(one.work_tokens for one in own)),
        tuple(map(sum, zip(*(one[0] for one in bins), strict=True))),
        tuple(map(sum, zip(*(one[1] for one in bins), strict=True))),
        max((pool.oldest_wait_s() for pool in pools), default=0.0),
        members,
        sum(sum(pool.e2e.counts) for pool in pools),
        {one.name: _member_load(one, behind_s) for one in gateway.members if one.named},
    )


def _member_load(one: Member, behind_s: float) -> MemberLoad:
    return MemberLoad(
        len(one.active),
        round(one.work_tokens),
        one.tokens_per_s * max(1, one.width),
        one.progress.moved_s + behind_s if one.progress.moved_s else 0.0,
        one.judged,
    )
