"""One run over the rows that a runner may do: drive the loop, obey signals and cancel files, summarise how it ended.

An `Assignment` says which rows those are and where their results go: all of them for the runner that holds the lock
(`whole_assignment`), blocks of them for one of several (`corral.use.batch.shared`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from corral.base.lock import heartbeat
from corral.client.client import run as run_loop
from corral.client.endpoint import ModelServer
from corral.use.batch.core.folder import BatchFolder, BatchLock
from corral.use.batch.core.lanes import Lane
from corral.use.batch.core.ledger import Ledger, LedgerEntry, Tally, WriteBuffer
from corral.use.batch.core.runner import Counts, Feed, RowsInOrder, Runner, RunnerSettings, Work
from corral.use.batch.core.table import RowReader, Table

_COUNTED = ("rows", "before", "fine", "failed", "left", "prompt_tokens", "cached_tokens", "output_tokens", "retries",
            "losses", "stolen", "groups", "example", "peak_in_flight")  # fmt: skip


class BatchState(StrEnum):
    """The state of a batch; a run of it ends as done, stopped (by a signal) or cancelled."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # its runner was killed


@dataclass(frozen=True)
class RunSummary:
    """What one run of a batch did."""

    state: BatchState
    rows: int
    before: int
    fine: int
    failed: int
    left: int
    wall_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    retries: int
    losses: int
    stolen: int
    groups: int
    errors: dict[str, int] = field(default_factory=dict)
    example: str = ""
    repaired: tuple[str, ...] = ()
    peak_in_flight: int = 0
    stopped_by: str = ""  # the signal

    @classmethod
    def of(cls, assignment: Assignment, state: BatchState, stopped_by: str = "") -> RunSummary:
        counts = assignment.counts
        counted: dict[str, Any] = {name: getattr(counts, name) for name in _COUNTED}
        return cls(
            state=state,
            wall_s=time.monotonic() - counts.began,
            errors=dict(counts.errors),
            repaired=tuple(assignment.ledger.repaired),
            stopped_by=stopped_by,
            **counted,
        )

    @property
    def done(self) -> bool:
        return self.state is BatchState.DONE

    @property
    def rows_per_s(self) -> float:
        return (self.fine + self.failed) / self.wall_s if self.wall_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s if self.wall_s else 0.0


class Listener(Protocol):
    """Receives the events and the progress of a run."""

    def note(self, kind: str, text: str) -> None:
        """Something happened: an endpoint was lost or came back, a file was repaired."""

    def tick(self, counts: Counts, runner: Runner) -> None:
        """Called about ten times a second."""


class Quiet:
    """A listener that shows nothing."""

    def note(self, kind: str, text: str) -> None:
        return

    def tick(self, counts: Counts, runner: Runner) -> None:
        return


class Assignment(Protocol):
    """The rows that one runner may do, and where it writes what it did."""

    folder: BatchFolder
    table: Table
    ledger: Ledger  # open
    done: bytearray  # 1 for every row that has a result, here or elsewhere
    counts: Counts
    alive: Path  # touched to show that the runner lives

    def feed(self) -> Feed:
        """Where the next row comes from; may read all rows first."""

    def refresh(self) -> None:
        """Called every second: show that the runner lives, and learn what others did."""

    def is_over(self) -> bool:
        """Whether others have finished all of it."""


class _WholeAssignment:
    """All rows of a batch."""

    def __init__(
        self, folder: BatchFolder, ledger: Ledger, table: Table, tally: Tally, lock: BatchLock, row_order: RowOrder
    ) -> None:
        self.folder, self.ledger, self.table, self.done = folder, ledger, table, tally.done
        self.counts = Counts(rows=len(table), before=tally.fine + tally.failed)
        self.alive, self.refresh, self._row_order = lock.path, lock.touch, row_order

    def feed(self) -> Feed:
        order = self._row_order()
        return RowsInOrder(range(len(self.table)) if order is None else order, self.done)

    def is_over(self) -> bool:
        return False


RowOrder = Callable[
    [], Sequence[int] | None
]  # the rows in the order in which they are sent; None: in that of the input


@contextlib.contextmanager
def whole_assignment(
    folder: BatchFolder,
    table: Table,
    lock: BatchLock,
    listener: Listener,
    *,
    row_order: RowOrder = lambda: None,
    first: Iterable[LedgerEntry] = (),
    forget_failed: bool = False,
) -> Iterator[Assignment]:
    """All rows, for the holder of the lock; `first` are results that need no request (rows found bad)."""
    ledger = Ledger(folder, table, lock.check)
    try:
        tally = ledger.open(forget_failed)
        for text in ledger.repaired:
            listener.note("repaired", text)
        assignment = _WholeAssignment(folder, ledger, table, tally, lock, row_order)
        if bad := commit_first(first, tally, ledger):
            assignment.counts.failed = assignment.counts.errors["InvalidRow"] = bad
        yield assignment
    finally:
        ledger.close()


def commit_first(first: Iterable[LedgerEntry], tally: Tally, ledger: Ledger) -> int:
    """Write the results that need no request, a group at a time; their number."""
    count = 0
    fresh = (entry for entry in first if not tally.done[entry.row])
    while group := list(itertools.islice(fresh, 10_000)):
        ledger.commit(group)
        for entry in group:
            tally.done[entry.row] = 1
        count += len(group)
    return count


def run_assignment(
    find: Callable[[], Sequence[ModelServer]],
    assignment: Assignment,
    work: Work,
    settings: RunnerSettings,
    listener: Listener,
    signals: bool,
) -> RunSummary:
    """Do the rows of an assignment on servers, which are found, or started, only when there is something to send."""
    loop = _Loop(assignment, listener)
    if not assignment.counts.left:
        return loop.summary()
    with heartbeat(assignment.alive):
        feed, servers = assignment.feed(), find()
    assignment.counts.began = time.monotonic()
    with contextlib.closing(RowReader(assignment.table)) as reader:
        return run_loop(loop.run(work, reader, feed, servers, settings, signals))


class _Loop:
    """One run inside the event loop."""

    def __init__(self, assignment: Assignment, listener: Listener) -> None:
        self._assignment, self._listener = assignment, listener
        self._refreshed = 0.0
        self._cancelled = False
        self._stopped_by = ""

    async def run(
        self,
        work: Work,
        reader: RowReader,
        feed: Feed,
        servers: Sequence[ModelServer],
        settings: RunnerSettings,
        signals: bool,
    ) -> RunSummary:
        rows = self._assignment
        buffer = WriteBuffer(rows.ledger, self._on_commit)
        runner = Runner(work, reader, feed, rows.done, servers, buffer, rows.counts, settings, self._listener.note)
        restore = self._on_signals(runner) if signals else None
        try:
            self._check_cancel(runner)  # asked for while the input was checked: then nothing is sent
            await runner.run(self._tick)
        finally:
            if restore:
                restore()
        return self.summary(runner.lanes)

    def summary(self, lanes: Sequence[Lane] = ()) -> RunSummary:
        assignment = self._assignment
        assignment.counts.losses = sum(lane.losses for lane in lanes)
        done = not assignment.counts.left or assignment.is_over()
        unfinished = BatchState.CANCELLED if self._cancelled else BatchState.STOPPED
        return RunSummary.of(assignment, BatchState.DONE if done else unfinished, self._stopped_by)

    def _on_commit(self, count: int) -> None:
        self._assignment.counts.committed += count
        self._assignment.counts.groups += 1

    def _tick(self, runner: Runner) -> None:
        counts, now = self._assignment.counts, time.monotonic()
        counts.peak_in_flight = max(counts.peak_in_flight, counts.in_flight)
        if now - self._refreshed > 1.0:
            self._refreshed = now
            self._assignment.refresh()
            self._check_cancel(runner)
            if self._assignment.is_over():
                runner.stop()
                runner.stop()  # at once
        self._listener.tick(counts, runner)

    def _check_cancel(self, runner: Runner) -> None:
        folder = self._assignment.folder
        if folder.cancel.exists() and not runner.stopped:
            at_once = folder.cancels_at_once
            self._cancelled = True
            under_way = "are given up" if at_once else "may finish"
            self._listener.note("cancelled", f"asked to stop; rows under way {under_way}")
            runner.stop()
            if at_once:
                runner.stop()

    def _on_signals(self, runner: Runner) -> Callable[[], None]:
        """Stop on Ctrl-C, SIGTERM and SIGUSR1 (a walltime warning); a second signal gives up the rows under way."""
        loop = asyncio.get_running_loop()

        def stop(name: str) -> None:
            finishing = "finishing what is under way; press again to leave at once"
            text = "giving up what is under way" if runner.stopped else finishing
            self._listener.note("stopping", f"{name}: {text}")
            self._stopped_by = self._stopped_by or name
            runner.stop()

        names = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        before = [signal.getsignal(name) for name in names]
        for name in names:
            loop.add_signal_handler(name, stop, name.name)

        def restore() -> None:
            for name, handler in zip(names, before, strict=True):
                loop.remove_signal_handler(name)
                signal.signal(name, handler)

        return restore
