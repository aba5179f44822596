"""The progress of a start: phases and figures from the engine's log, and whether the start advances.

An advance is a new phase, a further shard or percentage, a figure that the engine reports, or, while weights are
loaded, a further part of them read from disk. Processor time is not an advance, and neither is a log line that says
nothing new: an engine can compute for ever in a loop.
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
# lines that an engine repeats while nothing happens
WAITING = re.compile(
    r"No available shared memory broadcast block|Waiting for \d+ (?:local|remote)"
    r"|waiting for .*engine.*to (?:start|connect)|[Ss]till waiting",
)
DEFAULT_LIMIT_S = 900.0
READ_STEPS = 50  # parts of the weights; reading one of them is an advance …
READ_MOST = 3  # … until the weights have been read so many times
NOTABLE_LINES = 20
LONGEST_LINE = 300
SLOW_LEAST_S = 5.0  # beyond the usual time; shorter delays are not reported
_LOGGED = re.compile(r"(?:\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] (.*)")
_TROUBLE = re.compile(r"\b\w*(?:Error|Exception)\b: |[Ff]ailed to |[Rr]etrying")


def read_line(line: str) -> Optional[Tuple[Optional[str], Json]]:
    """What one line of the engine's log says: (phase, observed values), or None."""
    for pattern, phase, names in PATTERNS:
        match = pattern.search(line)
        if match:
            values = zip(names, match.groups())  # noqa: B905 - strict is newer than 3.8
            return phase, {name: _number(text) for name, text in values if text is not None}
    return None


def _number(text: str) -> Any:
    text = text.replace(",", "")
    return float(text) if "." in text else int(text)


class EngineLog:
    """The log that the engine appends to, read from the beginning of this attempt."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.offset = 0

    def skip(self) -> int:
        """Skip what earlier attempts wrote; the offset at which this one begins."""
        self.offset = os.path.getsize(self.path) if os.path.exists(self.path) else 0
        return self.offset

    def new_lines(self) -> Iterator[str]:
        with contextlib.suppress(OSError):
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(1 << 20)
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if not end and len(data) == 1 << 20:
                end = len(data)  # one endless line
            self.offset += end
            for line in re.split(rb"[\r\n]+", data[:end]):
                if line:
                    yield line.decode("utf-8", "replace")

    def trim(self) -> None:
        """Keep the log bounded: the engine appends, so truncating it is safe."""
        with contextlib.suppress(OSError):
            if os.path.getsize(self.path) > MAX_LOG_BYTES:
                shutil.copyfile(self.path, self.path + ".1")
                os.chmod(self.path + ".1", 0o600)
                os.truncate(self.path, 0)
                self.offset = 0


class StartProgress:
    """One attempt to start: its phase, when it last advanced, and what the engine logged last.

    The caller reads the clock.
    """

    def __init__(self, expected: Optional[Json], now: float) -> None:
        expected = expected or {}
        self._usual: Json = expected.get("usual_s") or {}
        self._limits: Json = expected.get("limit_s") or {}
        self._limit = float(expected.get("default_limit_s") or DEFAULT_LIMIT_S)
        self._part = float(expected.get("weights_bytes") or 0) / READ_STEPS
        self.phase = "starting"
        self._entered = self.advanced_at = now
        self._parts_read = 0
        self._reported = 1.0  # times the usual length, when it was last reported as slow
        self.line = ""
        self._notable: List[str] = []

    def enter(self, phase: str, now: float) -> None:
        """A phase begins, or continues."""
        if phase != self.phase:
            self.phase, self._entered, self._reported = phase, now, 1.0
            self.advance(now)

    def advance(self, now: float) -> None:
        self.advanced_at = now

    def read(self, total_bytes: int, now: float) -> None:
        """Note the bytes read from disk so far: while loading, each further part of the weights is an advance."""
        parts = int(total_bytes / self._part) if self._part else 0
        if self.phase == "loading" and self._parts_read < parts <= READ_MOST * READ_STEPS:
            self._parts_read = parts
            self.advance(now)

    def note_line(self, line: str) -> None:
        """Keep what a waiting user wants to know: the last line, and the last ones that tell of trouble."""
        logged = _LOGGED.match(line)
        level, text = logged.groups() if logged else ("", line.strip())
        trouble = level in ("WARNING", "ERROR", "CRITICAL") or bool(_TROUBLE.search(text) or WAITING.search(text))
        if not re.search(r"[A-Za-z]{3}", text) or not (logged or trouble):
            return
        text = text[:LONGEST_LINE]
        self.line = text
        if trouble:
            others = [one for one in self._notable if one != text]
            self._notable = [*others[1 - NOTABLE_LINES :], text]

    def slow(self, now: float) -> Optional[Json]:
        """What to report when the phase has lasted twice its usual length, and again at every doubling."""
        usual, lasted = float(self._usual.get(self.phase) or 0), now - self._entered
        if not usual or lasted < 2 * self._reported * usual or lasted < usual + SLOW_LEAST_S:
            return None
        while lasted >= 2 * self._reported * usual:
            self._reported *= 2
        return dict(self.log_lines(), phase=self.phase, lasted_s=round(lasted, 1), usual_s=usual)

    def limit_s(self) -> float:
        """How long this phase may go without an advance."""
        return float(self._limits.get(self.phase) or self._limit)

    def overdue(self, still_s: float, now: float) -> Json:
        """Why a start without an advance for `still_s` is given up."""
        usual = self._usual.get(self.phase)
        text = "it did not advance for %s while %s" % (_minutes(still_s), self.phase)
        if usual:
            text += ", which was expected to take %s" % _minutes(float(usual))
        return dict(self.log_lines(), text=text, phase=self.phase, lasted_s=round(now - self._entered, 1))

    def log_lines(self) -> Json:
        return {"line": self.line, "lines": list(self._notable)}


def _minutes(seconds: float) -> str:
    return "%d s" % seconds if seconds < 120 else "%d min" % (seconds / 60)
