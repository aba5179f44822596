"""The connections of one client in one event loop: kept, reused, watched for silence.

Long streams are decoded in slices between the loop's rounds, so that finishing one answer does not delay the time
stamps of the others. Time limits are swept, so that a request costs no timer of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from corral.client.endpoint import Endpoint
from corral.client.errors import KeyRefusedError, RequestError, ServerGoneError, TimedOutError, error_from_status
from corral.client.peer_check import PeerCheck
from corral.client.reply import Assembly, read_reply
from corral.client.wire import Exchange, Wire

_now = time.monotonic_ns
_STALE_NS = 1_000_000_000  # idle for this long: the server may have closed it
_IDLE_NS = 60_000_000_000
_SLICE = 32  # events decoded in one go


@dataclass(frozen=True)
class PoolLimits:
    """How many connections, and how long to wait for what."""

    connections: int = 1024
    stall_s: float = 600.0  # silence in the middle of a request
    timeout_s: float | None = None  # the whole request
    connect_s: float = 10.0


class Page(msgspec.Struct, frozen=True):
    """An answer that is not a completion: health, metrics, a list of models."""

    status: int
    body: bytes
    sent_ns: int = 0
    done_ns: int = 0

    def json(self) -> Any:
        try:
            return msgspec.json.decode(self.body)
        except RecursionError:
            raise msgspec.DecodeError("it is nested too deep") from None


class Pool:
    """The connections of one client in one event loop."""

    def __init__(self, endpoint: Endpoint, limits: PoolLimits, on_refused_key: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.endpoint, self.limits, self._on_refused_key = endpoint, limits, on_refused_key
        self.where = endpoint.root
        parts = urlsplit(endpoint.root)
        open_files(limits.connections + 256)
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: list[Wire] = []
        self._busy: set[Wire] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: deque[Exchange] = deque()
        self._assemblies: deque[tuple[Exchange, Assembly]] = deque()
        self._addresses: list[Any] = []
        # with TLS, the certificate proves the peer
        self._peers = PeerCheck(endpoint.root) if endpoint.has_key and self._tls is None else None
        self._sweeper: asyncio.TimerHandle | None = None
        self._tick_s = max(0.02, min(limits.stall_s, limits.timeout_s or limits.stall_s, 10.0) / 20)
        self._closed = False

    def start(self, exchange: Exchange) -> None:
        """Give a request to a free connection, a new one, or the queue."""
        wire = self._free_connection()
        if wire is not None:
            wire.reused = True
            self._busy.add(wire)
            wire.begin(exchange)
        elif len(self._busy) + len(self._opening) < self.limits.connections:
            task = self.loop.create_task(self._open(exchange))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self._waiting.append(exchange)
        if exchange.deadline_ns:
            left_s = (exchange.deadline_ns - exchange.asked_ns) / 1e9
            self._tick_s = min(self._tick_s, max(0.02, left_s / 20))
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(self._tick_s, self._sweep)

    def abandon(self, exchange: Exchange) -> None:
        """Drop a request whose caller no longer waits."""
        for wire in self._busy:
            if wire.exchange is exchange:
                self._busy.discard(wire)
                wire.drop()
                self._next()
                return
        with contextlib.suppress(ValueError):
            self._waiting.remove(exchange)

    async def close(self) -> None:
        self._closed = True
        while self._assemblies:
            self._assemble()
        if self._sweeper:
            self._sweeper.cancel()
        for exchange in self._waiting:
            self._settle(exchange, ServerGoneError("the client was closed.", "Open a new one."))
        self._waiting.clear()
        for task in list(self._opening):
            task.cancel()
        for wire in [*self._busy, *self._idle]:
            carried = wire.exchange
            wire.drop()
            if carried is not None:
                self._settle(carried, ServerGoneError("the client was closed.", "Open a new one."))
        self._busy.clear()
        self._idle.clear()
        await asyncio.gather(*self._opening, return_exceptions=True)
        await asyncio.sleep(0)  # transports close their sockets in the loop's next round

    # Called by connections

    def finished(self, wire: Wire, exchange: Exchange, keep: bool) -> None:
        self._busy.discard(wire)
        if keep and not self._closed:
            wire.idle_since_ns = exchange.last_ns
            waiting = self._next_waiting()
            if waiting is not None:
                wire.reused = True
                self._busy.add(wire)
                wire.begin(waiting)
            else:
                self._idle.append(wire)
        elif wire.transport is not None:
            wire.transport.close()
            self._next()
        if exchange.future.done():
            return
        if exchange.page:
            exchange.future.set_result(
                Page(exchange.status, b"".join(exchange.parts), exchange.sent_ns, exchange.last_ns)
            )
        elif exchange.status != 200:
            self._settle(exchange, self._refusal(exchange))
        elif len(exchange.events) > _SLICE:
            self._assemblies.append((exchange, Assembly(exchange, self.where)))
            if len(self._assemblies) == 1:
                self.loop.call_soon(self._assemble)
        else:
            try:
                reply = read_reply(exchange, self.where)
            except RequestError as error:
                self._settle(exchange, error)
            else:
                exchange.future.set_result(reply)

    def _assemble(self) -> None:
        """Decode a slice of a long stream; then let the loop stamp what has arrived."""
        if not self._assemblies:
            return
        exchange, assembly = self._assemblies[0]
        try:
            if exchange.future.done():
                self._assemblies.popleft()
            elif assembly.step(_SLICE):
                self._assemblies.popleft()
                exchange.future.set_result(assembly.reply())
        except RequestError as error:
            if self._assemblies and self._assemblies[0][0] is exchange:
                self._assemblies.popleft()
            self._settle(exchange, error)
        if self._assemblies:
            self.loop.call_soon(self._assemble)

    def failed(self, wire: Wire, exchange: Exchange, error: RequestError) -> None:
        self._busy.discard(wire)
        stale = wire.reused and exchange.sent_ns - wire.idle_since_ns > _STALE_NS
        if isinstance(error, ServerGoneError) and stale and not exchange.again and not self._closed:
            exchange.again = True
            self.start(exchange)
            return
        self._settle(exchange, error)
        self._next()

    def lost(self, wire: Wire) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(wire)

    # Inside

    def _settle(self, exchange: Exchange, error: BaseException) -> None:
        if not exchange.future.done():
            exchange.future.set_exception(error)

    def _refusal(self, exchange: Exchange) -> RequestError:
        body = b"".join([*exchange.parts, *exchange.events])
        model = self.endpoint.model
        error = error_from_status(exchange.status, body, exchange.retry_after, self.where, model)
        if isinstance(error, KeyRefusedError):
            self._on_refused_key()
        return error

    def _free_connection(self) -> Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if wire.open:
                return wire
        return None

    def _next_waiting(self) -> Exchange | None:
        while self._waiting:
            exchange = self._waiting.popleft()
            if not exchange.future.done():
                return exchange
        return None

    def _next(self) -> None:
        """A connection is gone: the next waiting request may open another."""
        waiting = self._next_waiting()
        if waiting is not None and not self._closed:
            self.start(waiting)

    async def _open(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(self.limits.connect_s):
                wire = await self._connect()
        except TimeoutError:
            late = TimedOutError(
                f"{self.where} did not accept a connection within {self.limits.connect_s:g} s.",
                "Check the address and the network.",
            )
            late.reached = False
            self._settle(exchange, late)
        except ssl.SSLError as error:
            self._settle(exchange, ServerGoneError(f"{self.where} accepts no TLS connection: {error.reason}.",
                                                   "Check the address and its certificate."))  # fmt: skip
        except RequestError as error:
            self._settle(exchange, error)
        except OSError as error:
            self._addresses = []
            gone = self._out_of_reach(error)
            gone.reached = False
            self._settle(exchange, gone)
        except asyncio.CancelledError:
            self._settle(exchange, ServerGoneError("the client was closed.", "Open a new one."))
            raise
        else:
            if exchange.future.done():
                waiting = self._next_waiting()
                if waiting is None:
                    wire.idle_since_ns = _now()
                    self._idle.append(wire)
                    return
                exchange = waiting
            self._busy.add(wire)
            wire.begin(exchange)
            return
        if not self._closed:
            self.loop.call_soon(self._next)

    def _out_of_reach(self, error: OSError) -> ServerGoneError:
        """The error for a name without an address, or for a server that is not there."""
        if isinstance(error, socket.gaierror):
            return ServerGoneError(
                f"the name {self._host!r} does not resolve to an address ({error.strerror}).",
                "Check the spelling; from a laptop, a cluster's names often work only through `corral tunnel`.",
            )
        return ServerGoneError(
            f"{self.where} cannot be reached: {error.strerror or error}.",
            "Check the address, and that the server is running.",
        )

    async def _connect(self) -> Wire:
        if not self._addresses:
            infos = await self.loop.getaddrinfo(self._host, self._port, type=1)
            self._addresses = [address for *_, address in infos]
        failure: OSError | None = None
        for address in list(self._addresses):
            try:
                transport, wire = await self.loop.create_connection(
                    lambda: Wire(self), address[0], address[1],
                    ssl=self._tls, server_hostname=self._host if self._tls else None,
                )  # fmt: skip
                if self._peers is not None:
                    await self._check_peer(self._peers, transport, wire)
                return wire
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = error
        raise failure or OSError("no address")

    @staticmethod
    async def _check_peer(peers: PeerCheck, transport: asyncio.BaseTransport, wire: Wire) -> None:
        try:
            await peers.check(transport)
        except BaseException:
            wire.drop()
            raise

    def _sweep(self) -> None:
        """Fail late requests, drop abandoned ones, close connections that were idle for long."""
        self._sweeper = None
        now = _now()
        stall_ns = int(self.limits.stall_s * 1e9)
        for wire in list(self._busy):
            exchange = wire.exchange
            if exchange is None:
                continue
            if exchange.future.done():
                self.abandon(exchange)
            elif exchange.deadline_ns and now > exchange.deadline_ns:
                self._expire(
                    wire, exchange, f"did not finish within {(exchange.deadline_ns - exchange.asked_ns) / 1e9:g} s"
                )
            elif now - wire.active_ns > stall_ns:
                self._expire(wire, exchange, f"sent nothing for {self.limits.stall_s:g} s")
        for exchange in [e for e in self._waiting if e.deadline_ns and now > e.deadline_ns]:
            self._settle(
                exchange, TimedOutError(f"no connection to {self.where} became free in time.", "Raise `connections`.")
            )
        for wire in [w for w in self._idle if now - w.idle_since_ns > _IDLE_NS]:
            self._idle.remove(wire)
            wire.drop()
        if self._busy or self._waiting or self._opening or self._idle:
            self._sweeper = self.loop.call_later(self._tick_s, self._sweep)

    def _expire(self, wire: Wire, exchange: Exchange, why: str) -> None:
        self._busy.discard(wire)
        wire.drop()
        exchange.last_ns = _now()
        self._settle(
            exchange, TimedOutError(f"{self.where} {why}.", "Is it overloaded? Allow more time, or ask for less.")
        )
        self._next()


def open_files(wanted: int = 1 << 20) -> int:
    """How many files, connections among them, this process may open; the soft limit is lifted as far as it goes."""
    try:
        import resource
    except ImportError:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return wanted if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return soft
