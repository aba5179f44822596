"""What a command shows while it runs: messages, JSON, tables, and lines that are drawn again and again.

On a terminal the current phase of a start is one live line with a spinner, and finished phases stay above it with
their time; elsewhere (logs, pipes, CI) every phase is a plain line. All of it goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TextIO

import click

from corral.base.errors import CorralError
from corral.base.record import to_json
from corral.base.ssh import WAITING
from corral.base.untrusted import plain
from corral.base.wording import duration
from corral.deploy.deployment.start_times import Expected, Phase, amount, left_s
from corral.lab.report import tables


def tell(text: str, err: bool = False, nl: bool = True) -> None:
    """Print a line about the work. A reader who left (`| head -1`) does not end it: the rest is not printed."""
    try:
        click.echo(text, err=err, nl=nl, color=False if os.environ.get("NO_COLOR") else None)
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # the stream may have no descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, (sys.stderr if err else sys.stdout).fileno())
            os.close(nowhere)


def explain(lead: str, text: str) -> None:
    """A sentence on stderr after its lead; control characters that other machines put into it are removed."""
    columns, rest = tables.room(err=True), " " * min(len(lead), 4)
    for number, part in enumerate(plain(text).split("\n")):
        for line in tables.wrapped(part, columns, "" if number else lead, rest):
            tell(line, err=True)


def explain_error(error: CorralError) -> None:
    """Print what failed, and below it what to do."""
    explain("corral: ", error.message)
    if error.remedy:
        explain("  → ", error.remedy)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(to_json(value), indent=2, ensure_ascii=False))


def event_line(name: str, event: str, text: str) -> str:
    """What happened to a deployment or a fleet just now, as one JSON line."""
    return json.dumps({"event": event, "at_s": time.time(), "name": name, "text": text}, ensure_ascii=False)


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int | None = None,
    tail: int = 1,
    spared: Sequence[str] = (),
) -> None:
    """A plain aligned table on stdout, within a terminal's width; nothing is cut off but the `spared` columns."""
    for line in tables.table_lines(headings, rows, left, tables.room(), spared, tail):
        click.echo(line)


def since(moment_s: float) -> str:
    """The time since then in words; a dash where it is not known."""
    return duration(max(0.0, time.time() - moment_s)) if moment_s else "-"


class LiveLines:
    """Some lines at the end of a terminal that are drawn again in place, within its size at that moment."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._drawn: list[str] = []

    def draw(self, lines: Sequence[str]) -> None:
        """Replace what was drawn; lines are cut to the terminal's width, and those beyond its height left out."""
        size = shutil.get_terminal_size()
        shown = [tables.cut(line, size.columns - 1) for line in lines[: max(1, size.lines - 1)]]
        self._write(self._home(size.columns) + "\n".join(shown))
        self._drawn = shown

    def clear(self) -> None:
        if self._drawn:
            self._write(self._home(shutil.get_terminal_size().columns))
            self._drawn = []

    def leave(self) -> None:
        """Keep what was drawn on the screen, and go on below it."""
        if self._drawn:
            self._write("\n")
            self._drawn = []

    def _home(self, columns: int) -> str:
        """To the beginning of what was drawn, erased; a terminal that became narrower has wrapped its lines."""
        rows = sum(max(1, -(-tables.display_width(line) // columns)) for line in self._drawn)
        up = f"\033[{rows - 1}A" if rows > 1 else ""
        return f"\r{up}\033[J"

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


class PhaseScreen:
    """Shows phases on stderr: live on a terminal, as plain lines elsewhere, there one a minute at most."""

    FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
    LINE_EVERY_S = 60.0

    def __init__(self, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._live = sys.stderr.isatty() and not quiet
        self._quiet, self._clock = quiet, clock
        self._began = self._phase_began = self._told = clock()
        self._phase = ""
        self._expected: Expected | None = None
        self._detail = ""
        self._lines = LiveLines()
        self._progress_began: tuple[float, int] = (0.0, 0)
        self._tick = 0
        self.times: dict[str, float] = {}
        self.notes: list[str] = []
        self._painter: threading.Thread | None = None
        self._stop = threading.Event()
        self._drawing = threading.RLock()  # the painter must not draw between a cleared line and the next one

    def __enter__(self) -> PhaseScreen:
        if not self._quiet:
            self._painter = threading.Thread(target=self._repaint, daemon=True)
            self._painter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish_phase(failed=error is not None)
        if self._painter is not None:
            self._stop.set()
            self._painter.join()

    def phase(self, name: str, expected: Expected | None = None) -> None:
        if name == self._phase:
            self._expected = expected or self._expected
            return
        self._finish_phase()
        self._phase, self._expected, self._detail = plain(name), expected, ""
        self._phase_began = self._clock()
        self._progress_began = (0.0, 0)
        if not self._live and name != Phase.READY:
            self._line(f"{name} …" + (f" ({expected.text})" if expected else ""))
        if name == Phase.READY:
            self._finish_phase()

    def detail(self, text: str, done: int = 0, total: int = 0, news: bool = False) -> None:
        parts = [text.rpartition("\r")[2].strip()] if text.strip() else []
        if total:
            parts.append(amount(done, total) + self._eta(done, total))
        self._detail = plain(" ".join(parts))
        if news and not self._live and self._detail:
            self._line(f"{self._phase}: {self._detail}")

    def note(self, text: str) -> None:
        self.notes.append(plain(text))
        with self._drawing:
            self._lines.clear()
            if not self._quiet:
                explain("  note: ", text)

    def remind(self) -> None:
        """Without a terminal: one line a minute, so that a long phase is seen to go on."""
        if self._phase and self._clock() - self._told >= self.LINE_EVERY_S:
            lasted = self._clock() - self._phase_began
            parts = [f"for {duration(lasted)}", self._usual(lasted), self._detail]
            self._line(f"{self._phase}, {', '.join(part for part in parts if part)}")

    def _usual(self, lasted_s: float) -> str:
        """How long this phase usually takes, and whether it has lasted more than twice that."""
        if self._expected is None:
            return ""
        late = ", past twice that" if self._expected.is_overdue(lasted_s) else ""
        return f"{self._expected.text}{late}"

    def _eta(self, done: int, total: int) -> str:
        now = self._clock()
        if not self._progress_began[0]:
            self._progress_began = (now, done)
        began, first = self._progress_began
        left = left_s(now - began, first, done, total)
        return "" if left is None else f", {duration(left)} left"

    def _line(self, text: str) -> None:
        self._told = self._clock()
        if not self._quiet:
            tell(f"[{self._told - self._began:7.1f} s] {text}", err=True)

    def _finish_phase(self, failed: bool = False) -> None:
        with self._drawing:
            self._end_phase(failed)

    def _end_phase(self, failed: bool) -> None:
        if not self._phase:
            return
        took = self._clock() - self._phase_began
        self.times[self._phase] = self.times.get(self._phase, 0.0) + took
        if self._live:
            self._lines.clear()
            mark = click.style("✗", fg="red") if failed else click.style("✓", fg="green")
            if self._phase == Phase.READY:
                took = self._clock() - self._began
            detail = f"  {self._detail}" if self._detail else ""
            tell(f"{mark} {self._phase:<18} {duration(took):>12}{click.style(detail, dim=True)}", err=True)
        elif self._phase == Phase.READY:
            self._line("ready")
        self._phase = ""

    def _repaint(self) -> None:
        while not self._stop.wait(0.1 if self._live else 1.0):
            with self._drawing:
                self._paint() if self._live else self.remind()

    def _paint(self) -> None:
        if not self._phase:
            return
        self._tick += 1
        lasted = self._clock() - self._phase_began
        parts = [self._usual(lasted), self._detail]
        frame = self.FRAMES[self._tick % len(self.FRAMES)]
        text = ", ".join(part for part in parts if part)
        self._lines.draw([f"{frame} {self._phase:<18} {duration(lasted):>12}  {text}"])


class CountLine:
    """One line of progress on stderr: drawn in place on a terminal, printed every few seconds elsewhere.

    A total of 0 is not known: time ends the count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._live, self._clock = sys.stderr.isatty(), clock
        self._lines = LiveLines()
        self._shown_s = -math.inf
        self._label, self._text, self._began_s = "", "", 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        now = self._clock()
        if label != self._label:
            self._label, self._began_s, self._shown_s = label, now, -math.inf
        if now - self._shown_s < (0.2 if self._live else 10.0) and done:
            return
        self._shown_s = now
        count = f"{done:,}/{total:,}" if total else f"{done:,} answered"
        self._text = f"{label}: {count}" if done else f"{label} …"
        if self._live:
            self._lines.draw([self._text])
        elif done:
            tell(self._text, err=True)

    def tick(self) -> None:
        """Say how long it has lasted: a slow server answers nothing for minutes."""
        now = self._clock()
        lasted = f"{self._text}  {duration(now - self._began_s)}"
        if self._live and self._text and now - self._began_s >= 5.0:
            self._lines.draw([lasted])
        elif not self._live and self._text and now - max(self._shown_s, self._began_s) >= 60.0:
            self._shown_s = now
            tell(lasted, err=True)

    def clear(self) -> None:
        self._lines.clear()


def say_waiting() -> None:
    """Let this command name the hosts that it waits for, from now on."""
    WAITING.set(lambda text: tell(f"corral: {text} …", err=True))
