"""Runs and traces that nobody wrote so: damaged, of a colleague, of another tool. Each ends in one clear sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.base.errors import DataError
from corral.client import trace
from corral.lab.bench.store import save_run
from tests.unit.conftest import in_process
from tests.unit.shown import run_of

DEEP = b"[" * 100_000 + b"]" * 100_000
ANY = [b"", b"null", b"[]", b'"x"', b"{", b"\xff\xfe", DEEP, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"1e999"]
RUN: list[tuple[str, object]] = [
    ("created_s", 1e300), ("created_s", -1e18), ("created_s", 10**400), ("summary", {}), ("spec", 7),
    ("verdict", 10**30), ("problems", [[]]), ("server", {"at_s": "x"}), ("limit", {"decode_share": "much"}),
    ("notes", {"a": 1}), ("cost", []),
]  # fmt: skip
VALUES: list[object] = [-1, 10**25, 1e308, "x", None, [], {}, True]


@pytest.fixture
def folder(clean_home: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    run, rows = run_of(1)
    save_run(folder, run, rows[:50], (), detailed=False)
    return folder


@pytest.fixture
def judged(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[], None]:
    """Both views of the run end well, or in one sentence that names the file."""
    run = in_process(capsys, "bench")

    def check() -> None:
        for words in (("report", str(folder)), ("report", str(folder), "-o", str(folder / "page.html")),
                      ("compare", str(folder), str(folder))):  # fmt: skip
            code, _, err = run(*words)
            assert code in (0, 10, 2), err[-500:]
            assert code != 10 or str(folder) in err

    return check


@pytest.mark.parametrize("file", ["run.json", "rows.jsonl", "server.jsonl"])
def test_a_file_of_a_run_that_is_none(file: str, folder: Path, judged: Callable[[], None]) -> None:
    for data in ANY:
        (folder / file).write_bytes(data)
        judged()


def test_a_run_with_absurd_values(folder: Path, judged: Callable[[], None]) -> None:
    whole = json.loads((folder / "run.json").read_bytes())
    for name, value in RUN:
        (folder / "run.json").write_text(json.dumps({**whole, name: value}))
        judged()


@pytest.mark.parametrize("file", ["rows.jsonl", "server.jsonl"])
def test_lines_with_absurd_values(file: str, folder: Path, judged: Callable[[], None]) -> None:
    line = (folder / "rows.jsonl").read_bytes().splitlines()[0] if file[0] == "r" else b'{"at_s": 1}'
    fields = json.loads(line)
    for name in fields:
        for value in VALUES if name != "chunk_ns" else [*VALUES, [], [-(10**18)], [10**18, 0], [1e308]]:
            (folder / file).write_text(json.dumps({**fields, name: value}) + "\n")
            judged()


def test_a_trace_without_newlines_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "LONGEST_LINE", 1000)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b" " * 100_000)
    with pytest.raises(DataError, match=r"line 1 of .*trace\.jsonl is longer than 1,000 bytes"):
        list(trace.read_trace(path))
    path.write_bytes(b'{"time_s": 0.5, "prompt_tokens": 100, "output_tokens": 200}' + b" " * 900)
    assert len(list(trace.read_trace(path))) == 1
