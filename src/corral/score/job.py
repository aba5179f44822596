"""Scoring a file: resumable, nothing lost, exactly one line for each row. The machinery is that of batch.

Results are committed through batch's ledger: a line counts once it is synced, and after any crash the same command
continues. Rows that cannot be scored go to the error file with their reason. While the server is away the job waits
for it, up to `patience_s`; Ctrl-C commits what is finished and leaves.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from corral.batch import FAILED, FINE, Entry, JobFolder, JobLock, Ledger, RowReader, Table
from corral.batch.core.outbox import Outbox
from corral.client.client import Client
from corral.client.client import run as run_loop
from corral.client.endpoint import Endpoint
from corral.client.errors import KeyRefusedError, RequestError, UnknownModelError, UnknownPathError
from corral.errors import ConflictError, CorralError, DataError, UsageError
from corral.files import write_atomic
from corral.record import to_json
from corral.score.likelihood import ScoreOptions, read_row
from corral.score.row_files import read_json_row, scan, write_parquet
from corral.score.score import Scorer, bad_row, summary

__all__ = ["JobReport", "score_file"]

OUTPUTS = (".jsonl", ".parquet")
_FATAL = (KeyRefusedError, UnknownModelError, UnknownPathError)


@dataclass(frozen=True)
class JobReport:
    """How a run ended; `summary` covers all rows, also those of earlier runs."""

    state: str  # done, stopped
    rows: int
    before: int
    fine: int
    failed: int
    left: int
    wall_s: float
    summary: dict[str, Any]
    output: str
    errors: str
    repaired: tuple[str, ...] = ()


def _identity(endpoint: Endpoint, options: ScoreOptions) -> dict[str, Any]:
    """What must not change between runs of one job."""
    free = ("concurrency", "memory_gib", "vocabulary")
    return {"model": endpoint.model, **{k: v for k, v in to_json(options).items() if k not in free}}


def score_file(
    endpoint: Endpoint,
    source: Path,
    output: Path,
    options: ScoreOptions,
    *,
    restart: bool = False,
    patience_s: float = 600.0,
    find: Callable[[], Endpoint] | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> JobReport:
    """Score every row of a file that has no result yet; `find` tells where the server is after it moved."""
    if output.suffix not in OUTPUTS:
        raise UsageError(f"the output cannot be {output.name!r}.", f"It ends in {' or '.join(OUTPUTS)}.")
    folder = JobFolder(output, live=output.suffix == ".jsonl")
    if not restart and output.exists() and not folder.job.exists():
        raise ConflictError(f"{output} exists and is not of a scoring job.", "Choose another -o, or give --restart.")
    output.parent.mkdir(parents=True, exist_ok=True)
    folder.create()
    with JobLock(folder.lock, str(output)) as lock:
        if restart:
            _forget(folder)
        _same_job(folder, _identity(endpoint, options))
        table = scan(source, folder.spool)
        job = _Job(endpoint, options, folder, table, lock, find or (lambda: endpoint), patience_s, on_progress)
        report = job.run()
        if not folder.live and report.state == "done":
            write_parquet(job.results_in_order(), output)
    return report


def _forget(folder: JobFolder) -> None:
    for path in folder.path.iterdir():
        if path != folder.lock and not path.name.startswith("lock."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (folder.output, folder.errors):
        path.unlink(missing_ok=True)


def _same_job(folder: JobFolder, asked: dict[str, Any]) -> None:
    if folder.job.exists():
        before = json.loads(folder.job.read_text(encoding="utf-8"))
        changed = [f"{k}: {before.get(k)!r} before, {v!r} now" for k, v in asked.items() if before.get(k) != v]
        if changed:
            raise ConflictError(
                f"{folder.output} was begun with other settings ({'; '.join(changed)}).",
                "Use the same ones, another -o, or --restart to begin anew.",
            )
    else:
        write_atomic(folder.job, json.dumps(asked, indent=2) + "\n")


class _Job:
    def __init__(
        self,
        endpoint: Endpoint,
        options: ScoreOptions,
        folder: JobFolder,
        table: Table,
        lock: JobLock,
        find: Callable[[], Endpoint],
        patience_s: float,
        on_progress: Callable[[int, int, int], None] | None,
    ) -> None:
        self._options, self._folder, self._table, self._lock = options, folder, table, lock
        self._find, self._patience_s, self._on_progress = find, patience_s, on_progress
        self._client = Client(endpoint)
        self._scorer = Scorer(self._client, options)
        self._ledger = Ledger(folder, table)
        self._fine = self._failed = self._before = 0
        self._old: list[Client] = []
        self._stopping = False
        self._good_s = time.monotonic()

    def run(self) -> JobReport:
        began = time.monotonic()
        tally = self._ledger.open()
        try:
            self._before = tally.fine + tally.failed
            reader = RowReader(self._table)
            try:
                if self._before < len(self._table):
                    run_loop(self._work(reader, tally.done))
            finally:
                reader.close()
            left = len(self._table) - self._before - self._fine - self._failed
            failed_in_all = tally.failed + self._failed
            return JobReport(
                "done" if not left else "stopped",
                len(self._table),
                self._before,
                self._fine,
                self._failed,
                left,
                time.monotonic() - began,
                summary(self._results(), failed_in_all),
                str(self._folder.output),
                str(self._folder.errors),
                tuple(self._ledger.repaired),
            )
        finally:
            self._ledger.close()
            errors = self._folder.errors
            if errors.is_file() and not errors.stat().st_size:
                errors.unlink()

    def _results(self) -> Iterator[dict[str, Any]]:
        for record in self._ledger.places():
            if record.kind == FINE:
                yield msgspec.json.decode(self._ledger.line(record))

    def results_in_order(self) -> Iterator[dict[str, Any]]:
        """Every result, in the order of the input."""
        with self._folder.results.open("rb") as file:
            places = []
            offset = 0
            for line in file:
                places.append((msgspec.json.decode(line)["row"], offset, len(line)))
                offset += len(line)
            for _, begin, length in sorted(places):
                file.seek(begin)
                yield msgspec.json.decode(file.read(length))

    async def _work(self, reader: RowReader, done: bytearray) -> None:
        outbox = Outbox(self._ledger, lambda _: self._told())
        todo = iter([number for number in range(len(self._table)) if not done[number]])
        loop = asyncio.get_running_loop()
        workers = [loop.create_task(self._worker(todo, reader, outbox)) for _ in range(self._options.concurrency)]
        everything = asyncio.gather(*workers)
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            loop.add_signal_handler(name, self._stop, everything)
        try:
            await everything
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await outbox.drain()
            for client in (*self._old, self._client):
                await client.close()
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                loop.remove_signal_handler(name)

    def _stop(self, everything: asyncio.Future[Any]) -> None:
        self._stopping = True
        everything.cancel()

    def _told(self) -> None:
        self._lock.touch()
        if self._on_progress:
            self._on_progress(self._before + self._fine + self._failed, len(self._table), self._failed)

    async def _worker(self, todo: Iterator[int], reader: RowReader, outbox: Outbox) -> None:
        for number in todo:
            while outbox.full and outbox.failure is None:
                await asyncio.sleep(0.05)
            if outbox.failure is not None:
                raise outbox.failure
            raw, line = reader.raw(number), self._table.lines[number]
            data: Any = None
            try:
                data = read_json_row(raw, line)
                score = await self._persistent(read_row(data, line))
            except (DataError, RequestError) as error:
                if isinstance(error, _FATAL) or (isinstance(error, RequestError) and error.retryable):
                    raise
                entry = Entry(number, FAILED, _line(to_json(bad_row(data, line, error))))
                self._failed += 1
            else:
                entry = Entry(number, FINE, _line({"row": line, **score.to_json()}))
                self._fine += 1
            outbox.add(entry)

    async def _persistent(self, row: Any) -> Any:
        """Score a row; while the server is away, wait for it and look where it is."""
        pause_s = 0.5
        while True:
            scorer = self._scorer
            try:
                score = await scorer.score(row)
            except RequestError as error:
                if not error.retryable or time.monotonic() - self._good_s > self._patience_s:
                    if error.retryable:
                        error.remedy = "Everything finished is kept. When the server is back, run the same command."
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(10.0, pause_s * 2)
                self._look_again(scorer)
            else:
                self._good_s = time.monotonic()
                return score

    def _look_again(self, used: Scorer) -> None:
        if used is not self._scorer:
            return  # another row has already found it
        try:
            endpoint = self._find()
        except CorralError:
            return
        if endpoint != self._client.endpoint:
            self._old.append(self._client)
            self._client = Client(endpoint)
            self._scorer = Scorer(self._client, self._options)


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
