"""A batch seen from outside: its status, a page of its rows, its failures grouped by cause; asking it to stop, and
checking an input without running it.

Rows are read as the ledger counts them, also while runners write: a record of the ledger is written after its line,
so every line found is whole.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from corral.base.errors import DataError
from corral.base.lock import SILENT_S, TOUCH_S, holder_of, lock_holder, silence_s
from corral.base.processes import Identity
from corral.deploy.targets.base import JobState
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.ledger import read_ledger
from corral.use.batch.core.records import FAILED, FINE
from corral.use.batch.core.run import BatchState
from corral.use.batch.core.table import RowReader, Table
from corral.use.batch.input.check import RowProblem, read_problems, scan
from corral.use.batch.input.recipe import Recipe
from corral.use.batch.input.rows import open_source
from corral.use.batch.jobs import QueuedState, cancel_waiting, queued_states
from corral.use.batch.parts import all_parts, claim_path, held_blocks, load_division, runners_of
from corral.use.batch.spec import BatchRecord, load_record


@dataclass(frozen=True)
class BatchStatus:
    """The status of a batch; `state` is running, done, or how it was left."""

    output: str
    errors: str
    state: BatchState | JobState
    reason: str
    rows: int
    fine: int
    failed: int
    model: str
    input: str
    created_s: float
    holder: Identity | None
    runners: tuple[Identity, ...] = ()  # every runner that works on it
    blocks: Blocks | None = None  # when it is shared
    jobs: tuple[QueuedState, ...] = ()  # of a scheduler

    @property
    def done(self) -> bool:
        return self.state is BatchState.DONE


@dataclass(frozen=True)
class Blocks:
    """How far the blocks of a shared batch are."""

    size: int
    count: int
    done: int
    held: int


@dataclass(frozen=True)
class CheckedRow:
    """A bad row: its line in the input, what is wrong, and its id where it has one."""

    line: int
    text: str
    id: str | None


@dataclass(frozen=True)
class Checked:
    """The result of `corral batch check`."""

    rows: int
    kind: str
    problems: tuple[CheckedRow, ...]


def inspect(output: str) -> BatchStatus:
    """The status of a batch, counted from its ledgers."""
    folder, record = load_record(output)
    counts, done = [0, 0], bytearray(record.rows)
    for one in (folder, *all_parts(folder)):
        for entry in read_ledger(one):
            if entry.row < record.rows and not done[entry.row]:
                done[entry.row] = 1
                counts[entry.kind] += 1
    fine, failed = counts
    jobs = queued_states(folder)
    known = _runners(folder, jobs_over=bool(jobs) and all(job.over for job in jobs))
    runners = [one.who for one in known if not one.gone]
    state: BatchState | JobState
    state, reason = _state(folder, fine + failed >= record.rows, known)
    if state not in (BatchState.RUNNING, BatchState.DONE) and (alive := [job for job in jobs if not job.over]):
        reason = reason if known and state is BatchState.INTERRUPTED else ""  # names the killed runner
        state = alive[0].state
    elif jobs and state not in (BatchState.RUNNING, BatchState.DONE):
        reason = next((job.text for job in reversed(jobs) if job.reason), jobs[-1].text)
    return BatchStatus(
        output=output,
        errors=str(folder.errors),
        state=state,
        reason=reason,
        rows=record.rows,
        fine=fine,
        failed=failed,
        model=record.model,
        input=record.input,
        created_s=record.created_s,
        holder=runners[0] if runners else None,
        runners=tuple(runners),
        blocks=_blocks(folder, record, done),
        jobs=tuple(jobs),
    )


def _blocks(folder: BatchFolder, record: BatchRecord, done: bytearray) -> Blocks | None:
    """How far the blocks are; in another order than the input's, finished ones are estimated from the rows done."""
    division = load_division(folder)
    if division is None:
        return None
    count, size = division.count(record.rows), division.size
    if division.row_order == "input":
        finished = {n for n in range(count) if done.find(0, n * size, (n + 1) * size) < 0}
    else:
        finished = set(range(sum(done) // size))
    try:
        held = held_blocks(folder)
    except FileNotFoundError:
        held = set()
    live = sum(holder_of(claim_path(folder, n)) is not None for n in held - finished)
    return Blocks(size, count, len(finished), live)


@dataclass(frozen=True)
class _Runner:
    """The holder of a lock; `gone` when it is dead."""

    who: Identity
    gone: bool
    silent_s: float  # 0 for those whose process can be seen from here
    touched_s: float


def _runners(folder: BatchFolder, jobs_over: bool) -> list[_Runner]:
    """The runners that work on a batch, or did and were killed; a silent one is gone when its job is over."""
    locks = [part.holder for part in all_parts(folder)]
    sharing = [one for lock in locks if (one := _runner(lock, jobs_over)) is not None]
    sole = None if any(not one.gone for one in sharing) else _runner(folder.lock, jobs_over)
    return [*sharing, sole] if sole else sharing


def _runner(lock: Path, jobs_over: bool) -> _Runner | None:
    who = lock_holder(lock)
    if who is None or not who.pid:
        return None
    try:
        touched_s = lock.stat().st_mtime
    except OSError:
        return None
    silent_s = 0.0 if who.is_among_ours() else silence_s(lock)
    gone = holder_of(lock) is None or (jobs_over and silent_s > 2 * TOUCH_S)
    return _Runner(who, gone, silent_s, touched_s)


def _silence(runners: list[_Runner]) -> str:
    """How long runners on other machines have been silent, when that is long."""
    late = [one for one in runners if not one.gone and one.silent_s > 3 * TOUCH_S]
    texts = [f"process {one.who.pid} on {one.who.host} has been silent for {one.silent_s:.0f} s" for one in late]
    return f"{', '.join(texts)}; after {SILENT_S:.0f} s it counts as gone" if texts else ""


def _state(folder: BatchFolder, complete: bool, runners: list[_Runner]) -> tuple[BatchState, str]:
    if any(not one.gone for one in runners):
        return BatchState.RUNNING, _silence(runners)
    try:
        saved = msgspec.json.decode(folder.state.read_bytes())
    except (OSError, msgspec.DecodeError):
        saved = {"state": "", "details": {}}
    killed = [one for one in runners if one.touched_s > saved.get("at_s", 0.0)]  # since it last ended
    if complete and (folder.live or saved["state"] == BatchState.DONE) and not folder.shared.is_dir():
        return BatchState.DONE, ""
    if saved["state"] in (BatchState.STOPPED, BatchState.CANCELLED, BatchState.FAILED) and not killed:
        failed = saved["state"] == BatchState.FAILED
        return BatchState(saved["state"]), saved["details"].get("error", {}).get("message", "") if failed else ""
    who = ", ".join(f"process {one.who.pid} on {one.who.host}" for one in killed or runners)
    return BatchState.INTERRUPTED, f"its runner{f', {who},' if who else ''} is gone: killed, or the machine went down"


def ask_to_stop(output: str) -> str:
    """Ask the runners of a batch to stop; returns a sentence that says what will happen."""
    folder, _ = load_record(output)
    runners = runners_of(folder) or [one for one in (holder_of(folder.lock),) if one is not None]
    waiting = cancel_waiting(folder) if folder.jobs.is_dir() else []
    if waiting:
        cancelled = f"{output}: took job {', '.join(waiting)} out of the queue"
        if not runners:
            return f"{cancelled}; `corral batch resume` continues"
    if not runners:
        return f"{output}: no one is working on it"
    descriptor = os.open(folder.cancel, os.O_WRONLY | os.O_CREAT, 0o600)
    os.close(descriptor)
    who = ", ".join(f"process {one.pid} on {one.host}" for one in runners)
    return f"{output}: asked {who} to stop; `corral batch resume` continues"


def check_input(given: str, format_: str | None, recipe: Recipe) -> Checked:
    """Check an input on its own."""
    source = open_source(given, format_)
    with tempfile.TemporaryDirectory(prefix="corral-check-") as temporary:
        folder = BatchFolder(Path(temporary) / "check.jsonl")
        folder.create()
        scanned = scan(source, recipe, folder)
        scanned.problems.close()
        problems = sorted(read_problems(scanned.problems.path), key=lambda p: p.line)
    return Checked(len(scanned.table), scanned.recipe.kind, tuple(map(_row, problems)))


def _row(problem: RowProblem) -> CheckedRow:
    return CheckedRow(problem.line, problem.text, problem.id)


LONGEST = 20_000  # characters of one text that are shown
_EXAMPLES = 5  # rows named for one cause
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*|'[^']*'|\"[^\"]*\"|`[^`]*`")


@dataclass(frozen=True)
class BatchRow:
    """One row that was answered or failed; `question` is the row of the input, where it can still be read."""

    line: int
    id: str
    question: str
    answer: str
    error: str = ""
    code: str = ""
    finish_reason: str = ""
    tokens: int | None = None


@dataclass(frozen=True)
class FailureGroup:
    """Rows that failed for the same reason: their messages differ in numbers and quoted values at most."""

    code: str
    message: str  # of the first of them
    count: int
    lines: tuple[int, ...] = ()  # of the input, the first few
    ids: tuple[str, ...] = field(default=())


def rows_of(
    output: str, failed: bool, at: int = 0, count: int = 50, code: str = "", like: str = ""
) -> list[BatchRow]:
    """A page of the rows that were answered, or of those that failed (for one cause), in the order they arrived."""
    folder, record = load_record(output)
    loaded = Table.load(folder.index)
    table = loaded[0] if loaded else None
    lines = _lines_of(folder, FAILED if failed else FINE)
    if code or like:
        lines = ((row, line) for row, line in lines if _cause(line) == (code, _shape(like)))
    with contextlib.ExitStack() as stack:
        reader = _reader(table, stack)
        return [_batch_row(row, line, record, table, reader) for row, line in itertools.islice(lines, at, at + count)]


def failure_groups(output: str) -> list[FailureGroup]:
    """Failed rows grouped by cause, the most frequent first."""
    folder, _ = load_record(output)
    examples: dict[tuple[str, str], list[tuple[int, str]]] = {}
    counts: dict[tuple[str, str], int] = {}
    messages: dict[tuple[str, str], str] = {}
    for _, line in _lines_of(folder, FAILED):
        code, message = _error_of(line)
        cause = (code, _shape(message))
        counts[cause] = counts.get(cause, 0) + 1
        messages.setdefault(cause, message)
        if counts[cause] <= _EXAMPLES:
            error = line.get("error") or {}
            examples.setdefault(cause, []).append((int(error.get("line") or 0), str(line.get("custom_id") or "")))
    return [
        FailureGroup(code, messages[code, shape], count, *zip(*examples[code, shape], strict=True))
        for (code, shape), count in sorted(counts.items(), key=lambda pair: -pair[1])
    ]


def _cause(line: dict[str, Any]) -> tuple[str, str]:
    code, message = _error_of(line)
    return code, _shape(message)


def _error_of(line: dict[str, Any]) -> tuple[str, str]:
    error = line.get("error")
    if not isinstance(error, dict):
        return "unknown", ""
    return str(error.get("code") or "unknown"), str(error.get("message") or "")


def _shape(message: str) -> str:
    """A message without the parts that differ from row to row."""
    return _VARYING.sub("…", message)[:500]


def _lines_of(folder: BatchFolder, kind: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row numbers and lines, from the batch and from all parts; of two results of a row, the first counts."""
    seen: set[int] = set()
    for one in (folder, *all_parts(folder)):
        path: Path = one.errors if kind == FAILED else one.results
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # nothing yet, or moved away
        try:
            for entry in read_ledger(one):
                if entry.kind == kind and entry.row not in seen:
                    seen.add(entry.row)
                    with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                        line = msgspec.json.decode(os.pread(descriptor, entry.length, entry.end - entry.length))
                        if isinstance(line, dict):
                            yield entry.row, line
        finally:
            os.close(descriptor)


def _reader(table: Table | None, stack: contextlib.ExitStack) -> RowReader | None:
    try:
        return stack.enter_context(contextlib.closing(RowReader(table))) if table is not None else None
    except OSError:
        return None  # the input was moved away


def _batch_row(
    number: int, line: dict[str, Any], record: BatchRecord, table: Table | None, reader: RowReader | None
) -> BatchRow:
    input_line = table.lines[number] if table is not None and number < len(table) else 0
    question = ""
    if reader is not None and table is not None and number < len(table):
        with contextlib.suppress(OSError, DataError):  # changed since: the answer is still worth a look
            question = reader.raw(number).decode("utf-8", "replace")
    if line.get("error"):
        code, message = _error_of(line)
        return BatchRow(input_line, str(line.get("custom_id") or ""), question[:LONGEST], "", message[:LONGEST], code)
    if record.shape == "columns":
        answer, finish = line.get(record.answer), line.get("finish_reason")
        identity, tokens = line.get(record.recipe.id_column or "id"), line.get("completion_tokens")
    else:
        identity = line.get("custom_id")
        answer, finish, tokens = _openai_answer(line)
    return BatchRow(
        input_line, str(identity or ""), question[:LONGEST], _text(answer)[:LONGEST], finish_reason=_text(finish),
        tokens=tokens if isinstance(tokens, int) else None,
    )  # fmt: skip


def _openai_answer(line: dict[str, Any]) -> tuple[Any, Any, Any]:
    try:
        body = line["response"]["body"]
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return text, choice.get("finish_reason"), (body.get("usage") or {}).get("completion_tokens")
    except (KeyError, IndexError, TypeError):
        return line, "", None


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
