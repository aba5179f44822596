"""The engine's log: what its lines say of phases, figures and progress, and how it is kept bounded.

Whether a start gets on: its phase and since when, when it last advanced, and what the engine said last.

An advance is a new phase, a further shard or percentage, a figure that the engine reports, or, while weights are
loaded, a further part of them read from disk. Processor time is none, and neither is a line of the log that says
nothing new: an engine can compute for ever in a loop that ends nowhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from typing import Any, Dict, Iterator, List, Optional, Tuple

Json = Dict[str, Any]
MAX_LOG_BYTES = 64 << 20
# (pattern, phase or None, names of the groups as observed values)
PHASES = [
    (r"Unable to find image '|Trying to pull |Starting to build|Converting OCI blobs", "pulling image", ()),
    (r"non-default args:|Initializing a V1 LLM engine", "initialising", ()),
    (r"Starting to load model", "loading", ()),
    (r"Loading \S+ (?:checkpoint shards|using [^:]+):\s+\d+% Completed \| (\d+)/(\d+)", "loading", ("done", "total")),
    (r"Time spent downloading weights", "loading", ()),
    (r"Loading weights took ([\d.]+) seconds", "loading", ("weights_read_s",)),
    (r"Model loading took ([\d.]+) GiB (?:memory )?and ([\d.]+) seconds", "loading", ("weights_gib", "load_s")),
    (r"(?:Using cache directory|Dynamo bytecode transform time|Compiling a graph|Start compil)", "compiling", ()),
    (r"Directly load the compiled graph|Directly load AOT compilation", "compiling", ()),
    (r"torch\.compile (?:takes|took) ([\d.]+) s", "compiling", ("compile_s",)),
    (r"Warming up model for the compilation", "compiling", ()),
    (r"Available KV cache memory: ([\d.]+) GiB", "warming", ("kv_gib",)),
    (
        r"KV cache size: ([\d,]+) tokens(?:, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x)?",
        "warming",
        ("kv_tokens", "context", "concurrency"),
    ),
    (r"Capturing CUDA graphs[^|]*?(\d+)%\|.*?\| (\d+)/(\d+)", "warming", ("percent", "done", "total")),
    (r"Graph capturing finished in ([\d.]+) secs, took ([\d.-]+) GiB", "warming", ("graph_s", "graph_gib")),
    (r"init engine \(.*?\) took ([\d.]+)", "warming", ("init_engine_s",)),
    (r"Starting vLLM (?:API )?server", "warming", ()),
    (r"Application startup complete", "warming", ()),
]
PATTERNS = [(re.compile(pattern), phase, names) for pattern, phase, names in PHASES]
PROGRESS_NAMES = ("done", "total", "percent")
# lines that an engine repeats while nothing happens: they are no sign of progress
WAITING = re.compile(
    r"No available shared memory broadcast block|Waiting for \d+ (?:local|remote)"
    r"|waiting for .*engine.*to (?:start|connect)|[Ss]till waiting",
)


def read_line(line: str) -> Optional[Tuple[Optional[str], Json]]:
    """What one line of the engine's log says: (phase, observed values), or None."""
    for pattern, phase, names in PATTERNS:
        match = pattern.search(line)
        if match:
            found = zip(names, match.groups())  # noqa: B905 - strict is newer than 3.8
            return phase, {name: _number(text) for name, text in found if text is not None}
    return None


def _number(text: str) -> Any:
    text = text.replace(",", "")
    return float(text) if "." in text else int(text)


class EngineLog:
    """A log that the engine appends to, read from where this attempt begins."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.offset = 0

    def skip(self) -> int:
        """Leave out what an earlier attempt wrote; where this one's lines begin."""
        self.offset = os.path.getsize(self.path) if os.path.exists(self.path) else 0
        return self.offset

    def new_lines(self) -> Iterator[str]:
        with contextlib.suppress(OSError):
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(1 << 20)
            whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if not whole and len(data) == 1 << 20:
                whole = len(data)  # one endless line
            self.offset += whole
            for line in re.split(rb"[\r\n]+", data[:whole]):
                if line:
                    yield line.decode("utf-8", "replace")

    def trim(self) -> None:
        """Keep the log bounded: the engine appends, so cutting it short is safe."""
        with contextlib.suppress(OSError):
            if os.path.getsize(self.path) > MAX_LOG_BYTES:
                shutil.copyfile(self.path, self.path + ".1")
                os.chmod(self.path + ".1", 0o600)
                os.truncate(self.path, 0)
                self.offset = 0


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
