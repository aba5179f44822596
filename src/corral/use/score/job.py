"""Scoring a file: the batch runner's ledger, lock, retries and signals, with the rows and the results of `corral
score`.

A line counts once it is synced, and after any crash the same command continues. Bad rows are refused before anything
is sent, or go to the error file with their reason (`skip_bad`); rows that turn out to be too long go there, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from corral.base.errors import ConflictError, CorralError, DataError, UsageError
from corral.base.files import create_private, write_atomic
from corral.base.lock import heartbeat
from corral.base.record import to_json
from corral.client.endpoint import ModelServer
from corral.use.batch.core.folder import BEFORE, BatchFolder, BatchLock
from corral.use.batch.core.ledger import Ledger, LedgerEntry
from corral.use.batch.core.records import FAILED, FINE
from corral.use.batch.core.run import Assignment, BatchState, Listener, run_assignment, whole_assignment
from corral.use.batch.core.runner import RowStep, RunnerSettings
from corral.use.batch.core.table import Table
from corral.use.batch.input.check import Readable, RowProblem, read_problems, scan
from corral.use.batch.input.recipe import Parsed
from corral.use.batch.input.rows import InputSource, decode_row, open_source, optional
from corral.use.batch.spec import folder_of
from corral.use.score.likelihood import ScoreOptions, ScoreRow, read_row
from corral.use.score.score import BadRow, Scoring, Steps, bad_row, summary


@dataclass(frozen=True)
class ScoreRows:
    """How rows to score are read; stands in place of a batch's recipe."""

    text_cells: bool = False  # CSV: every value is text
    kind: str = "scores"

    def settled(self, raw: bytes) -> Self:
        return self

    def read(self, raw: bytes, line: int, models: tuple[str, ...] = ()) -> Parsed:
        try:
            return Parsed(self.row(raw, line).id, "", {}, {})
        except DataError as error:
            remedy = error.remedy.removeprefix("Correct the row.")  # the same for all of them
            raise DataError(f"{error.message} {remedy}".strip()) from None

    def row(self, raw: bytes, line: int) -> ScoreRow:
        """The row to score; DataError when it is bad."""
        data = decode_row(raw)
        if self.text_cells and isinstance(data, dict):
            data = {name: _cell(name, value) for name, value in data.items() if value != "" or name == "context"}
        return read_row(data, line)

    def loose_id(self, raw: bytes) -> str | None:
        try:
            data = decode_row(raw)
        except DataError:
            return None
        value = data.get("id") if isinstance(data, dict) else None
        return str(value) if isinstance(value, (str, int)) and value != "" else None


def _cell(name: str, value: Any) -> Any:
    if name == "answer" and isinstance(value, str) and value.isdigit():
        return int(value)
    if name != "choices":
        return value
    try:
        return json.loads(value)
    except (ValueError, TypeError, RecursionError):
        return value  # `read_row` refuses it


_TOKEN = {"id": "int64", "text": "string", "logprob": "float64", "rank": "int64"}
_LIKELIHOOD = {
    "sum_logprob": "float64",
    "mean_logprob": "float64",
    "tokens": "int64",
    "greedy": "bool_",
    "perplexity": "float64",
    "windows": "int64",
}
SCORE_SCHEMA: dict[str, str] = {
    "id": "string",
    "row": "int64",
    "kind": "string",
    **_LIKELIHOOD,
    "chosen": "int64",
    "chosen_text": "string",
    "chosen_norm": "int64",
    "correct": "bool_",
    "correct_norm": "bool_",
}


def write_parquet(results: Iterator[dict[str, Any]], path: Path, like: Path | None = None) -> None:
    """Write results as one Parquet file, put in place in one step, with the mode of `like`."""
    arrow, parquet = optional("pyarrow", "write Parquet"), optional("pyarrow.parquet", "write Parquet")

    def plain(columns: dict[str, str]) -> list[Any]:
        return [arrow.field(name, getattr(arrow, kind)()) for name, kind in columns.items()]

    alternative = arrow.struct(plain({name: _TOKEN[name] for name in ("id", "text", "logprob")}))
    token = arrow.list_(arrow.struct([*plain(_TOKEN), arrow.field("top", arrow.list_(alternative))]))
    choice = arrow.list_(arrow.struct([*plain(_LIKELIHOOD), arrow.field("token_scores", token)]))
    fields = [*plain(SCORE_SCHEMA), arrow.field("choices", choice), arrow.field("token_scores", token)]
    schema = arrow.schema(fields)
    temporary = path.with_name(f".{path.name}.tmp")
    os.close(create_private(temporary, like))
    with parquet.ParquetWriter(temporary, schema) as writer:
        group: list[dict[str, Any]] = []
        for result in results:
            group.append(result)
            if len(group) == 4096:
                writer.write_table(arrow.Table.from_pylist(group, schema=schema))
                group = []
        writer.write_table(arrow.Table.from_pylist(group, schema=schema))
    temporary.replace(path)


OUTPUTS = (".jsonl", ".parquet")


@dataclass(frozen=True)
class ScoreReport:
    """The result of a run; `summary` covers all rows, also those of earlier runs."""

    state: BatchState
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

    @property
    def done(self) -> bool:
        return self.state is BatchState.DONE


def score_file(
    servers: Sequence[ModelServer],
    model: str,
    source: Path,
    output: Path,
    options: ScoreOptions,
    listener: Listener,
    *,
    settings: RunnerSettings,
    skip_bad: bool = False,
    force: bool = False,
    signals: bool = True,
) -> ScoreReport:
    """Score every row of a file that has no result yet."""
    folder, rows_file = check_paths(source, output)
    job = RowsJob(folder, rows_file, _identity(model, options), listener, skip_bad, force)
    rows = ScoreRows(text_cells=rows_file.format in ("csv", "tsv"))
    with job.opened(rows) as assignment:
        work = ScoreWork(options, assignment.table, rows)
        ran = run_assignment(lambda: servers, assignment, work, settings, listener, signals)
        failed = sum(1 for record in assignment.ledger.records() if record.kind == FAILED)
        totals = summary(_results(assignment.ledger), failed)
        if not folder.has_errors:
            folder.errors.unlink(missing_ok=True)
        if not folder.live and ran.done:
            write_parquet(_in_order(folder.results), output, folder.like(output))
    return ScoreReport(
        ran.state, ran.rows, ran.before, ran.fine, ran.failed, ran.left, ran.wall_s, totals, str(output),
        str(folder.errors), ran.repaired,
    )  # fmt: skip


@dataclass(frozen=True)
class RowsJob:
    """A file of rows that is done under a lock, with a ledger; `identity` is what must not change between runs."""

    folder: BatchFolder
    source: InputSource
    identity: dict[str, Any]
    listener: Listener
    skip_bad: bool = False
    force: bool = False
    retry_failed: bool = False

    @contextlib.contextmanager
    def opened(self, rows: Readable) -> Iterator[Assignment]:
        """Check the whole input; its rows, with those that have a result."""
        folder = self.folder
        if not self.force and (conflict := _conflict(folder, self.identity)):
            raise conflict
        folder.create()
        with BatchLock(folder.lock, str(folder.output)) as lock:
            if self.force and _conflict(folder, self.identity):
                _forget(folder)
            with heartbeat(lock.path):
                table = self._checked(rows)
            with whole_assignment(
                folder, table, lock, self.listener, first=_bad_rows(folder), forget_failed=self.retry_failed
            ) as assignment:
                yield assignment

    def _checked(self, rows: Readable) -> Table:
        """Read the whole input, compare with what was identity before, write down the job; refused, it leaves
        nothing.
        """
        folder = self.folder
        with folder.nothing_if_refused():
            if conflict := _conflict(folder, self.identity):  # another process began since
                raise conflict
            folder.sweep()
            scanned = scan(self.source, rows, folder)
            scanned.problems.settle(self.source, len(scanned.table), self.skip_bad, "score")
            scanned.problems.put_in_place(folder, scanned.table)
            write_atomic(folder.spec, json.dumps(self.identity, indent=2) + "\n")
        return scanned.table


def check_paths(source: Path, output: Path) -> tuple[BatchFolder, InputSource]:
    """The folder and the input, refused where they cannot be used; nothing is written and no server asked."""
    if output.suffix not in OUTPUTS:
        raise UsageError(f"the output {output.name!r} has no known ending.", f"Use {' or '.join(OUTPUTS)}.")
    return folder_of(str(output)), open_source(str(source), None)


class ScoreWork:
    """Turns rows into the requests that score them, step by step, and replies into lines."""

    def __init__(self, options: ScoreOptions, table: Table, rows: ScoreRows) -> None:
        self.scoring, self._table, self._rows = Scoring(options), table, rows

    def steps(self, number: int, raw: bytes) -> Steps[dict[str, Any]]:
        """The requests of a row, and what its line says then."""
        score = yield from self.scoring.steps(self._row(number, raw))
        return score.to_json()

    def first_step(self, number: int, raw: bytes) -> RowStep:
        steps = self.steps(number, raw)
        return RowStep(next(steps), steps)

    def result(self, number: int, context: Steps[Any], replies: Sequence[Any]) -> bytes | RowStep:
        try:
            return RowStep(context.send(replies), context)
        except StopIteration as end:
            return _line({"row": self._table.lines[number], **end.value})

    def failure(self, number: int, raw: bytes, error: CorralError) -> bytes:
        line = self._table.lines[number]
        try:
            data = {"id": self._row(number, raw).id}
        except DataError:
            data = {}
        return _line(to_json(bad_row(data, line, error)))

    def _row(self, number: int, raw: bytes) -> ScoreRow:
        return self._rows.row(raw, self._table.lines[number])


def _identity(model: str, options: ScoreOptions) -> dict[str, Any]:
    """The settings that must not change between runs of one output."""
    free = ("concurrency", "memory_gib", "vocabulary")
    return {"model": model, **{k: v for k, v in to_json(options).items() if k not in free}}


def _conflict(folder: BatchFolder, identity: dict[str, Any]) -> ConflictError | None:
    """Why an earlier output cannot be continued; None where it can, or there is none."""
    if not folder.spec.exists():
        if not folder.output.exists():
            return None
        return ConflictError(
            f"{folder.output} exists and does not belong to a scoring job.",
            "Choose another output, or overwrite it: --force",
        )
    before = json.loads(folder.spec.read_text(encoding="utf-8"))
    if before.keys() & identity.keys() <= {"model"}:
        return ConflictError(
            f"{folder.output} belongs to a batch.", "Choose another output, or overwrite it: --force"
        )
    changed = [f"{k}: {before.get(k)!r} before, {v!r} now" for k, v in identity.items() if before.get(k) != v]
    if not changed:
        return None
    return ConflictError(
        f"{folder.output} was begun with other settings: {'; '.join(changed)}.",
        "Use the old settings to continue, another output, or --force to start over with the new ones.",
    )


def _forget(folder: BatchFolder) -> None:
    for path in folder.path.iterdir():
        if path != folder.lock and not path.name.startswith("lock.") and path.suffix != BEFORE:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.begin_anew(folder.output, folder.errors)


def _bad_rows(folder: BatchFolder) -> Iterator[LedgerEntry]:
    return (LedgerEntry(one.row, FAILED, _line(to_json(_as_bad(one)))) for one in read_problems(folder.problems))


def _as_bad(problem: RowProblem) -> BadRow:
    identity = problem.id if problem.id is not None else str(problem.line)
    return BadRow(identity, problem.line, "DataError", f"line {problem.line} {problem.text}", "Correct the row.")


def _results(ledger: Ledger) -> Iterator[dict[str, Any]]:
    return (msgspec.json.decode(ledger.line(record)) for record in ledger.records() if record.kind == FINE)


def _in_order(results: Path) -> Iterator[dict[str, Any]]:
    """Every result, in the order of the input."""
    with results.open("rb") as file:
        found, offset = [], 0
        for line in file:
            found.append((msgspec.json.decode(line)["row"], offset, len(line)))
            offset += len(line)
        for _, begin, length in sorted(found):
            file.seek(begin)
            yield msgspec.json.decode(file.read(length))


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
