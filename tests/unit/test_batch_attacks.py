"""Attacks on what a batch reads and writes: neighbours who read its results, damaged disks, rows made to do harm."""

from __future__ import annotations

import errno
import gzip
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import DataError
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from corral.use.batch.batch import run_batch
from corral.use.batch.core.folder import BatchFolder, PartFolder
from corral.use.batch.core.ledger import Ledger, LedgerEntry
from corral.use.batch.core.records import FINE, RECORD_BYTES
from corral.use.batch.core.run import Quiet, RunSummary
from corral.use.batch.core.runner import RunnerSettings
from corral.use.batch.core.table import Table, hash64
from corral.use.batch.input.recipe import Recipe
from corral.use.batch.input.rows import DEEPEST_ROW
from corral.use.batch.spec import BatchServers, BatchSpec
from tests.testbed import NOT_ROOT

QUICK = RunnerSettings(backoff_s=0.01, longest_backoff_s=0.05, drain_s=1.0)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeOptions(answer_tokens=(2, 6), max_model_len=512)) as made:
        yield made


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Whatever is not made private on purpose can be read by everybody."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def rows_in(place: Path, count: int) -> Path:
    path = place / "in.jsonl"
    path.write_text("".join(json.dumps({"id": f"r{n}", "prompt": f"Row {n}"}) + "\n" for n in range(count)))
    return path


def batch(server: FakeServer, source: Path, output: Path, **more: Any) -> RunSummary:
    order = BatchSpec(input=str(source), output=str(output), **more)
    return run_batch(order, BatchServers(urls=(server.url,)), QUICK, Quiet(), signals=False).summary


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Who may read the results

FORMS = ["o.jsonl", "o.jsonl.gz", "o.jsonl.zst", "o.csv", "o.csv.gz", "o.parquet"]


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("name", FORMS)
def test_an_output_is_for_its_owner_alone_also_after_it_was_made_again(
    server: FakeServer, tmp_path: Path, name: str
) -> None:
    source, output = rows_in(tmp_path, 6), tmp_path / name
    source.write_text(source.read_text() + "{}\n")  # one that goes to the error file
    errors = tmp_path / f"{name.removesuffix('.jsonl')}.errors.jsonl"
    assert batch(server, source, output, skip_bad=True).state == "done"
    assert (mode(output), mode(errors)) == (0o600, 0o600)
    source.write_text(source.read_text().replace("Row 3", "Another row 3"))
    assert batch(server, source, output, skip_bad=True, force=True).fine == 1  # the old files are rewritten
    assert (mode(output), mode(errors)) == (0o600, 0o600)


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("name", ["o.jsonl", "o.csv.gz"])
def test_who_could_read_an_output_before_still_can(server: FakeServer, tmp_path: Path, name: str) -> None:
    source, output = rows_in(tmp_path, 4), tmp_path / name
    output.touch()
    output.chmod(0o640)
    assert batch(server, source, output).state == "done"
    assert mode(output) == 0o640
    output.chmod(0o644)  # published by hand, and then made again
    source.write_text(source.read_text().replace("Row 3", "Another row 3"))
    batch(server, source, output, force=True)
    assert mode(output) == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason=NOT_ROOT)  # to give a file to another group
def test_a_groups_right_to_read_goes_to_that_group_alone(server: FakeServer, tmp_path: Path) -> None:
    source, output = rows_in(tmp_path, 2), tmp_path / "o.csv"
    output.touch()
    os.chown(output, -1, 4242)
    output.chmod(0o640)
    batch(server, source, output)
    assert (output.stat().st_gid, mode(output)) == (4242, 0o640)


def test_beginning_anew_does_not_empty_what_a_link_leads_to(server: FakeServer, tmp_path: Path) -> None:
    source, precious, output = rows_in(tmp_path, 2), tmp_path / "precious", tmp_path / "o.jsonl"
    precious.write_text("kept\n")
    output.symlink_to(precious)
    assert batch(server, source, output, force=True).state == "done"
    assert precious.read_text() == "kept\n"


# A damaged ledger


def damage(server: FakeServer, place: Path, *records: int) -> tuple[Path, Path]:
    """A finished batch, with one bit of each of these records flipped: its input and its output."""
    source, output = rows_in(place, 40), place / "o.jsonl"
    batch(server, source, output)
    ledger = place / "o.jsonl.corral" / "ledger"
    data = bytearray(ledger.read_bytes())
    for number in records:
        data[number * RECORD_BYTES + 13] ^= 1
    ledger.write_bytes(data)
    return source, output


@pytest.mark.parametrize("records", [(0,), (7,), (3, 4, 20)], ids=str)
def test_a_flipped_bit_in_a_ledger_costs_one_row_and_loses_nothing(
    server: FakeServer, tmp_path: Path, records: tuple[int, ...]
) -> None:
    source, output = damage(server, tmp_path, *records)
    ledger, lines = output.with_name("o.jsonl.corral") / "ledger", output.read_bytes().splitlines()
    broken = ledger.read_bytes()
    summary = batch(server, source, output)
    assert (summary.before, summary.fine) == (40 - len(records), len(records))
    assert sorted(json.loads(line)["id"] for line in output.read_bytes().splitlines()) == sorted(
        f"r{n}" for n in range(40)
    )
    (copy,) = ledger.parent.glob("damaged.*")
    assert (copy / "ledger").read_bytes() == broken
    assert (copy / "results.jsonl").read_bytes().splitlines() == [lines[n] for n in records]
    assert mode(copy / "results.jsonl") == 0o600
    assert any(str(copy) in text for text in summary.repaired)
    assert batch(server, source, output).fine == 0  # the repair holds


def test_a_torn_tail_is_dropped_and_copied(server: FakeServer, tmp_path: Path) -> None:
    source, output = damage(server, tmp_path, 39)
    ledger = output.with_name("o.jsonl.corral") / "ledger"
    ledger.write_bytes(ledger.read_bytes()[:-7])
    torn = ledger.read_bytes()
    summary = batch(server, source, output)
    assert (summary.before, summary.fine) == (39, 1)
    (copy,) = ledger.parent.glob("damaged.*")
    assert (copy / "ledger").read_bytes() == torn
    assert len((copy / "results.jsonl").read_bytes().splitlines()) == 1


def test_a_ledger_is_not_mended_where_no_copy_can_be_made(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = damage(server, tmp_path, 5)
    files = [output, output.with_name("o.jsonl.corral") / "ledger"]
    before = [path.read_bytes() for path in files]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("corral.use.batch.core.records._copy", full)
        with pytest.raises(DataError, match=r"is damaged, and cannot be copied .*No space left"):
            batch(server, source, output)
    assert [path.read_bytes() for path in files] == before
    assert batch(server, source, output).fine == 1


def test_a_damaged_ledger_of_one_of_several_runners_is_kept_too(tmp_path: Path) -> None:
    folder, table = BatchFolder(tmp_path / "o.jsonl"), Table(Path("none"))
    for number in range(9):
        table.add(hash64(b"%d" % number), hash64(b"row %d" % number), 0, 1, number + 1)
    part = PartFolder(folder.output, name="host.1.abc")
    for one, rows in ((folder, range(3)), (part, range(3, 9))):
        one.create()
        ledger = Ledger(one, table)
        ledger.open()
        ledger.commit([LedgerEntry(n, FINE, b'{"id":%d}\n' % n) for n in rows])
        ledger.close()
    data = bytearray(part.ledger.read_bytes())
    data[2 * RECORD_BYTES] ^= 1
    part.ledger.write_bytes(data)
    ledger = Ledger(folder, table)
    ledger.open()
    tally = ledger.collect([part])
    ledger.close()
    assert tally.fine == 8
    assert (folder.path / "damaged.1" / "results.jsonl").read_bytes() == b'{"id":5}\n'


# Rows made to do harm

DEEP = 100_000
MANY = 300 << 20  # bytes that must not be held


def deep(name: str) -> bytes:
    """Four rows in the form that a name stands for, the second nested very deep."""
    nested = "[" * DEEP + "]" * DEEP
    rows = ['{"prompt":"one"}', '{"prompt":' + nested + "}", '{"prompt":"three"}', '{"prompt":"four"}']
    if name.endswith(".json"):
        return ("[" + ",\n".join(rows) + "]").encode()
    if name.endswith(".csv"):
        good = '"[{""role"":""user"",""content"":""x""}]"'
        return f'messages\n{good}\n"{nested}"\n{good}\n{good}\n'.encode()
    return "\n".join(rows).encode()


@pytest.mark.parametrize("name", ["in.jsonl", "in.json", "in.csv", "in.jsonl.gz"])
def test_a_row_nested_without_end_is_one_bad_row(server: FakeServer, tmp_path: Path, name: str) -> None:
    source, output = tmp_path / name, tmp_path / "o.jsonl"
    source.write_bytes(gzip.compress(deep(name)) if name.endswith(".gz") else deep(name))
    line = 3 if name.endswith(".csv") else 2
    with pytest.raises(DataError, match=rf"1 of 4 rows .*\n    (line|item) {line} "):
        batch(server, source, output)
    summary = batch(server, source, output, skip_bad=True)
    assert (summary.state, summary.fine, summary.failed) == ("done", 3, 1)
    assert json.loads((tmp_path / "o.errors.jsonl").read_text())["error"]["line"] == line


@pytest.mark.parametrize("deepest", [DEEPEST_ROW - 1, DEEPEST_ROW])
def test_a_row_may_be_nested_as_deep_as_is_said(deepest: int) -> None:
    raw = b'{"prompt":"x","tree":' + b"[" * deepest + b"]" * deepest + b"}"
    if deepest < DEEPEST_ROW:
        assert Recipe(kind="plain").read(raw, 1).body["prompt"] == "x"
    else:
        with pytest.raises(DataError, match="nested more than 256 levels"):
            Recipe(kind="plain").read(raw, 1)


LONG = """
import gzip, resource, sys
from pathlib import Path
from corral.use.batch.inspect import check_input
from corral.use.batch.input.recipe import Recipe
path, count = Path(sys.argv[1]), int(sys.argv[2])
head, tail = (part.encode().decode("unicode_escape").encode() for part in sys.argv[3:5])
with (gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb")) as file:
    file.write(head)
    for _ in range(count >> 20):
        file.write(b"x" * (1 << 20))
    file.write(tail)
resource.setrlimit(resource.RLIMIT_DATA, (220 << 20, 220 << 20))
found = check_input(str(path), None, Recipe())
print(found.rows, [(one.line, one.text) for one in found.problems])
"""


@pytest.mark.parametrize(
    ("name", "head", "tail", "bad"),
    [
        ("in.jsonl", r'{"prompt":"one"}\n{"prompt":"', r'"}\n{"prompt":"three"}\n', 2),
        ("in.jsonl.gz", r'{"prompt":"one"}\n{"prompt":"', r'"}\n{"prompt":"three"}\n', 2),
        ("in.txt", r"one\n", r"\nthree\n", 2),
        ("in.json", r'["one",{"prompt":"', r'"},"three"]', 2),
        ("in.csv", r"prompt\none\n", r"\nthree\n", 3),
        ("in.csv", r'prompt\none\n"', r'\n\nx"\nthree\n', 5),
    ],
    ids=["jsonl", "gz", "text", "array", "csv", "csv in quotes"],
)
def test_a_line_of_any_length_is_one_bad_row_and_is_not_held(
    tmp_path: Path, name: str, head: str, tail: str, bad: int
) -> None:
    argv = [sys.executable, "-c", LONG, str(tmp_path / name), str(MANY), head, tail]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"3 [({bad}, 'is longer than 32 MiB')]\n"), ran.stderr[-2000:]
