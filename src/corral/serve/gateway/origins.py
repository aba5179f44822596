"""Pages of other origins: browsers ask before they send a key, and read an answer only if it names their origin.

The gateway answers for its members: what they say of origins is left out of their answers. No origin is allowed
unless it is named, with `corral gateway --allowed-origins` or by the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable

from corral.client.http1 import Headers, response

ANY = "*"
OF_MEMBERS = frozenset(
    b"access-control-" + name for name in (b"allow-origin", b"allow-credentials", b"expose-headers")
)


class AllowedOrigins:
    """The origins whose pages may use the gateway."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origins)

    def lines(self, headers: Headers) -> bytes:
        """The header lines that let the page that asked read the answer; none for other pages."""
        if not self._origins:
            return b""
        found = [value for name, value in headers if name == b"origin"]
        if len(found) != 1 or not self._origins & {ANY, found[0].decode("latin-1")}:
            return b""
        return b"access-control-allow-origin: %b\r\nvary: origin\r\n" % found[0]

    def preflight(self, method: bytes, headers: Headers) -> bytes | None:
        """The answer to a browser that asks whether it may send a request."""
        if method != b"OPTIONS" or not self.lines(headers):
            return None
        asked = dict(headers)
        if b"access-control-request-method" not in asked:
            return None
        wanted = asked.get(b"access-control-request-headers", b"authorization, content-type")
        allow = b"access-control-allow-methods: GET, POST, DELETE\r\naccess-control-allow-headers: %b\r\n" % wanted
        return response(200, b"", extra=allow + b"access-control-max-age: 600\r\n")


def with_lines(answer: bytes, lines: bytes) -> bytes:
    """An answer with more header lines."""
    head, end, body = answer.partition(b"\r\n\r\n")
    return b"%b\r\n%b\r\n%b" % (head, lines, body) if lines and end else answer
