"""One connection from the proxy to a member; it carries one request at a time and is kept for the next."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, cast

from corral.proxy.framing import BadMessageError, Body, answer_body, has_token, split

if TYPE_CHECKING:
    from corral.proxy.members import Member
    from corral.proxy.relay import Relay

__all__ = ["Upstream"]

LARGEST_HEAD_BYTES = 1 << 17


class Upstream(asyncio.Protocol):
    """Bytes of an answer go to the request that the connection carries; a connection without one is idle."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.relay: Relay | None = None
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

    def send(self, relay: Relay, parts: list[bytes]) -> None:
        """Carry a request."""
        assert self._transport is not None
        self.relay, self._head, self._body, self._keep = relay, b"", None, True
        self._transport.writelines(parts)

    def drop(self) -> None:
        """Close at once, whatever it carries; nobody is told."""
        self.relay = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self, paused: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading() if paused else self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        relay = self.relay
        if relay is None:  # nothing was asked
            self.drop()
            return
        try:
            if self._body is None:
                self._read_head(relay, data)
            else:
                self._read_body(relay, self._body, data)
        except BadMessageError as error:
            self.drop()
            relay.broke(f"its answer holds {error}")

    def _read_head(self, relay: Relay, data: bytes) -> None:
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
                self._read_head(relay, data[end + 4 :])
            return
        body = self._body = answer_body(relay.method, status, headers)
        closes = has_token(headers, b"connection", b"close")
        self._keep = version == b"HTTP/1.1" and not closes and not body.until_eof
        relay.head(status, rest, headers, body)
        if self.relay is relay:  # it may have been dropped meanwhile
            self._read_body(relay, body, data[end + 4 :])

    def _read_body(self, relay: Relay, body: Body, data: bytes) -> None:
        payload: list[bytes] | None = [] if relay.wants_payload else None
        used = body.feed(data, payload)
        if payload is not None:
            for part in payload:
                relay.data(part)
        elif used:
            relay.data(data if used == len(data) else data[:used])
        if body.complete and self.relay is relay:
            self._finish(relay, keep=self._keep and used == len(data))

    def _finish(self, relay: Relay, keep: bool) -> None:
        self.relay = self._body = None
        relay.member_done(self.member)
        if keep and self.open and self.member.rank():
            self.reused = True
            if self._transport is not None:
                self._transport.resume_reading()  # a slow client may have paused it with its last bytes
            self.member.idle.append(self)
        elif self._transport is not None:
            self._transport.close()
        relay.complete()

    def eof_received(self) -> None:
        relay, body = self.relay, self._body
        if relay is not None and body is not None and body.until_eof:
            self._finish(relay, keep=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        with contextlib.suppress(ValueError):
            self.member.idle.remove(self)
        relay, self.relay = self.relay, None
        if relay is not None:
            relay.broke("the connection was reset" if exc else "the connection ended", stale=self.reused)
