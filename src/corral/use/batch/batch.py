"""`corral batch` as a function: one pipeline from an order to its result.

    serve      who answers: servers that are there, a model that is started, engines of a Ray cluster (`serving`)
    begin      check the input, compare it with what was asked before, take a share of the rows
    run        give every row of the share its one result line
    finish     make the output
    keep       write down how it ended

Who feeds the pipeline is a strategy: a lone runner that holds the lock (`Alone`) or one of several that share the
rows (`corral.use.batch.sharing`).

`corral.batch`: a file of prompts through a model, from Python, with the promises of `corral batch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from corral.base.errors import CorralError, DataError, UsageError
from corral.base.record import to_json
from corral.base.wording import counted
from corral.client.client import CHAT
from corral.client.sampling import request_fields
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle.deployments import plan_of
from corral.deploy.lifecycle.watching import Lines
from corral.use.batch.core.folder import BatchFolder, BatchLock
from corral.use.batch.core.run import BatchState, Listener, Quiet, RunSummary, Share, whole_share
from corral.use.batch.core.runner import Counts, Runner, RunnerSettings
from corral.use.batch.core.table import RowReader, save_json
from corral.use.batch.input.recipe import Recipe
from corral.use.batch.serving import BatchServers, FrontEndWatch, ModelToStart, Served, served_for, where_record
from corral.use.batch.sharing.shared import Sharing, Together
from corral.use.batch.spec import ORDERS, BatchOrder, Prepared, folder_of, load_record, prepare, source_of


@dataclass(frozen=True)
class Result:
    """How a batch ended, for people and programs."""

    summary: RunSummary
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


class BatchJournal:
    """A listener that also writes notes into the job's journal."""

    def __init__(self, folder: BatchFolder, inner: Listener) -> None:
        self._folder, self._inner = folder, inner

    def note(self, kind: str, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not hide the note
            append_event(self._folder.events, kind, text=text)
        self._inner.note(kind, text)

    def tick(self, counts: Counts, runner: Runner) -> None:
        self._inner.tick(counts, runner)


def carry_out(
    order: BatchOrder,
    where: BatchServers,
    settings: RunnerSettings,
    listener: Listener,
    *,
    row_order: str = "input",
    price: float | None = None,
    reporter: Any = None,
    signals: bool = True,
    sharing: Sharing | None = None,
    serve: Serve | None = None,
) -> Result:
    """Begin a batch, or continue it; returns when it is done, stopped or cancelled.

    With `sharing` this is one of several runners that work on it at once, each called like this. `serve` says who
    serves the model when that cannot be told from `where`.
    """
    if row_order not in ORDERS:
        raise UsageError(f"there is no order {row_order!r}.", f"Known: {', '.join(ORDERS)}.")
    folder = folder_of(order.output, order.ordered)
    if not folder.job.is_file():
        source_of(order, folder)  # what is mistyped is told before a server is asked for, or a model planned
    sharing, serve = sharing or Sharing(), serve or partial(served_for, where, order, reporter)
    pipeline = _Pipeline(
        folder, order, where_record(where), settings, BatchJournal(folder, listener), row_order, signals, serve
    )
    with _tidied(folder):
        made, summary, names = _fed(pipeline, where, sharing)
    return replace(_result(made, summary, names, price), runners=sharing.runners)


@contextlib.contextmanager
def _tidied(folder: BatchFolder) -> Iterator[None]:
    """A folder for the job, which goes away again when the job is refused; errors of the disk are told as such."""
    new = not folder.path.exists()
    try:
        folder.create()
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or folder.path} cannot be read or written: {error.strerror or error}.",
            "Check the disk and the permissions, then run the same command again.",
            errno=error.errno,
        ) from error
    finally:
        if new and not folder.job.exists():
            with contextlib.suppress(OSError):
                folder.path.rmdir()


def _fed(pipeline: _Pipeline, where: BatchServers, sharing: Sharing) -> _Ended:
    """Run it alone, unless it is shared."""
    folder, journal = pipeline.folder, pipeline.journal
    if not sharing.wanted and not folder.shared.is_dir():
        with BatchLock(folder.lock, pipeline.order.output) as lock:
            if not folder.shared.is_dir():  # others may have begun to share it just now
                return pipeline.run(Alone(folder, lock, journal))
    if where.offline is not None and sharing.counted and sharing.runners > 1:
        raise UsageError(
            "--jobs shares a batch between runners, and each would start the model on these same nodes.",
            "Start the model once with `corral up` and let the runners use it: --deployment NAME --jobs N.",
        )
    return pipeline.run(Together(folder, sharing, journal))


class Feeder(Protocol):
    """Who feeds the pipeline with rows."""

    def begin(
        self, order: BatchOrder, where: dict[str, Any], row_order: str, facts: dict[str, Any]
    ) -> tuple[Prepared, contextlib.AbstractContextManager[Share]]:
        """Check the input; the job, and the rows that this runner may do."""

    def finish(self, made: Prepared, summary: RunSummary) -> RunSummary | None:
        """Make the output when all is done; None when rows are missing after all and must be done again."""


class Alone:
    """The only runner, who holds the job's lock all the time."""

    def __init__(self, folder: BatchFolder, lock: BatchLock, listener: Listener) -> None:
        self._folder, self._lock, self._listener = folder, lock, listener

    def begin(
        self, order: BatchOrder, where: dict[str, Any], row_order: str, facts: dict[str, Any]
    ) -> tuple[Prepared, contextlib.AbstractContextManager[Share]]:
        self._folder.sweep()
        made = prepare(order, self._folder, where, **facts)
        return made, whole_share(
            self._folder,
            made.table,
            self._lock,
            self._listener,
            order=partial(made.in_order, row_order),
            first=made.bad_rows(),
            forget_failed=order.retry_failed,
        )

    def finish(self, made: Prepared, summary: RunSummary) -> RunSummary:
        if summary.done:
            made.export()
        return summary


Serve = Callable[[], contextlib.AbstractContextManager[Served]]
_Ended = tuple[Prepared, RunSummary, Sequence[str]]  # the job, how it went, the deployments


@dataclass(frozen=True)
class _Pipeline:
    """What is asked, and how hard to try."""

    folder: BatchFolder
    order: BatchOrder
    where: dict[str, Any]
    settings: RunnerSettings
    journal: BatchJournal
    row_order: str
    signals: bool
    serve: Serve

    def run(self, feeder: Feeder) -> _Ended:
        order, journal = self.order, self.journal
        with self.serve() as served:
            while True:
                made, taken = feeder.begin(order, self.where, self.row_order, served.facts)
                journal.note(
                    "begin", f"{counted(made.record.rows, 'row')}, {'continued' if made.continued else 'new batch'}"
                )
                _tell_short_answers(made, journal)
                with _kept_state(self.folder, journal) as keep:
                    watch = FrontEndWatch(journal, served.names)
                    with taken as share:
                        summary = served.run(share, made.work(), self.settings, watch, self.signals)
                    if said := watch.advice():
                        journal.note("advice", said)
                    if ended := feeder.finish(made, summary):
                        keep(ended)
                        return made, ended, served.names
                journal.note("repaired", "results were damaged on disk; their rows are done again")
                order = replace(order, retry_failed=False, force=False)


def _tell_short_answers(made: Prepared, journal: BatchJournal) -> None:
    """A whole request that does not say how many tokens it wants gets 16 from vLLM, and nobody expects that."""
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
        journal.note("note", "answers end after 16 tokens, vLLM's default: the requests name no max_tokens")


@contextlib.contextmanager
def _kept_state(folder: BatchFolder, journal: BatchJournal) -> Iterator[Callable[[RunSummary], None]]:
    """Writes down how it ended."""

    def write(state: BatchState, details: Any) -> None:
        with contextlib.suppress(OSError):
            save_json(folder.state, {"state": state, "at_s": time.time(), "details": details})

    def keep(summary: RunSummary) -> None:
        write(summary.state, to_json(summary))
        journal.note(summary.state, f"{summary.before + summary.fine + summary.failed} of {summary.rows} rows")

    try:
        yield keep
    except CorralError as error:
        write(BatchState.FAILED, error.to_json())
        journal.note(BatchState.FAILED, error.message)
        raise


def _result(made: Prepared, summary: RunSummary, names: Sequence[str], price: float | None) -> Result:
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


def again(output: str) -> tuple[BatchOrder, BatchServers]:
    """The order and the place of an existing job, for `corral batch resume`."""
    _, record = load_record(output)
    order = BatchOrder(
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
    where = BatchServers(
        record.deployments,
        record.urls,
        record.key_file,
        ModelToStart(
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
        record.in_process,
    )
    return order, where


def batch(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    deployment: str | None = None,
    url: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
    start: str | None = None,
    context: int | None = None,
    chat: bool = False,
    system: str | None = None,
    prompt_template: str | None = None,
    prompt_column: str | None = None,
    concurrency: int | None = None,
    offline: bool = False,
    skip_bad: bool = False,
    force: bool = False,
    quiet: bool = False,
    **params: Any,
) -> Result:
    """Run every row of a file and write the answers; called again after anything, it continues.

    It uses the named deployment, the server at an address, or the only ready one; with `start` it starts that model
    and stops it at the end. With `offline` rows go into the process of an engine on this machine, without HTTP.
    Sampling parameters for all rows are keyword arguments: `max_tokens=64, temperature=0`.
    """
    request_fields(params, chat=True)  # a misspelt name is an error, as it is for one prompt
    params |= params.pop("extra", None) or {}
    recipe = Recipe(template=prompt_template, chat=chat, system=system, params=params, prompt_column=prompt_column)
    order = BatchOrder(str(input), str(output), recipe, skip_bad=skip_bad, force=force)
    where = BatchServers(
        (deployment,) if deployment else (),
        (url,) if url else (),
        str(key_file) if key_file else None,
        ModelToStart(start, context) if start else None,
        offline,
    )
    settings = RunnerSettings(concurrency=concurrency)
    return _apart(lambda signals: carry_out(order, where, settings, Quiet(), reporter=Lines(quiet), signals=signals))


def _apart(work: Callable[[bool], Result]) -> Result:
    """Here, where Ctrl-C ends a batch in order; in a thread where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work(threading.current_thread() is threading.main_thread())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work, False).result()
