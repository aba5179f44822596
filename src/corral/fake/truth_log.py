"""The fake server's log of true times (its lines are described in `app`)."""

from __future__ import annotations

import os
from pathlib import Path


class TruthLog:
    """Appends lines to a file in blocks, so that logging costs a request next to nothing."""

    def __init__(self, path: Path | None) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else -1
        self._lines: list[bytes] = []

    @property
    def wanted(self) -> bool:
        return self._fd >= 0

    def add(self, line: bytes) -> None:
        self._lines.append(line)
        if len(self._lines) >= 512:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            os.write(self._fd, b"".join(self._lines))
            self._lines.clear()

    def close(self) -> None:
        self.flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
