"""Markdown of a streamed answer for a terminal: words wrapped, headings, lists, quotes, emphasis and code in colours.

`feed` takes text as it comes and gives what to write now; nothing that was written is drawn again. Held back are only
the last word, the beginning of a line that may become a heading, a list or a fence, and a mark of emphasis or code
until its end comes in the same line. A mark without an end is shown as it is. The text is untrusted: no control
character in it reaches the terminal. Code is never wrapped, and links, tables and formulas stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from corral.base.untrusted import plain
from corral.lab.report.tables import display_width

_MOST_HELD = 200  # characters that wait for the end of a mark or of the first words of a line
_MAYBE_BLOCK = re.compile(r" {0,40}(?:#{0,6}|`{0,2}|~{0,2}|[-*_+ ]+|\d{1,9}[.)]?|>) ?")
_FENCE = re.compile(r" *(`{3,}|~{3,})[^`]*")
_RULE = re.compile(r" {0,3}([-*_])(?: *\1){2,} *")
_HEADING = re.compile(r" {0,3}(#{1,6}) +")
_LIST = re.compile(r"( *)([-*+]|\d{1,9}[.)]) +")
_QUOTE = re.compile(r" {0,3}> ?")
_PIECE = re.compile(r"\n|[^\S\n]+|`+|\*{1,3}|_{1,3}|\\[*_`#]|\\|[^\s`*_\\]+")
_WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60"  # written without spaces
_UNBROKEN = re.compile(f"[{_WIDE}]|[^{_WIDE}]+")
_BOLD, _DIM, _ITALIC, _UNDERLINED, _CODE = "1", "2", "3", "4", "36"
_EMPHASIS = {1: (_ITALIC,), 2: (_BOLD,), 3: (_BOLD, _ITALIC)}
Style = tuple[str, ...]


class MarkdownStream:
    """One text. Without `markup` or without `colour` only its words are wrapped."""

    def __init__(
        self, columns: Callable[[], int], *, colour: bool = True, markup: bool = True, style: Style = ()
    ) -> None:
        self._columns, self._colour, self._markup = columns, colour, markup and colour
        self._base = self._style = style
        self._held = ""
        self._out: list[str] = []
        self._at_start, self._fence = True, ""
        self._word: list[tuple[str, Style]] = []
        self._gap, self._hanging, self._column = "", "", 0
        self._before = ""  # the last character: snake_case has no emphasis

    def feed(self, text: str) -> str:
        """What to write for a further piece of the text."""
        text = self._held + text
        kept = text[-1:] if text.endswith("\r") else ""  # a line feed may follow
        self._held = plain(text[: len(text) - len(kept)])
        return self._run(False, kept)

    def end(self) -> str:
        """What is left to write at the end of the text, or where it was broken off."""
        self._held = plain(self._held.removesuffix("\r"))
        return self._run(True)

    def _run(self, final: bool, kept: str = "") -> str:
        while self._held and (self._begin_line(final) if self._at_start else self._go_on(final)):
            pass
        if final:
            self._flush()
        self._held += kept
        written, self._out = "".join(self._out), []
        return written

    # Lines

    def _begin_line(self, final: bool) -> bool:
        """Find out what kind of line begins; False while that cannot be told."""
        line, feed, _ = self._held.partition("\n")
        whole = bool(feed) or final or len(line) > _MOST_HELD
        marks = line.strip()
        if self._fence:
            closes = set(marks) <= {self._fence[0]}
            if closes and not whole:
                return False
            if closes and len(marks) >= len(self._fence):
                self._fence = ""
                self._whole_line(line, line)
            self._at_start = False
            return True
        if not whole and (_MAYBE_BLOCK.fullmatch(line) or marks.startswith(("```", "~~~"))):
            return False
        self._style, self._hanging, self._before, self._at_start = self._base, "", "", False
        if whole and (found := _FENCE.fullmatch(line)):
            self._fence = found[1]
            self._whole_line(line, line)
        elif self._markup and whole and _RULE.fullmatch(line):
            self._whole_line(line, "─" * min(40, self._columns()))
        elif found := _LIST.match(line):
            mark = "•" if self._markup and found[2] in "-*+" else found[2]
            self._open(found, f"{found[1]}{mark} ", " " * (len(found[1]) + len(mark) + 1))
        elif self._markup and (found := _HEADING.match(line)):
            self._style = (*self._base, _BOLD, *((_UNDERLINED,) if found[1] == "#" else ()))
            self._open(found)
        elif self._markup and (found := _QUOTE.match(line)):
            self._style = (*self._base, _DIM)
            self._open(found, "│ ", "│ ")
        elif found := re.match(" +", line):
            self._open(found, found[0], found[0])
        return True

    def _open(self, found: re.Match[str], first: str = "", hanging: str = "") -> None:
        """Write what a line begins with, in the place of its mark."""
        self._held = self._held[found.end() :]
        self._hanging = hanging if len(hanging) < self._columns() // 2 else ""
        self._write(first, self._style)

    def _whole_line(self, line: str, shown: str) -> None:
        self._held = self._held[len(line) :]
        self._write(shown, (*self._base, _DIM))

    def _feed_line(self) -> None:
        self._flush()
        self._out.append("\n")
        self._column, self._gap, self._at_start = 0, "", True

    # Within a line

    def _go_on(self, final: bool) -> bool:
        """Write the next piece of a line; False while its meaning cannot be told."""
        if self._fence:
            return self._code_line()
        found = _PIECE.match(self._held)
        assert found is not None
        piece = found[0]
        if self._markup and piece[0] in "`*_":
            return self._marked(piece, final)
        if self._markup and piece == "\\" and not final and len(self._held) == 1:
            return False
        self._held = self._held[found.end() :]
        if piece == "\n":
            self._feed_line()
        elif piece.isspace():
            self._space(piece)
        else:
            self._add(piece[1:] if self._markup and piece[0] == "\\" and piece[1:] else piece, self._style)
        return True

    def _code_line(self) -> bool:
        line, feed, self._held = self._held.partition("\n")
        self._write(line, (*self._base, _CODE))
        if feed:
            self._feed_line()
        return True

    def _marked(self, mark: str, final: bool) -> bool:
        """Code or emphasis, once its end is there; False while it may still come."""
        line, feed, _ = self._held.partition("\n")
        rest, whole = line[len(mark) :], bool(feed) or final or len(line) > _MOST_HELD
        kind, code = re.escape(mark[0]), mark[0] == "`"
        opens = code or bool(rest and not rest[0].isspace() and not (mark[0] == "_" and self._before.isalnum()))
        if not whole and not rest:
            return False
        end = None
        if opens:
            blank, word = ("", "") if code else (r"(?<!\s)", r"(?!\w)" if mark[0] == "_" else "")
            end = re.compile(rf"(?<!{kind}){blank}{kind}{{{len(mark)}}}(?!{kind}){word}").search(rest, 1)
            if not whole and (end is None or end.end() == len(rest)):
                return False
        if end is None:
            self._held = self._held[len(mark) :]
            self._add(mark, self._style)
            return True
        inner, after = rest[: end.start()], self._held[len(mark) + end.end() :]
        outer, self._style = self._style, (*self._style, *((_CODE,) if code else _EMPHASIS[len(mark)]))
        if code:
            for piece in re.findall(r"\s+|\S+", inner):
                self._space(piece) if piece.isspace() else self._add(piece, self._style)
        else:
            self._held = inner
            while self._held:
                self._go_on(True)
        self._style, self._held, self._before = outer, after, mark[0]
        return True

    # Words

    def _space(self, blank: str) -> None:
        self._flush()
        self._gap, self._before = blank.replace("\t", "    "), " "

    def _add(self, text: str, style: Style) -> None:
        """Add to the word; a line may be broken before and after every CJK character."""
        self._before = text[-1]
        for part in [text] if text.isascii() else _UNBROKEN.findall(text):
            alone = len(part) == 1 and display_width(part) == 2
            if alone:
                self._flush()
            if self._word and self._word[-1][1] == style:
                part = self._word.pop()[0] + part
            self._word.append((part, style))
            if alone:
                self._flush()

    def _flush(self) -> None:
        """Write the word, in the next line where it has no room in this one."""
        if not self._word:
            return
        width = sum(display_width(text) for text, _ in self._word)
        if self._column > len(self._hanging) and self._column + len(self._gap) + width > self._columns():
            self._out.append("\n")
            self._column = 0
            self._write(self._hanging, self._style)
        else:
            self._write(self._gap, ())
        for text, style in self._word:
            self._write(text, style)
        self._word, self._gap = [], ""

    def _write(self, text: str, style: Style) -> None:
        if not text:
            return
        self._column += display_width(text)
        if self._column > self._columns():  # the terminal breaks what is longer than a line
            self._column %= self._columns()
        self._out.append(f"\033[{';'.join(style)}m{text}\033[0m" if style and self._colour else text)
