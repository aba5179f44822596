"""One HTTP/1.1 connection to a server, which carries one request at a time, and the client's use of it.

`HttpConnection` is the transport, the framing and the end of a connection; the gateway's connections to its members
are such ones, too. `Wire` collects an answer for the client, built so that a streamed chunk costs a microsecond: the
reader calls the `body` of the subclass, with nothing in between.

Every read is stamped once, in `data_received`, before anything is parsed. Server-sent events are only split here;
their JSON is decoded when the answer is complete (`reply`), or by who asked for them one by one.

Not covered: proxies, redirects, compression (none is asked for), HTTP/2.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from corral.client.errors import CutStreamError, MalformedReplyError, RequestError, ServerGoneError
from corral.client.http1 import BadMessageError, EventSplitter, Headers, ResponseReader, write_now

_now = time.monotonic_ns
_LARGEST_PAGE_BYTES = 64 << 20


class Exchange:
    """One request and what has come back so far."""

    __slots__ = (
        "again", "asked_ns", "body", "deadline_ns", "done", "events", "first_byte_ns", "future", "head", "last_ns",
        "on_event", "page", "parts", "retry_after", "sent_ns", "status", "stream", "times", "top",
    )  # fmt: skip

    def __init__(self, head: bytes, body: bytes, future: asyncio.Future[Any], asked_ns: int) -> None:
        self.head, self.body, self.future, self.asked_ns = head, body, future, asked_ns
        self.sent_ns = self.first_byte_ns = self.last_ns = self.deadline_ns = 0
        self.status = 0
        self.stream = False
        self.done = False  # [DONE] was seen
        self.again = False  # was already sent once, on a connection that turned out to be stale
        self.events: list[bytes] = []
        self.times: list[int] = []
        self.parts: list[bytes] = []
        self.retry_after: bytes | None = None
        self.on_event: Callable[[bytes, int], None] | None = None
        self.page = False  # any status and any body will do
        self.top: int | None = None  # how many alternatives were asked for, if known


class WireOwner(Protocol):
    """The pool that a connection belongs to."""

    where: str

    def finished(self, wire: Wire, exchange: Exchange, keep: bool) -> None: ...

    def failed(self, wire: Wire, exchange: Exchange, error: RequestError) -> None: ...

    def lost(self, wire: Wire) -> None: ...


class HttpConnection(asyncio.Protocol):
    """The transport of one connection and the reader of its answers; subclasses take the answers."""

    __slots__ = ("_fd", "_reader", "reused", "transport")

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reused = False
        self._fd = -1  # -1: bytes must pass the transport
        self._reader = ResponseReader(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is None:
            return
        if transport.get_extra_info("sslcontext") is None:
            self._fd = sock.fileno()
        # a node that lost its power sends nothing more: without these, a request would wait for an answer for ever
        for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @property
    def open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def drop(self) -> None:
        """Close at once; the request that it carries is not told."""
        self._forget()
        self._fd = -1
        if self.transport is not None:
            self.transport.abort()

    def eof_received(self) -> None:
        if self._busy and self._reader.ends_at_eof():
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport, self._fd = None, -1
        if self._busy:
            if exc is None and self._reader.ends_at_eof():
                self._finish()
            else:
                self._break("was reset" if exc else "ended")
        self._unlist()

    # called by the reader

    def answer(self, status: int, headers: Headers) -> None:
        """The head of the answer."""
        raise NotImplementedError

    def body(self, data: bytes) -> None:
        """Some of its body."""
        raise NotImplementedError

    # of the request that it carries

    @property
    def _busy(self) -> bool:
        """Whether it carries a request."""
        raise NotImplementedError

    def _forget(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """The answer is whole."""
        raise NotImplementedError

    def _break(self, how: str) -> None:
        """The connection ended before the answer was whole."""
        raise NotImplementedError

    def _unlist(self) -> None:
        """The owner keeps it no longer."""
        raise NotImplementedError


class Wire(HttpConnection):
    """A connection of the client's pool."""

    __slots__ = ("_events", "_exchange", "_owner", "_size", "_splitter", "_whole", "active_ns", "idle_since_ns")

    def __init__(self, owner: WireOwner) -> None:
        super().__init__()
        self._owner = owner
        self.active_ns = self.idle_since_ns = 0
        self._exchange: Exchange | None = None
        self._size = 0
        self._events = False
        self._whole = False  # these are events, and none is cut in two just now
        self._splitter = EventSplitter()

    @property
    def exchange(self) -> Exchange | None:
        return self._exchange

    @property
    def _busy(self) -> bool:
        return self._exchange is not None

    def _forget(self) -> None:
        self._exchange = None

    def begin(self, exchange: Exchange) -> None:
        """Send a request; the answer goes to the owner."""
        assert self.transport is not None
        self._exchange = exchange
        self._reader.expect()
        data = exchange.head + exchange.body
        exchange.sent_ns = self.active_ns = _now()
        write_now(self.transport, self._fd, data)

    def data_received(self, data: bytes) -> None:
        self.active_ns = _now()
        exchange, reader = self._exchange, self._reader
        if exchange is None:
            if self.transport is not None:
                self.transport.abort()  # nothing was asked
            return
        if not exchange.first_byte_ns:
            exchange.first_byte_ns = self.active_ns
        try:
            reader.feed(data)
        except BadMessageError as error:
            where = self._owner.where
            self._fail(MalformedReplyError(f"{where} does not speak HTTP: {error}.", "Check the base URL."))
        else:
            if reader.complete:
                self._finish()

    def _unlist(self) -> None:
        self._owner.lost(self)

    def _break(self, how: str) -> None:
        if self._exchange is not None:
            self._fail(self._broken(self._exchange, how))

    def _broken(self, exchange: Exchange, how: str) -> RequestError:
        where = self._owner.where
        if not exchange.first_byte_ns:
            return ServerGoneError(
                f"{where} closed the connection without an answer (it {how}).", "Is the server still running?"
            )
        return CutStreamError(
            f"the answer from {where} broke off (the connection {how}).", "Try again; look at the engine's log."
        )

    def answer(self, status: int, headers: Headers) -> None:
        exchange = self._exchange
        assert exchange is not None
        exchange.status, self._size = status, 0
        named = self._reader.named
        if status >= 400:
            exchange.retry_after = named.get(b"retry-after")
        self._events = status == 200 and named.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        exchange.stream = self._whole = self._events

    def body(self, data: bytes) -> None:
        """Some of its body: nearly always one chunk that is one whole event, of one line and a blank one."""
        exchange = self._exchange
        assert exchange is not None
        if (
            self._whole
            and data.startswith(b"data: {")  # not [DONE]
            and data.endswith(b"}\n\n")
            and data.find(b"\n") == len(data) - 2
        ):
            event = data[6:-2]
            exchange.events.append(event)
            exchange.times.append(self.active_ns)
            if exchange.on_event is not None:
                exchange.on_event(event, self.active_ns)
        elif self._events:
            self._take(exchange, self._splitter.feed(data), self.active_ns)
            self._whole = self._splitter.empty
        else:
            exchange.parts.append(data)
            self._size += len(data)
            if exchange.page and self._size > _LARGEST_PAGE_BYTES:
                raise BadMessageError("a page that does not end")

    def _take(self, exchange: Exchange, events: list[bytes], now: int) -> None:
        for event in events:
            if event == b"[DONE]":
                exchange.done = True
                continue
            exchange.events.append(event)
            exchange.times.append(now)
            if exchange.on_event is not None:
                exchange.on_event(event, now)

    def _finish(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        if self._reader.until_eof:
            self.active_ns = _now()
        exchange.last_ns = self.active_ns
        if not self._splitter.empty:
            self._take(exchange, self._splitter.end(), self.active_ns)
        self._owner.finished(self, exchange, keep=self._reader.keep)

    def _fail(self, error: RequestError) -> None:
        exchange, self._exchange = self._exchange, None
        if self.transport is not None:
            self.transport.abort()
        if exchange is not None:
            exchange.last_ns = _now()
            self._owner.failed(self, exchange, error)
