"""Tables for people: as narrow as their content, and within the width of a terminal without losing a word.

What does not fit beside the first columns follows below its row, indented, each value after its heading. Elsewhere
(a pipe, a file) every row is one line.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

import click

__all__ = ["room", "table_lines"]

_GAP, _INDENT = "  ", "    "
_TIED = "\x00"  # stands for a space at which no line is broken


def room() -> int | None:
    """Columns of the terminal that stdout is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table_lines(
    headings: Sequence[str], rows: Sequence[Sequence[str]], left: int | None = None, columns: int | None = None
) -> Iterator[str]:
    """The lines, headings first and bold; `left` columns and the last are aligned left (None: all of them)."""
    cells = [[_one_line(cell) for cell in row] for row in [headings, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    shown = _fitting(widths, columns)
    for number, row in enumerate(cells):
        words = [
            cell.rjust(width) if left is not None and left <= i < len(headings) - 1 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row[:shown], widths, strict=False))
        ]
        line = _GAP.join(words).rstrip()
        yield click.style(line, bold=True) if number == 0 else line
        if number and columns is not None:
            yield from _below(cells[0][shown:], row[shown:], columns)


def _fitting(widths: Sequence[int], columns: int | None) -> int:
    """How many of the first columns stand beside each other; one at least."""
    if columns is None or sum(widths) + len(_GAP) * (len(widths) - 1) <= columns:
        return len(widths)
    used, count = -len(_GAP), 0
    for width in widths:
        used += len(_GAP) + width
        if used > columns:
            break
        count += 1
    return max(1, count)


def _below(headings: Sequence[str], cells: Sequence[str], columns: int) -> Iterator[str]:
    """A heading stays with its value."""
    pairs = [(heading, cell) for heading, cell in zip(headings, cells, strict=True) if cell not in ("", "-")]
    text = " · ".join(f"{heading} {cell}".strip().replace(" ", _TIED) for heading, cell in pairs)
    wrapped = textwrap.wrap(text, columns - len(_INDENT), break_long_words=False, break_on_hyphens=False)
    yield from (f"{_INDENT}{line.replace(_TIED, ' ')}" for line in wrapped)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
