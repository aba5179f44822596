"""Files that cannot be read for a while, as on a network file system whose server is away."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

READS = ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "scandir"), (os, "listdir"))


@contextlib.contextmanager
def unreadable(*paths: Path, number: int = errno.ESTALE) -> Iterator[None]:
    """Within the block, opening or looking at these files, or anything in these folders, fails in this process."""
    roots = tuple(map(str, paths))
    with pytest.MonkeyPatch.context() as patch:
        for module, name in READS:
            patch.setattr(module, name, _failing(getattr(module, name), roots, number))
        yield


def _failing(real: Any, roots: tuple[str, ...], number: int) -> Any:
    def read(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if any(name == root or name.startswith(f"{root}/") for root in roots):
            raise OSError(number, os.strerror(number), name)
        return real(path, *arguments, **options)

    return read
