"""A client that hands rows to the engine's own process over its Unix sockets, instead of HTTP.

For batches on the machine where the engine runs: one connection to each API server process carries all requests of a
client, and answers come back in any order. Health, metrics and lists of models still go over HTTP. What a request
gives, a Reply or an error of `corral.client.errors`, is the same. The other side is `corral.node.row_socket`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from corral.client.client import JSON, Client
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError, ServerGoneError, TimedOutError, error_from_status
from corral.client.pool import Page
from corral.client.reply import Reply, read_reply
from corral.client.wire import Exchange
from corral.node.row_socket import ANSWER, REQUEST, connected, sockets_in

_LOOK_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_now = time.monotonic_ns


@dataclass(frozen=True)
class RowSocketEndpoint(Endpoint):
    """An endpoint on this machine whose processes take rows through the sockets in a folder."""

    sockets: str = ""


def has_row_socket(folder: str) -> bool:
    """Whether a process of this machine listens at one of the sockets in a folder."""
    for name in sockets_in(folder):
        if made := connected(folder, name):
            made.close()
            return True
    return False


def row_processes(folder: str) -> list[int]:
    """The processes of this machine that listen there, by the numbers that they have here."""
    found = []
    for name in sockets_in(folder):
        if made := connected(folder, name):
            with made:
                found.append(_CREDENTIALS.unpack(made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    return [pid for pid in found if pid]


def open_client(endpoint: Endpoint, *, connections: int, stall_s: float) -> Client:
    """The client that an endpoint is used with."""
    if isinstance(endpoint, RowSocketEndpoint):
        return RowSocketClient(endpoint, stall_s=stall_s)
    return Client(endpoint, connections=connections, stall_s=stall_s)


class RowSocketClient(Client):
    """Sends requests through the sockets of one endpoint, each to the process that has the fewest under way."""

    def __init__(self, endpoint: RowSocketEndpoint, *, stall_s: float = 600.0) -> None:
        super().__init__(endpoint, connections=16, stall_s=stall_s)
        self._folder = endpoint.sockets
        self._wires: dict[str, _RowWire] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def send(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        on_event: Callable[[bytes, int], None] | None = None,
    ) -> asyncio.Future[Reply]:
        """Hand over a request now; one that streams, or has a name of its own, goes over HTTP."""
        streams = isinstance(body, Mapping) and body.get("stream")
        if streams or on_event or request_id:
            return super().send(path, body, timeout_s=timeout_s, request_id=request_id, on_event=on_event)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        exchange = self._exchange(path, body, future)
        if isinstance(body, Mapping):
            exchange.top = body.get("top_logprobs" if body.get("logprobs") is True else "logprobs")
        self._limit(exchange, timeout_s)
        self._give(exchange)
        return future

    def post(self, path: str, body: Mapping[str, Any] | bytes, content_type: str = JSON) -> asyncio.Future[Page]:
        if content_type != JSON:
            return super().post(path, body, content_type)
        future: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        exchange = self._exchange(path, body, future)
        exchange.page = True
        self._give(exchange)
        return future

    def _exchange(self, path: str, body: Mapping[str, Any] | bytes, future: asyncio.Future[Any]) -> Exchange:
        exchange = Exchange(path.encode(), self._body(body), future, _now())
        exchange.sent_ns = exchange.asked_ns
        return exchange

    def _give(self, exchange: Exchange) -> None:
        if not self._wires and not self._closed:
            self._look()
        if not self._wires:
            gone = ServerGoneError(f"no process of {self.endpoint.root} takes rows.", "Is it still running?")
            gone.reached = False
            exchange.future.set_exception(gone)
            return
        min(self._wires.values(), key=lambda wire: len(wire.under_way)).begin(exchange)

    def _look(self) -> None:
        """Connect to processes that are new, and give up what nobody answers; again every second."""
        loop = asyncio.get_running_loop()
        for name in sockets_in(self._folder):
            if name not in self._wires and (made := connected(self._folder, name)):
                wire = self._wires[name] = _RowWire(self.endpoint, partial(self._wires.pop, name, None))
                wire.opening = loop.create_task(_opened(loop, wire, made))
        now = _now()
        for wire in self._wires.values():
            wire.give_up_late(now, int(self.limits.stall_s * 1e9))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(_LOOK_S, self._look)

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for wire in list(self._wires.values()):
            await wire.close()
        await super().close()


async def _opened(loop: asyncio.AbstractEventLoop, wire: _RowWire, made: Any) -> None:
    try:
        await loop.create_unix_connection(lambda: wire, sock=made)
    except OSError as error:
        made.close()
        wire.connection_lost(error)


class _RowWire(asyncio.Protocol):
    """One connection, and what is under way on it."""

    def __init__(self, endpoint: Endpoint, on_lost: Callable[[], object]) -> None:
        self._endpoint, self._on_lost = endpoint, on_lost
        self.under_way: dict[int, Exchange] = {}
        self.opening: asyncio.Task[None] | None = None
        self._number = 0
        self._early: list[bytes] = []  # requests from before it was open
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()

    def begin(self, exchange: Exchange) -> None:
        self._number = (self._number + 1) & 0xFFFFFFFF
        self.under_way[self._number] = exchange
        self._write(self._number, exchange.head, exchange.body)

    def _write(self, number: int, path: bytes, body: bytes) -> None:
        frame = REQUEST.pack(len(body), number, len(path)) + path + body
        if self._transport is None:
            self._early.append(frame)
        else:
            self._transport.write(frame)

    def give_up_late(self, now_ns: int, stall_ns: int) -> None:
        """Fail requests that took too long, and let the engine forget them."""
        for number, exchange in list(self.under_way.items()):
            late = now_ns - exchange.asked_ns > stall_ns or 0 < exchange.deadline_ns < now_ns
            if late or exchange.future.cancelled():
                del self.under_way[number]
                self._write(number, b"", b"")
                spent_s = (now_ns - exchange.asked_ns) / 1e9
                _fail(exchange, TimedOutError(f"{self._endpoint.root} gave no answer within {spent_s:.0f} s.",
                                              "Try again, or allow more time."))  # fmt: skip

    async def close(self) -> None:
        if self.opening is not None:
            await asyncio.wait([self.opening])
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(None)
        await asyncio.sleep(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self._transport.write(b"".join(self._early))
        self._early.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()
        for exchange in self.under_way.values():
            _fail(exchange, ServerGoneError(f"the connection to {self._endpoint.root} broke.", "Is it running?"))
        self.under_way.clear()

    def data_received(self, data: bytes) -> None:
        buffer, at, now = self._buffer, 0, _now()
        buffer += data
        while len(buffer) - at >= ANSWER.size:
            length, number, status = ANSWER.unpack_from(buffer, at)
            begin = at + ANSWER.size
            if len(buffer) < begin + length:
                break
            at = begin + length
            exchange = self.under_way.pop(number, None)
            if exchange is not None:
                exchange.first_byte_ns = exchange.last_ns = now
                self._settle(exchange, status, bytes(buffer[begin:at]))
        del buffer[:at]

    def _settle(self, exchange: Exchange, status: int, body: bytes) -> None:
        if exchange.future.done():
            return
        exchange.status, exchange.parts = status, [body]
        try:
            if status != 200:
                raise error_from_status(status, body, None, self._endpoint.root, self._endpoint.model)
            made = Page(status, body) if exchange.page else read_reply(exchange, self._endpoint.root)
            exchange.future.set_result(made)
        except RequestError as error:
            exchange.future.set_exception(error)


def _fail(exchange: Exchange, error: RequestError) -> None:
    if not exchange.future.done():
        exchange.future.set_exception(error)
