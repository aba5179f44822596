"""Result lines in two shapes, and the output files made from them.

`openai`: the lines of OpenAI's batch output, the server's body untouched inside. `columns`: the input row with the
answer and its token counts added. Both depend on nothing but the row and the reply, so that a deterministic server
gives the same bytes again. Errors always have OpenAI's shape, with the input's line number added.

Parquet, CSV, compressed files and input order are made at the end from the journal of results, in one step each:
until then the output does not exist, and a crash leaves nothing half made.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import msgspec

from corral.base.errors import CorralError, DataError, UsageError
from corral.base.files import create_private
from corral.client.audio import FORM, audio_form, audio_path
from corral.client.client import CHAT, COMPLETIONS
from corral.client.errors import error_body
from corral.client.images import with_images
from corral.client.pool import Page
from corral.client.pooling import (
    EMBEDDINGS,
    RERANK,
    TRANSCRIPTIONS,
    checked_body,
    prompt_tokens,
    ranking,
    text_of,
    vectors,
)
from corral.client.reply import Reply
from corral.use.batch.core.folder import COMPRESSIONS, BatchFolder, sync_dir
from corral.use.batch.core.ledger import Ledger
from corral.use.batch.core.records import FINE, LedgerRecord
from corral.use.batch.core.runner import RowRequest, RowStep
from corral.use.batch.core.table import Table, hash64
from corral.use.batch.input.check import RowProblem
from corral.use.batch.input.recipe import Recipe
from corral.use.batch.input.rows import optional

_encode = msgspec.json.Encoder().encode
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}


def output_kind(path: Path) -> tuple[str, str]:
    """The format and the compression that an output's name asks for."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    ending = Path(path.name.removesuffix(compression)).suffix.lower()
    if ending not in _KINDS:
        raise UsageError(
            f"the format of the output {str(path)!r} cannot be told from its name.",
            "End it in .jsonl, .csv or .parquet (.jsonl.gz, .jsonl.zst, …).",
        )
    if ending == ".parquet" and compression:
        raise UsageError("Parquet files are already compressed.", f"Drop the suffix {compression}.")
    return _KINDS[ending], compression


def is_live(path: Path, ordered: bool) -> bool:
    """Whether results can go straight into the output."""
    return output_kind(path) == ("jsonl", "") and not ordered


def check_output(path: Path) -> None:
    """Refuse an output that cannot be written, before anything is sent."""
    kind, compression = output_kind(path)
    if kind == "parquet":
        optional("pyarrow.parquet", "write Parquet")
    if compression == ".zst":
        optional("zstandard", "write .zst files")


class BatchWork:
    """Turns rows into requests and replies into lines, for `corral batch`."""

    def __init__(
        self, recipe: Recipe, table: Table, models: tuple[str, ...], shape: str, answer: str,
        as_service: bool = False, folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._recipe, self._table, self._models = recipe, table, models
        self._shape, self._answer, self._as_service = shape, answer, as_service
        self._folder = folder  # of the input

    def first_step(self, number: int, raw: bytes) -> RowStep:
        parsed = self._recipe.read(raw, self._table.lines[number], self._models)
        if parsed.path == TRANSCRIPTIONS:
            return RowStep([self._form(parsed.body)], parsed)
        page = parsed.path not in (CHAT, COMPLETIONS)
        # rows of the service come from others, and must not read files of this machine
        body, size = (parsed.body, 0) if self._as_service else with_images(parsed.body, self._folder)
        return RowStep([RowRequest(parsed.path, body, size, page)], parsed)

    def _form(self, body: dict[str, Any]) -> RowRequest:
        """The upload of a recording."""
        if self._as_service:
            raise DataError("recordings are files, and rows of the batch service read none.", "Use `corral batch`.")
        model = {"model": self._models[0]} if self._models else {}
        form = audio_form({**model, **body}, audio_path(body, self._folder))
        return RowRequest(TRANSCRIPTIONS, form, len(form), page=True, content_type=FORM)

    def result(self, number: int, context: Any, replies: Sequence[Reply | Page]) -> bytes:
        reply = replies[0]
        if isinstance(reply, Page):
            return self._page(context, reply)
        return self._columns(context, reply) if self._shape == "columns" else self._openai(context.id, reply)

    def _page(self, context: Any, page: Page) -> bytes:
        """The line of an answer that is no completion."""
        if self._shape != "columns":
            return self._whole(context.id, page.status, "", checked_body(page))
        row = self._own_columns(context)
        if context.path == EMBEDDINGS:
            texts = context.body["input"]
            found = vectors(page, len(texts) if isinstance(texts, list) else 1)
            row[self._answer] = found if isinstance(texts, list) else found[0]
        elif context.path == RERANK:
            found_rows = ranking(page, context.body["documents"])
            row[self._answer] = [{"index": one.index, "score": one.score} for one in found_rows]
        elif context.path == TRANSCRIPTIONS:
            row[self._answer] = text_of(page)
        else:
            row[self._answer] = page.json()
        row["prompt_tokens"] = prompt_tokens(page)
        return _encode(row) + b"\n"

    def failure(self, number: int, raw: bytes, error: CorralError) -> bytes:
        line = self._table.lines[number]
        try:
            identity: str | None = self._recipe.read(raw, line, self._models).id
        except DataError:
            identity = None
        status = getattr(error, "status", None)
        body = _own_body(error) or error_body(error.message, type(error).__name__, status)
        response = {"status_code": status, "request_id": "", "body": body} if status else None
        code = type(error).__name__.removesuffix("Error")
        if response and self._as_service:  # OpenAI's batches have an error beside a response in no line
            return _error_line(identity, line, "", "", response)
        return _error_line(identity, line, code, error.message, response)

    def _openai(self, identity: str, reply: Reply) -> bytes:
        return self._whole(identity, reply.status, reply.id, reply.raw)

    def _whole(self, identity: str, status: int, request_id: str, body: bytes) -> bytes:
        if b"\n" in body:
            body = _encode(msgspec.json.decode(body))
        name, custom = hash64(identity.encode()), _encode(identity)
        head = b'{"id":"batch_req_%016x","custom_id":%b,"response":{"status_code":%d,' % (name, custom, status)
        return head + b'"request_id":%b,"body":%b},"error":null}\n' % (_encode(request_id), body)

    def _own_columns(self, context: Any) -> dict[str, Any]:
        """The columns of the input, with an id where they have none."""
        row = dict(context.row)
        if self._recipe.id_column is None and "id" not in row and "custom_id" not in row:
            row = {"id": context.id, **row}
        return row

    def _columns(self, context: Any, reply: Reply) -> bytes:
        row = self._own_columns(context)
        many = len(reply.choices) > 1
        row[self._answer] = reply.texts if many else reply.text
        row["finish_reason"] = [c.finish_reason for c in reply.choices] if many else reply.finish_reason
        usage = reply.usage
        row["prompt_tokens"] = usage.prompt_tokens if usage else None
        row["completion_tokens"] = usage.completion_tokens if usage else None
        return _encode(row) + b"\n"


def _own_body(error: CorralError) -> Any:
    """The server's own error, where it has OpenAI's shape."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = msgspec.json.decode(getattr(error, "answer", b""))
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            return body
    return None


def problem_line(problem: RowProblem, table: Table) -> bytes:
    """The error line of a row that was found bad by the check; an id that belongs to another row is left out."""
    owned = problem.id is not None and table.ids[problem.row] == hash64(problem.id.encode())
    problem = problem if owned else msgspec.structs.replace(problem, id=None)
    return _error_line(problem.id, problem.line, "invalid_row", f"line {problem.line} {problem.text}", None)


def _error_line(identity: str | None, line: int, code: str, message: str, response: Any) -> bytes:
    name = hash64((identity if identity is not None else f"\0line {line}").encode())
    error = {"code": code, "message": message, "line": line} if code else None
    whole = {"id": f"batch_req_{name:016x}", "custom_id": identity, "response": response, "error": error}
    return _encode(whole) + b"\n"


# The output at the end


def export(folder: BatchFolder, table: Table, ordered: bool) -> int:
    """Make the output from the journal of results; returns its number of rows."""
    ledger = Ledger(folder, table)
    ledger.open()
    try:
        kind, compression = output_kind(folder.output)
        lines = _lines(ledger, table, ordered)
        temporary = folder.output.with_name(f".{folder.output.name}.tmp")
        try:
            os.close(create_private(temporary, folder.like(folder.output)))
            count = _WRITERS[kind](lines, temporary, compression)
            descriptor = os.open(temporary, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            temporary.replace(folder.output)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise DataError(
                f"{folder.output} cannot be written: {error.strerror or error}.",
                f"All results are kept in {folder.results}. Make room, then run the same command again.",
            ) from error
        sync_dir(folder.output.absolute().parent)
    finally:
        ledger.close()
    return count


def _lines(ledger: Ledger, table: Table, ordered: bool) -> Callable[[], Iterator[bytes]]:
    def as_they_came() -> Iterator[bytes]:
        return (ledger.line(record) for record in ledger.records() if record.kind == FINE)

    def in_order() -> Iterator[bytes]:
        ends, lengths = array("Q", bytes(8 * len(table))), array("I", bytes(4 * len(table)))
        for record in ledger.records():
            if record.kind == FINE:
                ends[record.row], lengths[record.row] = record.end, record.length
        for row, length in enumerate(lengths):
            if length:
                yield ledger.line(LedgerRecord(0, 0, ends[row], row, length, FINE))

    return in_order if ordered else as_they_came


def _write_jsonl(lines: Callable[[], Iterator[bytes]], path: Path, compression: str) -> int:
    count = 0
    with _opened(path, compression) as file:
        for line in lines():
            file.write(line)
            count += 1
    return count


def _write_csv(lines: Callable[[], Iterator[bytes]], path: Path, compression: str) -> int:
    import csv
    import io

    names = _columns_of(lines)
    count = 0
    with _opened(path, compression) as raw, io.TextIOWrapper(raw, "utf-8", newline="") as text:
        writer = csv.DictWriter(text, names, restval="")
        writer.writeheader()
        for line in lines():
            row = msgspec.json.decode(line)
            writer.writerow(
                {k: v if isinstance(v, str) else _encode(v).decode() for k, v in row.items() if v is not None}
            )
            count += 1
    return count


def _write_parquet(lines: Callable[[], Iterator[bytes]], path: Path, _: str) -> int:
    arrow, parquet = optional("pyarrow", "write Parquet"), optional("pyarrow.parquet", "write Parquet")
    names, count = _columns_of(lines), 0
    schema = _schema(arrow, names, lines)
    with parquet.ParquetWriter(str(path), schema, compression="zstd") as writer:
        group: list[dict[str, Any]] = []
        for line in lines():
            row = msgspec.json.decode(line)
            group.append({name: _cell(row.get(name), schema.field(name).type == arrow.string()) for name in names})
            count += 1
            if len(group) >= 4096:
                writer.write_table(arrow.Table.from_pylist(group, schema))
                group.clear()
        if group:
            writer.write_table(arrow.Table.from_pylist(group, schema))
    return count


class Vector:
    """A list of numbers that 32 bits hold exactly, as embeddings are."""


def _kind_of(value: Any) -> type:
    if isinstance(value, list) and value and all(isinstance(one, float) for one in value):
        return Vector if array("f", value).tolist() == value else list
    return type(value)


def _cell(value: Any, text: bool) -> Any:
    return _encode(value).decode() if text and value is not None and not isinstance(value, str) else value


def _schema(arrow: Any, names: list[str], lines: Callable[[], Iterator[bytes]]) -> Any:
    """Columns of one simple type keep it, vectors too; all others become text, JSON where they are not text."""
    kinds: dict[str, set[type]] = {name: set() for name in names}
    for line in lines():
        for name, value in msgspec.json.decode(line).items():
            if value is not None:
                kinds[name].add(_kind_of(value))
    simple = {bool: arrow.bool_(), int: arrow.int64(), float: arrow.float64(), Vector: arrow.list_(arrow.float32())}

    def of(found: set[type]) -> Any:
        if found == {int, float}:
            return arrow.float64()
        return simple.get(next(iter(found)), arrow.string()) if len(found) == 1 else arrow.string()

    return arrow.schema([(name, of(kinds[name])) for name in names])


def _columns_of(lines: Callable[[], Iterator[bytes]]) -> list[str]:
    names: dict[str, None] = {}
    for line in lines():
        names.update(dict.fromkeys(msgspec.json.decode(line)))
    return list(names)


def _opened(path: Path, compression: str) -> AbstractContextManager[IO[bytes]]:
    if compression == ".gz":
        import gzip

        return gzip.GzipFile(path, "wb", mtime=0)  # type: ignore[return-value]
    if compression == ".zst":
        zstandard = optional("zstandard", "write .zst files")
        return zstandard.open(path, "wb")  # type: ignore[no-any-return]
    return path.open("wb")


_WRITERS: dict[str, Callable[[Callable[[], Iterator[bytes]], Path, str], int]] = {
    "jsonl": _write_jsonl,
    "csv": _write_csv,
    "parquet": _write_parquet,
}
