"""What became of a listed file: whether it is still the one that was listed, by its size and time."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple, Optional, Sequence

from .talk import Json, tell


class Change(NamedTuple):
    """One file that is not what was listed; 0 bytes where there is, or was, none."""

    path: str
    how: str  # rewritten, gone, new
    was_bytes: int
    now_bytes: int


class ChangedError(Exception):
    """The source is being changed."""

    def __init__(self, changes: Sequence[Change]) -> None:
        super().__init__(changes[0].path)
        self.changes = changes

    def tell(self) -> None:
        tell("changed", **self.changes[0]._asdict(), more=len(self.changes) - 1)


def changed_file(row: Json, found: Optional[os.stat_result]) -> Optional[Change]:
    """A listed file beside what is there now."""
    if found is None:
        return Change(row["path"], "gone", row["size"], 0)
    same = (found.st_size, found.st_mtime_ns) == (row["size"], row.get("mtime_ns"))
    return None if same else Change(row["path"], "rewritten", row["size"], found.st_size)


def status_of(path: str) -> Optional[os.stat_result]:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path)
    return None
