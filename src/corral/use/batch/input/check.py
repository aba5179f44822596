"""The whole input, checked in one streaming pass before anything starts: every problem, by line.

Good rows and bad ones both enter the table, so that a bad row skipped on purpose has its one line in the error file
like any other. Memory does not grow with the text of the input, nor with the number of problems (they go to a file).
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec

from corral.base.errors import DataError
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.table import BAD, RowReader, Table, hash64
from corral.use.batch.input.recipe import OPENAI, Parsed, Recipe, asked_tokens
from corral.use.batch.input.rows import InputItem, InputSource

SHOWN = 50
_PREFIX_BYTES = 256
_ADDED_TOKENS = 8  # that a tokenizer puts around a prompt; a chat template's are outweighed by the JSON of messages


class Readable(Protocol):
    """How rows are read: a `Recipe`, or whatever another kind of work has in its place."""

    @property
    def kind(self) -> str: ...

    def settled(self, raw: bytes) -> Self:
        """For the kind of rows that the first one shows."""

    def read(self, raw: bytes, line: int, models: tuple[str, ...] = ()) -> Parsed:
        """A row; DataError with the problem in words when it is bad."""

    def loose_id(self, raw: bytes) -> str | None:
        """The id of a bad row, if it can be told."""


R = TypeVar("R", bound=Readable)


class Scanned(NamedTuple, Generic[R]):
    """What a check found."""

    table: Table
    problems: Problems
    long_rows: list[int]  # perhaps longer than the context: to be counted in tokens
    recipe: R  # settled for the kind of rows there are


class RowProblem(msgspec.Struct, frozen=True):
    """One bad row: its number in the table, its line in the input, its id where it has one, and what is wrong."""

    row: int
    line: int
    text: str
    id: str | None = None


@dataclass
class Problems:
    """All problems of an input: counted, the first of each kind at hand, all of them in a file."""

    path: Path
    count: int = 0
    first: list[RowProblem] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    _file: IO[bytes] | None = None

    def add(self, problem: RowProblem) -> None:
        if self._file is None:
            self._file = self.path.open("wb")
        self._file.write(msgspec.json.encode(problem) + b"\n")
        self.count += 1
        if problem.text in self.kinds or len(self.kinds) < SHOWN:
            self.kinds[problem.text] += 1
            if self.kinds[problem.text] == 1:
                self.first.append(problem)

    def refusal(self, source: InputSource, rows: int, remedy: str) -> DataError:
        """What is wrong with an input as a whole, the first of each kind by its line."""
        what = "item" if source.format in ("json", "parquet") else "line"
        shown = sorted(self.first, key=lambda p: p.line)[:20]
        lines = "".join(f"\n    {what} {p.line} {p.text}{alike(self.kinds[p.text])}" for p in shown)
        left = self.count - sum(self.kinds[p.text] for p in shown)
        more = f"\n    … and {left} more" if left else ""
        return DataError(
            f"{self.count} of {rows} rows of {source.name} cannot be used:{lines}{more}",
            remedy,
            problems=[{"line": p.line, "text": p.text, "id": p.id} for p in self.first],
            count=self.count,
        )

    def put_in_place(self, folder: BatchFolder, table: Table) -> None:
        """The new check counts from now on: its spool and its problems take the place of older ones."""
        if table.data == new_name(folder.spool):
            table.data.replace(folder.spool)
            table.data = folder.spool
        if self.count:
            self.path.replace(folder.problems)
        else:
            folder.problems.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
        elif not self.count:
            self.path.unlink(missing_ok=True)


def alike(count: int) -> str:
    """How many more rows have the same problem, in words."""
    return f"; {count - 1} more rows too" if count > 2 else "; one more row too" if count == 2 else ""


def read_problems(path: Path) -> Iterator[RowProblem]:
    """The problems that a check left behind."""
    if path.exists():
        decoder = msgspec.json.Decoder(RowProblem)
        with path.open("rb") as file:
            for line in file:
                yield decoder.decode(line)


def new_name(path: Path) -> Path:
    """Where a check writes what only counts once the job is accepted."""
    return path.with_name(path.name + ".new")


def _judged(
    item: InputItem, recipe: Readable, models: tuple[str, ...], taken: str | None
) -> tuple[Parsed | None, str, str | None]:
    """A row as it was understood, what is wrong with it, and its id as far as it has one."""
    if item.problem:
        return None, item.problem, None
    try:
        parsed = recipe.read(item.raw, item.line, models)
        if taken is not None and recipe.kind != OPENAI and taken in parsed.row:
            raise DataError(f"has a column {taken!r}, which the output adds (--answer-column)")
    except DataError as error:
        return None, error.message, recipe.loose_id(item.raw)
    return parsed, "", parsed.id


def scan(
    source: InputSource,
    recipe: R,
    folder: BatchFolder,
    *,
    models: tuple[str, ...] = (),
    taken: str | None = None,
    context: int | None = None,
) -> Scanned[R]:
    """Read and check an input; `taken` is the column that the output adds, which rows must not have."""
    table = Table(source.path.absolute() if source.in_place and source.path else new_name(folder.spool))
    problems = Problems(new_name(folder.problems))
    spool = None if source.in_place else table.data.open("wb")
    long_rows: list[int] = []
    next_offset = 0
    try:
        for item in source.items():
            number = len(table)
            recipe = recipe if item.problem else recipe.settled(item.raw)
            parsed, problem, identity = _judged(item, recipe, models, taken)
            offset = item.offset
            if spool is not None:
                offset, next_offset = next_offset, next_offset + len(item.raw) + 1
                spool.write(item.raw + b"\n")
            name_hash = hash64((f"\0line {item.line}" if identity is None else identity).encode())
            table.add(name_hash, hash64(item.raw), offset, len(item.raw), item.line, BAD if problem else 0)
            if problem:
                problems.add(RowProblem(number, item.line, problem, identity))
            elif parsed is not None and context is not None and _may_be_long(parsed, context):
                long_rows.append(number)
        if spool is not None:
            spool.flush()
            os.fsync(spool.fileno())
    finally:
        if spool is not None:
            spool.close()
    _mark_duplicates(table, recipe, problems)
    return Scanned(table, problems, long_rows, recipe)


def _may_be_long(parsed: Parsed, context: int) -> bool:
    """A token is at least a byte: only prompts with more bytes than the context has tokens need counting."""
    return len(_prompt(parsed.body)) + _ADDED_TOKENS + asked_tokens(parsed.body) > context


def note_beginnings(table: Table, recipe: Recipe) -> None:
    """Remember the first characters of every prompt, for the order that puts equal ones together."""
    table.prefixes = array("Q", (hash64(_prompt(body)[:_PREFIX_BYTES]) for body in _bodies(table, recipe)))


def note_weights(table: Table, recipe: Recipe) -> None:
    """Remember how much work every row is: tokens asked for, and those of the prompt at a tenth of their price."""
    table.weights = array("Q", (_weight(body) for body in _bodies(table, recipe)))


def _bodies(table: Table, recipe: Recipe) -> Iterator[dict[str, Any]]:
    reader = RowReader(table)
    try:
        for number in range(len(table)):
            yield {} if table.flags[number] else recipe.read(reader.raw(number), table.lines[number]).body
    finally:
        reader.close()


def _prompt(body: dict[str, Any]) -> bytes:
    text = body.get("prompt")
    return text.encode() if isinstance(text, str) else msgspec.json.encode(body.get("messages") or text)


def _weight(body: dict[str, Any]) -> int:
    return 40 * asked_tokens(body) * int(body.get("n") or 1) + len(_prompt(body))


def _mark_duplicates(table: Table, recipe: Readable, problems: Problems) -> None:
    """Ids that occur twice: the later row is bad, and both lines are named."""
    pairs = sorted((later, earlier) for earlier, later in table.duplicates())
    if not pairs:
        return
    reader = RowReader(table)
    try:
        for later, earlier in pairs:
            names = [_id(recipe, reader.raw(n), table.lines[n]) for n in (earlier, later)]
            if names[0] != names[1]:
                continue  # 64 bits collided
            if not table.flags[later]:
                text = f"has the id {names[1]!r}, which line {table.lines[earlier]} has already"
                problems.add(RowProblem(later, table.lines[later], text))
            table.flags[later] = BAD
            table.ids[later] = hash64(f"\0line {table.lines[later]}".encode())
    finally:
        reader.close()


def _id(recipe: Readable, raw: bytes, line: int) -> str | None:
    try:
        return recipe.read(raw, line).id
    except DataError:
        return recipe.loose_id(raw)
