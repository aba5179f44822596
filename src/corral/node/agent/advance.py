"""Whether a start gets on: its phase and since when, when it last advanced, and what the engine said last.

An advance is a new phase, a further shard or percentage, a figure that the engine reports, or, while weights are
loaded, a further part of them read from disk. Processor time is none, and neither is a line of the log that says
nothing new: an engine can compute for ever in a loop that ends nowhere.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Optional

from .engine_log import WAITING

Json = Dict[str, Any]
DEFAULT_LIMIT_S = 900.0
READ_STEPS = 50  # parts of the weights; reading one of them is an advance …
READ_MOST = 3  # … until so many times the weights have been read
NOTABLE_LINES = 20
LONGEST_LINE = 300
SLOW_LEAST_S = 5.0  # beyond what is usual; shorter delays are nobody's concern
_LOGGED = re.compile(r"(?:\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] (.*)")
_TROUBLE = re.compile(r"\b\w*(?:Error|Exception)\b: |[Ff]ailed to |[Rr]etrying")


class Advance:
    """One attempt to start, judged by a clock that the caller reads."""

    def __init__(self, expected: Optional[Json], now: float) -> None:
        given = expected or {}
        self._usual: Json = given.get("usual_s") or {}
        self._limits: Json = given.get("limit_s") or {}
        self._limit = float(given.get("default_limit_s") or DEFAULT_LIMIT_S)
        self._part = float(given.get("weights_bytes") or 0) / READ_STEPS
        self.phase = "starting"
        self._entered = self.at = now  # `at`: of the last advance
        self._parts_read = 0
        self._told = 1.0  # times the usual length that was told last
        self.line = ""
        self._notable: List[str] = []

    def enter(self, phase: str, now: float) -> None:
        """A phase begins, or goes on."""
        if phase != self.phase:
            self.phase, self._entered, self._told = phase, now, 1.0
            self.step(now)

    def step(self, now: float) -> None:
        """Something came nearer to its end."""
        self.at = now

    def read(self, total_bytes: int, now: float) -> None:
        """So much has been read from disk in all: while loading, parts of the weights count."""
        parts = int(total_bytes / self._part) if self._part else 0
        if self.phase == "loading" and self._parts_read < parts <= READ_MOST * READ_STEPS:
            self._parts_read = parts
            self.step(now)

    def hear(self, line: str) -> None:
        """Keep what somebody would want to know who waits: the last words, and the last troubles."""
        found = _LOGGED.match(line)
        level, words = found.groups() if found else ("", line.strip())
        trouble = level in ("WARNING", "ERROR", "CRITICAL") or bool(_TROUBLE.search(words) or WAITING.search(words))
        if not re.search(r"[A-Za-z]{3}", words) or not (found or trouble):
            return
        words = words[:LONGEST_LINE]
        self.line = words
        if trouble:
            others = [one for one in self._notable if one != words]
            self._notable = [*others[1 - NOTABLE_LINES :], words]

    def slow(self, now: float) -> Optional[Json]:
        """What to tell once the phase has lasted twice its usual length, and again whenever that has doubled."""
        usual, lasted = float(self._usual.get(self.phase) or 0), now - self._entered
        if not usual or lasted < 2 * self._told * usual or lasted < usual + SLOW_LEAST_S:
            return None
        while lasted >= 2 * self._told * usual:
            self._told *= 2
        return dict(self.said(), phase=self.phase, lasted_s=round(lasted, 1), usual_s=usual)

    def limit_s(self) -> float:
        """How long this phase may go without an advance."""
        return float(self._limits.get(self.phase) or self._limit)

    def overdue(self, still_s: float, now: float) -> Json:
        """The reason of a start that was given up, without an advance for `still_s`."""
        usual = self._usual.get(self.phase)
        text = "it did not advance for %s while %s" % (_minutes(still_s), self.phase)
        if usual:
            text += ", which was expected to take %s" % _minutes(float(usual))
        return dict(self.said(), text=text, phase=self.phase, lasted_s=round(now - self._entered, 1))

    def said(self) -> Json:
        return {"line": self.line, "lines": list(self._notable)}


def _minutes(seconds: float) -> str:
    return "%d s" % seconds if seconds < 120 else "%d min" % (seconds / 60)
