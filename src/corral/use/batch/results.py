"""The rows of a batch as its ledger counts them, for looking at: a page of them, and failures grouped by their cause.

Only reads, also while runners write: a record of the ledger comes after its line, so that every line found is whole.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from corral.base.errors import DataError
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.ledger import read_ledger
from corral.use.batch.core.records import FAILED, FINE
from corral.use.batch.core.table import RowReader, Table
from corral.use.batch.sharing.parts import all_parts
from corral.use.batch.spec import BatchRecord, load_record

LONGEST = 20_000  # characters of one text that are shown
_EXAMPLES = 5  # rows that are named of one cause
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*|'[^']*'|\"[^\"]*\"|`[^`]*`")


@dataclass(frozen=True)
class BatchRow:
    """One row that was answered or failed; `question` is the row as it was given, where it can still be read."""

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
    """A page of the rows that were answered, or of those that failed (of one cause), in the order they came."""
    folder, record = load_record(output)
    loaded = Table.load(folder.index)
    table = loaded[0] if loaded else None
    lines = _lines_of(folder, FAILED if failed else FINE)
    if code or like:
        lines = ((row, line) for row, line in lines if _cause(line) == (code, _shape(like)))
    with contextlib.ExitStack() as stack:
        reader = _reader(table, stack)
        return [_row(row, line, record, table, reader) for row, line in itertools.islice(lines, at, at + count)]


def failure_groups(output: str) -> list[FailureGroup]:
    """What rows failed of, most frequent first."""
    folder, _ = load_record(output)
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    counts: dict[tuple[str, str], int] = {}
    words: dict[tuple[str, str], str] = {}
    for _, line in _lines_of(folder, FAILED):
        code, message = _error_of(line)
        cause = (code, _shape(message))
        counts[cause] = counts.get(cause, 0) + 1
        words.setdefault(cause, message)
        if counts[cause] <= _EXAMPLES:
            error = line.get("error") or {}
            found.setdefault(cause, []).append((int(error.get("line") or 0), str(line.get("custom_id") or "")))
    return [
        FailureGroup(code, words[code, shape], count, *_examples(found[code, shape]))
        for (code, shape), count in sorted(counts.items(), key=lambda pair: -pair[1])
    ]


def _examples(rows: list[tuple[int, str]]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return tuple(line for line, _ in rows), tuple(identity for _, identity in rows)


def _cause(line: dict[str, Any]) -> tuple[str, str]:
    code, message = _error_of(line)
    return code, _shape(message)


def _error_of(line: dict[str, Any]) -> tuple[str, str]:
    error = line.get("error")
    if not isinstance(error, dict):
        return "unknown", ""
    return str(error.get("code") or "unknown"), str(error.get("message") or "")


def _shape(message: str) -> str:
    """A message without what differs from row to row."""
    return _VARYING.sub("…", message)[:500]


def _lines_of(folder: BatchFolder, kind: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The row's number and its line, of the batch and of all who work on it; of two results the first counts."""
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


def _row(
    number: int, line: dict[str, Any], record: BatchRecord, table: Table | None, reader: RowReader | None
) -> BatchRow:
    place = table.lines[number] if table is not None and number < len(table) else 0
    question = ""
    if reader is not None and table is not None and number < len(table):
        with contextlib.suppress(OSError, DataError):  # changed since: the answer is still worth a look
            question = reader.raw(number).decode("utf-8", "replace")
    if line.get("error"):
        code, message = _error_of(line)
        return BatchRow(place, str(line.get("custom_id") or ""), question[:LONGEST], "", message[:LONGEST], code)
    if record.shape == "columns":
        answer, finish = line.get(record.answer), line.get("finish_reason")
        identity, tokens = line.get(record.recipe.id_column or "id"), line.get("completion_tokens")
    else:
        identity = line.get("custom_id")
        answer, finish, tokens = _openai_answer(line)
    return BatchRow(
        place, str(identity or ""), question[:LONGEST], _text(answer)[:LONGEST], finish_reason=_text(finish),
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
