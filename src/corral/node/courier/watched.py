"""A source as it is watched: whether it is still what was listed, by size and time of its files, and by its names.

A file that is written to while it is copied arrives with bytes of two versions, which its hash finds out only at the
end, and at every further attempt. Here that is noticed where the file is: before its bytes go out, and by a look at
all that is wanted every second or so (less often where a look takes long).

What became of a listed file: whether it is still the one that was listed, by its size and time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import IO, List, NamedTuple, Optional, Sequence

from .courier_files import CourierFiles, Item
from .folders import listing
from .hashes import sha256_of
from .protocol import Json, TroubleError, tell


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


LOOK_S = 1.0
SHARE = 20  # a look may take one part in so many of the time


class Watched:
    """The listed files of a source. A new name counts, too, in a model's folder; in an environment it does not."""

    def __init__(
        self, folder: str, rows: List[Json], leave_out: Sequence[str], links_out: str, depot: CourierFiles
    ) -> None:
        self.folder, self.rows, self.leave_out, self.links_out = folder, rows, leave_out, links_out
        self.wanted: Optional[Sequence[int]] = None if links_out == "keep" else range(len(rows))
        self.depot = depot
        self.lock = threading.Lock()
        self.told = False
        threading.Thread(target=self._look, daemon=True).start()

    def changes(self) -> List[Change]:
        rows = [self.rows[number] for number in self.wanted or () if self.rows[number]["kind"] == "file"]
        looked = (changed_file(row, status_of(os.path.join(self.folder, row["path"]))) for row in rows)
        return [change for change in looked if change is not None] + self._new()

    def _new(self) -> List[Change]:
        if self.links_out == "keep":
            return []
        try:
            found = listing(self.folder, self.leave_out, self.links_out)
        except (OSError, TroubleError):  # something went while it was listed: the next look tells
            return []
        known = {row["path"] for row in self.rows}
        return [Change(row["path"], "new", 0, row["size"]) for row in found if row["path"] not in known]

    def is_same(self) -> bool:
        """Look once; a source that has changed gives nothing more, and says so once."""
        return self._judge(self.changes())

    def allows(self, item: Item, file: IO[bytes]) -> bool:
        """Whether an open file may be sent on."""
        change = changed_file(self.rows[item.number], os.fstat(file.fileno()))
        return self._judge([change] if change else [])

    def hash_again(self, number: int) -> bool:
        """For a file that arrived wrong although nothing shows: whether it is still what it was."""
        row = self.rows[number]
        found = sha256_of(os.path.join(self.folder, row["path"]), lambda _: None)
        same = found == row.get("sha256")
        return self._judge([] if same else [Change(row["path"], "rewritten", row["size"], row["size"])])

    def _judge(self, changes: Sequence[Change]) -> bool:
        if not changes:
            return True
        self.depot.close()
        with self.lock:
            first, self.told = not self.told, True
        if first:
            ChangedError(changes).tell()
        return False

    def _look(self) -> None:
        """Again and again, until something has changed."""
        while not self.told:
            began_s = time.monotonic()
            with contextlib.suppress(OSError):
                if self.wanted is not None:
                    self.is_same()
            time.sleep(max(LOOK_S, SHARE * (time.monotonic() - began_s)))
