"""What the server was asked, kept: a line of counters every few minutes, for whoever wants to know the last hour."""

from __future__ import annotations

import contextlib
import json
import os
import time

from ..load_figures import load_figures

EVERY_S = 300.0
MOST_BYTES = 4 << 20  # some weeks; then the older half goes


class LoadLog:
    """Appends to one file; a full disk loses lines, and nothing else."""

    def __init__(self, path: str) -> None:
        self._path, self._noted = path, float("-inf")

    def note(self, page: bytes, own: int) -> None:
        """Keep what a metrics page says, unless a line is young; `own` are the agent's own requests among them."""
        now = time.monotonic()
        if not self._path or now - self._noted < EVERY_S:
            return
        self._noted = now
        line = dict(load_figures(page), t=round(time.time(), 1), own=own)
        with contextlib.suppress(OSError):
            self._cut()
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                file.write((json.dumps(line) + "\n").encode())

    def _cut(self) -> None:
        """Leave the newer half of a file that has grown too long."""
        if not os.path.exists(self._path) or os.path.getsize(self._path) < MOST_BYTES:
            return
        with open(self._path, "rb") as file:
            file.seek(-(MOST_BYTES // 2), os.SEEK_END)
            kept = file.read().partition(b"\n")[2]
        with open(self._path, "wb") as file:
            file.write(kept)
