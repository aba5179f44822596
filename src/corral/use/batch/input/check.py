"""The whole input, checked in one streaming pass before anything is sent: every problem, by line.

Good rows and bad ones both enter the table, so that a bad row skipped on purpose has its one line in the error file
like any other. Memory grows neither with the text of the input nor with the number of problems (they go to a file).

Prompts that may be longer than the context are counted by the model's own tokenizer: a running server is asked; where
none runs yet, the tokenizer on disk is used inside the engine's environment. Where both are missing nothing is
counted, and the server will refuse rows that are too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from subprocess import DEVNULL, PIPE, SubprocessError, run
from typing import IO, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec

from corral.base.errors import CorralError, DataError
from corral.client.audio import audio_path, check_audio
from corral.client.client import Client
from corral.client.client import run as run_loop
from corral.client.endpoint import Endpoint, ModelServer
from corral.client.images import check_images
from corral.client.pooling import TRANSCRIPTIONS
from corral.client.sampling import ANSWER_TOKENS
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.table import BAD, RowReader, Table, hash64
from corral.use.batch.input.recipe import OPENAI, Parsed, Recipe, max_answer_tokens
from corral.use.batch.input.rows import InputItem, InputSource

SHOWN = 50
_PREFIX_BYTES = 256
_ADDED_TOKENS = 8  # that a tokenizer puts around a prompt; a chat template's are outweighed by the JSON of messages


class Readable(Protocol):
    """How rows are read: the `Recipe` of a batch, or `ScoreRows`."""

    @property
    def kind(self) -> str: ...

    def settled(self, raw: bytes) -> Self:
        """The reader for the kind of rows that the first row shows."""

    def read(self, raw: bytes, line: int, models: tuple[str, ...] = ()) -> Parsed:
        """A row; DataError with the problem as its message when it is bad."""

    def loose_id(self, raw: bytes) -> str | None:
        """The id of a bad row, if it has a readable one."""


R = TypeVar("R", bound=Readable)


class Scanned(NamedTuple, Generic[R]):
    """The result of a check."""

    table: Table
    problems: Problems
    long_rows: list[int]  # perhaps longer than the context: their tokens must be counted
    recipe: R  # for the kind of rows that the input has


class RowProblem(msgspec.Struct, frozen=True):
    """One bad row: its number in the table, its line in the input, its id where it has one, and what is wrong."""

    row: int
    line: int
    text: str
    id: str | None = None


@dataclass
class Problems:
    """All problems of an input: counted, the first of each kind in memory, all of them in a file."""

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

    def settle(self, source: InputSource, rows: int, skip_bad: bool, others: str) -> None:
        """Refuse an input with problems, listing them, unless its bad rows are to be lines of the error file.

        `others` says what then happens to the other rows.
        """
        self.close()
        if self.count and not skip_bad:
            raise self._refusal(
                source,
                rows,
                f"Correct them, or send them to the error file and {others} the others: --skip-bad."
                " `corral batch check` lists all rows of a batch.",
            )

    def _refusal(self, source: InputSource, rows: int, remedy: str) -> DataError:
        """The error that lists the first problem of each kind by its line."""
        what = "item" if source.format in ("json", "parquet") else "line"
        shown = sorted(self.first, key=lambda p: p.line)[:20]
        lines = "".join(f"\n    {what} {p.line} {p.text}{more_rows(self.kinds[p.text])}" for p in shown)
        left = self.count - sum(self.kinds[p.text] for p in shown)
        more = f"\n    … and {left} more" if left else ""
        return DataError(
            f"{self.count} of {rows} rows of {source.name} cannot be used:{lines}{more}",
            remedy,
            problems=[{"line": p.line, "text": p.text, "id": p.id} for p in self.first],
            count=self.count,
        )

    def put_in_place(self, folder: BatchFolder, table: Table) -> None:
        """Let the new check's spool and problems replace those of an earlier one."""
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


def more_rows(count: int) -> str:
    """How many more rows have the same problem, as text."""
    return f"; {count - 1} more rows too" if count > 2 else "; one more row too" if count == 2 else ""


def read_problems(path: Path) -> Iterator[RowProblem]:
    """The problems that a check left behind."""
    if path.exists():
        decoder = msgspec.json.Decoder(RowProblem)
        with path.open("rb") as file:
            for line in file:
                yield decoder.decode(line)


def new_name(path: Path) -> Path:
    """Where a check writes files that only count once the batch is accepted."""
    return path.with_name(path.name + ".new")


def _check_files(parsed: Parsed, source: InputSource) -> None:
    folder, what = source.path.absolute().parent if source.path else None, "picture"
    try:
        if parsed.path == TRANSCRIPTIONS:
            what = "recording"
            check_audio(audio_path(parsed.body, folder))
        check_images(parsed.body, folder)
    except DataError as error:
        raise DataError(f"has a {what} that cannot be sent: {error.message.removesuffix('.')}") from None


def _parsed(
    item: InputItem, recipe: Readable, models: tuple[str, ...], added: str | None, source: InputSource | None
) -> tuple[Parsed | None, str, str | None]:
    """A row, what is wrong with it, and its id if it has a readable one."""
    if item.problem:
        return None, item.problem, None
    try:
        parsed = recipe.read(item.raw, item.line, models)
        if added is not None and recipe.kind != OPENAI and added in parsed.row:
            raise DataError(f"has a column {added!r}, which the output adds (--answer-column)")
        if source is not None:
            _check_files(parsed, source)
    except DataError as error:
        return None, error.message, recipe.loose_id(item.raw)
    return parsed, "", parsed.id


def scan(
    source: InputSource,
    recipe: R,
    folder: BatchFolder,
    *,
    models: tuple[str, ...] = (),
    added: str | None = None,
    context: int | None = None,
    local: bool = True,
) -> Scanned[R]:
    """Read and check an input; `added` is the column that the output adds, `local` whether rows may name files."""
    table = Table(source.path.absolute() if source.in_place and source.path else new_name(folder.spool))
    problems = Problems(new_name(folder.problems))
    spool = None if source.in_place else table.data.open("wb")
    long_rows: list[int] = []
    next_offset = 0
    try:
        for item in source.items():
            number = len(table)
            recipe = recipe if item.problem else recipe.settled(item.raw)
            parsed, problem, identity = _parsed(item, recipe, models, added, source if local else None)
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
    if not {"prompt", "messages"} & parsed.body.keys():
        return False  # what is embedded or ranked is cut or refused by the server, each row for itself
    return len(_prompt(parsed.body)) + _ADDED_TOKENS + max_answer_tokens(parsed.body) > context


def note_prefixes(table: Table, recipe: Recipe) -> None:
    """Note the prefix of every prompt, for the order that puts equal ones together."""
    table.prefixes = array("Q", (hash64(_prompt(body)[:_PREFIX_BYTES]) for body in _bodies(table, recipe)))


def note_weights(table: Table, recipe: Recipe) -> None:
    """Note how much work every row is: the tokens of its answer, and those of its prompt at a tenth of their cost."""
    table.weights = array("Q", (_weight(body) for body in _bodies(table, recipe)))


def _bodies(table: Table, recipe: Recipe) -> Iterator[dict[str, Any]]:
    with contextlib.closing(RowReader(table)) as reader:
        for number in range(len(table)):
            yield {} if table.flags[number] else recipe.read(reader.raw(number), table.lines[number]).body


def _prompt(body: dict[str, Any]) -> bytes:
    text = body.get("prompt")
    return text.encode() if isinstance(text, str) else msgspec.json.encode(body.get("messages") or text or body)


def _weight(body: dict[str, Any]) -> int:
    return 40 * max_answer_tokens(body) * int(body.get("n") or 1) + len(_prompt(body))


def _mark_duplicates(table: Table, recipe: Readable, problems: Problems) -> None:
    """Mark the later of two rows with the same id as bad; the problem names both lines."""
    pairs = sorted((later, earlier) for earlier, later in table.duplicates())
    if not pairs:
        return
    with contextlib.closing(RowReader(table)) as reader:
        for later, earlier in pairs:
            names = [_id(recipe, reader.raw(n), table.lines[n]) for n in (earlier, later)]
            if names[0] != names[1]:
                continue  # 64 bits collided
            if not table.flags[later]:
                text = f"has the id {names[1]!r}, which line {table.lines[earlier]} has already"
                problems.add(RowProblem(later, table.lines[later], text))
            table.flags[later] = BAD
            table.ids[later] = hash64(f"\0line {table.lines[later]}".encode())


def _id(recipe: Readable, raw: bytes, line: int) -> str | None:
    try:
        return recipe.read(raw, line).id
    except DataError:
        return recipe.loose_id(raw)


_AT_ONCE = 32
_GROUP = 4096
_COUNT_S = 600

Question = Mapping[str, Any]  # {"prompt": …} or {"messages": …}
TokenCounter = Callable[[Sequence[Question]], Sequence[int]]  # tokens of each; 0 where unknown


def mark_too_long(scanned: Scanned[Recipe], counter: TokenCounter, context: int) -> None:
    """Mark rows whose prompt and answer exceed the context as bad."""
    table = scanned.table
    for rows, parsed in _groups(scanned):
        counts = counter([_question(body) for _, body in parsed])
        for row, (identity, body), tokens in zip(rows, parsed, counts, strict=True):
            wanted = max_answer_tokens(body)
            if tokens and tokens + max(1, wanted) > context and not table.flags[row]:
                text = f"has {tokens} tokens{_asks(wanted) if tokens < context else ''}; the context holds {context}"
                table.flags[row] = BAD
                scanned.problems.add(RowProblem(row, table.lines[row], text, identity))


def _asks(wanted: int) -> str:
    if not wanted:
        return ""
    hint = " (--max-tokens says for how many)" if wanted == ANSWER_TOKENS else ""
    return f" and asks for {wanted}{hint}"


def _groups(scanned: Scanned[Recipe]) -> Iterator[tuple[list[int], list[tuple[str, dict[str, Any]]]]]:
    """The long rows with their ids and bodies, some at a time."""
    table = scanned.table
    with contextlib.closing(RowReader(table)) as reader:
        for start in range(0, len(scanned.long_rows), _GROUP):
            rows = scanned.long_rows[start : start + _GROUP]
            parsed = (scanned.recipe.read(reader.raw(row), table.lines[row]) for row in rows)
            yield rows, [(one.id, one.body) for one in parsed]


def _question(body: Mapping[str, Any]) -> Question:
    return {"messages": body["messages"]} if "messages" in body else {"prompt": body["prompt"]}


# A server


def server_counter(server: ModelServer) -> TokenCounter | None:
    """A counter that asks a server; None while it is away."""
    endpoint = server.find()
    return None if endpoint is None else lambda questions: run_loop(_ask(endpoint, questions))


async def _ask(endpoint: Endpoint, questions: Sequence[Question]) -> Sequence[int]:
    counts: list[int] = []
    async with Client(endpoint, stall_s=60) as client:
        for start in range(0, len(questions), _AT_ONCE):
            counts += await asyncio.gather(*(_tokens(client, one) for one in questions[start : start + _AT_ONCE]))
    return counts


async def _tokens(client: Client, question: Question) -> int:
    try:
        page = await client.page("/tokenize", {"model": client.endpoint.model, **question}, timeout_s=60)
        return int(page.json()["count"]) if page.status == 200 else 0
    except (CorralError, KeyError, TypeError, ValueError):
        return 0


# A tokenizer on disk


def engine_counter(python: str, model: Path) -> TokenCounter:
    """A counter that runs the tokenizer of a model folder in an engine's environment."""

    def count(questions: Sequence[Question]) -> Sequence[int]:
        script = resources.files("corral") / "engines" / "engine_side" / "count_tokens.py"
        with tempfile.TemporaryFile() as prompts:  # two pipes could block each other
            for one in questions:
                prompts.write(msgspec.json.encode(one) + b"\n")
            prompts.seek(0)
            try:
                done = run([python, str(script), str(model)], stdin=prompts, stdout=PIPE, stderr=DEVNULL,
                           timeout=_COUNT_S, check=False)  # fmt: skip
                counts = [int(line) for line in done.stdout.split()]
            except (OSError, ValueError, SubprocessError):
                counts = []
        return counts if len(counts) == len(questions) else [0] * len(questions)

    return count
