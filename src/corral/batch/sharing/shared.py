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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corral.batch.core.folder import JobFolder, PartFolder, sync_dir
from corral.batch.core.ledger import Entry, Ledger, Tally
from corral.batch.core.lock import JobLock
from corral.batch.core.run import Job, Listener, Summary, commit_first
from corral.batch.core.runner import Counts, Settings, Work
from corral.batch.core.table import RowReader
from corral.batch.job import JobRecord, Prepared
from corral.batch.output import export
from corral.batch.sharing.blocks import BlockFeed, Division, block_size, load_division
from corral.batch.sharing.parts import Member, Others, all_parts, bury, runners_of
from corral.client.client import run as run_loop
from corral.client.endpoint import ModelServer
from corral.errors import ConflictError
from corral.files import write_atomic
from corral.lock import beating
from corral.processes import Identity
from corral.record import dump_json, load_json

__all__ = ["Joined", "Sharing", "brief_lock", "forget_failed", "gather", "join", "open_door", "work_through"]

MANY_PARTS = 64  # after so many lives they are gathered before going on
ALONE_S = 5.0  # a lock that is held longer than this, with no sign of sharing, is that of a lone runner


@dataclass(frozen=True)
class Sharing:
    """How a runner shares its batch with others."""

    runners: int = 1  # that may work on it at once
    counted: bool = True  # whether one too many is refused; a scheduler's jobs were counted when they were queued
    life: Path | None = None  # where a runner that may be put back into a queue keeps the name of its part

    @property
    def wanted(self) -> bool:
        return self.runners > 1 or not self.counted


@contextlib.contextmanager
def brief_lock(folder: JobFolder, patient: Callable[[], bool] | None = None) -> Iterator[JobLock]:
    """The job's lock, which runners of a shared batch hold only for moments; a lone runner holds it all the time."""
    patient_until = time.monotonic() + ALONE_S

    def shared() -> bool:
        return folder.shared.is_dir() or time.monotonic() < patient_until

    while True:
        folder.create()
        try:
            with JobLock(folder.lock, str(folder.output), patient or shared) as lock, beating(folder.lock):
                yield lock
            return
        except FileNotFoundError:
            if folder.path.is_dir():
                raise
            # the first one was refused and took the folder away, just when we reached for the lock


@contextlib.contextmanager
def open_door(folder: JobFolder, sharing: Sharing) -> Iterator[list[Identity]]:
    """Show that the batch is shared, refuse one too many; gives those who are there. Closed again when refused."""
    folder.shared.mkdir(mode=0o700, exist_ok=True)
    if sharing.life is not None and sharing.life.is_file():  # its scheduler has ended that life before this one
        bury(PartFolder(folder.output, folder.live, sharing.life.read_text().strip()))
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


def _too_many(folder: JobFolder, others: list[Identity], runners: int) -> ConflictError:
    who = ", ".join(f"process {one.pid} on {one.host}" for one in others)
    return ConflictError(
        f"{folder.output} is being worked on by {who}.",
        f"To join as one more, allow it: --jobs {max(len(others), runners) + 1}. `corral batch cancel` stops all.",
        pid=others[0].pid,
        host=others[0].host,
    )


class Joined:
    """A runner that may begin: what is done, how the rows are divided, and its own part, open."""

    def __init__(self, member: Member, division: Division, tally: Tally, ledger: Ledger) -> None:
        self.member, self.division, self.tally, self.ledger = member, division, tally, ledger


def join(
    made: Prepared,
    lock: JobLock,
    others: Sequence[Identity],
    sharing: Sharing,
    row_order: str,
    first: Iterable[Entry],
    retry_failed: bool,
    listener: Listener,
) -> Joined:
    """Become a member; the job's lock is held. Alone, this puts in order what earlier runners left."""
    folder, table = made.folder, made.table
    ledger = Ledger(folder, table, lock.check)
    division = load_division(folder)
    try:
        tally = ledger.open()
        if not others:
            stale = division is None or division.digest != made.record.digest
            if retry_failed or stale or len(all_parts(folder)) > MANY_PARTS:
                tally = ledger.collect(all_parts(folder))
                shutil.rmtree(folder.parts, ignore_errors=True)
            if retry_failed:
                ledger.close()
                tally = ledger.open(forget_failed=True)
            shutil.rmtree(folder.blocks, ignore_errors=True)
        elif retry_failed:
            listener.note("later", "others are at work; failed rows can be tried again when they are done")
        for text in ledger.repaired:
            listener.note("repaired", text)
        tally.failed += commit_first(first, tally, ledger)
    finally:
        ledger.close()
        _drop_empty(folder)
    if division is None or not others:
        division = Division(block_size(len(table), sharing.runners), row_order, made.record.digest)
        write_atomic(folder.division, dump_json(division))
    member = Member(folder)
    if sharing.life is not None:
        write_atomic(sharing.life, member.part.name)
    member.join()
    own = Ledger(member.part, table)
    own.open()
    return Joined(member, division, tally, own)


def forget_failed(made: Prepared, lock: JobLock) -> None:
    """Let failed rows be tried again; the job's lock is held and nobody works on it."""
    folder = made.folder
    ledger = Ledger(folder, made.table, lock.check)
    try:
        ledger.open()
        ledger.collect(all_parts(folder))
        shutil.rmtree(folder.parts, ignore_errors=True)
        ledger.close()
        ledger.open(forget_failed=True)
    finally:
        ledger.close()
        _drop_empty(folder)


def _drop_empty(folder: JobFolder) -> None:
    """No empty output while the results are still in parts."""
    for path in (folder.results, folder.errors):
        with contextlib.suppress(OSError):
            if not path.stat().st_size:
                path.unlink()


def work_through(
    made: Prepared,
    joined: Joined,
    work: Work,
    servers: Sequence[ModelServer],
    settings: Settings,
    listener: Listener,
    order: Callable[[str], Sequence[int] | None],
    signals: bool,
) -> Summary:
    """Do rows until every one is done by somebody, or this runner is stopped; then it is no member any more."""
    folder, table, member = made.folder, made.table, joined.member
    ledger, done = joined.ledger, joined.tally.done
    try:
        counts = Counts(rows=len(table), before=joined.tally.fine + joined.tally.failed)

        def elsewhere(rows: int) -> None:
            counts.before += rows

        others = Others(folder, table, member.part.name, done)
        elsewhere(others.refresh())
        with beating(member.part.holder):
            rows = order(joined.division.row_order)
            found = list(servers) if counts.left else []
        feed = BlockFeed(
            folder, member, joined.division, range(len(table)) if rows is None else rows, done, others, elsewhere
        )
        job = Job(member.part, ledger, listener, counts, feed.look, lambda: member.lost)
        if not counts.left:
            return job.summary(None, 0)
        reader = RowReader(table)
        try:
            return run_loop(job.run(work, reader, feed, done, found, settings, signals))
        finally:
            reader.close()
    finally:
        ledger.close()
        member.leave()


def gather(made: Prepared, summary: Summary) -> Summary | None:
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
    return replace(summary, state="done", left=0, before=before) if complete else None


def _gather(made: Prepared, lock: JobLock) -> bool:
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
    if complete and first and not folder.live:
        export(folder, table, made.record.ordered)
    shutil.rmtree(folder.shared, ignore_errors=True)  # last: it shows the others whose lock they are waiting for
    sync_dir(folder.path)
    return complete


def _is_still(made: Prepared) -> bool:
    """Whether the job is what it was when we joined."""
    folder = made.folder
    return folder.job.is_file() and _is_same(load_json(JobRecord, folder.job), made.record)


def _is_same(one: JobRecord, other: JobRecord) -> bool:
    """Whether two records are of the same job, wherever it ran."""
    where = {name: getattr(other, name) for name in ("deployments", "urls", "key_file", "offline", "fingerprint")}
    return replace(one, **where) == other
