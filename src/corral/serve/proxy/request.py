"""A request as it was read from a client, and as it goes on to a member."""

from __future__ import annotations

from typing import NamedTuple

from corral.client.http1 import Headers
from corral.serve.proxy.forwarding import forwarded

_WITH_BODY = frozenset((b"POST", b"PUT", b"PATCH"))
OWN = frozenset((b"host", b"content-length", b"expect"))  # said anew


class Request(NamedTuple):
    """A whole request."""

    method: bytes
    path: bytes
    headers: Headers
    http_10: bool
    body: bytes | bytearray
    keep: bool  # another may follow on its connection

    @property
    def bare_path(self) -> bytes:
        return self.path.partition(b"?")[0]

    def parts(self, host: bytes, drop: frozenset[bytes] = OWN, extra: bytes = b"") -> list[bytes | bytearray]:
        """What is sent to a member: without the headers to `drop` (`OWN` among them), with the lines of `extra`."""
        kept = forwarded(self.headers, drop) + extra
        size = len(self.body)
        length = b"content-length: %d\r\n" % size if size or self.method in _WITH_BODY else b""
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b\r\n" % (self.method, self.path, host, kept, length)
        return [head, self.body] if size else [head]
