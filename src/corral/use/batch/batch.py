"""`corral batch` as a function, and `corral.batch` for Python programs: a pipeline from a spec to its result.

    serve      find the servers, start a model, or use the engines of a Ray cluster (`serving`)
    begin      check the input, compare it with the earlier spec, get the rows that this runner may do
    run        give each of these rows its one result line
    finish     make the output
    keep       write down how it ended

A runner works alone and holds the lock (`SoleRunner`), or shares the rows with others (`shared.SharedRunner`).
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
from corral.client.client import COMPLETIONS
from corral.client.sampling import request_fields
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle.deployments import plan_of
from corral.deploy.lifecycle.watching import Lines
from corral.use.batch.core.folder import BatchFolder, BatchLock
from corral.use.batch.core.run import Assignment, BatchState, Listener, Quiet, RunSummary, whole_assignment
from corral.use.batch.core.runner import Counts, Runner, RunnerSettings
from corral.use.batch.core.table import RowReader, save_json
from corral.use.batch.in_process import FrontEndWatch
from corral.use.batch.input.recipe import Recipe
from corral.use.batch.serving import Served, served_for
from corral.use.batch.shared import SharedRunner, Sharing
from corral.use.batch.spec import (
    ROW_ORDERS,
    BatchServers,
    BatchSpec,
    ModelToStart,
    PreparedBatch,
    folder_of,
    load_record,
    prepare,
    source_of,
)


@dataclass(frozen=True)
class BatchResult:
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
    """A listener that also writes notes into the batch's journal."""

    def __init__(self, folder: BatchFolder, inner: Listener) -> None:
        self._folder, self._inner = folder, inner

    def note(self, kind: str, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not hide the note
            append_event(self._folder.events, kind, text=text)
        self._inner.note(kind, text)

    def tick(self, counts: Counts, runner: Runner) -> None:
        self._inner.tick(counts, runner)


def run_batch(
    spec: BatchSpec,
    servers: BatchServers,
    settings: RunnerSettings,
    listener: Listener,
    *,
    row_order: str = "input",
    price: float | None = None,
    reporter: Any = None,
    signals: bool = True,
    sharing: Sharing | None = None,
    serve: Serve | None = None,
) -> BatchResult:
    """Begin a batch, or continue it; returns when it is done, stopped or cancelled.

    With `sharing`, this is one of several runners that work on the batch at once. `serve` replaces the way in which
    `servers` are found or started.
    """
    if row_order not in ROW_ORDERS:
        raise UsageError(f"there is no order {row_order!r}.", f"Known: {', '.join(ROW_ORDERS)}.")
    folder = folder_of(spec.output, spec.ordered)
    if not folder.spec.is_file():
        source_of(spec, folder)  # a mistyped input is refused before a server is asked or a model planned
    sharing, serve = sharing or Sharing(), serve or partial(served_for, servers, spec, reporter)
    journal = BatchJournal(folder, listener)
    pipeline = _Pipeline(folder, spec, servers, settings, journal, row_order, signals, serve)
    with _folder_made(folder):
        batch, summary, names = _run(pipeline, sharing)
    return replace(_result(batch, summary, names, price), runners=sharing.runners)


@contextlib.contextmanager
def _folder_made(folder: BatchFolder) -> Iterator[None]:
    """Make the batch's folder; remove it again when the batch is refused, and report errors of the disk as such."""
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
        if new and not folder.spec.exists():
            with contextlib.suppress(OSError):
                folder.path.rmdir()


def _run(pipeline: _Pipeline, sharing: Sharing) -> _Ended:
    """Run the batch alone, unless it is shared."""
    folder, journal = pipeline.folder, pipeline.journal
    if not sharing.wanted and not folder.shared.is_dir():
        with BatchLock(folder.lock, pipeline.spec.output) as lock:
            if not folder.shared.is_dir():  # others may have begun to share it just now
                return pipeline.run(SoleRunner(folder, lock, journal))
    if pipeline.servers.start_model is not None and sharing.counted and sharing.runners > 1:
        raise UsageError(
            "--jobs shares a batch between runners, and each would start the model on these same nodes.",
            "Start the model once with `corral up` and let the runners use it: --deployment NAME --jobs N.",
        )
    return pipeline.run(SharedRunner(folder, sharing, journal))


class BatchRunner(Protocol):
    """How a runner gets its rows: all of them under the lock, or blocks of a shared batch."""

    def begin(
        self, spec: BatchSpec, servers: BatchServers, row_order: str, facts: dict[str, Any]
    ) -> tuple[PreparedBatch, contextlib.AbstractContextManager[Assignment]]:
        """Check the input; the batch, and the rows that this runner may do."""

    def finish(self, batch: PreparedBatch, summary: RunSummary) -> RunSummary | None:
        """Make the output when every row is done; None when rows are missing after all and must be done again."""


class SoleRunner:
    """The only runner of a batch; it holds the batch's lock all the time."""

    def __init__(self, folder: BatchFolder, lock: BatchLock, listener: Listener) -> None:
        self._folder, self._lock, self._listener = folder, lock, listener

    def begin(
        self, spec: BatchSpec, servers: BatchServers, row_order: str, facts: dict[str, Any]
    ) -> tuple[PreparedBatch, contextlib.AbstractContextManager[Assignment]]:
        self._folder.sweep()
        batch = prepare(spec, self._folder, servers, **facts)
        return batch, whole_assignment(
            self._folder,
            batch.table,
            self._lock,
            self._listener,
            row_order=partial(batch.in_order, row_order),
            first=batch.bad_rows(),
            forget_failed=spec.retry_failed,
        )

    def finish(self, batch: PreparedBatch, summary: RunSummary) -> RunSummary:
        if summary.done:
            batch.export()
        return summary


Serve = Callable[[], contextlib.AbstractContextManager[Served]]
_Ended = tuple[PreparedBatch, RunSummary, Sequence[str]]  # with the names of the deployments


@dataclass(frozen=True)
class _Pipeline:
    """One run of a batch, from its spec to its end."""

    folder: BatchFolder
    spec: BatchSpec
    servers: BatchServers
    settings: RunnerSettings
    journal: BatchJournal
    row_order: str
    signals: bool
    serve: Serve

    def run(self, runner: BatchRunner) -> _Ended:
        spec, journal = self.spec, self.journal
        with self.serve() as served:
            while True:
                batch, rows = runner.begin(spec, self.servers, self.row_order, served.facts)
                kind = "continued" if batch.continued else "new batch"
                journal.note("begin", f"{counted(batch.record.rows, 'row')}, {kind}")
                _note_short_answers(batch, journal)
                with _state_kept(self.folder, journal) as keep:
                    watch = FrontEndWatch(journal, served.names)
                    with rows as assignment:
                        summary = served.run(assignment, batch.work(), self.settings, watch, self.signals)
                    if advice := watch.advice():
                        journal.note("advice", advice)
                    if ended := runner.finish(batch, summary):
                        keep(ended)
                        return batch, ended, served.names
                journal.note("repaired", "results were damaged on disk; their rows are done again")
                spec = replace(spec, retry_failed=False, force=False)


def _note_short_answers(batch: PreparedBatch, journal: BatchJournal) -> None:
    """Warn that requests without `max_tokens` get 16 tokens from vLLM, which few users expect."""
    first = next((number for number in range(len(batch.table)) if not batch.table.flags[number]), None)
    if first is None or batch.continued:
        return
    with contextlib.suppress(CorralError), contextlib.closing(RowReader(batch.table)) as reader:
        parsed = batch.record.recipe.read(reader.raw(first), batch.table.lines[first])
        if parsed.path == COMPLETIONS and not parsed.body.get("max_tokens"):
            journal.note("note", "answers end after 16 tokens, vLLM's default: the requests name no max_tokens")


@contextlib.contextmanager
def _state_kept(folder: BatchFolder, journal: BatchJournal) -> Iterator[Callable[[RunSummary], None]]:
    """Write down how a run ends; gives the function to call with its summary."""

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


def _result(batch: PreparedBatch, summary: RunSummary, names: Sequence[str], price: float | None) -> BatchResult:
    folder = batch.folder
    gpus = sum(_gpus(name) for name in names) or None
    hours = gpus * summary.wall_s / 3600 if gpus else None
    failed = folder.has_errors
    if not failed:
        folder.errors.unlink(missing_ok=True)
    return BatchResult(
        summary=summary,
        output=str(folder.output),
        errors=str(folder.errors) if failed else None,
        model=batch.record.model,
        gpus=gpus,
        gpu_hours=hours,
        cost=hours * price if hours is not None and price is not None else None,
    )


def _gpus(name: str) -> int:
    plan = plan_of(DeploymentFolder.of(name))
    return (plan.gpus if plan else None) or 0


def saved_spec(output: str) -> tuple[BatchSpec, BatchServers]:
    """The spec and the servers of an existing batch, for `corral batch resume`."""
    _, record = load_record(output)
    spec = BatchSpec(
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
    return spec, record.servers


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
) -> BatchResult:
    """Run every row of a file and write the answers; called again after anything, it continues.

    The rows go to the named deployment, to the server at an address, or to the only ready one; `start` starts a
    model and stops it at the end. With `offline`, rows go into the process of an engine on this machine, without
    HTTP. Sampling parameters for all rows are keyword arguments: `max_tokens=64, temperature=0`.
    """
    request_fields(params, chat=True)  # a misspelt name is an error, as it is for one prompt
    params |= params.pop("extra", None) or {}
    recipe = Recipe(template=prompt_template, chat=chat, system=system, params=params, prompt_column=prompt_column)
    spec = BatchSpec(str(input), str(output), recipe, skip_bad=skip_bad, force=force)
    servers = BatchServers(
        (deployment,) if deployment else (),
        (url,) if url else (),
        str(key_file) if key_file else None,
        ModelToStart(start, context) if start else None,
        offline,
    )
    run = partial(run_batch, spec, servers, RunnerSettings(concurrency=concurrency), Quiet(), reporter=Lines(quiet))
    return _off_loop(run)


def _off_loop(run: Callable[..., BatchResult]) -> BatchResult:
    """Run in this thread, where Ctrl-C stops a batch; beside a running event loop (a notebook), in another one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(signals=threading.current_thread() is threading.main_thread())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run, signals=False).result()
