"""A streamed answer on the screen: thoughts folded into one line, Markdown, and calls of tools by name and arguments.

On a terminal stdout gets wrapped and coloured lines without control characters of the model's; a pipe or a file gets
the text as it is, without thoughts unless they are wanted.
"""

from __future__ import annotations

import os
import sys

import click

from corral.base.untrusted import plain
from corral.base.wording import counted, duration
from corral.client.reply import Piece, ToolCall, add_tool_call
from corral.lab.report import tables
from corral.lab.report.markdown import MarkdownStream
from corral.lab.report.screen import LiveLines

_DIM = ("2",)


class AnswerScreen:
    """Writes one answer, piece by piece."""

    def __init__(self, show_thoughts: bool = False) -> None:
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []
        self._show_thoughts = show_thoughts
        self._terminal = sys.stdout.isatty()
        self._colour = self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._stream = self._new_stream()
        self._line_open = False
        self._tokens = 0  # of the answer so far
        self._thought_ns: tuple[int, int] | None = None  # when the thought under way began, and its last piece
        self._tokens_before = 0  # it
        self._live = LiveLines(sys.stdout)
        self._drawn_ns = 0

    def add(self, piece: Piece) -> None:
        """Show a piece as it comes."""
        if piece.reasoning:
            self._think(piece)
        elif self._thought_ns is not None:
            self._fold(piece.at_ns)
        self._tokens = piece.tokens or self._tokens
        if piece.text:
            fresh = self._terminal and not "".join(self.texts).strip()
            self.texts.append(piece.text)
            self._write(piece.text.lstrip("\n") if fresh else piece.text)
        for part in piece.tool_calls:
            self._call(part)

    def end(self, broken: bool = False) -> None:
        """Write what is left and end the line; a call that was broken off gets no closing bracket."""
        if self._thought_ns is not None:
            self._fold(self._thought_ns[1])
        self._end_text()
        if self.calls and not broken:
            self._echo(")")
        if self._line_open or not (self._terminal or broken):
            self._echo("\n")

    def _new_stream(self, style: tuple[str, ...] = (), markup: bool = True) -> MarkdownStream | None:
        if not self._terminal:
            return None
        return MarkdownStream(lambda: tables.room() or 80, colour=self._colour, markup=markup, style=style)

    def _write(self, text: str) -> None:
        self._echo(text if self._stream is None else self._stream.feed(text))

    def _end_text(self) -> None:
        if self._stream is not None:
            self._echo(self._stream.end())
            self._stream = self._new_stream()

    def _echo(self, text: str) -> None:
        if text:
            click.echo(text, nl=False)
            sys.stdout.flush()
            self._line_open = not text.endswith("\n")

    def _think(self, piece: Piece) -> None:
        if self._thought_ns is None:
            self._end_text()
            if self._line_open:
                self._echo("\n")
            self._thought_ns, self._tokens_before = (piece.at_ns, piece.at_ns), self._tokens
            if self._show_thoughts:
                self._stream = self._new_stream(_DIM, markup=False)
        self._thought_ns = (self._thought_ns[0], piece.at_ns)
        if self._show_thoughts:
            self._write(piece.reasoning or "")
        elif self._terminal and piece.at_ns - self._drawn_ns > 200_000_000:
            self._drawn_ns = piece.at_ns
            self._live.draw([f"thinking … {self._measured(piece.at_ns, piece.tokens or 0)}"])

    def _fold(self, until_ns: int) -> None:
        """End a thought: its one line, or a blank one below it where it was shown."""
        line = f"thought for {self._measured(until_ns, self._tokens)}"
        self._live.clear()
        self._end_text()
        self._thought_ns = None
        if self._show_thoughts:
            self._echo("\n\n" if self._line_open else "\n")
        elif self._terminal:
            self._echo(click.style(f"({line})", dim=True) + "\n" if self._colour else f"({line})\n")

    def _measured(self, until_ns: int, tokens: int) -> str:
        seconds = duration(max(0, until_ns - (self._thought_ns or (until_ns, 0))[0]) / 1e9)
        spent = tokens - self._tokens_before
        return f"{seconds}, {counted(spent, 'token')}" if spent > 0 else seconds

    def _call(self, part: ToolCall) -> None:
        if add_tool_call(self.calls, part):
            self._end_text()
            if len(self.calls) > 1:
                self._echo(")")
            if self._line_open:
                self._echo("\n")
            self._echo(click.style("→ ", dim=True) if self._colour else "→ ")
            self._echo(self._safe(part.name) + "(")
        self._echo(self._safe(part.arguments))

    def _safe(self, text: str) -> str:
        return plain(text) if self._terminal else text
