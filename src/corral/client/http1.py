"""One HTTP/1.1 connection that carries one request at a time, built so that a streamed chunk costs microseconds.

Every read is stamped once, in `data_received`, before anything is parsed. Server-sent events are only split here;
their JSON is decoded when the answer is complete (`reply`), or by who asked for them one by one. Splits of the
bytes may fall anywhere: headers, chunk sizes, events and characters.

Not covered: proxies, redirects, compression (none is asked for), HTTP/2.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from corral.client.errors import CutStreamError, MalformedReplyError, RequestError, ServerGoneError

__all__ = ["EventSplitter", "Exchange", "Wire", "WireOwner"]

_now = time.monotonic_ns
_HEAD, _LENGTH, _CHUNKS, _UNTIL_EOF, _IDLE = range(5)
_MAX_HEAD_BYTES = 1 << 18


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


class EventSplitter:
    """Splits server-sent events out of bytes that may be cut anywhere; gives the data of each."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    @property
    def empty(self) -> bool:
        return not self._rest

    def end(self) -> list[bytes]:
        """The last event, if only the line feed after its carriage return was missing; other rests are dropped."""
        found = self.feed(b"\n") if self._rest.endswith(b"\r") else []
        self._rest = b""
        return found

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that is now complete."""
        text = self._rest + data
        if b"\r" in text:
            held = text.endswith(b"\r")  # its \n may still come
            text = text.replace(b"\r\n", b"\n")
            if held:
                text = text[:-1]
            text = text.replace(b"\r", b"\n")
        else:
            held = False
        *blocks, rest = text.split(b"\n\n")
        self._rest = rest + b"\r" if held else rest
        found = []
        for block in blocks:
            lines = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(line[1:] if line[:1] == b" " else line for line in lines))
        return found


class Wire(asyncio.Protocol):
    """One connection."""

    __slots__ = (
        "_close_after", "_events", "_exchange", "_fd", "_owner", "_rest", "_splitter", "_state", "_want", "_whole",
        "active_ns",
        "idle_since_ns", "reused", "transport",
    )  # fmt: skip

    def __init__(self, owner: WireOwner) -> None:
        self._owner = owner
        self.transport: asyncio.Transport | None = None
        self.active_ns = self.idle_since_ns = 0
        self.reused = False
        self._exchange: Exchange | None = None
        self._fd = -1
        self._state = _IDLE
        self._rest = b""
        self._want = 0
        self._close_after = self._events = False
        self._whole = False  # these are events, and none is cut in two just now
        self._splitter = EventSplitter()

    @property
    def exchange(self) -> Exchange | None:
        return self._exchange

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and transport.get_extra_info("sslcontext") is None:
            self._fd = sock.fileno()

    def begin(self, exchange: Exchange) -> None:
        """Send a request; the answer goes to the owner."""
        assert self.transport is not None
        self._exchange = exchange
        self._state = _HEAD
        data = exchange.head + exchange.body
        exchange.sent_ns = self.active_ns = _now()
        if self._fd >= 0 and not self.transport.is_closing() and not self.transport.get_write_buffer_size():
            # uvloop would send at the end of its round, after all that is still to be done in it: sent_ns would lie.
            try:
                sent = os.write(self._fd, data)
            except OSError:
                sent = 0  # the transport finds out why
            if sent == len(data):
                return
            data = data[sent:]
        self.transport.write(data)

    def abandon(self) -> None:
        """Drop the connection together with whatever it carries; nobody is told."""
        self._exchange, self._state, self._fd = None, _IDLE, -1
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        now = self.active_ns = _now()
        try:
            if self._state == _CHUNKS:
                self._chunks(data, now)
            elif self._state == _HEAD:
                self._head(data, now)
            elif self._state == _LENGTH:
                self._length(data, now)
            elif self._state == _UNTIL_EOF:
                self._payload(data, now)
            elif self.transport is not None:
                self.transport.abort()  # nothing was asked
        except ValueError as error:
            self._fail(
                MalformedReplyError(f"{self._owner.where} does not speak HTTP: {error}.", "Check the base URL.")
            )

    def eof_received(self) -> None:
        if self._state == _UNTIL_EOF and self._exchange is not None:
            self._close_after = True
            self._finish(_now())

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport, self._fd = None, -1
        exchange = self._exchange
        if exchange is not None:
            if self._state == _UNTIL_EOF and exc is None:
                self._close_after = True
                self._finish(_now())
                return
            self._fail(self._broken(exchange, exc))
        self._owner.lost(self)

    def _broken(self, exchange: Exchange, exc: Exception | None) -> RequestError:
        where, how = self._owner.where, "was reset" if exc else "ended"
        if not exchange.first_byte_ns:
            return ServerGoneError(
                f"{where} closed the connection without an answer (it {how}).", "Is the server still running?"
            )
        return CutStreamError(
            f"The answer of {where} broke off (the connection {how}).", "Try again; look into the engine's log."
        )

    def _head(self, data: bytes, now: int) -> None:
        exchange = self._exchange
        assert exchange is not None
        if not exchange.first_byte_ns:
            exchange.first_byte_ns = now
        data = self._rest + data if self._rest else data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD_BYTES or (len(data) >= 5 and not data.startswith(b"HTTP/")):
                raise ValueError("no header")
            self._rest = data
            return
        self._rest = b""
        head = data[:end].lower()
        if not head.startswith(b"http/1."):
            raise ValueError("no status line")
        status = exchange.status = int(head[9:12])
        if status < 200:
            if len(data) > end + 4:
                self._head(data[end + 4 :], now)
            return
        self._close_after = b"\r\nconnection: close" in head or head[5:8] == b"1.0"
        self._events = status == 200 and b"\r\ncontent-type: text/event-stream" in head
        exchange.stream = self._whole = self._events
        if status >= 400:
            exchange.retry_after = _value(head, b"\r\nretry-after:")
        if b"\r\ntransfer-encoding:" in head:
            self._state = _CHUNKS
        elif (length := _value(head, b"\r\ncontent-length:")) is not None:
            self._state, self._want = _LENGTH, int(length)
        elif status == 204 or status == 304:
            self._state, self._want = _LENGTH, 0
        else:
            self._state = _UNTIL_EOF
        rest = data[end + 4 :]
        if self._state == _LENGTH:
            self._length(rest, now)
        elif rest:
            self._chunks(rest, now) if self._state == _CHUNKS else self._payload(rest, now)

    def _length(self, data: bytes, now: int) -> None:
        if len(data) > self._want:
            raise ValueError("more bytes than announced")
        self._want -= len(data)
        if data:
            self._payload(data, now)
        if not self._want:
            self._finish(now)

    def _chunks(self, data: bytes, now: int) -> None:
        if self._rest:
            data = self._rest + data
        at, size = 0, len(data)
        while at < size:
            line = data.find(b"\r\n", at)
            if line < 0:
                break
            length = int(data[at:line].partition(b";")[0], 16)
            end = line + 2 + length
            if length <= 0:
                if length < 0:
                    raise ValueError("a negative chunk size")
                if data.startswith(b"\r\n", end) or data.find(b"\r\n\r\n", end) >= 0:
                    self._rest = b""
                    self._finish(now)
                    return
                break
            if end + 2 > size:
                break
            # Nearly always one whole event in one chunk: one line, one blank line.
            if (
                self._whole
                and data.startswith(b"data: {", line + 2)  # not [DONE]
                and data.startswith(b"}\n\n", end - 3)
                and data.find(b"\n", line + 2, end) == end - 2
            ):
                exchange = self._exchange
                assert exchange is not None
                exchange.events.append(data[line + 8 : end - 2])
                exchange.times.append(now)
                if exchange.on_event is not None:
                    exchange.on_event(exchange.events[-1], now)
            else:
                self._payload(data[line + 2 : end], now)
            at = end + 2
        self._rest = data[at:] if at else data

    def _payload(self, data: bytes, now: int) -> None:
        exchange = self._exchange
        assert exchange is not None
        if not self._events:
            exchange.parts.append(data)
            return
        self._take(exchange, self._splitter.feed(data), now)
        self._whole = self._splitter.empty

    def _take(self, exchange: Exchange, events: list[bytes], now: int) -> None:
        for event in events:
            if event == b"[DONE]":
                exchange.done = True
                continue
            exchange.events.append(event)
            exchange.times.append(now)
            if exchange.on_event is not None:
                exchange.on_event(event, now)

    def _finish(self, now: int) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        exchange.last_ns = now
        self._state = _IDLE
        self._rest = b""
        if not self._splitter.empty:
            self._take(exchange, self._splitter.end(), now)
        self._owner.finished(self, exchange, keep=not self._close_after)

    def _fail(self, error: RequestError) -> None:
        exchange, self._exchange = self._exchange, None
        self._state = _IDLE
        if self.transport is not None:
            self.transport.abort()
        if exchange is not None:
            exchange.last_ns = _now()
            self._owner.failed(self, exchange, error)


def _value(head: bytes, name: bytes) -> bytes | None:
    at = head.find(name)
    if at < 0:
        return None
    end = head.find(b"\r\n", at + 2)
    return head[at + len(name) : end if end >= 0 else len(head)].strip()
