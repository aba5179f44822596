"""HTTP/1.1: messages read out of bytes that may be cut anywhere, messages written, and server-sent events split.

Messages are read by llhttp (`httptools`) in its strict mode: two lengths, a length beside chunks, folded lines, bare
line ends, unknown methods and control characters are refused, because two readers that disagree on where a message
ends can be made to serve one user's answer to another. Added here is what llhttp leaves to its caller: only HTTP/1.0
and 1.1, no transfer coding but plain chunks, heads and trailers of bounded length, no change of protocol, and answers
that end with their connection.

A reader calls its sink with a head, with the bytes of the body as they arrive, and at the end. A sink must not feed
its own reader. Trailers are dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import httptools

if TYPE_CHECKING:
    import asyncio

Headers = list[tuple[bytes, bytes]]  # names in lower case

LARGEST_HEAD_BYTES = 1 << 16
MOST_INTERIM_ANSWERS = 32  # 100 Continue and the like, before the answer proper


class BadMessageError(ValueError):
    """The bytes are not HTTP, or not a kind that is accepted here."""


class HeadTooLongError(BadMessageError):
    """A head, or a trailer, that does not end."""


class _EndedError(Exception):
    """Raised inside a reader to stop llhttp at the end of a message."""


class _Reader:
    """The common part of both readers: headers, their bounds, and one kind of error."""

    __slots__ = ("_fed", "_headers", "_in_head", "_large", "_parser", "_trailer", "named", "on_body")

    def __init__(self) -> None:
        self._headers: Headers = []
        self.named: dict[bytes, bytes] = {}  # the last value of each header
        self._in_head = self._large = False
        self._fed = self._trailer = 0
        self._parser: Any = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), value))
            return
        self._trailer += len(name) + len(value) + 4
        if self._trailer > LARGEST_HEAD_BYTES:
            raise HeadTooLongError("trailers that are too long")

    def _begin(self) -> None:
        self._headers, self._in_head, self._fed, self._trailer = [], True, 0, 0

    def _end_of_head(self) -> tuple[bool, bool]:
        """Whether the body comes in chunks, and whether it has a length (llhttp has refused two of either)."""
        self._in_head = False
        if self._large and sum(len(name) + len(value) + 4 for name, value in self._headers) > LARGEST_HEAD_BYTES:
            raise HeadTooLongError("headers that are too long")
        named = self.named = dict(self._headers)
        chunked = is_chunked(self._headers) if b"transfer-encoding" in named else False
        return chunked, b"content-length" in named

    def _check_growth(self, data: bytes) -> None:
        """A head is bounded while it grows, too."""
        self._fed += len(data) if self._fed else of_last_head(data)
        if self._fed > LARGEST_HEAD_BYTES:
            raise HeadTooLongError("headers that are too long")


def _cause(error: httptools.HttpParserError) -> BaseException:
    """The cause of an error of llhttp: the exception of a callback, or llhttp's message."""
    if isinstance(error, httptools.HttpParserCallbackError) and error.__context__ is not None:
        return error.__context__
    return BadMessageError(str(error))


class RequestSink(Protocol):
    """Receives the requests of a connection."""

    def request(self, method: bytes, target: bytes, http_10: bool, headers: Headers) -> None: ...

    def body(self, data: bytes) -> None: ...

    def complete(self, keep: bool) -> None:
        """The request is whole; `keep`: another one may follow on this connection."""


class RequestReader(_Reader):
    """The requests of one connection. After one that asks for the end of the connection, the rest is ignored."""

    __slots__ = ("_changing", "_closed", "_sink", "_target", "receiving")

    def __init__(self, sink: RequestSink) -> None:
        super().__init__()
        self._sink, self.on_body = sink, sink.body
        self._closed = self._changing = self.receiving = False
        self._target = b""
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        if self._closed:
            return
        self._large = len(data) > LARGEST_HEAD_BYTES
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as change:
            self._ignore_upgrade(data[change.args[0] :])
        except httptools.HttpParserError as error:
            if not self._closed:
                raise _cause(error) from None
        if self._in_head:
            self._check_growth(data)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Ignore a requested change of protocol: read the same request once more, without its `upgrade` header."""
        kept = b"".join(b"%b: %b\r\n" % pair for pair in self._headers if pair[0] != b"upgrade")
        version = self._parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (self._parser.get_method(), self._target, version, kept)
        self._parser = httptools.HttpRequestParser(self)
        self.feed(head + rest)

    def on_message_begin(self) -> None:
        if self._closed:
            raise _EndedError
        self._begin()
        self._target = b""
        self.receiving = True

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_headers_complete(self) -> None:
        parser, target = self._parser, self._target
        chunked, _ = self._end_of_head()
        method: bytes = parser.get_method()
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise BadMessageError("a version of HTTP that is neither 1.0 nor 1.1")
        if chunked and version == "1.0":
            raise BadMessageError("chunks, which HTTP/1.0 does not have")
        if not target.startswith(b"/") or b"#" in target or method == b"CONNECT":
            raise BadMessageError("a target that is not a path of this server")
        if parser.should_upgrade():
            self._changing = True
        else:
            self._sink.request(method, target, version == "1.0", self._headers)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        self.receiving = False
        self._closed = self._changing or not self._parser.should_keep_alive()
        self._sink.complete(keep=not self._closed)


class ResponseSink(Protocol):
    """Receives an answer."""

    def answer(self, status: int, headers: Headers) -> None: ...

    def body(self, data: bytes) -> None: ...


class ResponseReader(_Reader):
    """The answers on one connection, each to a request that was announced with `expect`."""

    __slots__ = ("_head_only", "_interim", "_sink", "_spent", "chunked", "complete", "keep", "until_eof")

    def __init__(self, sink: ResponseSink) -> None:
        super().__init__()
        self._sink, self.on_body = sink, sink.body
        self._interim = 0
        self._head_only = self.chunked = self.until_eof = self.keep = False
        self._spent = self.complete = True

    def expect(self, method: bytes = b"GET") -> None:
        """A request was sent: its answer comes next."""
        if self._spent:
            self._parser, self._spent = httptools.HttpResponseParser(self), False
        self._head_only = method == b"HEAD"
        self._in_head = self.chunked = self.until_eof = self.keep = self.complete = False
        self._interim = 0

    def feed(self, data: bytes) -> None:
        """Read on; then `complete` says whether the answer is whole, `keep` whether another may follow."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._spent, self.keep = True, False
            if not self.complete:  # otherwise the error is in bytes after the answer
                raise _cause(error) from None
        if self._in_head:
            self._check_growth(data)

    def ends_at_eof(self) -> bool:
        """The connection ended: whether that is the end of the answer."""
        self._spent = True
        if self.until_eof and not self.complete:
            self.complete = True
            return True
        return False

    def on_message_begin(self) -> None:
        if self.complete:
            raise _EndedError
        self._begin()

    def on_headers_complete(self) -> None:
        status: int = self._parser.get_status_code()
        chunked, measured = self._end_of_head()
        if status < 200:
            self._interim += 1
            if status == 101 or self._interim > MOST_INTERIM_ANSWERS:
                raise BadMessageError("an interim answer that was not asked for")
            return
        bodiless = self._head_only or status in (204, 304)
        self.chunked = chunked and not bodiless
        self.until_eof = not (chunked or measured or bodiless)
        if self._head_only:
            self.complete = True
        self._sink.answer(status, self._headers)
        if self._head_only:
            raise _EndedError  # llhttp would wait for the body that the headers speak of

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self.complete = True
            self.keep = self._parser.should_keep_alive()


def has_token(headers: Headers, wanted: bytes, token: bytes) -> bool:
    """Whether a comma-separated header holds a word."""
    return any(
        name == wanted and token in [word.strip().lower() for word in value.split(b",")] for name, value in headers
    )


def of_last_head(data: bytes) -> int:
    """How many bytes the head that has just begun has at most, behind other messages in the same data."""
    end = data.rfind(b"\r\n\r\n")
    return max(1, len(data) - end - 4) if end >= 0 else len(data)


def is_chunked(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a body comes in chunks; any other coding, and chunks beside one, are refused."""
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        raise BadMessageError("a transfer coding that is not plain chunks")
    return bool(codings)


LAST_CHUNK = b"0\r\n\r\n"
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


def status_line(status: int) -> bytes:
    return b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b"Unknown"))


def response(status: int, body: bytes, kind: bytes = b"application/json", extra: bytes = b"") -> bytes:
    """A whole answer; `extra` are header lines."""
    first = status_line(status)
    return b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (first, kind, len(body), extra, body)


def chunk(data: bytes) -> bytes:
    """One chunk of a body without a length; `data` is not empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def write_now(transport: asyncio.Transport, fd: int, data: bytes) -> None:
    """Write past the transport where its buffer is empty: uvloop would send only at the end of its round.

    `fd` is the connection's own descriptor, or -1 where bytes must pass the transport (TLS).
    """
    if transport.is_closing():
        return  # its owner learns of the end
    if fd >= 0 and not transport.get_write_buffer_size():
        try:
            sent = os.write(fd, data)
        except OSError:
            sent = 0  # the transport reports the error
        if sent == len(data):
            return
        data = data[sent:]
    transport.write(data)


def http_url(host: str, port: int) -> str:
    """`http://127.0.0.1:8000`; an IPv6 address is put in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class EventSplitter:
    """Splits server-sent events out of bytes that may be cut anywhere; gives the data of each."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    @property
    def empty(self) -> bool:
        return not self._rest

    def end(self) -> list[bytes]:
        """The last event, if only the line feed after its carriage return was missing; other rests are dropped."""
        events = self.feed(b"\n") if self._rest.endswith(b"\r") else []
        self._rest = b""
        return events

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that is now complete."""
        text = self._rest + data
        if b"\r" in text:
            held = text.endswith(b"\r")  # its \n may still come
            text = text.replace(b"\r\n", b"\n")
            if held:
                text = text[:-1]
            text = text.replace(b"\r", b"\n")
        else:
            held = False
        *blocks, rest = text.split(b"\n\n")
        self._rest = rest + b"\r" if held else rest
        found = []
        for block in blocks:
            lines = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(line[1:] if line[:1] == b" " else line for line in lines))
        return found
