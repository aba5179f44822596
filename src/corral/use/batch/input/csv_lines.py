"""The lines of a CSV file for its reader: never more of a row than a row may have.

A row that is too long is passed over without being held, to the end of the line where its quotes are closed.
"""

from __future__ import annotations

from typing import Self, TextIO

from corral.use.batch.input.row_limits import LONGEST_ROW

_ENDS = ("\n", "\r")


class LongRowError(Exception):
    """A row of a CSV file has more characters than a row may have."""


class CsvLines:
    """Gives lines and counts them; `next_row` is called before each row."""

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
