"""Which headers of a message are passed on."""

from __future__ import annotations

import functools

from corral.client.http1 import Headers

# of one connection, not of the message
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip


@functools.lru_cache(16)
def _left_out(drop: frozenset[bytes]) -> frozenset[bytes]:
    return HOP_BY_HOP | drop


def forwarded(headers: Headers, drop: frozenset[bytes] = frozenset()) -> bytes:
    """Header lines as they go to the other side: without those of this connection only."""
    left_out = _left_out(drop)
    for name, value in headers:
        if name == b"connection":
            left_out |= {word.strip().lower() for word in value.split(b",")}
    return b"".join([b"%b: %b\r\n" % pair for pair in headers if pair[0] not in left_out])
