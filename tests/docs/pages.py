"""What a page asks its reader to type: the commands of its fenced blocks, with the output that is shown below them.

Every block says its language. `sh` is typed, line by line (a block that begins with `#!` is a script, as a whole);
in `console` a line that begins with `$` is typed and the others are what it prints; `python` is Python. Tables of
docs/from have their commands in the text, between backticks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

__all__ = ["LANGUAGES", "PAGES", "Block", "Command", "blocks", "commands", "indented"]

LANGUAGES = ("sh", "console", "python", "toml", "json", "yaml", "text")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """One fenced block, and the line of the page on which its first line stands."""

    language: str
    line: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """One thing to type."""

    page: str
    line: int
    text: str
    shown: tuple[str, ...] = ()  # what the page says that it prints

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    language, begun = "", 0
    inside: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```") and begun:
            yield Block(language, begun + 1, tuple(inside))
            begun = 0
        elif line.startswith("```"):
            language, begun, inside = line[3:].strip(), number, []
        elif begun:
            inside.append(line)


def indented(page: Path) -> list[int]:
    """The lines at which an indented block begins: it would say no language, and be held to nothing."""
    found, fenced, before = [], False, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced and line.startswith("    ") and not before.strip():
            found.append(number)
        before = line
    return found


def commands(page: Path) -> list[Command]:
    """Everything that a page asks to type, in order."""
    name = page.relative_to(ROOT).as_posix()
    found = [command for block in blocks(page) for command in _typed(name, block)]
    if page.parent.name == "from":
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            texts = [text for text in re.findall(r"`(corral [^`]+)`", line) if len(text.split()) > 2]
            found += [Command(name, number, text) for text in texts]  # `corral env` in a sentence only names a verb
    return found


def _typed(page: str, block: Block) -> Iterator[Command]:
    if block.language == "console":
        yield from _session(page, block)
    elif block.language == "sh" and block.lines[0].startswith("#!"):
        yield Command(page, block.line, "\n".join(block.lines))
    elif block.language == "sh":
        whole = ""
        for number, line in enumerate(block.lines, block.line):
            whole += line.rstrip("\\")
            if not line.endswith("\\"):
                if text := _without_comment(whole):
                    yield Command(page, number, text)
                whole = ""


def _session(page: str, block: Block) -> Iterator[Command]:
    at = [index for index, line in enumerate(block.lines) if line.startswith("$ ")]
    for begin, end in zip(at, [*at[1:], len(block.lines)], strict=True):
        shown = tuple(line for line in block.lines[begin + 1 : end] if line.strip())
        yield Command(page, block.line + begin, _without_comment(block.lines[begin][2:]), shown)


def _without_comment(line: str) -> str:
    return re.split(r"(?:^|\s)# ", line, maxsplit=1)[0].strip()
