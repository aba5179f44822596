"""Whether a file has changed since it was last looked at."""

from __future__ import annotations

import os
from pathlib import Path


def mark_of(path: str | Path) -> tuple[int, int]:
    """Its time and its size; zeros where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - hundreds a second, most of them by plain text
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)
