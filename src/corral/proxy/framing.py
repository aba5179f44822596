"""HTTP/1.1 as the proxy needs it: heads taken apart and put together, and where a body ends.

Bodies of answers are passed on as the bytes they came in; only their end is looked for. Heads are read strictly: two
lengths, a length beside chunks, folded lines or bare line ends are refused, because two readers that disagree on
where a message ends can be made to serve one user's answer to another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus

__all__ = ["BadMessageError", "Body", "Headers", "answer_body", "error_answer", "forwarded", "request_body", "split"]

Headers = list[tuple[bytes, bytes]]  # names in lower case
LONGEST_LINE_BYTES = 4096  # of a chunk's size or a trailer
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
# of one connection, not of the message: never passed on
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip


class BadMessageError(ValueError):
    """What came is not HTTP, or not the HTTP that is understood here."""


def split(head: bytes) -> tuple[bytes, Headers]:
    """The first line and the headers of a head without its final blank line."""
    first, *lines = head.split(b"\r\n")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _NAME.fullmatch(name):
            raise BadMessageError("a header line that is none")
        headers.append((name.lower(), value.strip(b" \t")))
    if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
        raise BadMessageError("a line that ends in another way than CR LF")
    return first, headers


def _values(headers: Headers, wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name == wanted]


def has_token(headers: Headers, name: bytes, token: bytes) -> bool:
    """Whether a comma-separated header holds a word."""
    return any(token == word.strip().lower() for value in _values(headers, name) for word in value.split(b","))


def forwarded(headers: Headers, drop: frozenset[bytes] = frozenset()) -> bytes:
    """Header lines as they go to the other side: without those of this connection only."""
    named = {word.strip().lower() for value in _values(headers, b"connection") for word in value.split(b",")}
    left_out = HOP_BY_HOP | drop | named
    return b"".join(b"%b: %b\r\n" % pair for pair in headers if pair[0] not in left_out)


@dataclass(slots=True)
class Body:
    """Follows a body through bytes that may be cut anywhere, until it is complete."""

    left: int = 0  # bytes still to come: of the body, or of the current chunk with its line end
    chunked: bool = False
    until_eof: bool = False
    complete: bool = False
    _line: bytes = b""
    _trailer: bool = False

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """How many of these bytes belong to the body; what they carry is appended to `payload` where one is given."""
        if self.chunked:
            return self._chunks(data, payload)
        used = len(data) if self.until_eof else min(self.left, len(data))
        if payload is not None and used:
            payload.append(data[:used])
        if not self.until_eof:
            self.left -= used
            self.complete = not self.left
        return used

    def _chunks(self, data: bytes, payload: list[bytes] | None) -> int:
        at, size = 0, len(data)
        while at < size:
            if self.left:
                used = min(self.left, size - at)
                if payload is not None and self.left > 2:
                    payload.append(data[at : at + min(used, self.left - 2)])
                self.left -= used
                at += used
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._line += data[at:]
                if len(self._line) > LONGEST_LINE_BYTES:
                    raise BadMessageError("a chunk without a size")
                return size
            line = (self._line + data[at:end]).rstrip(b"\r")
            self._line, at = b"", end + 1
            if self._trailer:
                if not line:
                    self.complete = True
                    return at
                continue
            digits = line.partition(b";")[0].strip()
            if not _SIZE.fullmatch(digits):
                raise BadMessageError("a chunk without a size")
            length = int(digits, 16)
            self.left, self._trailer = (length + 2, False) if length else (0, True)
        return at


def _declared(headers: Headers) -> Body | None:
    """The body that the headers announce; None when they say nothing."""
    lengths, codings = _values(headers, b"content-length"), _values(headers, b"transfer-encoding")
    if codings:
        if lengths or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise BadMessageError("a transfer coding that is not plain chunks")
        return Body(chunked=True)
    if not lengths:
        return None
    if len(set(lengths)) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 15:
        raise BadMessageError("lengths that cannot be meant")
    return Body(left=int(lengths[0]), complete=int(lengths[0]) == 0)


def request_body(headers: Headers) -> Body:
    return _declared(headers) or Body(complete=True)


def answer_body(method: bytes, status: int, headers: Headers) -> Body:
    declared = _declared(headers)
    if method == b"HEAD" or status in (204, 304):
        return Body(complete=True)
    return declared or Body(until_eof=True)


def error_answer(status: int, body: bytes, extra: bytes = b"") -> bytes:
    """A whole answer of the proxy's own."""
    phrase = _PHRASES[status].encode()
    return b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b" % (
        status, phrase, len(body), extra, body,
    )  # fmt: skip
