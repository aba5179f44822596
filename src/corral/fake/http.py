"""The little HTTP/1.1 that the fake server speaks: keep-alive, pipelining, bodies by length or in chunks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import deque
from http import HTTPStatus
from typing import Protocol, cast

__all__ = ["Connection", "Handler", "header", "response"]

_MAX_HEAD_BYTES = 65_536
_MAX_WAITING_BYTES = 64 << 20
_PHRASES = {s.value: s.phrase for s in HTTPStatus}


class Handler(Protocol):
    """Who answers requests: `handle` must end in `Connection.send` and `Connection.done`, now or later."""

    connections: set[Connection]

    def handle(self, to: Connection, method: bytes, path: bytes, head: bytes, body: bytes, arrival: int) -> None: ...


def header(head: bytes, name: bytes) -> bytes | None:
    """The value of one header (name in lower case)."""
    low = head.lower()
    at = low.find(b"\r\n" + name + b":")
    if at < 0:
        return None
    start = at + len(name) + 3
    end = head.find(b"\r\n", start)
    return head[start : end if end >= 0 else len(head)].strip()


def response(status: int, body: bytes, kind: bytes = b"application/json", extra: bytes = b"") -> bytes:
    """A whole response."""
    phrase = _PHRASES.get(status, "Unknown").encode()
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (
        status, phrase, kind, len(body), extra, body,
    )  # fmt: skip


class Connection(asyncio.Protocol):
    """One client connection; requests on it are answered one after the other."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.transport: asyncio.Transport | None = None
        self.on_lost: object = None  # the exchange to tell when the client goes away
        self.split_bytes = 0
        self._fd = -1
        self._buffer = b""
        self._need = 0
        self._busy = self._parsing = self._close_after = False
        self._pieces: deque[bytes] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._fd = transport.get_extra_info("socket").fileno()
        self.handler.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.handler.connections.discard(self)
        lost = getattr(self.on_lost, "lost", None)
        self.on_lost = None
        if lost:
            lost()

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if self._busy or len(self._buffer) < self._need:
            if len(self._buffer) > _MAX_WAITING_BYTES:
                self.reset()
            return
        if not self._parsing:
            self._parse()

    def send(self, data: bytes) -> None:
        """Write bytes, in tiny pieces when the `split` fault asks for it."""
        if self.transport is None:
            return
        if not self.split_bytes and not self._pieces:
            self._write(data)
            return
        size = self.split_bytes or len(data)
        pumping = bool(self._pieces)
        self._pieces.extend(data[i : i + size] for i in range(0, len(data), size))
        if not pumping:
            self._pump()

    def _write(self, data: bytes) -> None:
        """Write at once: uvloop would wait for the end of its round, and the log's times would lie."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if not transport.get_write_buffer_size():
            try:
                sent = os.write(self._fd, data)
            except OSError:
                sent = 0  # the transport finds out why
            if sent == len(data):
                return
            data = data[sent:]
        transport.write(data)

    def done(self) -> None:
        """The current request is answered: take the next one."""
        self.on_lost = None
        self._busy = False
        self.split_bytes = 0
        if self._close_after:
            self.close()
        elif self._buffer and not self._parsing:
            self._parse()

    def close(self) -> None:
        """End of file after what was written."""
        if self.transport is None:
            return
        if self._pieces:
            asyncio.get_running_loop().call_soon(self.close)
            return
        self.transport.close()

    def reset(self) -> None:
        """A TCP reset."""
        if self.transport is None:
            return
        sock = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _pump(self) -> None:
        if self.transport is None or not self._pieces:
            return
        self._write(self._pieces.popleft())
        if self._pieces:
            asyncio.get_running_loop().call_soon(self._pump)

    def _parse(self) -> None:
        self._parsing = True
        try:
            while self._buffer and not self._busy and self.transport is not None:
                if not self._take():
                    break
        finally:
            self._parsing = False

    def _take(self) -> bool:
        """Take one request off the buffer; False when it is not all there yet."""
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(buffer) > _MAX_HEAD_BYTES:
                self._refuse(431)
            return False
        head = buffer[:end]
        low = head.lower()
        at = low.find(b"\r\ncontent-length:")
        start = end + 4
        if at >= 0:
            stop = low.find(b"\r\n", at + 2)
            try:
                stop_at = start + int(low[at + 17 : stop if stop >= 0 else end])
            except ValueError:
                self._refuse(400)
                return False
            if len(buffer) < stop_at:
                self._continue(low)
                self._need = stop_at
                return False
            body = buffer[start:stop_at]
        elif b"\r\ntransfer-encoding: chunked" in low:
            chunked = _dechunk(buffer, start)
            if chunked is None:
                self._continue(low)
                return False
            body, stop_at = chunked
        else:
            body, stop_at = b"", start
        self._need = 0
        self._buffer = buffer[stop_at:]
        first = head[: head.find(b"\r\n")] if b"\r\n" in head else head
        parts = first.split(b" ")
        if len(parts) != 3:
            self._refuse(400)
            return False
        self._close_after = b"\r\nconnection: close" in low or parts[2] == b"HTTP/1.0"
        self._busy = True
        self.handler.handle(self, parts[0], parts[1], head, body, time.monotonic_ns())
        return True

    def _continue(self, low: bytes) -> None:
        if b"\r\nexpect: 100-continue" in low and not self._need:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refuse(self, status: int) -> None:
        self.send(response(status, b'{"error":{"message":"Invalid HTTP request received."}}'))
        self.close()


def _dechunk(buffer: bytes, at: int) -> tuple[bytes, int] | None:
    """The body of a chunked request and where it ends, or None when it is not all there."""
    parts: list[bytes] = []
    while True:
        line = buffer.find(b"\r\n", at)
        if line < 0:
            return None
        size = int(buffer[at:line].split(b";")[0] or b"0", 16)
        at = line + 2 + size + 2
        if len(buffer) < at:
            return None
        if size == 0:
            return b"".join(parts), at
        parts.append(buffer[line + 2 : line + 2 + size])
