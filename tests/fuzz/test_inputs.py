"""Rows, ledgers, locks, deployments' files, and the HTTP of clients and engines: one clear error, or a value."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import httptools
from hypothesis import strategies as st

from corral.base.errors import CorralError
from corral.base.lock import holder_of
from corral.client.http1 import BadMessageError, RequestReader, ResponseReader
from corral.client.reply import read_piece
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle.status import traces_of
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.ledger import Ledger, LedgerEntry
from corral.use.batch.core.records import FINE, RECORD_BYTES
from corral.use.batch.core.table import Table, hash64
from corral.use.batch.input.recipe import Recipe
from corral.use.batch.inspect import check_input
from tests.fuzz.conftest import Fuzz
from tests.fuzz.test_decoders import anything, changed, raw, text_of

ROW = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
}
KEPT_ROWS = [b'{"prompt":' + b"[" * 100_000, b'"\n"\0"', b'a,b\n"', b"[[[[", b'["a",]', b"\xff\xfe{", b'a\r\r\n"""']
ENDINGS = st.sampled_from(["jsonl", "json", "txt", "csv", "tsv", "jsonl.gz"])
HTTP = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
    b"HTTP/1.1 100 \r\n\r\n" * 40,
    b"\r\n",
    b"GET /\n HTTP",
]
messages = st.lists(st.sampled_from(HTTP) | st.binary(max_size=40), max_size=4).map(b"".join)


def test_rows(fuzz: Fuzz) -> None:
    lines = st.lists(changed(ROW) | raw | st.sampled_from(KEPT_ROWS), max_size=4)

    def check(value: object) -> None:
        assert isinstance(value, tuple)
        with tempfile.TemporaryDirectory() as temporary, contextlib.suppress(CorralError):
            path = Path(temporary) / f"in.{value[0]}"
            path.write_bytes(b"\n".join(text_of(one) for one in value[1]))
            found = check_input(str(path), None, Recipe())
            assert len(found.problems) <= found.rows

    fuzz(st.tuples(ENDINGS, lines), check)


def test_ledgers_keep_what_is_not_damaged(fuzz: Fuzz) -> None:
    places = st.lists(st.tuples(st.integers(0, 399), st.integers(1, 255)), max_size=4)

    def check(value: object) -> None:
        assert isinstance(value, list)
        with tempfile.TemporaryDirectory() as temporary:
            folder, table = BatchFolder(Path(temporary) / "o.jsonl"), Table(Path("none"))
            for number in range(10):
                table.add(hash64(b"%d" % number), number, 0, 1, number + 1)
            folder.create()
            ledger = Ledger(folder, table)
            ledger.open()
            ledger.commit([LedgerEntry(n, FINE, b"%d\n" % n) for n in range(10)])
            ledger.close()
            good = folder.ledger.read_bytes()
            data = bytearray(good)
            for at, bits in value:
                data[at] ^= bits
            folder.ledger.write_bytes(data)
            lost = {at // RECORD_BYTES for at, byte in enumerate(data) if byte != good[at]}
            ledger = Ledger(folder, table)
            tally = ledger.open()
            ledger.close()
            assert {n for n in range(10) if not tally.done[n]} == lost
            assert folder.output.read_bytes() == b"".join(b"%d\n" % n for n in range(10) if n not in lost)

    fuzz(places, check)


def test_locks(fuzz: Fuzz) -> None:
    holder = {"pid": 5, "host": "n", "boot_id": "b", "start_ticks": 9, "namespace": "pid:[1]"}

    def check(value: object) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "lock"
            path.write_bytes(text_of(value))
            holder_of(path)
            assert list(Path(temporary).iterdir()) == [path]

    fuzz(changed(holder) | raw, check)


def test_files_of_deployments(fuzz: Fuzz) -> None:
    launch = {"launch_id": "a-1", "target": "ssh", "target_options": {"hosts": ["a"]}, "ranks": [{"node": "a"}]}

    def check(value: object) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            folder = DeploymentFolder(Path(temporary))
            for path in (folder.record, folder.launch):
                path.write_bytes(text_of(value))
            found = traces_of(folder)
            assert isinstance(found.target_options, dict)
            assert all(isinstance(node, str) for node in found.nodes)

    fuzz(changed(launch) | raw, check)


class Sink:
    """Takes what a reader found, and checks its types."""

    def request(self, method: bytes, target: bytes, http_10: bool, headers: object) -> None:
        assert method.isalpha() or b"-" in method
        assert not any(byte < 32 for byte in target)

    def answer(self, status: int, headers: object) -> None:
        assert 100 <= status <= 999

    def body(self, data: bytes) -> None:
        assert data

    def complete(self, keep: bool) -> None:
        pass


def test_http_of_clients(fuzz: Fuzz) -> None:
    def check(value: object) -> None:
        assert isinstance(value, bytes)
        reader = RequestReader(Sink())
        with contextlib.suppress(BadMessageError, httptools.HttpParserUpgrade):
            for at in range(0, len(value), 7):
                reader.feed(value[at : at + 7])

    fuzz(messages, check)


def test_http_of_engines(fuzz: Fuzz) -> None:
    def check(value: object) -> None:
        assert isinstance(value, bytes)
        reader = ResponseReader(Sink())
        reader.expect(b"POST")
        with contextlib.suppress(BadMessageError):
            reader.feed(value)
            reader.ends_at_eof()

    fuzz(messages, check)


def test_pieces_of_answers(fuzz: Fuzz) -> None:
    event = {"id": "x", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}], "usage": None}

    def check(value: object) -> None:
        assert isinstance(read_piece(text_of(value), 0), list)

    fuzz(changed(event) | raw | anything, check)
