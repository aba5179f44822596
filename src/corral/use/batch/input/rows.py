"""Rows out of any input: JSONL, a JSON array, text, CSV, Parquet; plain, .gz or .zst; a file or stdin.

Every reader streams, and gives for each row its line (or the number of the item), its bytes as JSON, and, when it
cannot be read, the problem as text. Byte order marks, CRLF and blank lines are accepted; NUL bytes, broken UTF-8,
broken JSON and rows that are too long or nested too deep are problems of their line. An input may be hostile, or no
list of rows at all (a disk image, one line without an end): no more of it than one row of bounded size is ever in
memory, and the end of a longer one is found without holding it. A plain JSONL file is left in place and its rows are
read again by offset; everything else is copied into a spool while it is checked.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TextIO

import msgspec

from corral.base.errors import DataError, UsageError
from corral.base.files import existing_file
from corral.base.record import nearest
from corral.base.untrusted import deeper_than

LONGEST_ROW = 32 << 20  # bytes; a prompt of a million tokens has some 5 MB
DEEPEST_ROW = 256  # levels of lists and objects
TOO_LONG = f"is longer than {LONGEST_ROW >> 20} MiB"
TOO_DEEP = f"is nested more than {DEEPEST_ROW} levels deep"
_decode = msgspec.json.Decoder().decode


def decode_row(raw: bytes) -> Any:
    """The value of a row; DataError with the problem as its message when it has none."""
    try:
        row = _decode(raw)
    except RecursionError:
        raise DataError(TOO_DEEP) from None
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 (byte {error.start + 1})") from None
    except msgspec.DecodeError as error:
        raise DataError(f"is not valid JSON: {error}") from None
    if raw.count(b"[") + raw.count(b"{") > DEEPEST_ROW and deeper_than(row, DEEPEST_ROW):
        raise DataError(TOO_DEEP)
    return row


_PIECE = 1 << 20
_BRACKETS, _IN_STRING = re.compile(r'["\[\]{},]'), re.compile(r'["\\]')


class ArrayValue(NamedTuple):
    """One item of a JSON array, or what is wrong with it."""

    value: Any
    problem: str = ""


def array_values(text: TextIO) -> Iterator[ArrayValue]:
    """Every item, in order; after one whose end cannot be found there are no more."""
    decoder, buffer, at = json.JSONDecoder(), text.read(_PIECE).lstrip(), 0
    if not buffer:
        return
    if buffer[0] != "[":
        raise DataError("the JSON input is not an array.", 'Write ["prompt", …], or one object per line.')
    at = 1
    while True:
        while at < len(buffer) and buffer[at] in " \r\n\t,":
            at += 1
        if at < len(buffer) and buffer[at] == "]":
            return
        try:
            value, end = decoder.raw_decode(buffer, at)
            if end >= len(buffer):  # a number may go on, and a delimiter must follow
                raise json.JSONDecodeError("cut", buffer, end)
        except RecursionError:
            buffer, at = _past_item(text, buffer[at:]), 0
            yield ArrayValue(None, TOO_DEEP)
            continue
        except json.JSONDecodeError as error:
            if len(buffer) - at > LONGEST_ROW:
                buffer, at = _past_item(text, buffer[at:]), 0
                yield ArrayValue(None, TOO_LONG)
                continue
            more = text.read(
                max(_PIECE, len(buffer) - at)
            )  # twice as much each time, so that a long item is not decoded too often
            if not more:
                yield ArrayValue(None, f"is not valid JSON: {error.msg}; nothing after it can be read")
                return
            buffer, at = buffer[at:] + more, 0
            continue
        yield ArrayValue(None, TOO_DEEP) if deeper_than(value, DEEPEST_ROW) else ArrayValue(value)
        at = end


def _past_item(text: TextIO, piece: str) -> str:
    """Skip the item that begins with `piece`; what was read beyond its end."""
    depth, at, quoted = 0, 0, False
    while piece:
        while found := (_IN_STRING if quoted else _BRACKETS).search(piece, at):
            at, mark = found.end(), found[0]
            if mark == "\\":
                at += 1  # whatever is escaped; it may be the first character of the next piece
            elif mark == '"':
                quoted = not quoted
            elif mark in "[{":
                depth += 1
            elif depth == 0 and mark in ",]":
                return piece[at - 1 :]
            elif depth and mark in "]}":
                depth -= 1
        at = max(0, at - len(piece))
        piece = text.read(_PIECE)
    return ""


_ENDS = ("\n", "\r")


class LongRowError(Exception):
    """A row of a CSV file has more characters than a row may have."""


class CsvLines:
    """The lines of a CSV file for its reader, counted; `next_row` is called before each row.

    A row that is too long is skipped without being held, to the end of the line where its quotes are closed.
    """

    def __init__(self, text: TextIO) -> None:
        self._text = text
        self._within = False  # the end of the line is still to come
        self.number = self._length = self._quotes = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = self._next(LONGEST_ROW - self._length + 1)
        if not line:
            raise StopIteration
        self._length += len(line) if line.strip() else 0
        if self._length > LONGEST_ROW:
            while line and (self._within or self._quotes % 2):
                line = self._next(1 << 20)
            raise LongRowError
        return line

    def next_row(self) -> None:
        self._length = self._quotes = 0

    def _next(self, most: int) -> str:
        line = self._text.readline(most)
        self.number += bool(line) and not self._within
        self._within = bool(line) and not line.endswith(_ENDS)
        self._quotes += line.count('"')
        return line


FORMATS = ("jsonl", "json", "text", "csv", "tsv", "parquet")
_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".txt": "text", ".text": "text", ".csv": "csv",
            ".tsv": "tsv", ".parquet": "parquet", ".pq": "parquet"}  # fmt: skip
_BOM = codecs.BOM_UTF8
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_encode = msgspec.json.Encoder().encode


class InputItem(NamedTuple):
    """One row as read; `offset` is where it begins in the input when it can be read there again, else -1."""

    line: int
    offset: int
    raw: bytes
    problem: str = ""


@dataclass(frozen=True)
class InputSource:
    """An input and how to read it."""

    path: Path | None  # None: stdin
    format: str
    compression: str = ""

    @property
    def name(self) -> str:
        return str(self.path) if self.path else "standard input"

    @property
    def in_place(self) -> bool:
        """Whether rows can be read again at their offsets."""
        return self.path is not None and self.format == "jsonl" and not self.compression and self.path.is_file()

    def fingerprint(self) -> list[int]:
        """Values that change when the file is written to; empty for stdin."""
        if self.path is None:
            return []
        about = self.path.stat()
        return [about.st_size, about.st_mtime_ns, about.st_ino]

    def items(self) -> Iterator[InputItem]:
        """Every row, in order."""
        if self.format == "parquet":
            yield from _parquet(self)
            return
        try:
            with contextlib.ExitStack() as stack:
                yield from _READERS[self.format](self._open(stack))
        except _damage(self.compression) as error:
            raise DataError(
                f"{self.name} is cut off or damaged ({error}).",
                f"Copy or make it again; `{_TESTS[self.compression]} {self.path}` tests it.",
            ) from None

    def _open(self, stack: contextlib.ExitStack) -> BinaryIO:
        raw: BinaryIO = sys.stdin.buffer
        if self.path is not None:
            raw = stack.enter_context(self.path.open("rb", buffering=1 << 20))
        if self.compression and self.path is not None and self.path.is_file() and not self.path.stat().st_size:
            raise EOFError("it is empty")
        if self.compression == ".gz":
            return stack.enter_context(gzip.open(raw))  # type: ignore[return-value]
        if self.compression == ".zst":
            zstandard = optional("zstandard", "read .zst files")
            return stack.enter_context(io.BufferedReader(_Pieces(_zst_pieces(raw, zstandard)), 1 << 20))
        return raw


_TESTS = {".gz": "gzip -t", ".zst": "zstd -t"}


def _damage(compression: str) -> tuple[type[Exception], ...]:
    """The exceptions that a reader of compressed data raises when the data is cut off or damaged."""
    if not compression:
        return ()
    known = (EOFError, zlib.error, gzip.BadGzipFile)
    return (*known, optional("zstandard", "read .zst files").ZstdError) if compression == ".zst" else known


def _zst_pieces(file: BinaryIO, zstandard: Any) -> Iterator[bytes]:
    """The content of a file's frames; unlike zstandard's own reader, this notices an end inside a frame."""
    decompressor, frame, data = zstandard.ZstdDecompressor(), None, b""
    while data := data or file.read(1 << 14):
        frame = frame or decompressor.decompressobj()
        yield frame.decompress(data)
        data = frame.unused_data if frame.eof else b""
        frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends inside a frame")


class _Pieces(io.RawIOBase):
    """A file made of pieces of any length."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def optional(module: str, purpose: str) -> Any:
    """A module that Corral does not always install."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UsageError(
            f"{package} is needed to {purpose}, and is not installed.",
            f"Install it beside Corral: {sys.executable} -m uv pip install --python {sys.executable} {package}",
        ) from None


def open_source(name: str, format_: str | None = None) -> InputSource:
    """The source that a path (or - for stdin) stands for."""
    if format_ and format_ not in FORMATS:
        guess = nearest(format_, FORMATS, 1)
        raise UsageError(f"there is no input format {format_!r}.", f"Known: {', '.join(guess or FORMATS)}.")
    if name == "-":
        return InputSource(None, format_ or "jsonl")
    if Path(name).is_dir():
        raise UsageError(f"{name!r} is a folder.", "Give one file; `cat` several, or run one batch for each.")
    path = existing_file(name, "Check the path; - reads standard input.")
    compression = path.suffix if path.suffix in (".gz", ".zst") else ""
    ending = Path(path.name.removesuffix(compression)).suffix.lower()
    format_ = format_ or _ENDINGS.get(ending)
    if format_ is None:
        raise UsageError(
            f"the format of {name!r} cannot be told from its name.",
            f"Give it a suffix that tells, or --input-format of `corral batch run` ({', '.join(FORMATS)}).",
        )
    if format_ == "json" and not compression and _first_character(path) == b"{":
        format_ = "jsonl"  # JSON lines under another name
    return InputSource(path, format_, compression)


def _first_character(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(256).lstrip(_BOM + b" \r\n\t")[:1]


def _lines(file: BinaryIO) -> Iterator[InputItem]:
    """JSON lines, cut but not decoded."""
    offset = number = 0
    while line := file.readline(LONGEST_ROW + 2):
        number += 1
        if len(line) > LONGEST_ROW and not line.endswith(b"\n"):
            yield InputItem(number, offset, b"", TOO_LONG)
            offset += len(line) + _rest_of_line(file)
            continue
        start, end = 0, len(line)
        if number == 1:
            if line.startswith(_WIDE):
                raise DataError("the input is UTF-16.", "Convert it to UTF-8: iconv -f UTF-16 -t UTF-8 IN > OUT")
            if line.startswith(_BOM):
                start = 3
        if line.endswith(b"\r\n"):
            end -= 2
        elif line.endswith(b"\n"):
            end -= 1
        raw = line[start:end]
        if raw.strip():
            yield InputItem(number, offset + start, raw, "contains a NUL byte" if b"\0" in raw else "")
        offset += len(line)


def _rest_of_line(file: BinaryIO) -> int:
    """Skip the rest of a line; the number of its bytes."""
    count = 0
    while piece := file.readline(1 << 20):
        count += len(piece)
        if piece.endswith(b"\n"):
            break
    return count


def _text(file: BinaryIO) -> Iterator[InputItem]:
    for item in _lines(file):
        try:
            yield InputItem(item.line, -1, _encode({"prompt": item.raw.decode()}), item.problem)
        except UnicodeDecodeError as error:
            yield InputItem(item.line, -1, item.raw, f"is not UTF-8 (byte {error.start + 1})")


@contextlib.contextmanager
def _as_text(file: BinaryIO, errors: str = "strict") -> Iterator[io.TextIOWrapper]:
    text = io.TextIOWrapper(file, "utf-8-sig", errors=errors, newline="")
    try:
        yield text
    finally:
        text.detach()  # the caller closes the file


def _csv(file: BinaryIO, delimiter: str = ",") -> Iterator[InputItem]:
    with _as_text(file, "surrogateescape") as text:
        yield from _csv_rows(text, delimiter)


def _csv_rows(text: io.TextIOWrapper, delimiter: str) -> Iterator[InputItem]:
    csv.field_size_limit(LONGEST_ROW)
    lines = CsvLines(text)
    reader = csv.DictReader(lines, delimiter=delimiter, restkey="\0more", restval=None)
    try:
        names = list(reader.fieldnames or ())
    except (csv.Error, LongRowError):
        raise DataError("the CSV file has no header line with column names.", "Add one.") from None
    if len(set(names)) < len(names):
        raise DataError("two columns of the CSV file have the same name.", "Give every column a name of its own.")
    while True:
        lines.next_row()
        try:
            row = next(reader, None)
        except (csv.Error, LongRowError) as error:
            problem = TOO_LONG if isinstance(error, LongRowError) else f"is not CSV: {error}"
            yield InputItem(lines.number, -1, b"", problem)
            continue
        if row is None:
            return
        yield _csv_item(lines.number, row)


def _csv_item(number: int, row: dict[str | Any, str | Any]) -> InputItem:
    problem = "has more cells than there are columns" if "\0more" in row else ""
    if any(value is None for value in row.values()):
        problem = "has fewer cells than there are columns"
    elif any("\0" in str(value) for value in row.values()):
        problem = "contains a NUL byte"
    try:
        raw = _encode({k: v for k, v in row.items() if k != "\0more"})
    except UnicodeEncodeError:
        raw, problem = b"", "is not UTF-8"
    return InputItem(number, -1, raw, problem)


def _tsv(file: BinaryIO) -> Iterator[InputItem]:
    return _csv(file, "\t")


def _json_array(file: BinaryIO) -> Iterator[InputItem]:
    """The items of one JSON array, a piece of the file at a time."""
    with _as_text(file) as text:
        yield from _array_items(text)


def _array_items(text: io.TextIOWrapper) -> Iterator[InputItem]:
    number = 0
    try:
        for number, (value, problem) in enumerate(array_values(text), 1):
            yield InputItem(number, -1, b"", problem) if problem else _array_item(number, value)
    except UnicodeDecodeError:
        yield InputItem(number + 1, -1, b"", "is not UTF-8; nothing after it can be read")


def _array_item(number: int, value: Any) -> InputItem:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        return InputItem(number, -1, b"", "is neither text nor an object")
    try:
        return InputItem(number, -1, _encode(value))
    except UnicodeEncodeError:
        return InputItem(number, -1, b"", "contains half of a surrogate pair")


def _parquet(source: InputSource) -> Iterator[InputItem]:
    parquet = optional("pyarrow.parquet", "read Parquet")
    file_or_path: Any = str(source.path) if source.path else io.BytesIO(sys.stdin.buffer.read())
    try:
        file = parquet.ParquetFile(file_or_path)
        batches: Iterable[Any] = file.iter_batches(batch_size=1024)
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                raw = _encode({key: value for key, value in row.items() if value is not None})
                yield InputItem(number, -1, b"", TOO_LONG) if len(raw) > LONGEST_ROW else InputItem(number, -1, raw)
    except (ValueError, OSError) as error:  # pyarrow's errors are among them
        raise DataError(f"{source.name} cannot be read as Parquet: {error}", "Check the file.") from None


_READERS = {"jsonl": _lines, "json": _json_array, "text": _text, "csv": _csv, "tsv": _tsv}
