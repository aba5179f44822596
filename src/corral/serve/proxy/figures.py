"""What went through the proxy: counts, and the longest anybody waited. All times are monotonic."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Figures:
    """Counted since the proxy started."""

    requests: int = 0
    answered: int = 0  # whole answers passed on, whatever their status
    failed: int = (
        0  # no answer, or one that broke off; answers with a status of 4xx are the server's own and count as such
    )
    refused: int = 0  # passed on with a status of 400 or more
    left: int = 0  # the client went away first
    running: int = 0
    retried: int = 0  # sent again to another member, or on another connection, before the first byte
    held: int = 0  # waited because no member was ready
    switch_overs: int = 0
    longest_hold_s: float = 0.0
    longest_wait_s: float = 0.0  # from the last byte of a request to the first of its answer
    longest_stream_gap_s: float = 0.0  # between two arrivals of one answer
    longest_gap_s: float = 0.0  # in which requests ran and none got a byte
    _moved_s: float = 0.0

    def began(self, now_s: float) -> None:
        self.requests += 1
        self.running += 1
        if self.running == 1:
            self._moved_s = now_s

    def moved(self, now_s: float) -> None:
        """Bytes of some answer arrived."""
        gap = now_s - self._moved_s
        if gap > self.longest_gap_s:
            self.longest_gap_s = gap
        self._moved_s = now_s

    def to_json(self) -> dict[str, Any]:
        shown = [one.name for one in fields(self) if not one.name.startswith("_")]
        values = {name: getattr(self, name) for name in shown}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


def summary(figures: Figures) -> str:
    """The figures in two lines."""
    one = figures
    counts = (
        f"{one.requests:,} requests, {one.failed} failed, {one.refused} refused, {one.left} left by their clients"
    )
    held = f"{one.held} held (longest {one.longest_hold_s:.1f} s)"
    moves = f"{one.switch_overs} switch-overs, {one.retried} sent again, {held}"
    gaps = f"longest gap {one.longest_gap_s:.2f} s, within one answer {one.longest_stream_gap_s:.2f} s"
    return f"{counts}; {moves}\n{gaps}, to a first byte {one.longest_wait_s:.2f} s"
