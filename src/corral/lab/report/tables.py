"""Tables and named facts for people, within the width of a terminal.

A table is as narrow as its content. On a narrow terminal the columns in `spared` are left out first, one after the
other; what still does not fit follows below its row, indented, each value after its heading. Elsewhere (a pipe, a
file; `columns` is None) every row and every fact is one line, and nothing is left out.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence

import click

_GAP, _INDENT = "  ", "    "
_TIED = "\x00"  # stands for a space at which no line is broken
_COMMAND = re.compile(r"`[^`\n]*`")
Paint = Callable[[int, str, str], str]  # row, heading, padded cell -> the cell in colour


def room(err: bool = False) -> int | None:
    """Columns of the terminal that stdout (or stderr) is; None where it is none."""
    return shutil.get_terminal_size().columns if (sys.stderr if err else sys.stdout).isatty() else None


def reading_width() -> int:
    """Columns for running text, in files and pipes too: lines of more than 120 are hard to read."""
    return max(60, min(120, shutil.get_terminal_size((80, 24)).columns))


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
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    kept = _kept(list(cells[0]), widths, columns, spared)
    shown = kept[: _fitting([widths[i] for i in kept], columns)]
    for number, row in enumerate(cells):
        words = []
        for i in shown:
            right = left is not None and left <= i < len(headings) - tail
            words.append(row[i].rjust(widths[i]) if right else row[i].ljust(widths[i]))
        if words:
            words[-1] = words[-1].rstrip()
        if number and paint:
            words = [paint(number - 1, headings[i], word) for i, word in zip(shown, words, strict=True)]
        line = _GAP.join(words).rstrip()
        yield click.style(line, bold=True) if number == 0 else line
        if number and columns is not None:
            below = kept[len(shown) :]
            yield from _below([cells[0][i] for i in below], [row[i] for i in below], columns)


def fact_lines(facts: Sequence[tuple[str, str]], columns: int | None = None, indent: str = "") -> Iterator[str]:
    """Names beside what is said of them, which is wrapped beside its name; a word is never broken."""
    label = max((len(name) for name, _ in facts), default=0) + len(_GAP)
    for name, text in facts:
        first = f"{indent}{name:<{label}}"
        yield from wrapped(_one_line(text), columns, first, " " * len(first))


def tied(text: str) -> str:
    """A text that no line break divides: a command to be copied, a path."""
    return text.replace(" ", _TIED)


def wrapped(text: str, columns: int | None, first: str = "", rest: str = "") -> list[str]:
    """A sentence in lines; `first` and `rest` stand before the first line and the others.

    No line break divides a `command`: it is there to be copied.
    """
    if columns is None:
        return [f"{first}{text}".replace(_TIED, " ").rstrip()]
    lines = textwrap.wrap(
        _COMMAND.sub(lambda found: tied(found[0]), text),
        columns,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_TIED, " ").rstrip() for line in lines] or [first.rstrip()]


def flowing(words: Sequence[str], columns: int | None, gap: str = " · ", indent: str = "") -> list[str]:
    """Words one after the other, as many in a line as fit; none is broken."""
    if columns is None:
        return [indent + gap.join(words)]
    lines = [indent]
    for number, word in enumerate(words):
        if number and len(lines[-1]) + len(gap) + len(word) > columns:
            lines.append(indent)
        lines[-1] += word if lines[-1] == indent else gap + word
    return lines


def _kept(headings: Sequence[str], widths: Sequence[int], columns: int | None, spared: Sequence[str]) -> list[int]:
    """The columns that are not left out."""
    kept = list(range(len(headings)))
    for heading in spared:
        if _fitting([widths[i] for i in kept], columns) == len(kept):
            break
        kept = [i for i in kept if headings[i] != heading]
    return kept


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
    pairs = [(heading, cell) for heading, cell in zip(headings, cells, strict=True) if cell not in ("", "-", "–")]
    if pairs:
        yield from flowing([f"{heading} {cell}".strip() for heading, cell in pairs], columns, indent=_INDENT)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() or character == _TIED else "?" for character in text)
