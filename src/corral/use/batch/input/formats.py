"""What one row may be: so many bytes, nested so deep. Beyond that it is a bad row like any other, told by its line.

An input may be made to do harm, or be no list of rows at all (a disk image, one line without an end): what is held of
it is never more than one row of this size.

The items of one JSON array, a piece of the file at a time.

An item that is too long or nested too deep is passed over without being held: its end is found by counting brackets
outside of strings, and the items after it are read as if nothing had been.

The lines of a CSV file for its reader: never more of a row than a row may have.

A row that is too long is passed over without being held, to the end of the line where its quotes are closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Self, TextIO

import msgspec

from corral.base.errors import DataError
from corral.base.untrusted import deeper_than

LONGEST_ROW = 32 << 20  # bytes; a prompt of a million tokens has some 5 MB
DEEPEST_ROW = 256  # levels of lists and objects
TOO_LONG = f"is longer than {LONGEST_ROW >> 20} MiB"
TOO_DEEP = f"is nested more than {DEEPEST_ROW} levels deep"
_decode = msgspec.json.Decoder().decode


def decode_row(raw: bytes) -> Any:
    """The value of a row; DataError with the problem in words when it has none."""
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
    """One item, or what is wrong with it."""

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
            more = text.read(max(_PIECE, len(buffer) - at))  # twice as much each time: no item is read too often
            if not more:
                yield ArrayValue(None, f"is not valid JSON: {error.msg}; nothing after it can be read")
                return
            buffer, at = buffer[at:] + more, 0
            continue
        yield ArrayValue(None, TOO_DEEP) if deeper_than(value, DEEPEST_ROW) else ArrayValue(value)
        at = end


def _past_item(text: TextIO, piece: str) -> str:
    """What is left of the last piece read after the end of the item that begins with `piece`."""
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
