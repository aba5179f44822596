"""Rows of an input file, whatever its form, into a table that reads them again by number: JSONL, CSV, Parquet.

JSONL is read where it lies; other forms are first written out as JSON lines beside the output. A line that is no JSON
is still a row: it is quarantined when its turn comes. Two rows of one id are an error before anything starts.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from corral.batch import Table, hash64
from corral.errors import DataError, EngineError

__all__ = ["SCORE_SCHEMA", "read_json_row", "scan", "write_parquet"]

INPUTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".gz")
_BOM = b"\xef\xbb\xbf"


def scan(path: Path, spool: Path) -> Table:
    """The table of an input's rows; `spool` is used where the input cannot be read at any place."""
    if not path.is_file():
        raise DataError(f"there is no file {path}.", "Check --input.")
    name = path.name.removesuffix(".gz")
    if name.endswith((".csv", ".tsv", ".parquet")) or name != path.name:
        _write_spool(path, name, spool)
        return _indexed(spool)
    return _indexed(path)


def _indexed(path: Path) -> Table:
    table = Table(path)
    lines: dict[int, int] = {}
    for number, offset, raw in _json_lines(path):
        id_hash = hash64(_id_of(raw, number).encode("utf-8", "surrogatepass"))
        if id_hash in lines:
            raise DataError(
                f"{path}: lines {lines[id_hash]} and {number} have the same id.", "Ids must differ; correct one."
            )
        lines[id_hash] = number
        table.add(id_hash, hash64(raw), offset, len(raw), number)
    return table


def _json_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, place and content of every line that is not blank, without BOM and line end."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            begin, raw = offset, line
            offset += len(line)
            if number == 1 and raw.startswith(_BOM):
                begin, raw = begin + 3, raw[3:]
            raw = raw.rstrip(b"\r\n")
            if raw.strip():
                yield number, begin, raw


def read_json_row(raw: bytes, number: int) -> Any:
    """One line as JSON data, or the error that quarantines it."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"line {number} is not UTF-8: {error.reason} at byte {error.start}.", "Save it as UTF-8."
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"line {number} is not JSON: {error}.", "Correct the line.") from None


def _id_of(raw: bytes, number: int) -> str:
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return f"line {number}"
    found = data.get("id") if isinstance(data, dict) else None
    return str(number if found is None else found)


def _write_spool(path: Path, name: str, spool: Path) -> None:
    rows = _parquet_rows(path) if name.endswith(".parquet") else _text_rows(path, name)
    with spool.open("wb") as out:
        for row in rows:
            out.write(row + b"\n")


def _text_rows(path: Path, name: str) -> Iterator[bytes]:
    opened: IO[bytes] = gzip.open(path, "rb") if name != path.name else path.open("rb")  # type: ignore[assignment]  # noqa: SIM115
    try:
        with opened as file:
            if name.endswith((".csv", ".tsv")):
                text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
                for row in csv.DictReader(text, delimiter="\t" if name.endswith(".tsv") else ","):
                    yield msgspec.json.encode(_csv_row(row))
            else:
                for line in file:
                    yield line.rstrip(b"\r\n")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path} is cut off or damaged ({error}).", "Copy or make it again.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}.", "Save it as UTF-8, whole.") from None


def _csv_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of text columns: choices are JSON, an answer may be a number."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name is None or value is None or (value == "" and name != "context"):
            continue
        found[name] = value
        if name == "choices":
            try:
                found[name] = json.loads(value)
            except ValueError:
                continue  # told when the row's turn comes
        elif name == "answer" and value.isdigit():
            found[name] = int(value)
    return found


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise EngineError("pyarrow is not installed.", "pip install 'corral[batch]', or use JSONL.") from None
    return pyarrow


def _parquet_rows(path: Path) -> Iterator[bytes]:
    arrow = _pyarrow()
    try:
        with arrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for row in batch.to_pylist():
                    yield msgspec.json.encode({k: v for k, v in row.items() if v is not None})
    except arrow.ArrowException as error:
        raise DataError(f"{path} is not a Parquet file: {error}.", "Check --input.") from None


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


def write_parquet(results: Iterator[dict[str, Any]], path: Path) -> None:
    """Results as one Parquet file, put in place in one step."""
    arrow = _pyarrow()

    def plain(columns: dict[str, str]) -> list[Any]:
        return [arrow.field(name, getattr(arrow, kind)()) for name, kind in columns.items()]

    alternative = arrow.struct(plain({name: _TOKEN[name] for name in ("id", "text", "logprob")}))
    token = arrow.list_(arrow.struct([*plain(_TOKEN), arrow.field("top", arrow.list_(alternative))]))
    choice = arrow.list_(arrow.struct([*plain(_LIKELIHOOD), arrow.field("token_scores", token)]))
    fields = [*plain(SCORE_SCHEMA), arrow.field("choices", choice), arrow.field("token_scores", token)]
    schema = arrow.schema(fields)
    temporary = path.with_name(f".{path.name}.tmp")
    with arrow.parquet.ParquetWriter(temporary, schema) as writer:
        group: list[dict[str, Any]] = []
        for result in results:
            group.append(result)
            if len(group) == 4096:
                writer.write_table(arrow.Table.from_pylist(group, schema=schema))
                group = []
        writer.write_table(arrow.Table.from_pylist(group, schema=schema))
    temporary.replace(path)
