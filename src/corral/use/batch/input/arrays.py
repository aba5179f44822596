"""The items of one JSON array, a piece of the file at a time.

An item that is too long or nested too deep is passed over without being held: its end is found by counting brackets
outside of strings, and the items after it are read as if nothing had been.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

from corral.base.errors import DataError
from corral.base.untrusted import deeper_than
from corral.use.batch.input.row_limits import DEEPEST_ROW, LONGEST_ROW, TOO_DEEP, TOO_LONG

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
