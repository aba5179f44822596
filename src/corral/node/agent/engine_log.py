"""The engine's log: what its lines say of phases, figures and progress, and how it is kept bounded."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from typing import Any, Dict, Iterator, Optional, Tuple

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
