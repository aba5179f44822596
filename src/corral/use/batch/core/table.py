"""The rows of a batch in 33 bytes each: hashes of id and content, place in the data file, line number, flags.

A row is identified by the hash of its id and compared by the hash of its content (64 bits each; among a million rows
two collide with a probability of 3e-8, and a collision is noticed by comparing the rows themselves). The data file is
the input itself when any place of it can be read, otherwise a spool. A row must still have the hash it had when it
was checked: an input that changes under a running batch stops it.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from corral.base.errors import DataError
from corral.base.files import write_atomic

BAD = 1  # flag: the row was found bad, its problem is in problems.jsonl
_COLUMNS = (("ids", "Q"), ("contents", "Q"), ("offsets", "Q"), ("lengths", "I"), ("lines", "I"), ("flags", "B"))
VERSION = 1


def hash64(data: bytes) -> int:
    """The 64-bit hash of some bytes."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


class Table:
    """Columns of numbers, one entry per row."""

    __slots__ = ("contents", "data", "flags", "ids", "lengths", "lines", "offsets", "prefixes", "weights")

    def __init__(self, data: Path) -> None:
        self.data = data
        self.ids, self.contents, self.offsets = array("Q"), array("Q"), array("Q")
        self.lengths, self.lines, self.flags = array("I"), array("I"), array("B")
        self.prefixes: array[int] | None = None  # hashes of the first characters, when an order needs them
        self.weights: array[int] | None = None  # how much work a row is, when an order needs it

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, id_hash: int, content: int, offset: int, length: int, line: int, flag: int = 0) -> None:
        self.ids.append(id_hash)
        self.contents.append(content)
        self.offsets.append(offset)
        self.lengths.append(length)
        self.lines.append(line)
        self.flags.append(flag)

    def digest(self) -> str:
        """A hash over all rows with their contents, in their order."""
        state = blake2b(digest_size=16)
        state.update(memoryview(self.ids).cast("B"))
        state.update(memoryview(self.contents).cast("B"))
        return state.hexdigest()

    def duplicates(self) -> Iterator[tuple[int, int]]:
        """Pairs of rows (earlier, later) whose ids have the same hash."""
        ids = self.ids
        order = sorted(range(len(ids)), key=ids.__getitem__)
        first = 0
        for at in range(1, len(order)):
            if ids[order[at]] == ids[order[first]]:
                yield order[first], order[at]
            else:
                first = at

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Write the table in one step; its presence says that the check is complete."""
        beside = self.data.parent == path.parent  # then it moves with the table, and its name is enough
        data = self.data.name if beside else str(self.data.absolute())
        head = msgspec.json.encode({**about, "version": VERSION, "rows": len(self), "data": data})
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            file.write(head + b"\n")
            for name, _ in _COLUMNS:
                getattr(self, name).tofile(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> tuple[Table, dict[str, Any]] | None:
        """A saved table and its description; None when there is none, or it is of another version."""
        try:
            with path.open("rb") as file:
                about = msgspec.json.decode(file.readline())
                if about["version"] != VERSION:
                    return None
                data = Path(about["data"])
                if not data.is_absolute() or data.parent.name == path.parent.name:
                    data = path.parent / data.name  # it lay beside the table, wherever that was
                table = cls(data)
                for name, _ in _COLUMNS:
                    getattr(table, name).fromfile(file, about["rows"])
        except (FileNotFoundError, msgspec.MsgspecError, KeyError, TypeError, EOFError):
            return None
        return table, about

    def longest_first(self) -> Sequence[int]:
        """Row numbers, those with the most work first, so that no long row is left at the end."""
        work = self.lengths if self.weights is None else self.weights
        return array("I", sorted(range(len(self)), key=work.__getitem__, reverse=True))

    def prefix_first(self) -> Sequence[int]:
        """Row numbers with equal prefixes next to each other, for the server's prefix cache."""
        prefixes = self.prefixes
        if prefixes is None:
            raise DataError("the rows were checked without their prefixes.", "Check them again.")
        return array("I", sorted(range(len(self)), key=prefixes.__getitem__))


class RowReader:
    """Reads rows by number from the data file; refuses one that changed since it was checked."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._descriptor = os.open(table.data, os.O_RDONLY) if len(table) else -1

    def raw(self, number: int) -> bytes:
        table = self._table
        data = os.pread(self._descriptor, table.lengths[number], table.offsets[number])
        if hash64(data) != table.contents[number]:
            raise DataError(
                f"{table.data}, line {table.lines[number]}, changed after it was checked.",
                "Leave the input alone while a batch runs; run it again to check the new content.",
            )
        return data

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def save_json(path: Path, value: Any) -> None:
    """Write one small JSON document in one step."""
    write_atomic(path, msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
