"""Rows of a file to score, and their results as Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.errors import DataError
from corral.base.files import create_private
from corral.use.batch.input.formats import decode_row
from corral.use.batch.input.recipe import Parsed
from corral.use.batch.input.rows import optional
from corral.use.score.likelihood import ScoreRow, read_row


@dataclass(frozen=True)
class ScoreRows:
    """How rows to score are read, in the place of a batch's recipe."""

    text_cells: bool = False  # CSV: every value is text
    kind: str = "scores"

    def settled(self, raw: bytes) -> ScoreRows:
        return self

    def read(self, raw: bytes, line: int, models: tuple[str, ...] = ()) -> Parsed:
        try:
            return Parsed(self.row(raw, line).id, "", {}, {})
        except DataError as error:
            remedy = error.remedy.removeprefix("Correct the row.")  # that much is said of all of them
            raise DataError(f"{error.message} {remedy}".strip()) from None

    def row(self, raw: bytes, line: int) -> ScoreRow:
        """What is to be scored; DataError when that cannot be told."""
        data = decode_row(raw)
        if self.text_cells and isinstance(data, dict):
            data = {name: _cell(name, value) for name, value in data.items() if value != "" or name == "context"}
        return read_row(data, line)

    def loose_id(self, raw: bytes) -> str | None:
        try:
            data = decode_row(raw)
        except DataError:
            return None
        found = data.get("id") if isinstance(data, dict) else None
        return str(found) if isinstance(found, (str, int)) and found != "" else None


def _cell(name: str, value: Any) -> Any:
    if name == "answer" and isinstance(value, str) and value.isdigit():
        return int(value)
    if name != "choices":
        return value
    try:
        return json.loads(value)
    except (ValueError, TypeError, RecursionError):
        return value  # refused as what it is


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
    """Results as one Parquet file, put in place in one step; `like` says who may read it."""
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
