"""A file system of its own that can be filled without harm; hosts that come later share it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(path: Path, size_bytes: int, mode: int = 0o1777) -> Iterator[None]:
    """Mounted at `path`, which is made; gone afterwards, also where something still has files open there."""
    path.mkdir()
    options = f"size={size_bytes},mode={mode:o}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False)
