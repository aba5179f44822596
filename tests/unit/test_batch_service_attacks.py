"""What strangers, broken clients and a full disk can do to the batch service: next to nothing."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from corral.serve.connections import ServerLimits
from corral.use.batch.service import store as upload
from corral.use.batch.service.app import BatchService, ServiceOptions

BOUNDARY = b"xxBOUNDARYxx"


class Service(BatchService):
    """One without a model: nothing here needs an answer."""

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    @property
    def key(self) -> bytes:
        return Path(self.key_file).read_bytes().strip()

    def left(self) -> list[str]:
        return sorted(path.name for path in (self.store.folder / "files").iterdir())

    def sdk(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=self.key.decode(), max_retries=0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(ServiceOptions(tmp_path / "kept", port=0, jobs=1, largest_upload_bytes=4 << 20)) as made:
        yield made


def head(service: Service, line: bytes, *more: bytes, key: bool = True) -> bytes:
    lines = [line + b" HTTP/1.1", b"host: x", *more]
    if key:
        lines.append(b"authorization: Bearer " + service.key)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def ask(service: Service, *pieces: bytes) -> tuple[int, bytes]:
    """Send bytes; the status and the rest of what comes back until the connection ends."""
    with socket.create_connection(service.address, timeout=60) as to:
        for piece in pieces:
            to.sendall(piece)
        got = read_all(to)
    return int(got[9:12]), got


def read_all(to: socket.socket) -> bytes:
    got = b""
    while True:
        try:
            more = to.recv(1 << 16)
        except ConnectionResetError:
            return got
        if not more:
            return got
        got += more


def form(content: bytes, purpose: bytes = b"batch") -> bytes:
    part = b'--%b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    text = part % (BOUNDARY, b"purpose", b"", purpose)
    text += part % (BOUNDARY, b"file", b'; filename="rows.jsonl"', content)
    return text + b"--%b--\r\n" % BOUNDARY


KIND = b"content-type: multipart/form-data; boundary=" + BOUNDARY
CHUNKED = b"transfer-encoding: chunked"
CLOSE = b"connection: close"


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to that")


def test_a_stranger_is_answered_before_the_body_is_read(service: Service) -> None:
    big = head(service, b"POST /v1/files", KIND, b"content-length: 1000000000", key=False)
    status, got = ask(service, big, b"x" * 1000)
    assert status == 401
    assert b"connection: close" in got
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert service.left() == []


def test_a_head_that_does_not_end_is_refused(service: Service) -> None:
    assert ask(service, b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000)[0] == 431
    assert ask(service, b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000)[0] == 431


def test_an_upload_that_breaks_off_leaves_nothing(service: Service) -> None:
    body = form(b"row\n" * 1000)
    for framing, piece in (
        (b"content-length: %d" % len(body), body[:2000]),
        (CHUNKED, b"%x\r\n%b" % (len(body), body[:2000])),
    ):
        with socket.create_connection(service.address, timeout=60) as to:
            to.sendall(head(service, b"POST /v1/files", KIND, framing) + piece)
            until(lambda: bool(service.left()))
        until(lambda: not service.left())


def test_an_upload_that_falls_silent_leaves_nothing(tmp_path: Path) -> None:
    limits = ServerLimits(read_s=0.2)
    with Service(ServiceOptions(tmp_path / "kept", port=0, jobs=1, limits=limits)) as service:
        status, _ = ask(service, head(service, b"POST /v1/files", KIND, b"content-length: 5000") + form(b"x")[:50])
        assert status == 408
        until(lambda: not service.left())


def test_an_upload_that_is_too_long_leaves_nothing(service: Service) -> None:
    with service.sdk() as client, pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("x.jsonl", io.BytesIO(bytes(5 << 20))), purpose="batch")
    assert refused.value.status_code == 413
    body = form(bytes(5 << 20))
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with socket.create_connection(service.address, timeout=60) as to:
        with contextlib.suppress(ConnectionError):  # it had seen enough
            to.sendall(head(service, b"POST /v1/files", KIND, CHUNKED) + chunked)
        until(lambda: not service.left())
    assert service.left() == []


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"content-type: application/json", b"{}"),
        (b"content-type: multipart/form-data", form(b"x")),
        (KIND, b"nonsense"),
        (KIND, form(b"x")[:-20]),
        (KIND, b"--%b\r\na: b\r\n\r\nx\r\n--%b--\r\n" % (BOUNDARY, BOUNDARY)),
        (KIND, form(b"x").replace(b'"file"', b'"other"')),
        (KIND, form(b"x").replace(b'"purpose"', b'"file"')),
        (KIND, form(b"x", b"assistants")),
        (KIND, form(b"x", b"y" * 100_000)),
        (KIND, b""),
    ],
)
def test_a_form_that_cannot_be_read_is_refused_and_leaves_nothing(service: Service, kind: bytes, body: bytes) -> None:
    status, got = ask(service, head(service, b"POST /v1/files", kind, b"content-length: %d" % len(body)) + body)
    assert status in (400, 413)
    assert b'"error"' in got
    assert service.left() == []


def test_a_full_disk_is_told_without_a_path(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/secret/path")

    with service.sdk() as client:
        with monkeypatch.context() as patch:
            patch.setattr(upload, "_write_all", full)
            with pytest.raises(openai.APIStatusError) as refused:
                client.files.create(file=("x.jsonl", b"row\n"), purpose="batch")
        assert refused.value.status_code == 507
        assert "/secret" not in str(refused.value)
        assert service.left() == []
        assert client.files.create(file=("x.jsonl", b"row\n"), purpose="batch").bytes == 4


def test_one_large_chunk_is_not_held_in_memory(tmp_path: Path) -> None:
    size = 48 << 20
    with Service(ServiceOptions(tmp_path / "kept", port=0, jobs=1)) as service:
        start, end = form(b"SPLIT").split(b"SPLIT")
        total = len(start) + size + len(end)
        with socket.create_connection(service.address, timeout=60) as to:
            to.sendall(head(service, b"POST /v1/files", KIND, CHUNKED, CLOSE) + b"%x\r\n" % total + start)
            piece = bytes(1 << 16)
            tracemalloc.start()
            try:
                for _ in range(size // len(piece)):
                    to.sendall(piece)
                to.sendall(end + b"\r\n0\r\n\r\n")
                got = read_all(to)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert got.startswith(b"HTTP/1.1 200")
        assert json.loads(got.partition(b"\r\n\r\n")[2])["bytes"] == size
        assert peak < 16 << 20


def test_odd_requests_get_a_proper_answer(service: Service) -> None:
    deep = b"[" * 100_000
    created = b"content-length: %d" % len(deep)
    cases = [
        (400, head(service, b"GET /v1/files?limit=abc", CLOSE)),
        (400, head(service, b"GET /v1/files?limit=0", CLOSE)),
        (400, head(service, b"GET /v1/batches?limit=" + b"9" * 5000, CLOSE)),
        (400, head(service, b"GET /v1/batches?limit=%D9%A3", CLOSE)),
        (404, head(service, b"GET /v1/files/" + b"a" * 5000, CLOSE)),
        (404, head(service, b"GET /v1/files/%00%2e%2e", CLOSE)),
        (404, head(service, b"GET /v1/batches/..%2fkey", CLOSE)),
        (404, head(service, b"GET /v1/models", CLOSE)),
        (405, head(service, b"DELETE /v1/batches", CLOSE)),
        (400, head(service, b"POST /v1/batches", created, CLOSE) + deep),
        (400, head(service, b"POST /v1/batches", b"content-length: 1", CLOSE) + b"\xff"),
        (400, head(service, b"POST /v1/batches", b"content-length: 2", CLOSE) + b"[]"),
        (413, head(service, b"POST /v1/batches", b"content-length: 2000000") + b" " * 1_500_000),
        (400, head(service, b"POST /v1/batches", b"content-length: 3", b"content-length: 4")),
        (400, head(service, b"POST /v1/files", b"connection: upgrade", b"upgrade: h2c", b"content-length: 5")),
    ]
    for status, request in cases:
        got = ask(service, request)
        assert got[0] == status, (request[:200], got)
        assert json.loads(got[1].partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_body_of_a_get_is_not_the_next_request(service: Service) -> None:
    hidden = b"GET /v1/batches HTTP/1.1\r\n\r\n"
    first = head(service, b"GET /health", b"content-length: %d" % len(hidden)) + hidden
    _, got = ask(service, first + head(service, b"GET /health", CLOSE))
    assert got.count(b"HTTP/1.1 200") == got.count(b"HTTP/1.1") == 2


def test_what_an_earlier_life_left_half_done_is_removed(tmp_path: Path) -> None:
    options = ServiceOptions(tmp_path / "kept", port=0, jobs=1)
    with Service(options) as service, service.sdk() as client:
        kept = client.files.create(file=("x.jsonl", b"row\n"), purpose="batch").id
        for name in (".file-1.upload", "file-2.data"):
            (service.store.folder / "files" / name).write_bytes(b"half")
    with Service(options) as service, service.sdk() as client:
        assert service.left() == [f"{kept}.data", f"{kept}.json"]
        assert client.files.content(kept).read() == b"row\n"


def test_lists_are_paged_as_the_sdk_wants_them(service: Service) -> None:
    with service.sdk() as client:
        made = [client.files.create(file=(f"{n}.jsonl", b"x"), purpose="batch").id for n in range(5)]
        assert {file.id for file in client.files.list(limit=2)} == set(made)
        page = client.files.list(limit=2)
        assert (len(page.data), page.has_more) == (2, True)
        down = [file.id for file in client.files.list()]
        assert [file.id for file in client.files.list(order="asc")] == down[::-1]
        assert not client.files.list(purpose="fine-tune").data
        with pytest.raises(openai.BadRequestError, match="limit is"):
            client.files.list(limit=100_000)


@pytest.mark.parametrize("line", [b"GET /v1/models", b"POST /v1/chat/completions", b"POST /v1/completions"])
def test_who_asks_for_the_model_is_told_where_it_is(service: Service, line: bytes) -> None:
    status, rest = ask(service, head(service, line, b"content-length: 0", CLOSE))
    assert status == 404
    assert b"deployment's own address: see `corral status`" in rest
