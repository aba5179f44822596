"""Several runners on one batch: they join, work through blocks of rows, and one of them puts the parts together.

    join      under the batch's lock, briefly: check the input, refuse one runner too many, cut the rows into blocks
              when no other runner is there, become a participant
    work      without the lock: claim blocks, do their rows, write the results into a part of one's own (`parts`)
    gather    when every row is done somewhere, the runner that gets the lock first copies all parts into the batch's
              own ledger and results, in one step; then the batch is as if one runner had done it

A runner that is killed leaves a part and claims; others take the claims over, and the part counts. A gather that is
cut off is done again. Results that are lost in damaged files are noticed by the gather, and their rows done again.
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
from corral.use.batch.core.run import Assignment, BatchState, Listener, RunSummary, commit_first
from corral.use.batch.core.runner import Counts, Feed
from corral.use.batch.parts import (
    BlockFeed,
    Division,
    Others,
    Participant,
    all_parts,
    block_size,
    load_division,
    remove_claims,
    runners_of,
)
from corral.use.batch.spec import BatchRecord, BatchServers, BatchSpec, PreparedBatch, prepare

MANY_PARTS = 64  # after so many attempts they are gathered before going on
ALONE_S = 5.0  # a lock that is held longer than this, with no sign of sharing, is that of a lone runner


@dataclass(frozen=True)
class Sharing:
    """How several runners share one batch."""

    runners: int = 1  # that may work on it at once
    counted: bool = True  # refuse one too many; the jobs of a scheduler were counted when they were queued
    part_name_file: Path | None = None  # where a runner that may be requeued keeps the name of its part

    @property
    def wanted(self) -> bool:
        return self.runners > 1 or not self.counted


@contextlib.contextmanager
def brief_lock(folder: BatchFolder, patient: Callable[[], bool] | None = None) -> Iterator[BatchLock]:
    """The batch's lock, which runners of a shared batch hold only briefly, and a sole runner all the time."""
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
            # another runner was refused and removed the folder just now


@contextlib.contextmanager
def joining(folder: BatchFolder, sharing: Sharing) -> Iterator[list[Identity]]:
    """Mark the batch as shared and refuse one runner too many; gives the runners that work on it."""
    folder.shared.mkdir(mode=0o700, exist_ok=True)
    if (
        sharing.part_name_file is not None and sharing.part_name_file.is_file()
    ):  # its scheduler has ended that attempt before this one
        remove_claims(PartFolder(folder.output, folder.live, sharing.part_name_file.read_text().strip()))
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


class SharedRunner:
    """One of several runners of a batch; the one that finds all rows done makes the output."""

    def __init__(self, folder: BatchFolder, sharing: Sharing, listener: Listener) -> None:
        self._folder, self._sharing, self._listener = folder, sharing, listener

    def begin(
        self, spec: BatchSpec, servers: BatchServers, row_order: str, facts: dict[str, Any]
    ) -> tuple[PreparedBatch, contextlib.AbstractContextManager[Assignment]]:
        """Check the input and join, under the lock."""
        folder, listener = self._folder, self._listener
        with brief_lock(folder) as lock, joining(folder, self._sharing) as others:
            folder.sweep()
            batch = prepare(spec, folder, servers, busy=bool(others), **facts)
            division = load_division(folder)
            tally = _open_ledger(batch, lock, division, bool(others), spec.retry_failed, listener)
            if division is None or not others:
                size = block_size(len(batch.table), self._sharing.runners)
                division = Division(size, row_order, batch.record.digest)
                write_atomic(folder.division, dump_json(division))
            member = Participant(folder)
            if self._sharing.part_name_file is not None:
                write_atomic(self._sharing.part_name_file, member.part.name)
            member.join()
        if others:
            listener.note("joined", f"{len(others)} more at work")
        return batch, _BlockAssignment(batch, member, division, tally)

    def finish(self, batch: PreparedBatch, summary: RunSummary) -> RunSummary | None:
        """Put the parts together when all is done; None when rows are missing after all and must be done again."""
        return gather(batch, summary) if summary.done else summary


def _open_ledger(
    batch: PreparedBatch,
    lock: BatchLock,
    division: Division | None,
    busy: bool,
    retry_failed: bool,
    listener: Listener,
) -> Tally:
    """Which rows are done; without other runners, the parts that earlier ones left are collected."""
    folder = batch.folder
    ledger = Ledger(folder, batch.table, lock.check)
    try:
        tally = ledger.open()
        if not busy:
            stale = division is None or division.digest != batch.record.digest
            if retry_failed or stale or len(all_parts(folder)) > MANY_PARTS:
                tally = _collect(ledger, folder, retry_failed)
            shutil.rmtree(folder.blocks, ignore_errors=True)
        elif retry_failed:
            listener.note("later", "other runners are at work; failed rows can be tried again when they are done")
        for text in ledger.repaired:
            listener.note("repaired", text)
        tally.failed += commit_first(batch.bad_rows(), tally, ledger)
    finally:
        ledger.close()
        _drop_empty(folder)
    return tally


def _collect(ledger: Ledger, folder: BatchFolder, retry_failed: bool) -> Tally:
    """Collect all parts in the batch's own ledger; failed rows may be forgotten."""
    tally = ledger.collect(all_parts(folder))
    shutil.rmtree(folder.parts, ignore_errors=True)
    if retry_failed:
        ledger.close()
        tally = ledger.open(forget_failed=True)
    return tally


def forget_failed(batch: PreparedBatch, lock: BatchLock) -> None:
    """Let failed rows be tried again; the lock is held and no one works on the batch."""
    ledger = Ledger(batch.folder, batch.table, lock.check)
    try:
        ledger.open()
        _collect(ledger, batch.folder, retry_failed=True)
    finally:
        ledger.close()
        _drop_empty(batch.folder)


def _drop_empty(folder: BatchFolder) -> None:
    """Remove an empty output while the results are still in parts."""
    for path in (folder.results, folder.errors):
        with contextlib.suppress(OSError):
            if not path.stat().st_size:
                path.unlink()


class _BlockAssignment:
    """Blocks of rows, claimed one after the other; the results go into the runner's own part."""

    def __init__(self, batch: PreparedBatch, member: Participant, division: Division, tally: Tally) -> None:
        self._batch, self._member, self._division = batch, member, division
        self.folder: BatchFolder = member.part
        self.table, self.done = batch.table, tally.done
        self.ledger = Ledger(member.part, batch.table)
        self.alive = member.part.holder
        self._others = Others(batch.folder, batch.table, member.part.name, tally.done)
        self.counts = Counts(rows=len(batch.table), before=tally.fine + tally.failed)
        self.refresh: Callable[[], None] = member.touch

    def __enter__(self) -> _BlockAssignment:
        self.ledger.open()
        self._count(self._others.refresh())
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.close()
        self._member.leave()

    def feed(self) -> Feed:
        order = self._batch.in_order(self._division.row_order)
        rows = range(len(self.table)) if order is None else order
        feed = BlockFeed(self._batch.folder, self._member, self._division, rows, self.done, self._others, self._count)
        self.refresh = feed.refresh
        return feed

    def is_over(self) -> bool:
        return self._member.lost

    def _count(self, rows: int) -> None:
        """Add rows that others have done."""
        self.counts.before += rows


def gather(batch: PreparedBatch, summary: RunSummary) -> RunSummary | None:
    """Put the parts together, unless another runner has; None when rows are missing and must be done again."""
    while True:
        try:
            with brief_lock(batch.folder, lambda: _is_still(batch)) as lock:
                complete = _gather(batch, lock) if _is_still(batch) else True
            break
        except ConflictError:
            if not _is_still(batch):  # it was finished, and the output belongs to another batch now
                complete = True
                break
    before = batch.record.rows - summary.fine - summary.failed
    return replace(summary, state=BatchState.DONE, left=0, before=before) if complete else None


def _gather(batch: PreparedBatch, lock: BatchLock) -> bool:
    """Whether every row has its result; the lock is held."""
    folder, table = batch.folder, batch.table
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
        batch.export()
    shutil.rmtree(folder.shared, ignore_errors=True)  # last: while it exists, other runners wait for the lock
    sync_dir(folder.path)
    return complete


def _is_still(batch: PreparedBatch) -> bool:
    """Whether the batch is the one that this runner joined."""
    folder = batch.folder
    return folder.spec.is_file() and _is_same(load_json(BatchRecord, folder.spec), batch.record)


def _is_same(one: BatchRecord, other: BatchRecord) -> bool:
    """Whether two records are of the same batch, wherever it ran."""
    places = ("deployments", "urls", "key_file", "start_model", "in_process", "fingerprint")
    return replace(one, **{name: getattr(other, name) for name in places}) == other
