"""`corral top` at 60, 80 and 120 columns, as text: read it when it changes."""

from __future__ import annotations

import io
import os
import re
import shutil

import pytest

from corral.client.metrics import Load, Reading
from corral.lab.report.screen import LiveLines
from corral.lab.report.tables import cut, display_width, table_lines
from corral.lab.report.top import screen_lines
from corral.use.llm.top import Line

BUSY = Line(
    "llama-3.1-405b-instruct-fp8",
    "meta-llama/Llama-3.1-405B-Instruct-FP8",
    "http://127.0.0.1:8000",
    Reading(at_s=0, running=256, waiting=1744, kv_use=0.987),
    Load(generated_tokens_per_s=12_345.6, prompt_tokens_per_s=98_765.4, ttft_s=12.345, prefix_hit_share=0.43),
)
SILENT = Line("smollm2", "smollm2", "http://127.0.0.1:8001", None, None, "127.0.0.1:8001 refused the connection.")

SCREENS = {
    60: """
NAME              RUN  WAIT     KV   TOK/S       TTFT
llama-3.1-405b-…  256  1744  98.7%  12,346  12,345 ms
smollm2
Ctrl-C or q leaves
smollm2: 127.0.0.1:8001 refused the connection.
""",
    80: """
NAME                      RUN  WAIT     KV   TOK/S  PROMPT/S       TTFT  HITS
llama-3.1-405b-instruct…  256  1744  98.7%  12,346    98,765  12,345 ms   43%
smollm2
Ctrl-C or q leaves
smollm2: 127.0.0.1:8001 refused the connection.
""",
    120: """
NAME                      RUN  WAIT                KV   TOK/S  PROMPT/S       TTFT  HITS  MODEL
llama-3.1-405b-instruct…  256  1744  ██████████ 98.7%  12,346    98,765  12,345 ms   43%  meta-llama/Llama-3.1-405…
smollm2
Ctrl-C or q leaves
smollm2: 127.0.0.1:8001 refused the connection.
""",
}


COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("columns", SCREENS)
def test_the_screen_fits(columns: int) -> None:
    lines = [COLOUR.sub("", line).rstrip() for line in screen_lines([BUSY, SILENT], columns)]
    assert "\n".join(lines) + "\n" == SCREENS[columns].lstrip("\n")
    assert all(display_width(line) < columns for line in lines)


def test_a_long_problem_is_wrapped() -> None:
    silent = Line("smollm2", "smollm2", "http://127.0.0.1:8001", None, None, "the host is not known. " * 8)
    lines = screen_lines([silent], 60)
    assert len(lines) > 4
    assert all(display_width(line) < 60 for line in lines)


def test_wide_characters_take_two_columns() -> None:
    assert display_width("模型") == 4
    assert display_width("e\u0301 \x1b[1mbold\x1b[0m") == 6
    assert cut("模型模型", 5) == "模型…"
    assert cut("模型模型", 6) == "模型…"
    assert cut("\x1b[31mred and long\x1b[0m", 6) == "\x1b[31mred a…\x1b[0m"
    named = Line("部署-一-二-三-四-五-六", BUSY.model, BUSY.url, BUSY.reading, BUSY.load)
    rows = [COLOUR.sub("", line) for line in screen_lines([BUSY, named], 60)]
    at = [display_width(row[: row.index("256")]) for row in rows[1:3]]
    assert at[0] == at[1]
    left, right = (COLOUR.sub("", line) for line in table_lines(("模型", "N"), [("一", "2")], 1, tail=0))
    assert (left, right) == ("模型  N", "一    2")


class Terminal:
    """What a terminal of a size would show of what was written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int, rows: int) -> None:
        self.rows: list[str] = [""]
        self.row = 0
        self.size = os.terminal_size((columns, rows))
        self.stream = io.StringIO()
        monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: self.size)

    def resize(self, columns: int) -> None:
        """Lines that no longer fit wrap, as those of a real terminal do."""
        self.shown()
        wrapped = []
        for line in self.rows:
            wrapped += [line[at : at + columns] for at in range(0, max(1, len(line)), columns)]
        self.rows, self.row = wrapped, len(wrapped) - 1
        self.size = os.terminal_size((columns, self.size.lines))

    def shown(self) -> list[str]:
        text = self.stream.getvalue()
        self.stream.seek(0)
        self.stream.truncate()
        for part in re.findall(r"\x1b\[\d*[AJ]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif part.endswith("A") and part.startswith("\x1b"):
                self.row -= int(part[2:-1])
            elif part == "\x1b[J":
                self.rows = [*self.rows[: self.row], ""]
            elif part != "\r":
                self.rows[self.row] = part
        return self.rows


def test_lines_are_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, 40, 10)
    live = LiveLines(terminal.stream)
    live.draw(["one", "two"])
    live.draw(["one", "2", "three"])
    assert terminal.shown() == ["one", "2", "three"]
    live.draw(["only"])
    assert terminal.shown() == ["only"]
    live.leave()
    live.draw(["below"])
    assert terminal.shown() == ["only", "below"]
    live.clear()
    assert terminal.shown() == ["only", ""]


def test_a_terminal_that_shrinks_keeps_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, 40, 10)
    live = LiveLines(terminal.stream)
    live.draw(["a" * 39, "b" * 20, "c"])
    terminal.resize(15)
    live.draw(["x" * 30, "y"])
    assert terminal.shown() == ["x" * 13 + "…", "y"]
    terminal.size = os.terminal_size((15, 3))
    live.draw(["1", "2", "3", "4"])
    assert terminal.shown() == ["1", "2"]


class Broken(io.StringIO):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def test_a_reader_who_left_ends_nothing() -> None:
    live = LiveLines(Broken())
    live.draw(["nobody reads this"])
    live.clear()
