"""Tables and named facts for people, within the width of a terminal.

A table is as narrow as its content. On a narrow terminal the columns in `spared` are left out first, one after the
other; what still does not fit follows below its row, indented, each value after its heading. Elsewhere (a pipe, a
file; `columns` is None) every row and every fact is one line, and nothing is left out. Widths are those on a screen:
most CJK characters and emoji take two columns, combining marks and colours none.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Sequence

import click

_GAP, _INDENT = "  ", "    "
_TIED = "\x00"  # stands for a space at which no line is broken
_COMMAND = re.compile(r"`[^`\n]*`")
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
Paint = Callable[[int, str, str], str]  # row, heading, padded cell -> the cell in colour


def room(err: bool = False) -> int | None:
    """Columns of the terminal that stdout (or stderr) writes to; None where it writes to a pipe or a file."""
    return shutil.get_terminal_size().columns if (sys.stderr if err else sys.stdout).isatty() else None


def reading_width() -> int:
    """Columns for running text, in files and pipes too: lines of more than 120 are hard to read."""
    return max(60, min(120, shutil.get_terminal_size((80, 24)).columns))


def display_width(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii() and "\x1b" not in text:
        return len(text)
    return sum(map(_columns_of, _COLOUR.sub("", text)))


def _columns_of(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """The text within so many columns, with an ellipsis where some of it is left out; colours are kept."""
    if display_width(text) <= columns:
        return text
    parts, used, full = [], 0, False
    for part in _COLOUR.split(text):
        if _COLOUR.fullmatch(part):
            parts.append(part)
            continue
        for character in part if not full else "":
            used += _columns_of(character)
            if used > columns - 1:
                parts.append("…")
                full = True
                break
            parts.append(character)
    return "".join(parts)


def _padded(text: str, width: int, right: bool) -> str:
    space = " " * (width - display_width(text))
    return space + text if right else text + space


def table_lines(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int | None = None,
    columns: int | None = None,
    spared: Sequence[str] = (),
    tail: int = 1,
    paint: Paint | None = None,
) -> Iterator[str]:
    """The lines, headings first and bold.

    The first `left` columns and the last `tail` are aligned left, those between right; all left where `left` is None.
    """
    cells = [[_one_line(cell) for cell in row] for row in [headings, *rows]]
    widths = [max(display_width(row[i]) for row in cells) for i in range(len(headings))]
    kept = _kept(list(cells[0]), widths, columns, spared)
    shown = kept[: _fitting([widths[i] for i in kept], columns)]
    for number, row in enumerate(cells):
        padded: list[str] = []
        for i in shown:
            right = left is not None and left <= i < len(headings) - tail
            padded.append(_padded(row[i], widths[i], right))
        if padded:
            padded[-1] = padded[-1].rstrip()
        if number and paint:
            padded = [paint(number - 1, headings[i], cell) for i, cell in zip(shown, padded, strict=True)]
        line = _GAP.join(padded).rstrip()
        yield click.style(line, bold=True) if number == 0 else line
        if number and columns is not None:
            below = kept[len(shown) :]
            yield from _below([cells[0][i] for i in below], [row[i] for i in below], columns)


def fact_lines(facts: Sequence[tuple[str, str]], columns: int | None = None, indent: str = "") -> Iterator[str]:
    """Names, each with its text beside it; a long text is wrapped there, between words."""
    label = max((len(name) for name, _ in facts), default=0) + len(_GAP)
    for name, text in facts:
        first = f"{indent}{name:<{label}}"
        yield from wrapped(_one_line(text), columns, first, " " * len(first))


def tied(text: str) -> str:
    """A text that no line break divides: a command to be copied, a path."""
    return text.replace(" ", _TIED)


def wrapped(text: str, columns: int | None, first: str = "", rest: str = "") -> list[str]:
    """A sentence in lines; the first begins with `first`, the others with `rest`.

    No line break divides a `command`: it is there to be copied.
    """
    if columns is None:
        return [f"{first}{text}".replace(_TIED, " ").rstrip()]
    lines = textwrap.wrap(
        _COMMAND.sub(lambda match: tied(match[0]), text),
        columns,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_TIED, " ").rstrip() for line in lines] or [first.rstrip()]


def flowing(items: Sequence[str], columns: int | None, gap: str = " · ", indent: str = "") -> list[str]:
    """Items one after the other, as many in a line as fit; none is broken."""
    if columns is None:
        return [indent + gap.join(items)]
    lines = [indent]
    for number, item in enumerate(items):
        if number and display_width(lines[-1] + gap + item) > columns:
            lines.append(indent)
        lines[-1] += item if lines[-1] == indent else gap + item
    return lines


def _kept(headings: Sequence[str], widths: Sequence[int], columns: int | None, spared: Sequence[str]) -> list[int]:
    """The numbers of the columns that are not left out."""
    kept = list(range(len(headings)))
    for heading in spared:
        if _fitting([widths[i] for i in kept], columns) == len(kept):
            break
        kept = [i for i in kept if headings[i] != heading]
    return kept


def _fitting(widths: Sequence[int], columns: int | None) -> int:
    """How many of the first columns fit beside each other; one at least."""
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
    """The cells that do not fit beside each other, each after its heading."""
    pairs = [(heading, cell) for heading, cell in zip(headings, cells, strict=True) if cell not in ("", "-", "–")]
    if pairs:
        yield from flowing([f"{heading} {cell}".strip() for heading, cell in pairs], columns, indent=_INDENT)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() or character == _TIED else "?" for character in text)
