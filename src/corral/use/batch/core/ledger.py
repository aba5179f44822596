"""The results of a batch that count: one small record for every result line that is safely on disk.

Results are committed in groups: the lines are appended to the results (or errors) file and synced, then their records
are appended to the ledger and synced. A result counts once its record is there. So after a crash

- lines beyond the last record of a file are cut off, torn or whole: their rows are done again;
- torn records at the end of the ledger are dropped, and their lines with them;
- a record in the middle that a disk damaged is set aside with its line, and its row done again; all others count;
- a record whose line is missing or not a line (a disk that lost what it had promised) is dropped.

That makes exactly one line per id, whatever happened. A record holds the hashes of id and content, so that a resume
compares them with the input; the row's number in it is only a hint where to look first. After a write error (disk
full) the files are cut back to the last commit, which needs no space. A damaged ledger is copied first (`records`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from corral.base.errors import CorralError, DataError
from corral.base.files import create_private
from corral.use.batch.core.folder import BatchFolder, sync_dir
from corral.use.batch.core.records import (
    FAILED,
    FINE,
    RECORD_BYTES,
    LedgerFiles,
    LedgerRecord,
    end_of_records,
    pack_record,
    read_records,
    set_aside,
)
from corral.use.batch.core.table import Table


class LedgerEntry(NamedTuple):
    """One result to commit."""

    row: int
    kind: int
    line: bytes


@dataclass
class Tally:
    """Which rows of a table are done."""

    done: bytearray  # 1 for every row that has a result
    fine: int = 0
    failed: int = 0


class Ledger:
    """The ledger of a batch with its two files of lines, open for appending by the holder of the lock."""

    def __init__(self, folder: BatchFolder, table: Table, guard: Callable[[], None] = lambda: None) -> None:
        self._folder, self._table, self._guard = folder, table, guard
        self._paths = (folder.results, folder.errors)
        self._fds: list[int] = []
        self._ends = [0, 0]
        self._ledger_fd = -1
        self._ledger_end = 0
        self.repaired: list[str] = []  # what was cut or dropped, as text

    def open(self, forget_failed: bool = False) -> Tally:
        """Open the files and repair what a crash left; which rows are done. Failed rows may be forgotten."""
        self._finish_rewrite()
        new = [path for path in (*self._paths, self._folder.ledger) if not path.exists()]
        for path in new:
            os.close(create_private(path, self._folder.like(path)))
        self._open_files()
        for parent in {path.parent for path in new}:
            sync_dir(parent)
        tally = self._scan(forget_failed)
        for kind, path in enumerate(self._paths):
            size = os.fstat(self._fds[kind]).st_size
            if size > self._ends[kind]:
                os.ftruncate(self._fds[kind], self._ends[kind])
                self.repaired.append(f"cut {size - self._ends[kind]} bytes that did not count from {path.name}")
        return tally

    def commit(self, entries: Iterable[LedgerEntry]) -> None:
        """Write results: lines first, then their records; after an error nothing of them is left."""
        self._guard()  # raises when another process has taken over
        lines: tuple[list[bytes], list[bytes]] = ([], [])
        ends, records, table = list(self._ends), bytearray(), self._table
        for row, kind, line in entries:
            ends[kind] += len(line)
            lines[kind].append(line)
            made = LedgerRecord(table.ids[row], table.contents[row], ends[kind], row, len(line), kind)
            records += pack_record(made)
        try:
            for kind in (FINE, FAILED):
                if lines[kind]:
                    _append(self._fds[kind], b"".join(lines[kind]), self._ends[kind])
            _append(self._ledger_fd, records, self._ledger_end)
        except OSError as error:
            self._cut_to_commit()
            cure = "Make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Check the disk"
            raise DataError(
                f"{self._folder.output} cannot be written: {error.strerror or error}.",
                f"Everything up to here is kept. {cure}, then run the same command again; it continues.",
                errno=error.errno,
            ) from error
        self._ends = ends
        self._ledger_end += len(records)

    def close(self) -> None:
        for descriptor in (*self._fds, self._ledger_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._fds, self._ledger_fd = [], -1

    def records(self) -> Iterable[LedgerRecord]:
        """Every record, in the order in which results arrived."""
        return read_records(self._ledger_fd)

    def line(self, record: LedgerRecord) -> bytes:
        return _line(self._fds, record)

    def collect(self, parts: Sequence[BatchFolder]) -> Tally:
        """Copy the results of other ledgers into this one, in one step; of several results of a row, the first
        counts.
        """
        with ExitStack() as stack:
            opened = [stack.enter_context(_reading(part)) for part in parts]
            others = [files for files in opened if files]
            for files in others:
                damaged: list[int] = []
                deque(read_records(files.ledger_fd, damaged=damaged), maxlen=0)
                self._keep_damaged(files, damaged)
            try:
                return self._rewrite(Finder(self._table), others)
            except OSError as error:
                for copy, _ in self._copies():
                    copy.unlink(missing_ok=True)
                raise DataError(
                    f"the results cannot be put together in {self._folder.output}: {error.strerror or error}.",
                    "All of them are kept. Make room for a second copy, then run the same command again.",
                    errno=error.errno,
                ) from error

    # Inside

    def _cut_to_commit(self) -> None:
        """Cut the files back to the last commit; where that fails, the next `open` does it."""
        for descriptor, end in (*zip(self._fds, self._ends, strict=True), (self._ledger_fd, self._ledger_end)):
            with suppress(OSError):  # the error that led here is the one to report
                os.ftruncate(descriptor, end)

    def _scan(self, forget_failed: bool) -> Tally:
        """Read the ledger; keep the records whose row still is what it was and whose line is there."""
        tally = Tally(bytearray(len(self._table)))
        own = LedgerFiles(self._fds, self._ledger_fd)
        sizes = [os.fstat(fd).st_size for fd in self._fds]
        self._ends, self._ledger_end = [0, 0], 0
        find = Finder(self._table, forget_failed)
        kept, stale, lost = 0, 0, 0
        last: list[LedgerRecord | None] = [None, None]
        counts = [0, 0]
        damaged: list[int] = []
        for record in read_records(self._ledger_fd, damaged=damaged):
            row = find(record)
            if record.end > sizes[record.kind] or record.end - record.length < self._ends[record.kind]:
                lost += 1
            elif row < 0 or tally.done[row]:
                stale += 1
            else:
                tally.done[row] = 1
                counts[record.kind] += 1
                self._ends[record.kind] = record.end
                last[record.kind] = record
                kept += 1
        size = os.fstat(self._ledger_fd).st_size
        self._ledger_end = kept * RECORD_BYTES
        broken = any(record is not None and not _is_line(self._fds, record) for record in last)
        inside = self._keep_damaged(own, damaged, lost > 0 or broken)
        if stale or lost or broken or inside or find.moved:
            return self._rewrite(find, [])
        if size != self._ledger_end:
            os.ftruncate(self._ledger_fd, self._ledger_end)
        tally.fine, tally.failed = counts
        return tally

    def _keep_damaged(self, files: LedgerFiles, damaged: list[int], lost: bool = False) -> int:
        """Copy a ledger that is about to lose records; the number of damaged ones among those that count."""
        size = os.fstat(files.ledger_fd).st_size
        end = end_of_records(size, damaged)
        if not (lost or size != end or damaged):
            return 0
        copy = set_aside(self._folder, files)
        inside = sum(at < end for at in damaged)
        if inside:
            many = "a damaged record" if inside == 1 else f"{inside} damaged records"
            self.repaired.append(f"set {many} of the ledger aside, and did those rows again (copy: {copy})")
        elif size != end:
            self.repaired.append(f"dropped a torn record from the ledger (copy: {copy})")
        return inside

    def _rewrite(self, find: Finder, others: list[LedgerFiles]) -> Tally:
        """Copy the lines that count into new files, with a new ledger."""
        fresh = Tally(bytearray(len(self._table)))
        files = [os.fdopen(create_private(copy, self._folder.like(path)), "wb") for copy, path in self._copies()]
        own = LedgerFiles(self._fds, self._ledger_fd)
        counts, dropped, ends = [0, 0], 0, [0, 0]
        try:
            for source, record in _all_records([own, *others]):
                row = find(record)
                if row >= 0 and fresh.done[row]:  # two runners did it: the first counts
                    dropped += source is own
                    continue
                line = _line(source.fds, record) if row >= 0 else b""
                if not _is_whole(line, record):
                    dropped += not find.forgets(record)
                    continue
                fresh.done[row] = 1
                kind = record.kind
                counts[kind] += 1
                ends[kind] += len(line)
                files[kind].write(line)
                id_hash, content = self._table.ids[row], self._table.contents[row]
                files[2].write(pack_record(LedgerRecord(id_hash, content, ends[kind], row, record.length, kind)))
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            self._ends, self._ledger_end = [files[0].tell(), files[1].tell()], files[2].tell()
        finally:
            for file in files:
                file.close()
        self._replace()
        if dropped:
            self.repaired.append(f"dropped {dropped} results that are missing on disk or belong to changed rows")
        fresh.fine, fresh.failed = counts
        return fresh

    def _replace(self) -> None:
        self._guard()
        self.close()
        self._marker.touch()
        sync_dir(self._folder.path)
        self._finish_rewrite()
        self._open_files()

    def _open_files(self) -> None:
        self._fds = [os.open(path, os.O_RDWR) for path in self._paths]
        self._ledger_fd = os.open(self._folder.ledger, os.O_RDWR)

    @property
    def _marker(self) -> Path:
        """Present while finished copies are put in place: after a crash in between, the next start completes it."""
        return self._folder.path / "rewrite"

    def _copies(self) -> list[tuple[Path, Path]]:
        return [(path.with_name(f".{path.name}.rewrite"), path) for path in (*self._paths, self._folder.ledger)]

    def _finish_rewrite(self) -> None:
        for copy, path in self._copies():
            if copy.exists():
                if self._marker.exists():
                    copy.replace(path)
                else:
                    copy.unlink()
                sync_dir(path.parent)
        self._marker.unlink(missing_ok=True)


def read_ledger(folder: BatchFolder, at: int = 0) -> Iterable[LedgerRecord]:
    """The records of a batch that other runners may work on, from byte `at` on."""
    try:
        descriptor = os.open(folder.ledger, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        yield from read_records(descriptor, at)
    finally:
        os.close(descriptor)


@contextmanager
def _reading(folder: BatchFolder) -> Iterator[LedgerFiles | None]:
    """Another runner's ledger, open for reading; None when it has none yet."""
    opened: list[int] = []
    try:
        for path in (folder.results, folder.errors, folder.ledger):
            opened.append(os.open(path, os.O_RDONLY))
        yield LedgerFiles(opened[:2], opened[2])
    except FileNotFoundError:
        if len(opened) == 3:
            raise
        yield None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _all_records(sources: Iterable[LedgerFiles]) -> Iterator[tuple[LedgerFiles, LedgerRecord]]:
    for source in sources:
        for record in read_records(source.ledger_fd):
            yield source, record


def _line(fds: Sequence[int], record: LedgerRecord) -> bytes:
    return os.pread(fds[record.kind], record.length, record.end - record.length)


def _is_line(fds: Sequence[int], record: LedgerRecord) -> bool:
    return _is_whole(_line(fds, record), record)


def _is_whole(line: bytes, record: LedgerRecord) -> bool:
    """Whether the bytes are one line of JSON, as they were when they were committed."""
    if len(line) != record.length or not line.endswith(b"\n") or b"\n" in line[:-1]:
        return False
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


class Finder:
    """Finds the row a record belongs to: by its hint, else by a search over all ids."""

    def __init__(self, table: Table, forget_failed: bool = False) -> None:
        self._table, self._forget_failed = table, forget_failed
        self._by_id: dict[int, int] | None = None
        self.moved = 0

    def __call__(self, record: LedgerRecord) -> int:
        table, row = self._table, record.row
        if self.forgets(record):
            return -1
        if row < len(table) and table.ids[row] == record.id_hash:
            return row if table.contents[row] == record.content else -1
        if self._by_id is None:
            self._by_id = {id_hash: number for number, id_hash in enumerate(table.ids)}
        found = self._by_id.get(record.id_hash, -1)
        if found < 0 or table.contents[found] != record.content:
            return -1
        self.moved += 1
        return found

    def forgets(self, record: LedgerRecord) -> bool:
        return self._forget_failed and record.kind == FAILED


def _append(descriptor: int, data: bytes | bytearray, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
    os.fsync(descriptor)


SHORTEST_S, LONGEST_S = 0.03, 1.0
FULL_BYTES = 16 << 20


class WriteBuffer:
    """Collects results and commits them in groups.

    One group is under way at a time, in a thread, so that the event loop never waits for a disk. The pause between
    groups grows with what a sync costs (a tenth of the time at most, never over a second), so slow shared file
    systems get few large groups and fast disks many small ones.
    """

    def __init__(self, ledger: Ledger, on_commit: Callable[[int], None]) -> None:
        self._ledger, self._on_commit = ledger, on_commit
        self._waiting: list[LedgerEntry] = []
        self._waiting_bytes = self._flying_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="corral-commit")
        self._running: asyncio.Task[None] | None = None
        self.failure: CorralError | None = None

    @property
    def full(self) -> bool:
        """Whether the disk does not keep up, so that nothing more should be sent."""
        return self._waiting_bytes + self._flying_bytes > FULL_BYTES

    def add(self, entry: LedgerEntry) -> None:
        self._waiting.append(entry)
        self._waiting_bytes += len(entry.line)
        if self._running is None and self.failure is None:
            self._running = asyncio.get_running_loop().create_task(self._work())

    async def drain(self) -> None:
        """Wait until everything that was added is committed; raises the error that prevented it."""
        while self._running is not None:
            await asyncio.shield(self._running)
        self._thread.shutdown()
        if self.failure:
            raise self.failure

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                self._flying_bytes, self._waiting_bytes = self._waiting_bytes, 0
                began = time.monotonic()
                await loop.run_in_executor(self._thread, self._ledger.commit, group)
                took = time.monotonic() - began
                self._flying_bytes = 0
                self._on_commit(len(group))
                await asyncio.sleep(min(LONGEST_S, max(SHORTEST_S, 9 * took)))
        except Exception as error:  # whatever it is, its group was not committed
            self.failure = error if isinstance(error, CorralError) else _write_error(error)
        finally:
            self._running = None


def _write_error(error: Exception) -> DataError:
    reason = error if isinstance(error, OSError) else repr(error)
    return DataError(
        f"results cannot be written: {reason}.",
        "Everything up to here is kept. Remove the cause, then run the same command again; it continues.",
        errno=error.errno if isinstance(error, OSError) else None,
    )
