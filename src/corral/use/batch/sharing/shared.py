"""Several runners on one batch: joining, working through blocks, and putting the parts together at the end.

    join      under the job's lock, for a moment: check the input (or see that it is what was checked), refuse one
              runner too many, cut the rows into blocks when nobody else is there, become a member
    work      without the lock: claim blocks, do their rows, write them into a part of one's own (`parts`, `blocks`)
    gather    when every row is done somewhere, whoever gets the job's lock first copies all parts into the job's own
              ledger and results, in one step; then the batch is as if one runner had done it

A runner killed at any of these leaves a part and claims; others take the claims over, and the part counts. A gather
that is cut off is done again. What damaged files lost is found when they are gathered, and is done again.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.errors import ConflictError
from corral.base.files import write_atomic
from corral.base.lock import heartbeat
from corral.base.processes import Identity
from corral.base.record import dump_json, load_json
from corral.use.batch.core.folder import BatchFolder, BatchLock, PartFolder, sync_dir
from corral.use.batch.core.ledger import Ledger, Tally
from corral.use.batch.core.run import BatchState, Listener, RunSummary, Share, commit_first
from corral.use.batch.core.runner import Counts, Feed
from corral.use.batch.sharing.parts import (
    BlockFeed,
    Division,
    Others,
    Participant,
    all_parts,
    block_size,
    bury,
    load_division,
    runners_of,
)
from corral.use.batch.spec import BatchOrder, BatchRecord, Prepared, prepare

MANY_PARTS = 64  # after so many attempts they are gathered before going on
ALONE_S = 5.0  # a lock that is held longer than this, with no sign of sharing, is that of a lone runner


@dataclass(frozen=True)
class Sharing:
    """How a runner shares its batch with others."""

    runners: int = 1  # that may work on it at once
    counted: bool = True  # whether one too many is refused; a scheduler's jobs were counted when they were queued
    part_name_file: Path | None = None  # where a runner that may be requeued keeps the name of its part

    @property
    def wanted(self) -> bool:
        return self.runners > 1 or not self.counted


@contextlib.contextmanager
def brief_lock(folder: BatchFolder, patient: Callable[[], bool] | None = None) -> Iterator[BatchLock]:
    """The job's lock, which runners of a shared batch hold only for moments; a lone runner holds it all the time."""
    patient_until = time.monotonic() + ALONE_S

    def shared() -> bool:
        return folder.shared.is_dir() or time.monotonic() < patient_until

    while True:
        folder.create()
        try:
            with BatchLock(folder.lock, str(folder.output), patient or shared) as lock, heartbeat(folder.lock):
                yield lock
            return
        except FileNotFoundError:
            if folder.path.is_dir():
                raise
            # the first one was refused and took the folder away, just when we reached for the lock


@contextlib.contextmanager
def open_door(folder: BatchFolder, sharing: Sharing) -> Iterator[list[Identity]]:
    """Show that the batch is shared, refuse one too many; gives those who are there. Closed again when refused."""
    folder.shared.mkdir(mode=0o700, exist_ok=True)
    if (
        sharing.part_name_file is not None and sharing.part_name_file.is_file()
    ):  # its scheduler has ended that attempt before this one
        bury(PartFolder(folder.output, folder.live, sharing.part_name_file.read_text().strip()))
    others = runners_of(folder)
    try:
        if sharing.counted and len(others) >= sharing.runners:
            raise _too_many(folder, others, sharing.runners)
        if others and folder.cancel.exists():
            raise ConflictError(f"{folder.output} is being stopped.", "Run the same command again in a moment.")
        yield others
    except BaseException:
        for path in (folder.parts, folder.blocks, folder.shared):
            with contextlib.suppress(OSError):
                path.rmdir()  # only when empty
        raise


def _too_many(folder: BatchFolder, others: list[Identity], runners: int) -> ConflictError:
    who = ", ".join(f"process {one.pid} on {one.host}" for one in others)
    return ConflictError(
        f"{folder.output} is being worked on by {who}.",
        f"To join as one more, allow it: --jobs {max(len(others), runners) + 1}. `corral batch cancel` stops all.",
        pid=others[0].pid,
        host=others[0].host,
    )


class Together:
    """One of several runners on a batch, each called like this; whoever finds all rows done makes the output."""

    def __init__(self, folder: BatchFolder, sharing: Sharing, listener: Listener) -> None:
        self._folder, self._sharing, self._listener = folder, sharing, listener

    def begin(
        self, order: BatchOrder, where: dict[str, Any], row_order: str, facts: dict[str, Any]
    ) -> tuple[Prepared, contextlib.AbstractContextManager[Share]]:
        """Check the input and become a member, under the lock."""
        folder, listener = self._folder, self._listener
        with brief_lock(folder) as lock, open_door(folder, self._sharing) as others:
            folder.sweep()
            made = prepare(order, folder, where, busy=bool(others), **facts)
            division = load_division(folder)
            tally = _take_stock(made, lock, division, bool(others), order.retry_failed, listener)
            if division is None or not others:
                size = block_size(len(made.table), self._sharing.runners)
                division = Division(size, row_order, made.record.digest)
                write_atomic(folder.division, dump_json(division))
            member = Participant(folder)
            if self._sharing.part_name_file is not None:
                write_atomic(self._sharing.part_name_file, member.part.name)
            member.join()
        if others:
            listener.note("joined", f"{len(others)} more at work")
        return made, _BlockShare(made, member, division, tally)

    def finish(self, made: Prepared, summary: RunSummary) -> RunSummary | None:
        """Put the parts together when all is done; None when rows turn out to be missing and must be done again."""
        return gather(made, summary) if summary.done else summary


def _take_stock(
    made: Prepared, lock: BatchLock, division: Division | None, busy: bool, retry_failed: bool, listener: Listener
) -> Tally:
    """What is done; alone, this puts in order what earlier runners left."""
    folder = made.folder
    ledger = Ledger(folder, made.table, lock.check)
    try:
        tally = ledger.open()
        if not busy:
            stale = division is None or division.digest != made.record.digest
            if retry_failed or stale or len(all_parts(folder)) > MANY_PARTS:
                tally = _collect(ledger, folder, retry_failed)
            shutil.rmtree(folder.blocks, ignore_errors=True)
        elif retry_failed:
            listener.note("later", "others are at work; failed rows can be tried again when they are done")
        for text in ledger.repaired:
            listener.note("repaired", text)
        tally.failed += commit_first(made.bad_rows(), tally, ledger)
    finally:
        ledger.close()
        _drop_empty(folder)
    return tally


def _collect(ledger: Ledger, folder: BatchFolder, retry_failed: bool) -> Tally:
    """Take all parts into the job's own ledger; failed rows may be forgotten."""
    tally = ledger.collect(all_parts(folder))
    shutil.rmtree(folder.parts, ignore_errors=True)
    if retry_failed:
        ledger.close()
        tally = ledger.open(forget_failed=True)
    return tally


def forget_failed(made: Prepared, lock: BatchLock) -> None:
    """Let failed rows be tried again; the job's lock is held and nobody works on it."""
    ledger = Ledger(made.folder, made.table, lock.check)
    try:
        ledger.open()
        _collect(ledger, made.folder, retry_failed=True)
    finally:
        ledger.close()
        _drop_empty(made.folder)


def _drop_empty(folder: BatchFolder) -> None:
    """No empty output while the results are still in parts."""
    for path in (folder.results, folder.errors):
        with contextlib.suppress(OSError):
            if not path.stat().st_size:
                path.unlink()


class _BlockShare:
    """Blocks of rows, claimed one after the other; results go into a part of one's own."""

    def __init__(self, made: Prepared, member: Participant, division: Division, tally: Tally) -> None:
        self._made, self._member, self._division = made, member, division
        self.folder: BatchFolder = member.part
        self.table, self.done = made.table, tally.done
        self.ledger = Ledger(member.part, made.table)
        self.alive = member.part.holder
        self._others = Others(made.folder, made.table, member.part.name, tally.done)
        self.counts = Counts(rows=len(made.table), before=tally.fine + tally.failed)
        self.look: Callable[[], None] = member.touch

    def __enter__(self) -> _BlockShare:
        self.ledger.open()
        self._count(self._others.refresh())
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.close()
        self._member.leave()

    def feed(self) -> Feed:
        order = self._made.in_order(self._division.row_order)
        rows = range(len(self.table)) if order is None else order
        feed = BlockFeed(self._made.folder, self._member, self._division, rows, self.done, self._others, self._count)
        self.look = feed.look
        return feed

    def is_over(self) -> bool:
        return self._member.lost

    def _count(self, rows: int) -> None:
        """Others were seen to have done so many."""
        self.counts.before += rows


def gather(made: Prepared, summary: RunSummary) -> RunSummary | None:
    """Put the parts together, unless somebody has; None when rows turn out to be missing and must be done again."""
    while True:
        try:
            with brief_lock(made.folder, lambda: _is_still(made)) as lock:
                complete = _gather(made, lock) if _is_still(made) else True
            break
        except ConflictError:
            if not _is_still(made):  # it was done, and is something else by now
                complete = True
                break
    before = made.record.rows - summary.fine - summary.failed
    return replace(summary, state=BatchState.DONE, left=0, before=before) if complete else None


def _gather(made: Prepared, lock: BatchLock) -> bool:
    """Whether every row has its result; the lock is held."""
    folder, table = made.folder, made.table
    first = folder.shared.is_dir()
    ledger = Ledger(folder, table, lock.check)
    try:
        tally = ledger.open()
        if parts := all_parts(folder):
            tally = ledger.collect(parts)
    finally:
        ledger.close()
    complete = tally.fine + tally.failed == len(table)
    for path in (folder.parts, folder.blocks):
        shutil.rmtree(path, ignore_errors=True)
    if complete and first:
        made.export()
    shutil.rmtree(folder.shared, ignore_errors=True)  # last: it shows the others whose lock they are waiting for
    sync_dir(folder.path)
    return complete


def _is_still(made: Prepared) -> bool:
    """Whether the job is what it was when we joined."""
    folder = made.folder
    return folder.job.is_file() and _is_same(load_json(BatchRecord, folder.job), made.record)


def _is_same(one: BatchRecord, other: BatchRecord) -> bool:
    """Whether two records are of the same job, wherever it ran."""
    where = {name: getattr(other, name) for name in ("deployments", "urls", "key_file", "offline", "fingerprint")}
    return replace(one, **where) == other
