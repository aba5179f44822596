"""`corral batch` as a function: check, run, write the output, tell how it went; `serving` has the model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from corral.batch.core.folder import JobFolder
from corral.batch.core.ledger import FAILED, Entry
from corral.batch.core.lock import JobLock
from corral.batch.core.run import Listener, Summary, run_job
from corral.batch.core.runner import Counts, Runner, Settings
from corral.batch.core.table import RowReader, Table, save_json
from corral.batch.input.check import note_beginnings, note_weights, read_problems
from corral.batch.job import Order, Prepared, folder_of, load_record, prepare
from corral.batch.output import BatchWork, export, problem_line
from corral.batch.serving import Offline, Served, Where, kept, served_for
from corral.batch.sharing.shared import Sharing, brief_lock, gather, join, open_door, work_through
from corral.client.client import CHAT
from corral.client.endpoint import ModelServer
from corral.deployment.events import append_event
from corral.deployment.folder import DeploymentFolder
from corral.errors import CorralError, DataError, UsageError
from corral.lifecycle.deployments import plan_of
from corral.record import to_json

__all__ = [
    "ORDERS",
    "Journal",
    "Result",
    "again",
    "bad_rows",
    "carry_out",
    "forget_failed",
    "kept_state",
    "work_of",
]

ORDERS = ("input", "longest-first", "prefix-first")


@dataclass(frozen=True)
class Result:
    """How a batch ended, for people and programs."""

    summary: Summary
    output: str
    errors: str | None
    model: str
    gpus: int | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    runners: int = 1  # that may have worked on it at once

    def to_json(self) -> dict[str, Any]:
        body = to_json(self)
        body["summary"]["rows_per_s"] = round(self.summary.rows_per_s, 3)
        body["summary"]["output_tokens_per_s"] = round(self.summary.output_tokens_per_s, 3)
        return {**body.pop("summary"), **body}


class Journal:
    """A listener that also writes notes into the job's journal."""

    def __init__(self, folder: JobFolder, inner: Listener) -> None:
        self._folder, self._inner = folder, inner

    def note(self, kind: str, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not hide the note
            append_event(self._folder.events, kind, text=text)
        self._inner.note(kind, text)

    def tick(self, counts: Counts, runner: Runner) -> None:
        self._inner.tick(counts, runner)


def carry_out(
    order: Order,
    where: Where,
    settings: Settings,
    listener: Listener,
    *,
    row_order: str = "input",
    price: float | None = None,
    reporter: Any = None,
    signals: bool = True,
    sharing: Sharing | None = None,
    serve: Callable[[], contextlib.AbstractContextManager[Served]] | None = None,
) -> Result:
    """Begin a batch, or continue it; returns when it is done, stopped or cancelled.

    With `sharing` this is one of several runners that work on it at once, each called like this. `serve` says who
    serves the model when that cannot be told from `where`.
    """
    if row_order not in ORDERS:
        raise UsageError(f"there is no order {row_order!r}.", f"Known: {', '.join(ORDERS)}.")
    folder = folder_of(order.output, order.ordered)
    new = not folder.path.exists()
    try:
        folder.create()
        sharing, serve = sharing or Sharing(), serve or partial(served_for, where, order, reporter)
        how = _How(order, where, settings, Journal(folder, listener), row_order, signals, serve)
        ended = None if sharing.wanted or folder.shared.is_dir() else _alone(folder, how)
        made, summary, names = ended or _together(folder, how, sharing)
    except OSError as error:
        raise DataError(
            f"{error.filename or folder.path} cannot be read or written: {error.strerror or error}.",
            "Check the disk and the permissions, then run the same command again.",
        ) from error
    finally:
        if new and not folder.job.exists():  # refused: leave nothing behind
            with contextlib.suppress(OSError):
                folder.path.rmdir()
    return replace(_result(made, summary, names, price), runners=sharing.runners)


@dataclass(frozen=True)
class _How:
    """What is asked, and how hard to try."""

    order: Order
    where: Where
    settings: Settings
    journal: Journal
    row_order: str
    signals: bool
    serve: Callable[[], contextlib.AbstractContextManager[Served]]


_Ended = tuple[Prepared, Summary, Sequence[str]]  # the job, how it went, the deployments


def _alone(folder: JobFolder, how: _How) -> _Ended | None:
    """The only runner, which holds the job's lock all the time; None when others have begun to share it."""
    order, journal = how.order, how.journal
    with JobLock(folder.lock, order.output) as lock:
        if folder.shared.is_dir():
            return None
        with how.serve() as served:
            folder.sweep()
            made = prepare(order, folder, kept(how.where), **served.facts)
            journal.note("begin", f"{'continuing' if made.continued else 'new'}: {made.record.rows} rows")
            _tell_short_answers(made, journal)
            table, record = made.table, made.record
            if order.retry_failed:
                forget_failed(folder, table)
            with kept_state(folder, journal) as keep:
                summary = run_job(
                    folder, table, work_of(made), _Lazy(served.servers), how.settings, lock=lock, listener=journal,
                    order=_row_order(table, record, how.row_order), first=bad_rows(made), signals=how.signals,
                )  # fmt: skip
                if summary.state == "done" and not folder.live:
                    export(folder, table, record.ordered)
                keep(summary)
            return made, summary, served.names


def _together(folder: JobFolder, how: _How, sharing: Sharing) -> _Ended:
    """One of several runners; the last one to finish, or any that finds all rows done, puts the output together."""
    order, journal = how.order, how.journal
    if how.where.offline is not None and sharing.counted and sharing.runners > 1:
        raise UsageError(
            "--jobs shares a batch between runners, and each would start the model on these same nodes.",
            "Start the model once with `corral up` and let the runners use it: --deployment NAME --jobs N.",
        )
    with how.serve() as served:
        while True:
            with brief_lock(folder) as lock, open_door(folder, sharing) as others:
                folder.sweep()
                made = prepare(order, folder, kept(how.where), busy=bool(others), **served.facts)
                joined = join(made, lock, others, sharing, how.row_order, bad_rows(made), order.retry_failed, journal)
            company = f", with {len(others)} more at work" if others else ""
            journal.note("begin", f"{'continuing' if made.continued else 'new'}: {made.record.rows} rows{company}")
            with kept_state(folder, journal) as keep:
                summary = work_through(
                    made, joined, work_of(made), _Lazy(served.servers), how.settings, journal,
                    partial(_row_order, made.table, made.record), how.signals,
                )  # fmt: skip
                if summary.state == "done":
                    gathered = gather(made, summary)
                    if gathered is None:
                        order = replace(order, retry_failed=False, force=False)
                        journal.note("repaired", "results were damaged on disk; their rows are done again")
                        continue
                    summary = gathered
                keep(summary)
            return made, summary, served.names


def _tell_short_answers(made: Prepared, journal: Journal) -> None:
    """A completion that does not say how many tokens it wants gets 16 from vLLM, and nobody expects that."""
    first = next((number for number in range(len(made.table)) if not made.table.flags[number]), None)
    if first is None or made.continued:
        return
    reader = RowReader(made.table)
    try:
        parsed = made.record.recipe.read(reader.raw(first), made.table.lines[first])
    except CorralError:
        return
    finally:
        reader.close()
    if parsed.path != CHAT and not parsed.body.get("max_tokens"):
        journal.note("note", "answers end after 16 tokens, vLLM's default for plain prompts: give --max-tokens")


def work_of(made: Prepared) -> BatchWork:
    """What a job does with its rows."""
    record = made.record
    models = (record.model,) if record.model else ()
    return BatchWork(record.recipe, made.table, models, record.shape, record.answer)


def bad_rows(made: Prepared) -> Iterator[Entry]:
    """The error lines of rows that were found bad."""
    return (Entry(p.row, FAILED, problem_line(p, made.table)) for p in read_problems(made.folder.problems))


@contextlib.contextmanager
def kept_state(folder: JobFolder, journal: Journal) -> Iterator[Callable[[Summary], None]]:
    """Writes down how it ended."""

    def keep(summary: Summary) -> None:
        _keep_state(folder, summary.state, to_json(summary))
        journal.note(summary.state, f"{summary.before + summary.fine + summary.failed} of {summary.rows} rows")

    try:
        yield keep
    except CorralError as error:
        _keep_state(folder, "failed", error.to_json())
        journal.note("failed", error.message)
        raise


class _Lazy(Sequence[ModelServer]):
    """Servers that are looked for only when something is to be sent: a finished batch needs no server."""

    def __init__(self, make: Callable[[], Sequence[ModelServer]]) -> None:
        self._make = make
        self._made: Sequence[ModelServer] | None = None

    def _servers(self) -> Sequence[ModelServer]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __getitem__(self, index: Any) -> Any:
        return self._servers()[index]

    def __len__(self) -> int:
        return len(self._servers())


def forget_failed(folder: JobFolder, table: Table) -> None:
    from corral.batch.core.ledger import Ledger

    ledger = Ledger(folder, table)
    ledger.open(forget_failed=True)
    ledger.close()


def _row_order(table: Table, record: Any, row_order: str) -> Sequence[int] | None:
    if row_order == "longest-first":
        note_weights(table, record.recipe)
        return table.longest_first()
    if row_order == "prefix-first":
        note_beginnings(table, record.recipe)
        return table.prefix_first()
    return None


def _keep_state(folder: JobFolder, state: str, details: Any) -> None:
    with contextlib.suppress(OSError):
        save_json(folder.state, {"state": state, "at_s": time.time(), "details": details})


def _result(made: Prepared, summary: Summary, names: Sequence[str], price: float | None) -> Result:
    folder = made.folder
    gpus = sum(_gpus(name) for name in names) or None
    hours = gpus * summary.wall_s / 3600 if gpus else None
    failed = folder.has_errors
    if not failed:
        folder.errors.unlink(missing_ok=True)
    return Result(
        summary=summary,
        output=str(folder.output),
        errors=str(folder.errors) if failed else None,
        model=made.record.model,
        gpus=gpus,
        gpu_hours=hours,
        cost=hours * price if hours is not None and price is not None else None,
    )


def _gpus(name: str) -> int:
    plan = plan_of(DeploymentFolder.of(name))
    return (plan.gpus if plan else None) or 0


def again(output: str) -> tuple[Order, Where]:
    """The order and the place of an existing job, for `corral batch resume`."""
    _, record = load_record(output)
    order = Order(
        input=record.input,
        output=output,
        recipe=record.recipe,
        input_format=record.format,
        shape=record.shape,
        answer=record.answer,
        ordered=record.ordered,
        skip_bad=record.skip_bad,
        saved=record.input == "-",  # what came through stdin is in the spool
    )
    offline = record.offline
    where = Where(
        record.deployments,
        record.urls,
        record.key_file,
        Offline(
            offline["model"],
            offline.get("context"),
            tuple(offline.get("fixed", ())),
            tuple(offline.get("engine_args", ())),
            offline.get("more", {}),
            offline.get("engine", "http"),
            offline.get("replicas", 1),
        )
        if offline
        else None,
    )
    return order, where
