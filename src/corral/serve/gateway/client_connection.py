"""One connection of a client: requests are read whole, one after the other, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections import deque
from typing import Protocol, cast

from corral.client.http1 import BadMessageError, Headers, HeadTooLongError, RequestReader, has_token, response
from corral.serve.errors import error_body
from corral.serve.gateway.relay import Relay, RelayHost
from corral.serve.gateway.request import ForwardedRequest, Request

LARGEST_AHEAD_BYTES = 1 << 18  # of requests sent before the last was answered
SLOWEST_BYTES_PER_S = 16_384
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_now = time.monotonic


class RefusedError(Exception):
    """A request that is not passed on; nothing after it on its connection is read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class ConnectionHost(RelayHost, Protocol):
    """The gateway, as a client's connection sees it."""

    connections: set[ClientConnection]

    def handle(self, request: Request, is_local: bool) -> ForwardedRequest | bytes:
        """Accept a request, or answer it; `is_local`: it comes from this machine."""


class ClientConnection(asyncio.Protocol):
    """Reads requests, gives each to a relay, writes its answer."""

    __slots__ = (
        "_ahead_bytes", "_body", "_expects", "_gateway", "_handling", "_head", "_http_10", "_is_local", "_paused",
        "_reader", "_refused", "_relay", "_since_s", "_transport", "_waiting", "closing",
    )  # fmt: skip

    def __init__(self, gateway: ConnectionHost) -> None:
        self._gateway = gateway
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(self)
        self._head: tuple[bytes, bytes, Headers, bool] = (b"", b"", [], False)
        self._http_10 = False  # of the request that is being answered
        self._body = bytearray()
        self._waiting: deque[Request] = deque()  # whole, behind the one that is being answered
        self._refused: RefusedError | None = None  # answered after those
        self._relay: Relay | None = None
        self._ahead_bytes = 0
        self._paused = self._handling = self._expects = self._is_local = False
        self._since_s = _now()  # when the current wait began
        self.closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self._is_local = peer is not None and (str(peer[0]).startswith("127.") or peer[0] == "::1")
        self._gateway.connections.add(self)
        if len(self._gateway.connections) > self._gateway.limits.connections:
            self._refuse(RefusedError(503, "too many connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._gateway.connections.discard(self)
        self._release()
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.abandon()

    # writing

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def pause_writing(self) -> None:
        if self._relay is not None:
            self._relay.pause(True)

    def resume_writing(self) -> None:
        if self._relay is not None:
            self._relay.pause(False)

    def done(self) -> None:
        """The request is answered: handle the next."""
        self._relay, self._since_s = None, _now()
        if self.closing or self._gateway.ending:
            self.close()
            return
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        if not self._handling:
            self._next()

    def close(self) -> None:
        """Close once all that was written is sent."""
        if self._transport is not None:
            self._transport.close()

    def end(self) -> None:
        """The gateway ends, and with it the request that is being answered."""
        if self._relay is not None:
            self._relay.cut_short()
        self.close()

    def cut(self) -> None:
        """End in the middle of an answer in a way that the client cannot mistake for its end."""
        self._relay = None
        transport = self._transport
        if transport is None:
            return
        if self._http_10:  # such an answer ends with its connection: only a reset shows the cut
            with contextlib.suppress(OSError):
                sock = transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            transport.close()  # what was received is passed on; the announced end is missing

    # reading

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        if not self._reader.receiving:
            self._since_s = _now()
        try:
            self._reader.feed(data)
        except RefusedError as error:
            self._refused = error
        except HeadTooLongError:
            self._refused = RefusedError(431, "the request's headers are too long")
        except BadMessageError as error:
            self._refused = RefusedError(400, f"the request cannot be read: {error}")
        self._next()
        if self._relay is not None:
            self._ahead_bytes += len(data)
            if self._ahead_bytes > LARGEST_AHEAD_BYTES and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
        elif self._expects and self._reader.receiving:
            self._expects = False
            self.write(CONTINUE)

    # called by the reader

    def request(self, method: bytes, target: bytes, http_10: bool, headers: Headers) -> None:
        self._head = method, target, headers, http_10
        self._since_s = _now()
        named = self._reader.named
        announced = int(named.get(b"content-length", b"0"))
        if announced > self._gateway.limits.body_bytes:
            raise self._too_long()
        self._expects = b"expect" in named and has_token(headers, b"expect", b"100-continue")

    def body(self, data: bytes) -> None:
        self._body += data
        self._gateway.held_bytes += len(data)
        if len(self._body) > self._gateway.limits.body_bytes:
            raise self._too_long()
        if self._gateway.held_bytes > self._gateway.limits.held_bytes:
            raise RefusedError(503, "too many large requests at once")

    def _too_long(self) -> RefusedError:
        return RefusedError(413, f"the request is longer than {self._gateway.limits.body_bytes:,} bytes")

    def complete(self, keep: bool) -> None:
        body, self._body = self._body, bytearray()
        self._waiting.append(Request(*self._head, body, keep))

    # handling

    def _next(self) -> None:
        """Handle what waits, in a loop: requests that are answered at once must not nest calls."""
        if self._handling:
            return
        self._handling = True
        try:
            while self._waiting and self._relay is None and self._transport is not None and not self.closing:
                self._handle(self._waiting.popleft())
        finally:
            self._handling = False
        if self._refused is not None and self._relay is None and not self.closing:
            self._refuse(self._refused)

    def _handle(self, request: Request) -> None:
        self._http_10, self._ahead_bytes = request.http_10, 0
        self.closing = request.http_10 or not request.keep
        answer = self._gateway.handle(request, self._is_local)
        if isinstance(answer, bytes):
            self._gateway.held_bytes -= len(request.body)
            self.write(answer)
            self.done()
        else:
            self._relay = Relay(self._gateway, self, request, answer)
            self._relay.start()

    def _release(self) -> None:
        self._gateway.held_bytes -= len(self._body) + sum(len(request.body) for request in self._waiting)
        self._body = bytearray()
        self._waiting.clear()

    def _refuse(self, refused: RefusedError) -> None:
        """Answer what cannot be passed on, and close: what follows cannot be understood."""
        self.closing, self._refused = True, refused
        self._release()
        self._gateway.figures.requests += 1
        self._gateway.figures.failed += 1
        text = f"{self._gateway.title}: {refused.message}"
        body = json.dumps(error_body(text, "invalid_request_error", refused.status)).encode()
        self.write(response(refused.status, body, extra=b"connection: close\r\n"))
        self.close()

    def sweep(self, now_s: float) -> None:
        """End connections that send too slowly, or nothing for long."""
        waited, limits = now_s - self._since_s, self._gateway.limits
        if self._relay is not None or self.closing:
            return
        if self._reader.receiving:
            if waited > limits.read_s + len(self._body) / SLOWEST_BYTES_PER_S:
                self._refuse(RefusedError(408, "the request did not arrive in time"))
        elif waited > limits.idle_s:
            self.close()
