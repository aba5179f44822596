"""One connection from the gateway to a member; it carries one request at a time and is kept for the next."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Protocol, cast

from corral.client.http1 import BadMessageError, Headers, ResponseReader


class Receiver(Protocol):
    """The request that a connection carries, as the connection sees it."""

    method: bytes

    def head(self, status: int, headers: Headers, measured: bool) -> None:
        """The head of the answer; `measured`: its headers say how long the body is, or there is none."""

    def data(self, data: list[bytes], last: bool) -> None:
        """Bytes of the answer's body that came together; `last`: nothing follows."""

    def read(self) -> None:
        """The whole answer was read: the connection is no longer the request's."""

    def complete(self) -> None:
        """The connection is with its owner again, or closed."""

    def broke(self, how: str, stale: bool = False) -> None: ...


class Owner(Protocol):
    """The member that a connection leads to: it keeps the connection for the next request."""

    def keep_connection(self, connection: MemberConnection) -> bool: ...

    def connection_lost(self, connection: MemberConnection) -> None: ...


class MemberConnection(asyncio.Protocol):
    """Bytes of an answer go to the request that the connection carries; a connection without one is idle."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._receiver: Receiver | None = None
        self.reused = False
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader(self)
        self._arrived: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        # a node that lost its power sends nothing more: without these, a request would wait for an answer for ever
        for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, receiver: Receiver, parts: Sequence[bytes | bytearray]) -> None:
        """Carry a request."""
        assert self._transport is not None
        self._receiver, self._arrived = receiver, []
        self._reader.expect(receiver.method)
        self._transport.writelines(parts)

    def drop(self) -> None:
        """Close at once, whatever it carries, without a call of `broke`."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self, paused: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading() if paused else self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:  # no request is under way
            self.drop()
            return
        try:
            self._reader.feed(data)
        except BadMessageError as error:
            self.drop()
            receiver.broke(f"its answer is not HTTP ({error})")
        else:
            self._pass_on(receiver)

    def _pass_on(self, receiver: Receiver) -> None:
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            receiver.data(arrived, self._reader.complete)
        if self._reader.complete and self._receiver is receiver:  # it may have been dropped meanwhile
            self._finish(receiver)

    # called by the reader

    def answer(self, status: int, headers: Headers) -> None:
        if self._receiver is not None:
            self._receiver.head(status, headers, not (self._reader.chunked or self._reader.until_eof))

    def body(self, data: bytes) -> None:
        self._arrived.append(data)

    def _finish(self, receiver: Receiver) -> None:
        self._receiver = None
        receiver.read()
        if self._reader.keep and self.open and self._owner.keep_connection(self):
            self.reused = True
            if self._transport is not None:
                self._transport.resume_reading()  # a slow client may have paused it with its last bytes
        elif self._transport is not None:
            self._transport.close()
        receiver.complete()

    def eof_received(self) -> None:
        if self._receiver is not None and self._reader.ends_at_eof():
            self._finish(self._receiver)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.connection_lost(self)
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.broke("the connection was reset" if exc else "the connection ended", stale=self.reused)
