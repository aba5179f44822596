"""The one HTTP/1.1 framing: what is read, what is refused, and that cuts in the bytes change nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.client.http1 import (
    LARGEST_HEAD_BYTES,
    MOST_INTERIM_ANSWERS,
    BadMessageError,
    Headers,
    HeadTooLongError,
    RequestReader,
    ResponseReader,
    chunk,
    has_token,
    response,
)


class Requests:
    """Keeps what a reader tells."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, bytes, bool, Headers, bytes, bool]] = []
        self.reader = RequestReader(self)

    def request(self, method: bytes, target: bytes, http_10: bool, headers: Headers) -> None:
        self._head, self._body = (method, target, http_10, headers), b""

    def body(self, data: bytes) -> None:
        self._body += data

    def complete(self, keep: bool) -> None:
        self.seen.append((*self._head, self._body, keep))


class Answers:
    def __init__(self, method: bytes = b"GET") -> None:
        self.status, self.headers, self.bytes = 0, Headers(), b""
        self.reader = ResponseReader(self)
        self.reader.expect(method)

    def answer(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes) -> None:
        self.bytes += data

    def feed(self, data: bytes, step: int = 1 << 20) -> Answers:
        for at in range(0, len(data), step):
            self.reader.feed(data[at : at + step])
        return self


def requests(data: bytes, step: int = 1 << 20) -> list[tuple[bytes, bytes, bool, Headers, bytes, bool]]:
    sink = Requests()
    for at in range(0, len(data), step):
        sink.reader.feed(data[at : at + step])
    return sink.seen


POST = b"POST / HTTP/1.1\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
SEVERAL = (
    b"\r\nGET /a?b=c HTTP/1.1\r\nHost: x\r\nEmpty:\r\nA:  b \r\n\r\n"
    b"POST /d HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"
    b"PUT /e HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n5;x=y\r\nhello\r\n01\r\n!\r\n0\r\ntrailer: z\r\n\r\n"
    b"DELETE /f HTTP/1.1\r\nconnection: close\r\n\r\nGET /ignored HTTP/1.1\r\n\r\n"
)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50, 1 << 20])
def test_requests_are_the_same_however_they_are_cut(step: int) -> None:
    seen = requests(SEVERAL, step)
    assert [(method, target, body, keep) for method, target, _, _, body, keep in seen] == [
        (b"GET", b"/a?b=c", b"", True),
        (b"POST", b"/d", b"hello", True),
        (b"PUT", b"/e", b"hello!", True),
        (b"DELETE", b"/f", b"", False),
    ]
    assert [(name, value.strip()) for name, value in seen[0][3]] == [(b"host", b"x"), (b"empty", b""), (b"a", b"b")]


REFUSED = {
    "two lengths": POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "the same length twice": POST + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "a list of lengths": POST + b"content-length: 3, 3\r\n\r\nabc",
    "length and chunks": POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    "another coding": POST + b"transfer-encoding: gzip\r\n\r\n",
    "a coding before chunks": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunks twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "nearly chunks": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a hidden character": POST + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length with a sign": POST + b"content-length: +3\r\n\r\nabc",
    "a negative length": POST + b"content-length: -3\r\n\r\nabc",
    "a length beyond counting": POST + b"content-length: 99999999999999999999999\r\n\r\n",
    "no length": POST + b"content-length: \r\n\r\n",
    "a space before the colon": POST + b"content-length : 3\r\n\r\nabc",
    "a folded line": POST + b"a: b\r\n folded\r\n\r\n",
    "a folded first line": POST + b" a: b\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nhost: x\n\n",
    "one bare line feed": POST + b"a: b\nc: d\r\n\r\n",
    "a bare carriage return": POST + b"a: b\rc: d\r\n\r\n",
    "NUL": POST + b"a: b\0c\r\n\r\n",
    "no name": POST + b": b\r\n\r\n",
    "no colon": POST + b"ab\r\n\r\n",
    "a size in another notation": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a negative size": CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    "a size beyond counting": CHUNKED + b"fffffffffffffffff\r\n",
    "a chunk longer than it says": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "chunks with bare line feeds": CHUNKED + b"3\nabc\n0\n\n",
    "a length in a trailer": CHUNKED + b"0\r\ncontent-length: 5\r\n\r\n",
    "another method": b"BREW / HTTP/1.1\r\n\r\n",
    "a method in small letters": b"get / HTTP/1.1\r\n\r\n",
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\n\r\n",
    "another server": b"GET http://elsewhere/ HTTP/1.1\r\n\r\n",
    "no path": b"OPTIONS * HTTP/1.1\r\n\r\n",
    "a fragment": b"GET /a#b HTTP/1.1\r\n\r\n",
    "a control character in the path": b"GET /a\x01b HTTP/1.1\r\n\r\n",
    "HTTP/2": b"GET / HTTP/2.0\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\n\r\n",
    "a space too many": b"GET / HTTP/1.1 \r\n\r\n",
    "something else": b"nonsense\r\n\r\n",
}


@pytest.mark.parametrize("step", [1, 1 << 20])
@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_requests_are_refused(name: str, step: int) -> None:
    with pytest.raises(BadMessageError):
        requests(REFUSED[name], step)


def test_heads_and_trailers_are_bounded() -> None:
    for endless in (
        b"GET /" + b"a" * LARGEST_HEAD_BYTES + b" HTTP/1.1\r\n",
        POST + b"a: " + b"b" * LARGEST_HEAD_BYTES,
        POST + b"a: b\r\n" * (LARGEST_HEAD_BYTES // 2),
        POST + b"a: b\r\n" * (LARGEST_HEAD_BYTES // 2) + b"\r\n",
        CHUNKED + b"0\r\n" + b"a: b\r\n" * (LARGEST_HEAD_BYTES // 2),
    ):
        for step in (1000, 1 << 20):
            with pytest.raises(HeadTooLongError):
                requests(endless, step)
    with pytest.raises(HeadTooLongError):
        Answers().feed(b"HTTP/1.1 200 OK\r\na: " + b"b" * LARGEST_HEAD_BYTES)


@pytest.mark.parametrize("step", [1, 1 << 20])
def test_a_wish_for_another_protocol_is_read_over_and_its_body_is_not_taken_for_a_request(step: int) -> None:
    wish = b"POST /x HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 24\r\n\r\n"
    ((method, target, _, headers, body, keep),) = requests(wish + b"GET /smuggled HTTP/1.1\r\n\r\n", step)
    assert (method, target, body, keep) == (b"POST", b"/x", b"GET /smuggled HTTP/1.1\r\n", False)
    assert b"upgrade" not in dict(headers)


def test_an_error_in_a_sink_is_not_taken_for_a_bad_message() -> None:
    class Broken(Requests):
        def complete(self, keep: bool) -> None:
            raise KeyError("a fault of the sink")

    with pytest.raises(KeyError):
        Broken().reader.feed(SEVERAL)


@pytest.mark.parametrize("step", [1, 2, 5, 1 << 20])
def test_answers_end_where_they_end(step: int) -> None:
    cases: list[tuple[bytes, bytes, bytes, bool]] = [
        (b"GET", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok", True),
        (b"GET", b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nok", b"ok", True),
        (b"GET", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\na: b\r\n\r\n", b"ok", True),
        (b"GET", b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", b"ok", False),
        (b"GET", b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok", False),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", b"", True),
        (b"GET", b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na", b"a", True),
        (b"HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", b"", False),
        (b"HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"", False),
    ]
    for method, data, body, keep in cases:
        one = Answers(method).feed(data, step)
        assert (one.reader.complete, one.bytes, one.reader.keep) == (True, body, keep), data
        assert not one.reader.ends_at_eof()


def test_a_reader_is_used_for_one_answer_after_the_other() -> None:
    one = Answers()
    for method in (b"GET", b"HEAD", b"POST"):
        one.reader.expect(method)
        one.bytes = b""
        one.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n" + (b"ok" if method != b"HEAD" else b""))
        assert one.reader.complete
        assert one.bytes == (b"ok" if method != b"HEAD" else b"")


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    one = Answers().feed(b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert one.reader.until_eof
    assert not one.reader.complete
    assert one.reader.ends_at_eof()
    assert (one.bytes, one.reader.keep) == (b"abc", False)
    assert not Answers().feed(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab").reader.ends_at_eof()
    assert not Answers().feed(b"HTTP/1.1 200 OK\r\n").reader.ends_at_eof()


@pytest.mark.parametrize("more", [b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong", b"\0"])
def test_bytes_that_nobody_asked_for_reach_nobody(more: bytes) -> None:
    for close in (b"", b"connection: close\r\n"):
        one = Answers().feed(b"HTTP/1.1 200 OK\r\n" + close + b"content-length: 2\r\n\r\nok" + more)
        assert (one.reader.complete, one.bytes, one.status, one.reader.keep) == (True, b"ok", 200, False)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\ncontent-length: 0\n\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\n\r\n" * (MOST_INTERIM_ANSWERS + 1),
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000,
    ],
)
def test_other_answers_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessageError):
        Answers().feed(data)


PIECES = st.sampled_from(
    [b"GET ", b"POST ", b"/", b" HTTP/1.1\r\n", b"HTTP/1.1 200 OK\r\n", b"content-length: 3\r\n", b"\r\n", b"\n",
     b"\r", b"transfer-encoding: chunked\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n", b"abc", b":", b" ", b"upgrade: x\r\n",
     b"connection: upgrade\r\n", b"connection: close\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"\0", b"\xff"]
)  # fmt: skip


@given(st.lists(PIECES | st.binary(max_size=4), max_size=25).map(b"".join), st.integers(1, 40))
def test_whatever_comes_cuts_change_nothing_and_nothing_breaks(data: bytes, step: int) -> None:
    def read(step: int) -> tuple[object, ...]:
        asked, answered, ends = Requests(), Answers(), []
        for reader in (asked.reader, answered.reader):
            try:
                for at in range(0, len(data), step):
                    if reader is answered.reader and answered.reader.complete:
                        break
                    reader.feed(data[at : at + step])
                ends.append("fine")
            except BadMessageError:
                ends.append("refused")
        return asked.seen, answered.status, answered.bytes, answered.reader.complete, ends

    assert read(step) == read(1 << 20)


def test_what_is_written() -> None:
    assert response(404, b"{}") == (
        b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    assert response(299, b"", b"text/plain", b"a: b\r\n").startswith(b"HTTP/1.1 299 Unknown\r\n")
    assert chunk(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"
    assert has_token([(b"connection", b"Keep-Alive, Close")], b"connection", b"close")
    assert not has_token([(b"connection", b"closed")], b"connection", b"close")
