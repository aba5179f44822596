"""Messages of HTTP/1.1, put together."""

from __future__ import annotations

from http import HTTPStatus

__all__ = ["LAST_CHUNK", "chunk", "response", "status_line"]

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
