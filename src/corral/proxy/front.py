"""One connection of a client to the proxy: requests are read whole, one after the other, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from typing import Any, Protocol, cast

from corral.proxy.framing import BadMessageError, Body, Headers, error_answer, has_token, request_body, split
from corral.proxy.host import Host
from corral.proxy.relay import Relay, Request

__all__ = ["Front", "FrontHost"]

LARGEST_HEAD_BYTES = 1 << 16
LARGEST_AHEAD_BYTES = 1 << 18  # of requests sent before the last was answered
SLOWEST_BYTES_PER_S = 16_384
_now = time.monotonic


class FrontHost(Host, Protocol):
    """The proxy, seen from one of its clients' connections."""

    fronts: set[Front]
    ending: bool

    def status(self) -> dict[str, Any]: ...


class Front(asyncio.Protocol):
    """Reads requests, hands each to a relay, writes its answer."""

    def __init__(self, host: FrontHost) -> None:
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._first: tuple[bytes, bytes, bool] | None = None  # method, path, whether it is HTTP/1.0
        self._headers: Headers = []
        self._body: Body | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._relay: Relay | None = None
        self._paused = self._parsing = False
        self._since_s = _now()  # of what is now waited for
        self.closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._host.fronts.add(self)
        if len(self._host.fronts) > self._host.limits.connections:
            self._refuse(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._host.fronts.discard(self)
        self._release()
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.abandon()

    @property
    def from_this_machine(self) -> bool:
        peer = self._transport.get_extra_info("peername") if self._transport else None
        return peer is not None and (str(peer[0]).startswith("127.") or peer[0] == "::1")

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
        if self._buffer and not self._parsing:
            self._parse()

    def close(self) -> None:
        """After what was written."""
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """End in the middle of an answer, such that the client cannot take it for whole."""
        self._relay = None
        transport = self._transport
        if transport is None:
            return
        if (
            self._first is not None and self._first[2]
        ):  # an HTTP/1.0 answer ends with its connection: only a reset tells
            with contextlib.suppress(OSError):
                sock = transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            transport.close()  # what was received is passed on; the announced end is missing

    # reading

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if self._relay is not None:
            if len(self._buffer) > LARGEST_AHEAD_BYTES and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
            return
        if not self._parsing:
            self._parse()

    def _parse(self) -> None:
        self._parsing = True
        try:
            while self._buffer and self._relay is None and self._transport is not None and not self.closing:
                if self._body is None and not self._take_head():
                    return
                self._take_body()
        except BadMessageError as error:
            self._refuse(400, f"the request holds {error}")
        finally:
            self._parsing = False

    def _take_head(self) -> bool:
        if self._buffer[:1] in b"\r\n":  # blank lines before a request are let through
            self._buffer = self._buffer.lstrip(b"\r\n")
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or end > LARGEST_HEAD_BYTES:
            if len(self._buffer) > LARGEST_HEAD_BYTES:
                self._refuse(431, "the request's headers are too long")
            return False
        head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        line, headers = split(head)
        words = line.split(b" ")
        if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0") or not words[1].startswith(b"/"):
            raise BadMessageError("no request line")
        body = request_body(headers)
        if body.left > self._host.limits.body_bytes and not body.chunked:
            self._refuse(413, f"the request is longer than {self._host.limits.body_bytes:,} bytes")
            return False
        old = words[2] == b"HTTP/1.0"
        self._first, self._headers, self._body = (words[0], words[1], old), headers, body
        self._since_s = _now()
        if has_token(headers, b"expect", b"100-continue") and not body.complete and not self._buffer:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _take_body(self) -> None:
        body = self._body
        assert body is not None
        if not body.complete:
            arrived: list[bytes] = []
            used = body.feed(self._buffer, arrived)
            self._buffer = self._buffer[used:]
            self._parts += arrived
            grown = sum(map(len, arrived))
            self._size += grown
            self._host.held_bytes += grown
            if self._size > self._host.limits.body_bytes:
                self._refuse(413, f"the request is longer than {self._host.limits.body_bytes:,} bytes")
            elif self._host.held_bytes > self._host.limits.held_bytes:
                self._refuse(503, "too many large requests at once")
        if body.complete and not self.closing:
            self._handle()

    def _handle(self) -> None:
        assert self._first is not None
        method, path, old = self._first
        if old or has_token(self._headers, b"connection", b"close"):
            self.closing = True
        request = Request(method, path, self._headers, tuple(self._parts), self._size, old)
        self._parts, self._size, self._body = [], 0, None  # the bytes are the request's now
        if path.partition(b"?")[0] == b"/proxy/status":
            self._host.held_bytes -= request.size
            self._status_page()
            return
        self._relay = Relay(self._host, self, request)
        self._relay.start()

    def _status_page(self) -> None:
        if not self.from_this_machine:
            self._refuse(403, "this path is for the proxy's own machine")
            return
        self.write(error_answer(200, json.dumps(self._host.status()).encode()))
        self.done()

    def _release(self) -> None:
        self._host.held_bytes -= self._size
        self._parts, self._size = [], 0

    def _refuse(self, status: int, message: str) -> None:
        """Answer what cannot be passed on, and close: what follows cannot be understood."""
        self.closing = True
        self._release()
        self._host.figures.requests += 1
        self._host.figures.failed += 1
        error = {
            "message": f"corral proxy: {message}",
            "type": "invalid_request_error",
            "param": None,
            "code": status,
        }
        body = json.dumps({"error": error}).encode()
        self.write(error_answer(status, body, b"connection: close\r\n"))
        self.close()

    def sweep(self, now_s: float) -> None:
        """End connections that send too slowly, or nothing for long."""
        waited, limits = now_s - self._since_s, self._host.limits
        if self._relay is not None or self.closing:
            return
        if self._body is not None:
            if waited > limits.read_s + self._size / SLOWEST_BYTES_PER_S:
                self._refuse(408, "the request did not arrive in time")
        elif self._buffer:
            if waited > limits.read_s:
                self._refuse(408, "the request did not arrive in time")
        elif waited > limits.idle_s:
            self.close()
