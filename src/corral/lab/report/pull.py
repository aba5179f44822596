"""`corral pull` for people: a line per node while files arrive, and a table at the end."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator

from corral.base.wording import duration
from corral.deploy.transfer.courier_group import Outcome, Progress
from corral.deploy.transfer.pull import Pull
from corral.lab.report.screen import LiveLines, tell
from corral.lab.report.tables import table_lines

STATES = {
    "arrived": "arrived",
    "already": "was there",
    "converted": "converted here",
    "shared": "sees it",
    "failed": "failed",
}


def pull_lines(result: Pull, columns: int | None) -> Iterator[str]:
    """Where the files are now, and how fast they came to each host."""
    why = f" ({result.why})" if result.why else ""
    yield f"{result.model}: {_gb(result.total_bytes)} in {result.folder}, {duration(result.seconds)}"
    yield f"from {result.source}{why}\n"
    headings = ["host", "state", "received", "speed", "storage reads", "load, predicted"]
    yield from table_lines(headings, [_row(arrival) for arrival in result.hosts], columns=columns)
    for arrival in result.hosts:
        if arrival.damaged:
            yield f"\n{arrival.host}: fetched again because damaged: {', '.join(arrival.damaged)}"


def _row(arrival: Outcome) -> list[str]:
    return [
        arrival.host,
        STATES[arrival.state],
        _gb(arrival.moved_bytes) if arrival.moved_bytes else "–",
        f"{arrival.mb_per_s:.0f} MB/s" if arrival.mb_per_s else "–",
        f"{arrival.read_mb_per_s:.0f} MB/s" if arrival.read_mb_per_s else "–",
        duration(arrival.load_s) if arrival.load_s is not None else "–",
    ]


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


class NodeLines:
    """One line per node on stderr: live on a terminal, printed every few seconds elsewhere."""

    def __init__(self, quiet: bool = False) -> None:
        self._live = sys.stderr.isatty() and not quiet
        self._quiet = quiet
        self._began_s = time.monotonic()
        self._nodes: dict[str, Progress] = {}
        self._first: dict[str, tuple[float, int]] = {}
        self._printed: dict[str, tuple[str, float]] = {}
        self._lines = LiveLines()
        self._lock = threading.Lock()

    def __enter__(self) -> NodeLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.leave()

    def report(self, step: Progress) -> None:
        """Show how far a node is."""
        if self._quiet:
            return
        with self._lock:
            known = self._nodes.get(step.host)
            if known is None or known.what != step.what:
                self._first[step.host] = (time.monotonic(), step.done_bytes)
            self._nodes[step.host] = step
            if self._live:
                self._lines.draw(self._shown())
            else:
                self._print(step)

    def _print(self, step: Progress) -> None:
        what, printed_s = self._printed.get(step.host, ("", 0.0))
        if what == step.what and time.monotonic() - printed_s < 5:
            return
        self._printed[step.host] = (step.what, time.monotonic())
        tell(f"[{time.monotonic() - self._began_s:7.1f} s] {self._line(step)}", err=True)

    def _line(self, step: Progress) -> str:
        if not step.total_bytes:
            return f"{step.host}: {step.what}"
        began_s, first = self._first[step.host]
        took_s = time.monotonic() - began_s
        speed = f"  {(step.done_bytes - first) / 1e6 / took_s:.0f} MB/s" if took_s > 1 else ""
        share = 100 * step.done_bytes / step.total_bytes
        return f"{step.host}: {step.what} {_gb(step.done_bytes)} of {_gb(step.total_bytes)} ({share:.0f}%){speed}"

    def _shown(self) -> list[str]:
        """A line for each node, or where there is no room for all, for the slowest, which hold up the others."""
        steps, room = list(self._nodes.values()), shutil.get_terminal_size().lines - 2
        if len(steps) <= room:
            return [self._line(step) for step in steps]
        slowest = sorted(steps, key=lambda step: step.done_bytes)[: room - 1]
        return [*map(self._line, slowest), f"… and {len(steps) - len(slowest)} more"]
