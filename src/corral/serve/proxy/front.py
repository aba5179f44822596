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
from corral.serve.proxy.host import Host
from corral.serve.proxy.relay import Relay
from corral.serve.proxy.request import Request

LARGEST_AHEAD_BYTES = 1 << 18  # of requests sent before the last was answered
SLOWEST_BYTES_PER_S = 16_384
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_now = time.monotonic


class RefusedError(Exception):
    """A request that is not passed on; nothing after it on its connection is read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class FrontHost(Host, Protocol):
    """The server, seen from one of its clients' connections."""

    fronts: set[Front]


class Front(asyncio.Protocol):
    """Reads requests, hands each to a relay, writes its answer."""

    __slots__ = (
        "_ahead_bytes", "_body", "_expects", "_from_here", "_handling", "_head", "_host", "_http_10", "_paused",
        "_reader", "_refused", "_relay", "_since_s", "_transport", "_waiting", "closing",
    )  # fmt: skip

    def __init__(self, host: FrontHost) -> None:
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(self)
        self._head: tuple[bytes, bytes, Headers, bool] = (b"", b"", [], False)
        self._http_10 = False  # of the request that is being answered
        self._body = bytearray()
        self._waiting: deque[Request] = deque()  # whole, behind the one that is being answered
        self._refused: RefusedError | None = None  # told when those have their answers
        self._relay: Relay | None = None
        self._ahead_bytes = 0
        self._paused = self._handling = self._expects = self._from_here = False
        self._since_s = _now()  # of what is now waited for
        self.closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self._from_here = peer is not None and (str(peer[0]).startswith("127.") or peer[0] == "::1")
        self._host.fronts.add(self)
        if len(self._host.fronts) > self._host.limits.connections:
            self._refuse(RefusedError(503, "too many connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._host.fronts.discard(self)
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
        """The request is answered: on to the next."""
        self._relay, self._since_s = None, _now()
        if self.closing or self._host.ending:
            self.close()
            return
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        if not self._handling:
            self._next()

    def close(self) -> None:
        """After what was written."""
        if self._transport is not None:
            self._transport.close()

    def end(self) -> None:
        """The server ends: so does what is being answered."""
        if self._relay is not None:
            self._relay.cut_short()
        self.close()

    def cut(self) -> None:
        """End in the middle of an answer, such that the client cannot take it for whole."""
        self._relay = None
        transport = self._transport
        if transport is None:
            return
        if self._http_10:  # such an answer ends with its connection: only a reset tells
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

    # what the reader tells

    def request(self, method: bytes, target: bytes, http_10: bool, headers: Headers) -> None:
        self._head = method, target, headers, http_10
        self._since_s = _now()
        named = self._reader.named
        announced = int(named.get(b"content-length", b"0"))
        if announced > self._host.limits.body_bytes:
            raise self._too_long()
        self._expects = b"expect" in named and has_token(headers, b"expect", b"100-continue")

    def body(self, data: bytes) -> None:
        self._body += data
        self._host.held_bytes += len(data)
        if len(self._body) > self._host.limits.body_bytes:
            raise self._too_long()
        if self._host.held_bytes > self._host.limits.held_bytes:
            raise RefusedError(503, "too many large requests at once")

    def _too_long(self) -> RefusedError:
        return RefusedError(413, f"the request is longer than {self._host.limits.body_bytes:,} bytes")

    def complete(self, keep: bool) -> None:
        body, self._body = self._body, bytearray()
        self._waiting.append(Request(*self._head, body, keep))

    # handling

    def _next(self) -> None:
        """Give on what waits, in a loop: a request that is answered at once must not lead to a call in a call."""
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
        taken = self._host.take(request, self._from_here)
        if isinstance(taken, bytes):
            self._host.held_bytes -= len(request.body)
            self.write(taken)
            self.done()
        else:
            self._relay = Relay(self._host, self, request, taken)
            self._relay.start()

    def _release(self) -> None:
        self._host.held_bytes -= len(self._body) + sum(len(request.body) for request in self._waiting)
        self._body = bytearray()
        self._waiting.clear()

    def _refuse(self, refused: RefusedError) -> None:
        """Answer what cannot be passed on, and close: what follows cannot be understood."""
        self.closing, self._refused = True, refused
        self._release()
        self._host.figures.requests += 1
        self._host.figures.failed += 1
        error = {
            "message": f"{self._host.title}: {refused.message}",
            "type": "invalid_request_error",
            "param": None,
            "code": refused.status,
        }
        body = json.dumps({"error": error}).encode()
        self.write(response(refused.status, body, extra=b"connection: close\r\n"))
        self.close()

    def sweep(self, now_s: float) -> None:
        """End connections that send too slowly, or nothing for long."""
        waited, limits = now_s - self._since_s, self._host.limits
        if self._relay is not None or self.closing:
            return
        if self._reader.receiving:
            if waited > limits.read_s + len(self._body) / SLOWEST_BYTES_PER_S:
                self._refuse(RefusedError(408, "the request did not arrive in time"))
        elif waited > limits.idle_s:
            self.close()
