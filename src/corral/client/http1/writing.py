"""Messages of HTTP/1.1, put together and sent."""

from __future__ import annotations

import asyncio
import os
from http import HTTPStatus

LAST_CHUNK = b"0\r\n\r\n"
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


def status_line(status: int) -> bytes:
    return b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b"Unknown"))


def response(status: int, body: bytes, kind: bytes = b"application/json", extra: bytes = b"") -> bytes:
    """A whole answer; `extra` are header lines."""
    first = status_line(status)
    return b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (first, kind, len(body), extra, body)


def chunk(data: bytes) -> bytes:
    """Some bytes of a body that has no length; there must be some."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def write_now(transport: asyncio.Transport, fd: int, data: bytes) -> None:
    """Write past the transport where its buffer is empty: uvloop would send only at the end of its round.

    `fd` is the connection's own descriptor, or -1 where bytes must pass the transport (TLS).
    """
    if transport.is_closing():
        return  # its owner is told of the end
    if fd >= 0 and not transport.get_write_buffer_size():
        try:
            sent = os.write(fd, data)
        except OSError:
            sent = 0  # the transport finds out why
        if sent == len(data):
            return
        data = data[sent:]
    transport.write(data)
