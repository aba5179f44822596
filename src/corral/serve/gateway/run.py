"""A gateway as a process: its port, its files in the folders of the fleets that it serves, its end by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from corral.base.errors import CorralError
from corral.base.files import write_atomic
from corral.base.processes import only_lingering, own_identity, port_refused
from corral.base.record import dump_json, load_json
from corral.client.client import run as run_loop
from corral.serve.fleet.record import (
    FleetFolder,
    GatewayAddress,
    GatewayLoad,
    MemberLoad,
    held_gateways,
    new_gateway_id,
    read_fleet,
)
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.looking import Overseer
from corral.serve.gateway.watching import GatewaySnapshot, GatewayWatcher, Source
from corral.serve.proxy.figures import Figures
from corral.serve.proxy.relay_server import calm_collector
from corral.serve.proxy.run import free_port, is_free

LOAD_S = 1.0
ENDING_S = 10.0  # for running requests when the gateway is told to end


@dataclass(frozen=True)
class GatewayPlace:
    """Where a gateway listens, and the name of its files."""

    id: str
    host: str
    port: int


def choose_place(sources: Sequence[Source], host: str, wanted: int | None) -> GatewayPlace:
    """As asked; or where an ended gateway of these fleets was; or a port that depends on the names only."""
    fleets = [one.fleet for one in sources if one.fleet is not None]
    for folder in fleets:
        held = held_gateways(folder)
        for path in sorted(folder.gateways.glob("*.json")):
            with contextlib.suppress(OSError, CorralError):
                if not path.name.endswith(".load.json") and path.stem not in held:
                    saved = load_json(GatewayAddress, path)
                    if saved.host == host and (wanted or saved.port) == saved.port and _usable(host, saved.port):
                        return GatewayPlace(path.stem, host, saved.port)
    own = [read_fleet(folder).port for folder in fleets]
    port = wanted or next((one for one in own if one and _usable(host, one)), None)
    return GatewayPlace(new_gateway_id(), host, port or free_port(host, " ".join(one.name for one in sources)))


def _usable(host: str, port: int) -> bool:
    """Whether nobody listens there; connections of an ended gateway may still linger."""
    return is_free(host, port) or only_lingering(port)


def run_gateway(
    sources: Sequence[Source],
    place: GatewayPlace,
    route: str,
    ready: Callable[[str], None],
    say: Callable[[str], None],
) -> Figures:
    """Serve until a signal; `ready` is told the URL once it listens."""
    return run_loop(_serve(sources, place, route, ready, say))


async def _serve(
    sources: Sequence[Source],
    place: GatewayPlace,
    route: str,
    ready: Callable[[str], None],
    say: Callable[[str], None],
) -> Figures:
    calm_collector()
    loop = asyncio.get_running_loop()
    gateway, ending = Gateway(route, say=say), asyncio.Event()
    fleets = [one.fleet for one in sources if one.fleet is not None]
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    try:
        await gateway.listen(place.host, place.port)
    except OSError as error:
        raise port_refused(place.port, place.host, error, "End it, or choose another port with --port.") from None
    watcher = GatewayWatcher(sources, lambda found: _tell(loop, gateway, found))
    _tell(loop, gateway, await asyncio.to_thread(watcher.look))
    await asyncio.to_thread(_write_addresses, fleets, place, gateway, True)
    watcher.start()
    overseer = asyncio.ensure_future(Overseer(gateway).run())
    loads = asyncio.ensure_future(_write_loads(fleets, place.id, gateway))
    try:
        ready(gateway.url)
        await ending.wait()
    finally:
        watcher.stop()
        for task in (overseer, loads):
            task.cancel()
        await asyncio.gather(overseer, loads, return_exceptions=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await gateway.close(ENDING_S)
        await asyncio.to_thread(_write_addresses, fleets, place, gateway, False)
    return gateway.figures


def _tell(loop: asyncio.AbstractEventLoop, gateway: Gateway, found: GatewaySnapshot) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(gateway.update, found.readings, found.grants)


# Files


def _write_addresses(fleets: Sequence[FleetFolder], place: GatewayPlace, gateway: Gateway, held: bool) -> None:
    """Where it listens, for each fleet; when it ends the port stays its own."""
    saved = GatewayAddress(place.host, place.port, own_identity() if held else None, tuple(gateway.pools))
    for folder in fleets:
        with contextlib.suppress(OSError):  # the fleet may be gone
            if folder.record.is_file():
                folder.gateways.mkdir(mode=0o700, exist_ok=True)
                write_atomic(folder.gateway(place.id), dump_json(saved))
                if not held:
                    folder.gateway_load(place.id).unlink(missing_ok=True)


async def _write_loads(fleets: Sequence[FleetFolder], id: str, gateway: Gateway) -> None:
    while True:
        for folder in fleets:
            text = dump_json(fleet_load(gateway, folder.name))
            with contextlib.suppress(OSError):
                await asyncio.to_thread(write_atomic, folder.gateway_load(id), text)
        await asyncio.sleep(LOAD_S)


def fleet_load(gateway: Gateway, fleet: str) -> GatewayLoad:
    """What a gateway has to do for one fleet, now."""
    own = [one for one in gateway.members if one.source == fleet]
    pools = [pool for pool in gateway.pools.values() if any(one.source == fleet for one in pool.members)]
    now = time.monotonic()
    bins = [pool.arrivals.bins(now) for pool in pools]
    behind_s = time.time() - now
    members = {
        one.name: MemberLoad(
            len(one.active),
            round(one.work_tokens),
            one.tokens_per_s * max(1, one.width),
            one.progress.moved_s + behind_s if one.progress.moved_s else 0.0,
            one.judged,
        )
        for one in own
    }
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
    )
