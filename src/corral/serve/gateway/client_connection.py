"""One connection of a client: requests are read whole, one after the other, within the limits of `serve.connections`.

The key is looked up at the end of a head: without one that is known, a body is refused before any of it is kept.
Nothing more is read while what was written is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections import deque
from collections.abc import Hashable
from typing import Protocol, cast

from corral.client.errors import error_body
from corral.client.http1 import BadMessageError, Headers, HeadTooLongError, RequestReader, has_token, response
from corral.serve.connections import ConnectionPhase, ConnectionProgress, ConnectionTable
from corral.serve.gateway.form import FormReader, is_form
from corral.serve.gateway.large_json import LARGE_BYTES, LargeJsonReader
from corral.serve.gateway.origins import with_lines
from corral.serve.gateway.relay import Relay, RelayHost
from corral.serve.gateway.request import ForwardedRequest, Request
from corral.serve.gateway.usage import KeyTable, KeyUser

LARGEST_AHEAD_BYTES = 1 << 18  # of requests sent before the last was answered
HALF_CLOSED = (
    "the client closed its side of the connection before it was answered, which ends a request: keep it open for both"
    " directions until the answer is whole"
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_now = time.monotonic


class RefusedError(Exception):
    """A request that is not passed on; nothing after it on its connection is read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class ConnectionHost(RelayHost, Protocol):
    """The gateway, as a client's connection sees it."""

    connections: ConnectionTable[ClientConnection]
    draining: bool  # another process accepts clients in its place
    keys: KeyTable

    def handle(self, request: Request, is_local: bool) -> ForwardedRequest | bytes:
        """Accept a request, or answer it; `is_local`: it comes from this machine."""

    def refuse_key(self, headers: Headers, extra: bytes = b"") -> bytes:
        """The answer to a request without a key that is known."""

    def refusal(self, status: int, message: str, *, extra: bytes = b"") -> bytes:
        """An answer of the gateway's own, counted as refused."""


class ClientConnection(asyncio.Protocol):
    """Reads requests, gives each to a relay, writes its answer."""

    __slots__ = (
        "_ahead_bytes", "_body", "_expects", "_form", "_gateway", "_handling", "_head", "_http_10", "_in_body",
        "_is_local", "_large", "_paused", "_reader", "_refused", "_relay", "_transport", "_unread", "_user",
        "_waiting", "address", "closing", "owner", "progress",
    )  # fmt: skip

    def __init__(self, gateway: ConnectionHost) -> None:
        self._gateway = gateway
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(self)
        self._head: tuple[bytes, bytes, Headers, bool] = (b"", b"", [], False)
        self._user: KeyUser | None = None  # of the request that is being read
        self._http_10 = False  # of the request that is being answered
        self._body = bytearray()
        self._form: FormReader | None = None  # of that body
        self._large: LargeJsonReader | None = None
        self._waiting: deque[Request] = deque()  # whole, behind the one that is being answered
        self._refused: RefusedError | None = None  # answered after those
        self._relay: Relay | None = None
        self._ahead_bytes = 0
        self._paused = self._unread = self._handling = self._expects = self._in_body = self._is_local = False
        self.address, self.owner = "", cast("Hashable", None)
        self.progress = ConnectionProgress(_now())
        self.closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self._is_local = self.address.startswith("127.") or self.address == "::1"
        if not self._gateway.connections.add(self):
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
        self._unread = True
        if self._relay is not None:
            self._relay.pause(True)
        self._set_reading()

    def resume_writing(self) -> None:
        self._unread = False
        if self._relay is not None:
            self._relay.pause(False)
        self._set_reading()
        self._next()

    def done(self) -> None:
        """The request is answered: handle the next."""
        self._relay = None
        if self.closing or self._gateway.ending:
            self.close()
            return
        phase = (
            ConnectionPhase.IDLE
            if not self._reader.receiving
            else ConnectionPhase.BODY
            if self._in_body
            else ConnectionPhase.HEAD
        )
        self.progress.enter(phase, _now())
        if self._paused:
            self._paused = False
            self._set_reading()
        if not self._handling:
            self._next()

    def close(self) -> None:
        """Close once all that was written is sent."""
        self.progress.enter(ConnectionPhase.CLOSING, _now())
        if self._transport is not None:
            self._transport.close()

    def end(self) -> None:
        """The gateway ends, and with it the request that is being answered."""
        if self._relay is not None:
            self._relay.cut_short()
        self.close()

    def end_for_room(self) -> None:
        if self._transport is not None:
            self._transport.abort()

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
            self.close()  # what was received is passed on; the announced end is missing

    # reading

    def data_received(self, data: bytes) -> None:
        if self._refused is not None or self.closing:
            return
        if self.progress.phase is ConnectionPhase.IDLE:
            self.progress.enter(ConnectionPhase.HEAD, _now())
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
            if self._ahead_bytes > LARGEST_AHEAD_BYTES:
                self._paused = True
                self._set_reading()
        elif self._expects and self._reader.receiving:
            self._expects = False
            self.write(CONTINUE)

    def eof_received(self) -> None:
        """The client sends no more: it has left, as servers of models take it too. One that still reads is told."""
        relay = self._relay
        if self._refused is not None or (self.closing and relay is None):
            return
        if self._reader.receiving or (relay is not None and not relay.is_answering):
            body = error_body(f"{self._gateway.title}: {HALF_CLOSED}", "invalid_request_error", 400)
            self.write(response(400, json.dumps(body).encode(), extra=b"connection: close\r\n"))
        if relay is not None:
            self._relay = None
            relay.abandon()

    def _set_reading(self) -> None:
        """Read on, unless much was sent ahead, or what was written is not read."""
        if self._transport is not None and not self._transport.is_closing():
            if self._paused or self._unread:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # called by the reader

    def request(self, method: bytes, target: bytes, http_10: bool, headers: Headers) -> None:
        self._head = method, target, headers, http_10
        self._user = self._gateway.keys.find(headers)
        named = self._reader.named
        announced = int(named.get(b"content-length", b"0"))
        if self._user is None:
            if announced or b"transfer-encoding" in named:
                raise RefusedError(401, "")
        elif not self._gateway.connections.show_key(self, self._user):
            raise RefusedError(429, f"the key {self._user.name!r} has too many connections")
        if announced > self._gateway.limits.body_bytes:
            raise self._too_long()
        self._form = self._large = None
        for name, value in headers:
            if name == b"content-type":
                self._form = FormReader(value, self._body) if is_form(value) else None
                break
        self._in_body = True
        if self._relay is None:
            self.progress.enter(ConnectionPhase.BODY, _now())
        self._expects = b"expect" in named and has_token(headers, b"expect", b"100-continue")

    def body(self, data: bytes) -> None:
        self.progress.received(len(data))
        if len(self._body) + len(data) > self._gateway.limits.body_bytes:
            raise self._too_long()
        if problem := self._gateway.held.take(self._user, len(data)):
            raise RefusedError(503, problem)
        self._body += data
        if self._form is not None:
            self._form.advance()
        elif len(self._body) > LARGE_BYTES:
            self._large = self._large or LargeJsonReader(self._body)
            self._large.advance()

    def _too_long(self) -> RefusedError:
        return RefusedError(413, f"the request is longer than {self._gateway.limits.body_bytes:,} bytes")

    def complete(self, keep: bool) -> None:
        self._in_body = False
        body, self._body = self._body, bytearray()
        self._waiting.append(Request(*self._head, body, keep, self._user, self._form, self._large))

    # handling

    def _next(self) -> None:
        """Handle what waits, in a loop: requests that are answered at once must not nest calls."""
        if self._handling:
            return
        self._handling = True
        try:
            while self._is_free() and self._waiting:
                self._handle(self._waiting.popleft())
        finally:
            self._handling = False
        if self._refused is not None and self._is_free():
            self._refuse(self._refused)

    def _is_free(self) -> bool:
        """Whether the next request may be answered."""
        return self._relay is None and self._transport is not None and not self.closing and not self._unread

    def _handle(self, request: Request) -> None:
        self._http_10, self._ahead_bytes = request.http_10, 0
        self.closing = request.http_10 or not request.keep or self._gateway.draining
        self.progress.enter(ConnectionPhase.ANSWER, _now())
        answer: ForwardedRequest | bytes = b""
        try:
            answer = self._gateway.handle(request, self._is_local)
        finally:
            if isinstance(answer, bytes):
                self._gateway.held.release(request.user, len(request.body))
        if isinstance(answer, bytes):
            answer = with_lines(answer, self._gateway.origins.lines(request.headers))
            head_only = request.method == b"HEAD"
            self.write(answer[: answer.index(b"\r\n\r\n") + 4] if head_only else answer)
            self.done()
        else:
            self._relay = Relay(self._gateway, self, request, answer)
            self._relay.start()

    def _release(self) -> None:
        self._gateway.held.release(self._user, len(self._body))
        self._body = bytearray()
        for request in self._waiting:
            self._gateway.held.release(request.user, len(request.body))
        self._waiting.clear()

    def _refuse(self, refused: RefusedError) -> None:
        """Answer what cannot be passed on, and close; what still arrives is dropped, so that the answer is read."""
        self.closing, self._refused = True, refused
        self._release()
        self.progress.enter(ConnectionPhase.CLOSING, _now())
        end = b"connection: close\r\n"
        if refused.status == 401:
            answer = self._gateway.refuse_key(self._head[2], end)
        else:
            answer = self._gateway.refusal(refused.status, refused.message, extra=end)
        self.write(with_lines(answer, self._gateway.origins.lines(self._head[2])))
        if self._transport is not None:
            self._transport.write_eof()

    def sweep(self, now_s: float) -> None:
        """End a connection that sends too slowly, sends nothing for long, or does not read."""
        if self._transport is None:
            return
        unread_bytes = self._transport.get_write_buffer_size()
        if not self.progress.is_stuck(self._gateway.limits, now_s, unread_bytes):
            return
        if unread_bytes or self.progress.phase is ConnectionPhase.CLOSING:
            self._transport.abort()
        elif self.progress.phase is ConnectionPhase.IDLE:
            self.close()
        else:
            self._refuse(RefusedError(408, "the request did not arrive in time"))
