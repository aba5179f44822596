"""Files that cannot be read for a while, as on a network file system whose server is away."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

READS = ("open", "read_bytes", "read_text", "stat")


@contextlib.contextmanager
def unreadable(*paths: Path, number: int = errno.ESTALE) -> Iterator[None]:
    """Within the block, reading these files, or anything in these folders, fails in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(Path, name, _failing(getattr(Path, name), paths, number))
        yield


def _failing(real: Any, paths: tuple[Path, ...], number: int) -> Any:
    def read(self: Path, *arguments: Any, **options: Any) -> Any:
        if any(path == self or path in self.parents for path in paths):
            raise OSError(number, os.strerror(number), str(self))
        return real(self, *arguments, **options)

    return read
