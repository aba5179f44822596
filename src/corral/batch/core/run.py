"""Run a resumable job: open its ledger, drive the runner, tell how it ended."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from corral.batch.core.folder import JobFolder
from corral.batch.core.ledger import Entry, Ledger, Tally
from corral.batch.core.lock import JobLock
from corral.batch.core.outbox import Outbox
from corral.batch.core.runner import Counts, Feed, InOrder, Runner, Settings, Work
from corral.batch.core.table import RowReader, Table
from corral.client.client import run as run_loop
from corral.client.endpoint import ModelServer
from corral.lock import beating

__all__ = ["Job", "Listener", "Quiet", "Summary", "commit_first", "run_job"]


@dataclass(frozen=True)
class Summary:
    """How one run of a job went; `state` is done, stopped (by a signal) or cancelled."""

    state: str
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


def run_job(
    folder: JobFolder,
    table: Table,
    work: Work,
    servers: Sequence[ModelServer],
    settings: Settings | None = None,
    *,
    lock: JobLock,
    listener: Listener | None = None,
    order: Sequence[int] | None = None,
    first: Iterable[Entry] = (),
    signals: bool = True,
) -> Summary:
    """Give every row of the table that has none yet its one result line; returns when done, stopped or cancelled.

    The caller holds the job's lock and has compared what is asked with what was asked before. `first` are results
    that need no request (rows found bad). Errors that end the job are raised after everything finished was committed.
    """
    settings, listener = settings or Settings(), listener or Quiet()
    ledger = Ledger(folder, table, lock.check)
    try:
        tally = ledger.open()
        for text in ledger.repaired:
            listener.note("repaired", text)
        counts = Counts(rows=len(table), before=tally.fine + tally.failed)
        counts.failed += commit_first(first, tally, ledger)
        counts.errors.update({"InvalidRow": counts.failed} if counts.failed else {})
        job = Job(folder, ledger, listener, counts, lock.touch)
        if not counts.left:
            return job.summary(None, 0)
        with beating(lock.path):
            found = list(servers)  # may look for, or start, a server
            counts.began = time.monotonic()
        feed = InOrder(range(len(table)) if order is None else order, tally.done)
        reader = RowReader(table)
        try:
            return run_loop(job.run(work, reader, feed, tally.done, found, settings, signals))
        finally:
            reader.close()
    finally:
        ledger.close()


def commit_first(first: Iterable[Entry], tally: Tally, ledger: Ledger) -> int:
    """Write the results that need no request, a group at a time; their number."""
    count = 0
    fresh = (entry for entry in first if not tally.done[entry.row])
    while group := list(itertools.islice(fresh, 10_000)):
        ledger.commit(group)
        for entry in group:
            tally.done[entry.row] = 1
        count += len(group)
    return count


class Job:
    """One run of a job inside the event loop; `look` is called every second, and `is_over` may end it."""

    def __init__(
        self,
        folder: JobFolder,
        ledger: Ledger,
        listener: Listener,
        counts: Counts,
        look: Callable[[], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder, self._ledger, self._listener, self._look = folder, ledger, listener, look
        self._counts, self._is_over = counts, is_over
        self._looked = 0.0
        self._peak = 0
        self._cancelled = False
        self._stopped_by = ""

    async def run(
        self,
        work: Work,
        reader: RowReader,
        feed: Feed,
        done: bytearray,
        servers: Sequence[ModelServer],
        settings: Settings,
        signals: bool,
    ) -> Summary:
        outbox = Outbox(self._ledger, self._on_commit)
        runner = Runner(work, reader, feed, done, servers, outbox, self._counts, settings, self._listener.note)
        restore = self._on_signals(runner) if signals else None
        try:
            self._heed_cancel(runner)  # it may have come while the input was checked: then nothing is sent
            await runner.run(self._tick)
        finally:
            if restore:
                restore()
        return self.summary(runner, outbox.groups)

    def summary(self, runner: Runner | None, groups: int) -> Summary:
        c = self._counts
        state = "done" if not c.left or self._is_over() else "cancelled" if self._cancelled else "stopped"
        return Summary(
            state=state,
            rows=c.rows,
            before=c.before,
            fine=c.fine,
            failed=c.failed,
            left=c.left,
            wall_s=time.monotonic() - c.began,
            prompt_tokens=c.prompt_tokens,
            cached_tokens=c.cached_tokens,
            output_tokens=c.output_tokens,
            retries=c.retries,
            losses=sum(lane.losses for lane in runner.lanes) if runner else 0,
            stolen=c.stolen,
            groups=groups,
            errors=dict(c.errors),
            example=c.example,
            repaired=tuple(self._ledger.repaired),
            peak_in_flight=self._peak,
            stopped_by=self._stopped_by,
        )

    def _on_commit(self, count: int) -> None:
        self._counts.committed += count

    def _tick(self, runner: Runner) -> None:
        self._peak = max(self._peak, self._counts.in_flight)
        now = time.monotonic()
        if now - self._looked > 1.0:
            self._looked = now
            self._look()
            self._heed_cancel(runner)
            if self._is_over():
                runner.stop()
                runner.stop()  # at once
        self._listener.tick(self._counts, runner)

    def _heed_cancel(self, runner: Runner) -> None:
        if self._folder.cancel.exists() and not runner.stopped:
            self._cancelled = True
            self._listener.note("cancelled", "asked to stop; rows under way may finish")
            runner.stop()

    def _on_signals(self, runner: Runner) -> Callable[[], None]:
        """Ctrl-C, SIGTERM and SIGUSR1 (a walltime warning) stop gently; a second one gives up what is under way."""
        loop = asyncio.get_running_loop()

        def stop(name: str) -> None:
            again = runner.stopped
            text = (
                "giving up what is under way" if again else "finishing what is under way; once more to leave at once"
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
