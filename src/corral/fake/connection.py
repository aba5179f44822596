"""One connection of the fake server: keep-alive, pipelining, answers in tiny pieces when a fault asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from typing import NamedTuple, Protocol, cast

from corral.client.http1 import BadMessageError, Headers, HeadTooLongError, RequestReader, response, write_now

_MAX_WAITING_BYTES = 64 << 20
_REQUEST_BYTES = 512  # of a request without its body


class FakeRequest(NamedTuple):
    """A whole request."""

    method: bytes
    path: bytes  # with its query
    headers: dict[bytes, bytes]  # names in lower case
    keep: bool  # another may follow on its connection
    body: bytes


class RequestHandler(Protocol):
    """Answers requests: `handle` must end in `FakeConnection.send` and `FakeConnection.done`, now or later."""

    connections: set[FakeConnection]

    def handle(self, to: FakeConnection, request: FakeRequest, arrival: int) -> None: ...


class FakeConnection(asyncio.Protocol):
    """One client connection; requests on it are answered one after the other."""

    def __init__(self, handler: RequestHandler) -> None:
        self.handler = handler
        self.transport: asyncio.Transport | None = None
        self.on_lost: object = None  # the exchange to tell when the client goes away
        self.split_bytes = 0
        self._fd = -1
        self._reader = RequestReader(self)
        self._head: tuple[bytes, bytes] = (b"", b"")
        self._parts: list[bytes] = []
        self._waiting: deque[FakeRequest] = deque()
        self._waiting_bytes = self._bad = 0
        self._busy = self._answering = self._close_after = self._expects = False
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
        try:
            self._reader.feed(data)
        except BadMessageError as error:
            self._bad = 431 if isinstance(error, HeadTooLongError) else 400
        if not self._answering:
            self._next()
        if self._expects and self._reader.receiving and not self._busy:
            self._expects = False
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._waiting_bytes > _MAX_WAITING_BYTES:
            self.reset()

    # Called by the reader

    def request(self, method: bytes, target: bytes, http_10: bool, headers: Headers) -> None:
        self._head = method, target
        self._expects = b"expect" in self._reader.named

    def body(self, data: bytes) -> None:
        self._parts.append(data)
        self._waiting_bytes += len(data)

    def complete(self, keep: bool) -> None:
        parts, self._parts = self._parts, []
        self._waiting_bytes += _REQUEST_BYTES
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._waiting.append(FakeRequest(*self._head, self._reader.named, keep, body))

    def _next(self) -> None:
        """Answer the waiting requests, in a loop, so that instant answers do not nest calls."""
        self._answering = True
        try:
            while self._waiting and not self._busy and self.transport is not None:
                request = self._waiting.popleft()
                self._waiting_bytes -= len(request.body) + _REQUEST_BYTES
                self._busy, self._close_after = True, not request.keep
                self.handler.handle(self, request, time.monotonic_ns())
            if self._bad and not self._busy:
                self._refuse(self._bad)
        finally:
            self._answering = False

    def send(self, data: bytes) -> None:
        """Write bytes, in tiny pieces when the `split` fault asks for it."""
        if self.transport is None:
            return
        if not self.split_bytes and not self._pieces:
            write_now(self.transport, self._fd, data)
            return
        size = self.split_bytes or len(data)
        pumping = bool(self._pieces)
        self._pieces.extend(data[i : i + size] for i in range(0, len(data), size))
        if not pumping:
            self._pump()

    def done(self) -> None:
        """The current request is answered: begin the next one."""
        self.on_lost = None
        self._busy = False
        self.split_bytes = 0
        if self._close_after:
            self.close()
        elif not self._answering:
            self._next()

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
        write_now(self.transport, self._fd, self._pieces.popleft())
        if self._pieces:
            asyncio.get_running_loop().call_soon(self._pump)

    def _refuse(self, status: int) -> None:
        self.send(response(status, b'{"error":{"message":"Invalid HTTP request received."}}'))
        self.close()
