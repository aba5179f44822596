"""Which batches there are: each leaves a note in the home, because its files lie beside its output.

    <home>/batches/<hash>      the path of one output

A note says only where to look: a batch that was moved or deleted is not listed, and a lost note costs nothing but
its line in a list.

What a batch was asked to do, on disk; compared before anything continues.

`corral batch` with the same arguments continues. Another input, model, parameters or shape is refused: with `--force`
rows whose content did not change keep their results when only the input changed, and everything is done anew when the
model, the parameters or the shape changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from corral.base.errors import ConflictError, DataError, NotFoundError, UsageError
from corral.base.files import make_private_dir, write_atomic
from corral.base.home import batches_dir
from corral.base.record import dump_json, load_json, to_json
from corral.use.batch.core.folder import BatchFolder, sync_dir
from corral.use.batch.core.ledger import LedgerEntry
from corral.use.batch.core.records import FAILED
from corral.use.batch.core.table import Table
from corral.use.batch.input.check import Problems, Scanned, note_beginnings, note_weights, read_problems, scan
from corral.use.batch.input.lengths import Counter, mark_too_long
from corral.use.batch.input.recipe import AUTO, OPENAI, Recipe
from corral.use.batch.input.rows import InputSource, open_source
from corral.use.batch.output import BatchWork, check_output, export, is_live, output_kind, problem_line


def note_output(output: Path) -> None:
    """Remember where a batch writes; a home that cannot be written does not hinder the batch."""
    path = str(output.absolute())
    note = batches_dir() / hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    with contextlib.suppress(OSError):
        if not note.exists():
            make_private_dir(batches_dir())
            write_atomic(note, path + "\n")


def known_outputs() -> list[Path]:
    """The outputs of all batches that are still where they were begun, the one worked on last first."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for note in batches_dir().iterdir():
            with contextlib.suppress(OSError, UnicodeDecodeError):
                folder = BatchFolder(Path(note.read_text(encoding="utf-8").rstrip("\n")))
                ledger = folder.ledger if folder.ledger.exists() else folder.job
                if folder.job.is_file():
                    found.append((ledger.stat().st_mtime, folder.output))
    return [output for _, output in sorted(found, key=lambda pair: -pair[0])]


VERSION = 1
ORDERS = ("input", "longest-first", "prefix-first")  # in which rows are sent


@dataclass(frozen=True)
class BatchOrder:
    """What the user asks for, apart from where it runs."""

    input: str
    output: str
    recipe: Recipe = field(default_factory=Recipe)
    input_format: str | None = None
    shape: str | None = None  # openai, columns; None: as the input
    answer: str = "response"
    ordered: bool = False
    skip_bad: bool = False
    force: bool = False
    retry_failed: bool = False
    saved: bool = False  # the rows are those that were checked and kept: the input cannot be read again


@dataclass(frozen=True)
class BatchRecord:
    """The job as it is kept in its folder."""

    version: int
    input: str
    format: str
    compression: str
    fingerprint: tuple[int, ...]
    rows: int
    digest: str
    bad: int
    recipe: Recipe
    model: str
    shape: str
    answer: str
    ordered: bool
    skip_bad: bool
    created_s: float
    deployments: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    key_file: str | None = None
    offline: dict[str, Any] | None = None  # the model that the batch starts itself
    in_process: bool = False  # `--offline`: rows go to the engine without HTTP


@dataclass(frozen=True)
class Prepared:
    """A job that may run."""

    folder: BatchFolder
    record: BatchRecord
    table: Table
    problems: Problems
    continued: bool

    def work(self) -> BatchWork:
        """What is done with the rows."""
        record = self.record
        models = (record.model,) if record.model else ()
        return BatchWork(record.recipe, self.table, models, record.shape, record.answer)

    def bad_rows(self) -> Iterator[LedgerEntry]:
        """The error lines of rows that were found bad."""
        return (LedgerEntry(p.row, FAILED, problem_line(p, self.table)) for p in read_problems(self.folder.problems))

    def in_order(self, name: str) -> Sequence[int] | None:
        """The rows in an order of `ORDERS`; None: as they are."""
        if name == "longest-first":
            note_weights(self.table, self.record.recipe)
            return self.table.longest_first()
        if name == "prefix-first":
            note_beginnings(self.table, self.record.recipe)
            return self.table.prefix_first()
        return None

    def export(self) -> None:
        """Make the output from the results, where they did not go straight into it."""
        if not self.folder.live:
            export(self.folder, self.table, self.record.ordered)


def folder_of(output: str, ordered: bool = False) -> BatchFolder:
    """The folder of a job, refused where the output cannot be written."""
    path = Path(output)
    if path.is_dir():
        raise UsageError(f"the output {output!r} is a folder.", "Give a file name in it.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} for the output.", f"mkdir -p {path.parent}")
    check_output(path)
    return BatchFolder(path, is_live(path, ordered))


def load_record(output: str) -> tuple[BatchFolder, BatchRecord]:
    """An existing job by its output."""
    folder = BatchFolder(Path(output))
    if not folder.job.is_file():
        raise NotFoundError(f"there is no batch with the output {output!r}.", "Give the path that -o was given.")
    record = load_json(BatchRecord, folder.job)
    return BatchFolder(folder.output, is_live(folder.output, record.ordered)), record


def _earlier(order: BatchOrder, folder: BatchFolder) -> BatchRecord | None:
    if folder.job.is_file():
        return load_json(BatchRecord, folder.job)
    _refuse_foreign(order, folder)
    return None


def source_of(order: BatchOrder, folder: BatchFolder) -> InputSource:
    """The input, refused where there is none, or where it is the output."""
    source = open_source(order.input, order.input_format)
    if source.path is not None and source.path.absolute() == folder.output.absolute():
        raise UsageError("the output is the input.", "Write to another file.")
    return source


def prepare(
    order: BatchOrder,
    folder: BatchFolder,
    where: dict[str, Any],
    *,
    model: str,
    models: tuple[str, ...] = (),
    context: int | None = None,
    counter: Counter | None = None,
    busy: bool = False,
) -> Prepared:
    """Check the input, compare with what was asked before, write down the job; the lock must be held.

    `busy` says that other runners work on it: then nothing may change under them.
    """
    if not busy:  # left from an earlier run; one that comes while the input is checked counts
        folder.cancel.unlink(missing_ok=True)
    before = _earlier(order, folder)
    source = source_of(order, folder)
    recipe = replace(order.recipe, text_cells=order.recipe.text_cells or source.format in ("csv", "tsv"))
    same = before is not None and _differences(before, order, recipe, model) == []
    with folder.nothing_if_refused():
        seen = _saved(before, folder) if order.saved else _reuse(before, source, folder) if same else None
        fresh = seen is None
        if seen is None:
            seen = _check(order, source, recipe, folder, models, context, counter)
        record = _record(order, source, seen, folder, model, before, where)
        if before is not None:
            _compare(before, record, order, folder, busy)
        if fresh:
            seen.problems.put_in_place(folder, seen.table)
            seen.table.save(folder.index, {"digest": seen.digest})
        if record != before:
            write_atomic(folder.job, dump_json(record))
        sync_dir(folder.path)
        note_output(folder.output)
    return Prepared(folder, record, seen.table, seen.problems, continued=before is not None)


class _CheckedInput(NamedTuple):
    """An input that was checked, now or earlier."""

    table: Table
    problems: Problems
    recipe: Recipe
    digest: str


def _check(
    order: BatchOrder,
    source: InputSource,
    recipe: Recipe,
    folder: BatchFolder,
    models: tuple[str, ...],
    context: int | None,
    counter: Counter | None,
) -> _CheckedInput:
    """Read the whole input; refuse it when it has problems that are not to be skipped."""
    taken = order.answer if order.shape != OPENAI else None
    scanned = scan(source, recipe, folder, models=models, taken=taken, context=context)
    if context is not None and counter is not None and scanned.long_rows:
        mark_too_long(scanned, counter, context)
    scanned.problems.close()
    if scanned.problems.count and not order.skip_bad:
        raise scanned.problems.refusal(
            source,
            len(scanned.table),
            "Correct them, or send them to the error file and do the others: --skip-bad. "
            "`corral batch check` lists all.",
        )
    return _CheckedInput(scanned.table, scanned.problems, _kind(scanned), scanned.table.digest())


def _record(
    order: BatchOrder,
    source: InputSource,
    seen: _CheckedInput,
    folder: BatchFolder,
    model: str,
    before: BatchRecord | None,
    where: dict[str, Any],
) -> BatchRecord:
    return BatchRecord(
        version=VERSION,
        input=str(source.path.absolute()) if source.path else "-",
        format=source.format,
        compression=source.compression,
        fingerprint=tuple(source.fingerprint()),
        rows=len(seen.table),
        digest=seen.digest,
        bad=seen.problems.count,
        recipe=seen.recipe,
        model=model,
        shape=_shape(order, seen.recipe, folder),
        answer=order.answer,
        ordered=order.ordered,
        skip_bad=order.skip_bad,
        created_s=before.created_s if before else time.time(),
        **where,
    )


def _kind(scanned: Scanned[Recipe]) -> Recipe:
    """An input without rows is of either kind."""
    return replace(scanned.recipe, kind="plain") if scanned.recipe.kind == AUTO else scanned.recipe


def _refuse_foreign(order: BatchOrder, folder: BatchFolder) -> None:
    for path in (folder.output, folder.errors):
        if path.exists() and path.stat().st_size and not order.force:
            raise ConflictError(
                f"{path} exists and does not belong to a batch.",
                "Choose another output, or overwrite it: `corral batch run` with --force.",
            )
    folder.begin_anew(folder.output, folder.errors)


def _shape(order: BatchOrder, recipe: Recipe, folder: BatchFolder) -> str:
    shape = order.shape or (OPENAI if recipe.kind == OPENAI else "columns")
    if shape == OPENAI and output_kind(folder.output)[0] != "jsonl":
        raise UsageError("OpenAI batch results are JSON lines.", "End the output in .jsonl, or use --format columns.")
    return shape


def _reuse(before: BatchRecord | None, source: InputSource, folder: BatchFolder) -> _CheckedInput | None:
    """The table of an earlier check, when the input has not been touched since."""
    if before is None or not before.fingerprint or list(before.fingerprint) != source.fingerprint():
        return None
    if before.input != str(source.path.absolute() if source.path else "-"):
        return None
    return _load(before, folder)


def _saved(before: BatchRecord | None, folder: BatchFolder) -> _CheckedInput:
    """The table of an input that came through stdin."""
    seen = _load(before, folder) if before is not None else None
    if seen is None:
        raise DataError(
            f"the rows of {folder.output} are not in {folder.path} as they were kept.",
            "Give the input once more: run the command it was begun with.",
        )
    return seen


def _load(before: BatchRecord, folder: BatchFolder) -> _CheckedInput | None:
    loaded = Table.load(folder.index)
    if loaded is None or loaded[1].get("digest") != before.digest:
        return None
    problems = Problems(folder.problems)
    problems.count = sum(1 for _ in read_problems(folder.problems))
    return _CheckedInput(loaded[0], problems, before.recipe, before.digest)


def _differences(before: BatchRecord, order: BatchOrder, recipe: Recipe, model: str) -> list[str]:
    """What is asked differently, in words."""
    found = []
    if before.model != model and model:
        found.append(f"model {before.model!r} → {model!r}")
    old, new = to_json(before.recipe), to_json(recipe)
    for name in new:
        if name == "kind" and new[name] == AUTO:
            continue
        if name == "params":
            keys = sorted(old[name].keys() | new[name].keys())
            found += [f"{k} {_said(old[name], k)} → {_said(new[name], k)}" for k in keys
                      if old[name].get(k) != new[name].get(k)]  # fmt: skip
        elif old[name] != new[name]:
            found.append(f"{name} {old[name]!r} → {new[name]!r}")
    if order.shape not in (None, before.shape):
        found.append(f"format {before.shape} → {order.shape}")
    if order.answer != before.answer:
        found.append(f"answer column {before.answer!r} → {order.answer!r}")
    if order.ordered != before.ordered:
        found.append(f"ordered {before.ordered} → {order.ordered}")
    return found


def _said(values: dict[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "unset"


def _compare(before: BatchRecord, now: BatchRecord, order: BatchOrder, folder: BatchFolder, busy: bool) -> None:
    """Refuse what would mix results of different questions, or, forced, throw the old ones away."""
    asked = _differences(before, order, replace(now.recipe, kind=before.recipe.kind), now.model)
    if before.recipe.kind != now.recipe.kind:
        asked.append(f"kind of rows {before.recipe.kind} → {now.recipe.kind}")
    if busy and order.force and (asked or before.digest != now.digest):
        raise ConflictError(
            f"{folder.output} is being worked on, and input or settings changed.",
            "Stop it first with `corral batch cancel`; then start it again: `corral batch run` with --force.",
        )
    if asked:
        if not order.force:
            raise ConflictError(
                f"{folder.output} was begun with other settings: {'; '.join(asked)}.",
                "Use the old settings to continue, another output, or `corral batch run` with --force to start over.",
                differences=asked,
            )
        folder.ledger.unlink(missing_ok=True)
        folder.begin_anew(folder.results, folder.errors, folder.output)
        shutil.rmtree(folder.parts, ignore_errors=True)
    elif before.digest != now.digest and not order.force:
        raise ConflictError(
            f"the input changed since {folder.output} was begun ({before.rows} rows then, {now.rows} now).",
            "`corral batch run` with --force keeps the results of rows that did not change. Or use another output.",
        )
