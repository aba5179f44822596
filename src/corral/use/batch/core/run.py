"""Run the rows that one runner may do: drive the loop, heed signals and cancel files, tell how it ended.

A `Share` says which rows those are and where their results go: all of them for the runner that holds the lock
(`whole_share`), blocks of them for one of several (`corral.use.batch.sharing`).
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
from corral.use.batch.core.ledger import Ledger, LedgerEntry, Tally
from corral.use.batch.core.runner import Counts, Feed, InOrder, Runner, RunnerSettings, Work
from corral.use.batch.core.table import RowReader, Table
from corral.use.batch.core.write_buffer import WriteBuffer

_COUNTED = ("rows", "before", "fine", "failed", "left", "prompt_tokens", "cached_tokens", "output_tokens", "retries",
            "losses", "stolen", "groups", "example", "peak_in_flight")  # fmt: skip


class BatchState(StrEnum):
    """Where a batch stands; a run of it ends as done, stopped (by a signal) or cancelled."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # its runner ended without a word


@dataclass(frozen=True)
class RunSummary:
    """How one run of a job went."""

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
    def of(cls, share: Share, state: BatchState, stopped_by: str = "") -> RunSummary:
        counts = share.counts
        counted: dict[str, Any] = {name: getattr(counts, name) for name in _COUNTED}
        return cls(
            state=state,
            wall_s=time.monotonic() - counts.began,
            errors=dict(counts.errors),
            repaired=tuple(share.ledger.repaired),
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
    """Somebody who is told how a job goes."""

    def note(self, kind: str, text: str) -> None:
        """Something happened: an endpoint was lost or came back, a file was repaired."""

    def tick(self, counts: Counts, runner: Runner) -> None:
        """Called about ten times a second."""


class Quiet:
    """A listener that says nothing."""

    def note(self, kind: str, text: str) -> None:
        return

    def tick(self, counts: Counts, runner: Runner) -> None:
        return


class Share(Protocol):
    """The rows that one runner may do, and where it writes what it did."""

    folder: BatchFolder
    table: Table
    ledger: Ledger  # open
    done: bytearray  # 1 for every row that has a result, here or elsewhere
    counts: Counts
    alive: Path  # touched to show that the runner lives

    def feed(self) -> Feed:
        """Where the next row comes from; may read all rows first."""

    def look(self) -> None:
        """Called every second: show that the runner lives, and learn what others did."""

    def is_over(self) -> bool:
        """Whether others have finished all of it."""


class _WholeShare:
    """All rows."""

    def __init__(
        self, folder: BatchFolder, ledger: Ledger, table: Table, tally: Tally, lock: BatchLock, order: RowOrder
    ) -> None:
        self.folder, self.ledger, self.table, self.done = folder, ledger, table, tally.done
        self.counts = Counts(rows=len(table), before=tally.fine + tally.failed)
        self.alive, self.look, self._order = lock.path, lock.touch, order

    def feed(self) -> Feed:
        order = self._order()
        return InOrder(range(len(self.table)) if order is None else order, self.done)

    def is_over(self) -> bool:
        return False


RowOrder = Callable[[], Sequence[int] | None]  # the rows in the order in which they are sent; None: as they are


@contextlib.contextmanager
def whole_share(
    folder: BatchFolder,
    table: Table,
    lock: BatchLock,
    listener: Listener,
    *,
    order: RowOrder = lambda: None,
    first: Iterable[LedgerEntry] = (),
    forget_failed: bool = False,
) -> Iterator[Share]:
    """The share of the only runner, who holds the lock; `first` are results that need no request (rows found bad)."""
    ledger = Ledger(folder, table, lock.check)
    try:
        tally = ledger.open(forget_failed)
        for text in ledger.repaired:
            listener.note("repaired", text)
        share = _WholeShare(folder, ledger, table, tally, lock, order)
        if bad := commit_first(first, tally, ledger):
            share.counts.failed = share.counts.errors["InvalidRow"] = bad
        yield share
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


def run_job(
    folder: BatchFolder,
    table: Table,
    work: Work,
    servers: Sequence[ModelServer],
    settings: RunnerSettings | None = None,
    *,
    lock: BatchLock,
    listener: Listener | None = None,
    signals: bool = True,
) -> RunSummary:
    """Give every row of the table that has none yet its one result line; returns when done, stopped or cancelled.

    The caller holds the job's lock and has compared what is asked with what was asked before. Errors that end the job
    are raised after everything finished was committed.
    """
    listener = listener or Quiet()
    with whole_share(folder, table, lock, listener) as share:
        return run_share(lambda: servers, share, work, settings or RunnerSettings(), listener, signals)


def run_share(
    find: Callable[[], Sequence[ModelServer]],
    share: Share,
    work: Work,
    settings: RunnerSettings,
    listener: Listener,
    signals: bool,
) -> RunSummary:
    """Do the rows of a share on servers, which are looked for, or started, only when there is something to send."""
    loop = _Loop(share, listener)
    if not share.counts.left:
        return loop.summary()
    with heartbeat(share.alive):
        feed, servers = share.feed(), find()
    share.counts.began = time.monotonic()
    reader = RowReader(share.table)
    try:
        return run_loop(loop.run(work, reader, feed, servers, settings, signals))
    finally:
        reader.close()


class _Loop:
    """One run inside the event loop."""

    def __init__(self, share: Share, listener: Listener) -> None:
        self._share, self._listener = share, listener
        self._looked = 0.0
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
        share = self._share
        outbox = WriteBuffer(share.ledger, self._on_commit)
        runner = Runner(work, reader, feed, share.done, servers, outbox, share.counts, settings, self._listener.note)
        restore = self._on_signals(runner) if signals else None
        try:
            self._heed_cancel(runner)  # it may have come while the input was checked: then nothing is sent
            await runner.run(self._tick)
        finally:
            if restore:
                restore()
        return self.summary(runner.lanes)

    def summary(self, lanes: Sequence[Lane] = ()) -> RunSummary:
        share = self._share
        share.counts.losses = sum(lane.losses for lane in lanes)
        done = not share.counts.left or share.is_over()
        unfinished = BatchState.CANCELLED if self._cancelled else BatchState.STOPPED
        return RunSummary.of(share, BatchState.DONE if done else unfinished, self._stopped_by)

    def _on_commit(self, count: int) -> None:
        self._share.counts.committed += count
        self._share.counts.groups += 1

    def _tick(self, runner: Runner) -> None:
        counts, now = self._share.counts, time.monotonic()
        counts.peak_in_flight = max(counts.peak_in_flight, counts.in_flight)
        if now - self._looked > 1.0:
            self._looked = now
            self._share.look()
            self._heed_cancel(runner)
            if self._share.is_over():
                runner.stop()
                runner.stop()  # at once
        self._listener.tick(counts, runner)

    def _heed_cancel(self, runner: Runner) -> None:
        if self._share.folder.cancel.exists() and not runner.stopped:
            self._cancelled = True
            self._listener.note("cancelled", "asked to stop; rows under way may finish")
            runner.stop()

    def _on_signals(self, runner: Runner) -> Callable[[], None]:
        """Ctrl-C, SIGTERM and SIGUSR1 (a walltime warning) stop gently; a second one gives up what is under way."""
        loop = asyncio.get_running_loop()

        def stop(name: str) -> None:
            again = runner.stopped
            text = (
                "giving up what is under way"
                if again
                else "finishing what is under way; press again to leave at once"
            )
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
