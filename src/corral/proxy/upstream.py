"""One connection from the proxy to a member; it carries one request at a time and is kept for the next."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Protocol, cast

from corral.proxy.framing import BadMessageError, Body, Headers, answer_body, has_token, split

__all__ = ["Owner", "Receiver", "Upstream"]

LARGEST_HEAD_BYTES = 1 << 17


class Receiver(Protocol):
    """The request that a connection carries, as the connection sees it."""

    method: bytes
    wants_payload: bool  # its answer's bytes without their framing

    def head(self, status: int, rest: bytes, headers: Headers, body: Body) -> None: ...

    def data(self, data: bytes) -> None: ...

    def read(self) -> None:
        """The whole answer was read: the connection is no longer the request's."""

    def complete(self) -> None:
        """The connection is with its owner again, or closed."""

    def broke(self, how: str, stale: bool = False) -> None: ...


class Owner(Protocol):
    """Whose connections these are: it takes one back for the next request, and is told of one that ended."""

    def take_back(self, connection: Upstream) -> bool: ...

    def lost(self, connection: Upstream) -> None: ...


class Upstream(asyncio.Protocol):
    """Bytes of an answer go to the request that the connection carries; a connection without one is idle."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._receiver: Receiver | None = None
        self.reused = False
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._body: Body | None = None
        self._keep = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        # a node that lost its power says nothing more: without these, a request would wait for an answer for ever
        for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, receiver: Receiver, parts: list[bytes]) -> None:
        """Carry a request."""
        assert self._transport is not None
        self._receiver, self._head, self._body, self._keep = receiver, b"", None, True
        self._transport.writelines(parts)

    def drop(self) -> None:
        """Close at once, whatever it carries; nobody is told."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self, paused: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading() if paused else self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:  # nothing was asked
            self.drop()
            return
        try:
            if self._body is None:
                self._read_head(receiver, data)
            else:
                self._read_body(receiver, self._body, data)
        except BadMessageError as error:
            self.drop()
            receiver.broke(f"its answer holds {error}")

    def _read_head(self, receiver: Receiver, data: bytes) -> None:
        data = self._head + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > LARGEST_HEAD_BYTES or not b"HTTP/1.".startswith(data[:7]):
                raise BadMessageError("no head")
            self._head = data
            return
        first, headers = split(data[:end])
        version, _, rest = first.partition(b" ")
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or not rest[:3].isdigit():
            raise BadMessageError("no status line")
        status = int(rest[:3])
        if status == 101:
            raise BadMessageError("a change of protocol that was not asked for")
        if status < 200:
            self._head = b""
            if data[end + 4 :]:
                self._read_head(receiver, data[end + 4 :])
            return
        body = self._body = answer_body(receiver.method, status, headers)
        closes = has_token(headers, b"connection", b"close")
        self._keep = version == b"HTTP/1.1" and not closes and not body.until_eof
        receiver.head(status, rest, headers, body)
        if self._receiver is receiver:  # it may have been dropped meanwhile
            self._read_body(receiver, body, data[end + 4 :])

    def _read_body(self, receiver: Receiver, body: Body, data: bytes) -> None:
        payload: list[bytes] | None = [] if receiver.wants_payload else None
        used = body.feed(data, payload)
        if payload is not None:
            for part in payload:
                receiver.data(part)
        elif used:
            receiver.data(data if used == len(data) else data[:used])
        if body.complete and self._receiver is receiver:
            self._finish(receiver, keep=self._keep and used == len(data))

    def _finish(self, receiver: Receiver, keep: bool) -> None:
        self._receiver = self._body = None
        receiver.read()
        if keep and self.open and self._owner.take_back(self):
            self.reused = True
            if self._transport is not None:
                self._transport.resume_reading()  # a slow client may have paused it with its last bytes
        elif self._transport is not None:
            self._transport.close()
        receiver.complete()

    def eof_received(self) -> None:
        receiver, body = self._receiver, self._body
        if receiver is not None and body is not None and body.until_eof:
            self._finish(receiver, keep=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.lost(self)
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.broke("the connection was reset" if exc else "the connection ended", stale=self.reused)
