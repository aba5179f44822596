"""What a batch is asked to do, and with which servers: kept on disk, and compared before anything continues.

`corral batch` with the same arguments continues. Another input, model, parameters or shape is refused: with `--force`
rows whose content did not change keep their results when only the input changed, and everything is done anew when the
model, the parameters or the shape changed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from corral.base.errors import ConflictError, DataError, NotFoundError, UsageError
from corral.base.record import load_json, renamed_from, save_record, to_json
from corral.use.batch.core.folder import BatchFolder, note_output, sync_dir
from corral.use.batch.core.ledger import LedgerEntry
from corral.use.batch.core.records import FAILED
from corral.use.batch.core.table import Table
from corral.use.batch.input.check import (
    Problems,
    Scanned,
    TokenCounter,
    mark_too_long,
    note_prefixes,
    note_weights,
    read_problems,
    scan,
)
from corral.use.batch.input.recipe import AUTO, OPENAI, Recipe
from corral.use.batch.input.rows import InputSource, open_source
from corral.use.batch.output import BatchWork, check_output, export, is_live, output_kind, problem_line

if TYPE_CHECKING:
    from corral.deploy.lifecycle.decision import DeployRequest

VERSION = 1
ROW_ORDERS = ("input", "longest-first", "prefix-first")  # in which rows are sent


@dataclass(frozen=True)
class BatchSpec:
    """What the user asks for, apart from the servers."""

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
    as_service: bool = False  # as OpenAI's batch API has it: the server itself refuses rows that are too long
    saved: bool = False  # the rows are those that were checked and kept: the input cannot be read again


RAY_DATA = "ray-data"


@dataclass(frozen=True)
class ModelToStart:
    """A model that the batch starts for itself and stops at the end."""

    model: str
    context: int | None = None
    fixed: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)  # other fields of a request: target, runtime, …
    engine: str = "http"  # or RAY_DATA: Ray starts it (`ray_engine`)
    replicas: int = 1  # engines that Ray starts

    def request(self, name: str, **more: Any) -> DeployRequest:
        """The request of the `corral up` that starts it."""
        from corral.deploy.lifecycle.decision import DeployRequest
        from corral.plan.settings import parse_assignments

        fields = dict(self.more)
        context = {"context": self.context} if self.context else {}
        fields["goal"] = {**fields.get("goal", {}), **context, "goal": "throughput"}
        fields["patience"] = {"restarts": 3, **fields.get("patience", {})}
        fields["fixed"] = {**fields.get("fixed", {}), **parse_assignments(self.fixed)}
        fields["extra_args"] = (*fields.get("extra_args", ()), *self.engine_args)
        return DeployRequest.of({**fields, "model": self.model, "name": name, **more})


@dataclass(frozen=True)
class BatchServers:
    """The servers that a batch uses, or the model that it starts."""

    deployments: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    key_file: str | None = None
    start_model: ModelToStart | None = None
    in_process: bool = False  # `--in-process`: rows go to the engine without HTTP
    jobs: int = 1  # that a scheduler is to run at once


@dataclass(frozen=True)
class BatchRecord:
    """A batch's spec and servers as they are kept in its folder."""

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
    start_model: ModelToStart | None = field(default=None, metadata=renamed_from("offline"))
    in_process: bool = False
    jobs: int = 1
    as_service: bool = False

    @property
    def servers(self) -> BatchServers:
        return BatchServers(self.deployments, self.urls, self.key_file, self.start_model, self.in_process, self.jobs)


@dataclass(frozen=True)
class PreparedBatch:
    """A batch that may run."""

    folder: BatchFolder
    record: BatchRecord
    table: Table
    problems: Problems
    continued: bool

    def work(self) -> BatchWork:
        """The requests and the result lines of the rows."""
        record = self.record
        models = (record.model,) if record.model else ()
        folder = Path(record.input).parent if record.input != "-" else None
        return BatchWork(record.recipe, self.table, models, record.shape, record.answer, record.as_service, folder)

    def bad_rows(self) -> Iterator[LedgerEntry]:
        """The error lines of rows that were found bad."""
        return (LedgerEntry(p.row, FAILED, problem_line(p, self.table)) for p in read_problems(self.folder.problems))

    def in_order(self, name: str) -> Sequence[int] | None:
        """The rows in an order of `ROW_ORDERS`; None: in that of the input."""
        if name == "longest-first":
            note_weights(self.table, self.record.recipe)
            return self.table.longest_first()
        if name == "prefix-first":
            note_prefixes(self.table, self.record.recipe)
            return self.table.prefix_first()
        return None

    def export(self) -> None:
        """Make the output from the results, where they did not go straight into it."""
        if not self.folder.live:
            export(self.folder, self.table, self.record.ordered)


def folder_of(output: str, ordered: bool = False) -> BatchFolder:
    """The folder of a batch; an output that cannot be written is refused."""
    path = Path(output)
    if path.is_dir():
        raise UsageError(f"the output {output!r} is a folder.", "Give a file name in it.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} for the output.", f"mkdir -p {path.parent}")
    check_output(path)
    return BatchFolder(path, is_live(path, ordered))


def load_record(output: str) -> tuple[BatchFolder, BatchRecord]:
    """An existing batch by its output."""
    folder = BatchFolder(Path(output))
    if not folder.spec.is_file():
        raise NotFoundError(f"there is no batch with the output {output!r}.", "Give the path that -o was given.")
    record = load_json(BatchRecord, folder.spec)
    return BatchFolder(folder.output, is_live(folder.output, record.ordered)), record


def _earlier(spec: BatchSpec, folder: BatchFolder) -> BatchRecord | None:
    if folder.spec.is_file():
        return load_json(BatchRecord, folder.spec)
    _refuse_foreign(spec, folder)
    return None


def source_of(spec: BatchSpec, folder: BatchFolder) -> InputSource:
    """The input; one that does not exist, or is the output, is refused."""
    source = open_source(spec.input, spec.input_format)
    if source.path is not None and source.path.absolute() == folder.output.absolute():
        raise UsageError("the output is the input.", "Write to another file.")
    return source


def prepare(
    spec: BatchSpec,
    folder: BatchFolder,
    servers: BatchServers,
    *,
    model: str,
    models: tuple[str, ...] = (),
    context: int | None = None,
    counter: TokenCounter | None = None,
    busy: bool = False,
) -> PreparedBatch:
    """Check the input, compare the spec with the earlier one, and write it down; the lock must be held.

    `busy` says that other runners work on the batch: then nothing may change under them.
    """
    if not busy:  # left from an earlier run; one that comes while the input is checked counts
        folder.cancel.unlink(missing_ok=True)
    before = _earlier(spec, folder)
    source = source_of(spec, folder)
    recipe = replace(spec.recipe, text_cells=spec.recipe.text_cells or source.format in ("csv", "tsv"))
    same = before is not None and _differences(before, spec, recipe, model) == []
    with folder.nothing_if_refused():
        checked = _saved(before, folder) if spec.saved else _reuse(before, source, folder) if same else None
        fresh = checked is None
        if checked is None:
            checked = _check(spec, source, recipe, folder, models, None if spec.as_service else context, counter)
        record = _record(spec, source, checked, folder, model, before, servers)
        if before is not None:
            _compare(before, record, spec, folder, busy)
        if fresh:
            checked.problems.put_in_place(folder, checked.table)
            checked.table.save(folder.index, {"digest": checked.digest})
        if record != before:
            save_record(folder.spec, record)
        sync_dir(folder.path)
        note_output(folder.output)
    return PreparedBatch(folder, record, checked.table, checked.problems, continued=before is not None)


class _CheckedInput(NamedTuple):
    """The result of a check, made now or earlier."""

    table: Table
    problems: Problems
    recipe: Recipe
    digest: str


def _check(
    spec: BatchSpec,
    source: InputSource,
    recipe: Recipe,
    folder: BatchFolder,
    models: tuple[str, ...],
    context: int | None,
    counter: TokenCounter | None,
) -> _CheckedInput:
    """Read the whole input; refuse it when it has problems that are not to be skipped."""
    added = spec.answer if spec.shape != OPENAI else None
    scanned = scan(source, recipe, folder, models=models, added=added, context=context, local=not spec.as_service)
    if context is not None and counter is not None and scanned.long_rows:
        mark_too_long(scanned, counter, context)
    scanned.problems.settle(source, len(scanned.table), spec.skip_bad, "do")
    return _CheckedInput(scanned.table, scanned.problems, _kind(scanned), scanned.table.digest())


def _record(
    spec: BatchSpec,
    source: InputSource,
    checked: _CheckedInput,
    folder: BatchFolder,
    model: str,
    before: BatchRecord | None,
    servers: BatchServers,
) -> BatchRecord:
    return BatchRecord(
        version=VERSION,
        input=str(source.path.absolute()) if source.path else "-",
        format=source.format,
        compression=source.compression,
        fingerprint=tuple(source.fingerprint()),
        rows=len(checked.table),
        digest=checked.digest,
        bad=checked.problems.count,
        recipe=checked.recipe,
        model=model,
        shape=_shape(spec, checked.recipe, folder),
        answer=spec.answer,
        ordered=spec.ordered,
        skip_bad=spec.skip_bad,
        created_s=before.created_s if before else time.time(),
        deployments=servers.deployments,
        urls=servers.urls,
        key_file=str(Path(servers.key_file).absolute()) if servers.key_file else None,
        start_model=servers.start_model,
        in_process=servers.in_process,
        jobs=servers.jobs,
        as_service=spec.as_service,
    )


def _kind(scanned: Scanned[Recipe]) -> Recipe:
    """The recipe with the kind of rows that the input has; an empty input counts as plain."""
    return replace(scanned.recipe, kind="plain") if scanned.recipe.kind == AUTO else scanned.recipe


def _refuse_foreign(spec: BatchSpec, folder: BatchFolder) -> None:
    for path in (folder.output, folder.errors):
        if path.exists() and path.stat().st_size and not spec.force:
            raise ConflictError(
                f"{path} exists and does not belong to a batch.",
                "Choose another output, or overwrite it: `corral batch run` with --force.",
            )
    folder.begin_anew(folder.output, folder.errors)


def _shape(spec: BatchSpec, recipe: Recipe, folder: BatchFolder) -> str:
    shape = spec.shape or (OPENAI if recipe.kind == OPENAI else "columns")
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
    checked = _load(before, folder) if before is not None else None
    if checked is None:
        raise DataError(
            f"the rows of {folder.output} are not in {folder.path} as they were kept.",
            "Give the input once more: run the command it was begun with.",
        )
    return checked


def _load(before: BatchRecord, folder: BatchFolder) -> _CheckedInput | None:
    loaded = Table.load(folder.index)
    if loaded is None or loaded[1].get("digest") != before.digest:
        return None
    problems = Problems(folder.problems)
    problems.count = sum(1 for _ in read_problems(folder.problems))
    return _CheckedInput(loaded[0], problems, before.recipe, before.digest)


def _differences(before: BatchRecord, spec: BatchSpec, recipe: Recipe, model: str) -> list[str]:
    """The settings that differ from the earlier ones, as text."""
    changes = []
    if before.model != model and model:
        changes.append(f"model {before.model!r} → {model!r}")
    old, new = to_json(before.recipe), to_json(recipe)
    for name in new:
        if name == "kind" and new[name] == AUTO:
            continue
        if name == "params":
            keys = sorted(old[name].keys() | new[name].keys())
            changes += [f"{k} {_shown(old[name], k)} → {_shown(new[name], k)}" for k in keys
                      if old[name].get(k) != new[name].get(k)]  # fmt: skip
        elif old[name] != new[name]:
            changes.append(f"{name} {old[name]!r} → {new[name]!r}")
    if spec.shape not in (None, before.shape):
        changes.append(f"format {before.shape} → {spec.shape}")
    if spec.answer != before.answer:
        changes.append(f"answer column {before.answer!r} → {spec.answer!r}")
    if spec.ordered != before.ordered:
        changes.append(f"ordered {before.ordered} → {spec.ordered}")
    return changes


def _shown(values: dict[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "unset"


def _compare(before: BatchRecord, now: BatchRecord, spec: BatchSpec, folder: BatchFolder, busy: bool) -> None:
    """Refuse settings that would mix results of different requests; with `force`, drop the old results."""
    changes = _differences(before, spec, replace(now.recipe, kind=before.recipe.kind), now.model)
    if before.recipe.kind != now.recipe.kind:
        changes.append(f"kind of rows {before.recipe.kind} → {now.recipe.kind}")
    if busy and spec.force and (changes or before.digest != now.digest):
        raise ConflictError(
            f"{folder.output} is being worked on, and input or settings changed.",
            "Stop it first with `corral batch cancel`; then start it again: `corral batch run` with --force.",
        )
    if changes:
        if not spec.force:
            raise ConflictError(
                f"{folder.output} was begun with other settings: {'; '.join(changes)}.",
                "Use the old settings to continue, another output, or `corral batch run` with --force to start over.",
                differences=changes,
            )
        folder.ledger.unlink(missing_ok=True)
        folder.begin_anew(folder.results, folder.errors, folder.output)
        shutil.rmtree(folder.parts, ignore_errors=True)
    elif before.digest != now.digest and not spec.force:
        raise ConflictError(
            f"the input changed since {folder.output} was begun ({before.rows} rows then, {now.rows} now).",
            "`corral batch run` with --force keeps the results of rows that did not change. Or use another output.",
        )
