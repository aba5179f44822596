"""The ledger and the lock: what counts after any damage, and who may work."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.base.errors import ConflictError, DataError
from corral.base.lock import SILENT_S, holder_of, lock_holder
from corral.base.processes import own_identity
from corral.use.batch.core.folder import BatchFolder, BatchLock
from corral.use.batch.core.ledger import Ledger, LedgerEntry, WriteBuffer, read_ledger
from corral.use.batch.core.records import FAILED, FINE
from corral.use.batch.core.table import Table, hash64


def table_of(count: int, change: int = -1, order: list[int] | None = None) -> Table:
    table = Table(Path("none"))
    for number in order or range(count):
        content = f"row {number}{' changed' if number == change else ''}"
        table.add(hash64(f"id{number}".encode()), hash64(content.encode()), 0, 1, number + 1)
    return table


def line(number: int) -> bytes:
    return json.dumps({"custom_id": f"id{number}", "answer": "x" * (number % 7)}).encode() + b"\n"


def make(folder: BatchFolder, table: Table, groups: list[list[int]]) -> None:
    folder.create()
    ledger = Ledger(folder, table)
    ledger.open()
    for group in groups:
        ledger.commit([LedgerEntry(n, FAILED if n % 5 == 0 else FINE, line(n)) for n in group])
    ledger.close()


def state(folder: BatchFolder, table: Table) -> tuple[set[int], list[str]]:
    """Rows that count, and the ids of all lines on disk, after opening."""
    ledger = Ledger(folder, table)
    tally = ledger.open()
    ledger.close()
    lines = folder.results.read_bytes().splitlines() + folder.errors.read_bytes().splitlines()
    ids = [json.loads(one)["custom_id"] for one in lines]
    return {n for n, done in enumerate(tally.done) if done}, ids


def test_what_was_committed_counts_and_nothing_else(tmp_path: Path) -> None:
    folder, table = BatchFolder(tmp_path / "o.jsonl"), table_of(20)
    make(folder, table, [[1, 2, 5], [0, 7]])
    with folder.output.open("ab") as file:
        file.write(line(9) + b'{"custom_id": "id1')  # written, but never committed
    done, ids = state(folder, table)
    assert done == {0, 1, 2, 5, 7}
    assert sorted(ids) == sorted(f"id{n}" for n in done)


@settings(max_examples=150)
@given(
    st.integers(0, 2**32), st.sampled_from(["results", "errors", "ledger"]), st.sampled_from(["cut", "flip", "add"])
)
def test_any_damage_at_the_end_costs_work_never_a_wrong_line(
    tmp_path_factory: pytest.TempPathFactory, seed: int, which: str, how: str
) -> None:
    chance = random.Random(seed)
    place = tmp_path_factory.mktemp("ledger")
    folder, table = BatchFolder(place / "o.jsonl"), table_of(30)
    rows = chance.sample(range(30), 20)
    make(folder, table, [rows[:8], rows[8:15], rows[15:]])
    path = getattr(folder, which)
    data = bytearray(path.read_bytes())
    tail = min(len(data), chance.randrange(1, 100))
    if how == "cut":
        del data[len(data) - tail :]
    elif how == "add":
        data += chance.randbytes(tail)
    elif data and which == "ledger":
        data[-chance.randrange(1, min(40, len(data)) + 1)] ^= 0xFF
    elif data:
        data[len(data) - min(tail, 20) :] = bytes(min(tail, 20))
    path.write_bytes(data)
    done, ids = state(folder, table)
    assert done <= set(rows)
    assert len(done) >= 20 - 8  # at most the last lines of one file are lost
    assert sorted(ids) == sorted(f"id{n}" for n in done)
    assert state(folder, table)[0] == done  # the repair holds
    make(folder, table, [[n for n in range(30) if n not in done]])
    assert sorted(state(folder, table)[1]) == sorted(f"id{n}" for n in range(30))


def test_changed_and_moved_rows_are_told_by_content(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path / "o.jsonl")
    make(folder, table_of(10), [[1, 2, 3, 4, 6]])
    order = [9, 3, 2, 1, 0, 4, 5, 6, 7, 8]
    done, ids = state(folder, table_of(10, change=3, order=order))
    assert {order[n] for n in done} == {1, 2, 4, 6}
    assert sorted(ids) == ["id1", "id2", "id4", "id6"]


def test_failed_rows_can_be_forgotten(tmp_path: Path) -> None:
    folder, table = BatchFolder(tmp_path / "o.jsonl"), table_of(10)
    make(folder, table, [[0, 1, 2, 5]])
    ledger = Ledger(folder, table)
    tally = ledger.open(forget_failed=True)
    ledger.close()
    assert [n for n, done in enumerate(tally.done) if done] == [1, 2]
    assert not folder.errors.read_bytes()


def test_a_rewrite_that_was_cut_short_is_completed(tmp_path: Path) -> None:
    folder, table = BatchFolder(tmp_path / "o.jsonl"), table_of(10)
    make(folder, table, [[1, 2]])
    good = folder.output.read_bytes()
    ledger = folder.ledger.read_bytes()
    (tmp_path / ".o.jsonl.rewrite").write_bytes(good)
    (folder.path / ".ledger.rewrite").write_bytes(ledger)
    folder.output.write_bytes(b"old")
    (folder.path / "rewrite").touch()  # the copies were complete
    assert state(folder, table)[0] == {1, 2}
    (tmp_path / ".o.jsonl.rewrite").write_bytes(b"half a copy")
    assert state(folder, table)[0] == {1, 2}
    assert not list(tmp_path.glob(".*.rewrite"))


def test_a_reader_can_count_while_somebody_writes(tmp_path: Path) -> None:
    folder, table = BatchFolder(tmp_path / "o.jsonl"), table_of(10)
    assert list(read_ledger(folder)) == []
    make(folder, table, [[1, 5]])
    assert [(record.row, record.kind) for record in read_ledger(folder)] == [(1, FINE), (5, FAILED)]


def test_the_second_runner_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with BatchLock(path, "out.jsonl"):
        assert holder_of(path) == own_identity()
        with (
            pytest.raises(ConflictError, match=f"process {os.getpid()} on ") as refused,
            BatchLock(path, "out.jsonl"),
        ):
            pass
        assert refused.value.exit_code == 4
    assert holder_of(path) is None
    assert not list(tmp_path.iterdir())


def test_a_lock_of_a_dead_process_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = "import sys, os; from pathlib import Path; from corral.use.batch.core.folder import BatchLock\n"
    code += "BatchLock(Path(sys.argv[1]), 'x').__enter__(); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert path.exists()
    assert holder_of(path) is None
    with BatchLock(path, "out.jsonl"):
        assert holder_of(path) == own_identity()


def test_a_lock_of_another_machine_is_stale_when_it_is_silent(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "boot_id": "b", "start_ticks": 5}))
    with pytest.raises(ConflictError, match="process 1 on elsewhere"), BatchLock(path, "out.jsonl"):
        pass
    old = time.time() - SILENT_S - 5
    os.utime(path, (old, old))
    with BatchLock(path, "out.jsonl"):
        assert holder_of(path) == own_identity()


def test_a_torn_lock_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("{")
    with BatchLock(path, "out.jsonl"):
        pass


def test_a_lock_that_cannot_be_read_names_nobody_and_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"

    def none_left(self: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(self))

    with BatchLock(path, "out.jsonl") as lock:
        monkeypatch.setattr(Path, "read_bytes", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            lock_holder(path)
        with pytest.raises(OSError, match="Too many open files"):
            lock.check()
        assert lock_holder(tmp_path / "none") is None
    assert not path.exists()  # told by its inode to be ours


def away(*_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_a_disk_that_is_away_is_told_and_what_counted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, table = BatchFolder(tmp_path / "o.jsonl"), table_of(20)
    make(folder, table, [[1, 2]])
    ledger = Ledger(folder, table)
    ledger.open()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", away)
        patch.setattr(os, "ftruncate", away)  # cutting back fails too
        with pytest.raises(DataError, match=r"o\.jsonl cannot be written: Input/output error") as told:
            ledger.commit([LedgerEntry(3, FINE, line(3))])
    assert "Make room" not in told.value.remedy
    ledger.close()
    assert state(folder, table)[0] == {1, 2}


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files", "lock"), RuntimeError("odd")])
def test_a_commit_that_fails_in_any_way_fails_the_job(tmp_path: Path, error: Exception) -> None:
    folder, table = BatchFolder(tmp_path / "o.jsonl"), table_of(20)
    folder.create()

    def guard() -> None:
        raise error

    ledger = Ledger(folder, table, guard)
    ledger.open()

    async def work() -> None:
        outbox = WriteBuffer(ledger, lambda _: None)
        outbox.add(LedgerEntry(3, FINE, line(3)))
        await outbox.drain()

    with pytest.raises(DataError, match=r"odd|Too many open files") as told:
        asyncio.run(work())
    assert "Everything up to here is kept" in told.value.remedy
    ledger.close()
