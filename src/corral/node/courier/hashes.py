"""Hashes of a folder's files, computed once and remembered; and whether a listed file has changed since.

A file that is written to while it is copied arrives with bytes of two versions, which its hash shows only at the end,
and again at every further attempt. A watched folder notices the change where the file is, by size and time: before
bytes are sent, and by a check of all wanted files every second or so (less often where a check takes long).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import socket
import threading
import time
from typing import IO, Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from ..files import write_atomic
from .files import CourierFiles, Item
from .folder import listing
from .protocol import CourierError, Json, Progress, send_event

HASHES_FILE = ".corral-hashes.json"
CHECK_S = 1.0
CHECK_SHARE = 20  # a check may take one part in so many of the time


class HashCache:
    """Known hashes of a folder's files, each valid while the file's size, times and inode stay the same."""

    def __init__(self, folder: str, own: bool) -> None:
        self.store = os.path.join(folder, HASHES_FILE)  # beside the data, so that other nodes see it, too
        if not own and not os.path.exists(self.store):
            cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            name = f"{socket.gethostname()}:{os.path.realpath(folder)}"
            self.store = os.path.join(cache, "corral", "hashes", hashlib.sha1(name.encode()).hexdigest() + ".json")  # noqa: S324
        self.lock = threading.Lock()
        self.known: Dict[str, List[Any]] = {}
        with contextlib.suppress(OSError, ValueError, RecursionError), open(self.store, encoding="utf-8") as file:
            stored = json.load(file)  # whoever may write here may lie; a wrong hash only means a file fetched again
            if isinstance(stored, dict):
                self.known = {path: row for path, row in stored.items() if isinstance(row, list) and len(row) == 5}

    def get(self, path: str, full_path: str) -> Optional[str]:
        row = self.known.get(path)
        return str(row[0]) if row and row[1:] == self.key(full_path) else None

    def put(self, path: str, full_path: str, sha256: str) -> None:
        with self.lock:
            self.known[path] = [sha256, *self.key(full_path)]

    @staticmethod
    def key(full_path: str) -> List[int]:
        status = os.stat(full_path)
        return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]

    def save(self) -> None:
        with contextlib.suppress(OSError):  # a folder that cannot be written to is hashed again next time
            os.makedirs(os.path.dirname(self.store), exist_ok=True)
            with self.lock:
                text = json.dumps(self.known)
            write_atomic(self.store, text, 0o644)


def sha256_of(full_path: str, on_bytes: Callable[[int], None]) -> str:
    digest, buffer = hashlib.sha256(), bytearray(1 << 20)
    with open(full_path, "rb", buffering=0) as file:
        while True:
            count = file.readinto(buffer)
            if not count:
                return digest.hexdigest()
            digest.update(memoryview(buffer)[:count])
            on_bytes(count)


def git_sha1_of(full_path: str) -> str:
    with open(full_path, "rb") as file:
        body = file.read()
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()  # noqa: S324


def promised_hash(full_path: str) -> Optional[str]:
    """A hub cache names large files by their hash."""
    if not os.path.islink(full_path):
        return None
    real = os.path.realpath(full_path)
    name = os.path.basename(real)
    named = os.path.basename(os.path.dirname(real)) == "blobs" and re.fullmatch("[0-9a-f]{64}", name)
    return name if named else None


def hash_files(folder: str, rows: Sequence[Json], how: str, hashes: HashCache) -> None:
    """Put `sha256` into the rows. `known`: only what is known already; `all`: hash the rest; `again`: hash all."""
    todo = []
    for row in rows:
        if row["kind"] != "file":
            continue
        full_path = os.path.join(folder, row["path"])
        sha256 = None if how == "again" else hashes.get(row["path"], full_path) or promised_hash(full_path)
        if sha256:
            row["sha256"] = sha256
        elif how != "known":
            todo.append(row)
    progress = Progress("hashing", sum(row["size"] for row in todo))
    changes: List[Change] = []

    def add(count: int) -> None:
        if changes:  # the other hashes are not needed any more
            raise ChangedError(changes)
        progress.add(count)

    def work(row: Json) -> None:
        full_path = os.path.join(folder, row["path"])
        with contextlib.suppress(FileNotFoundError):
            row["sha256"] = sha256_of(full_path, add)
        if change := changed_file(row, status_of(full_path)):
            changes.append(change)
            raise ChangedError(changes)
        hashes.put(row["path"], full_path, row["sha256"])

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(work, todo))
    if todo:
        hashes.save()


class Change(NamedTuple):
    """One file that differs from its row; 0 bytes where there is, or was, none."""

    path: str
    how: str  # rewritten, gone, new
    was_bytes: int
    now_bytes: int


class ChangedError(Exception):
    """The source is being changed."""

    def __init__(self, changes: Sequence[Change]) -> None:
        super().__init__(changes[0].path)
        self.changes = changes

    def report(self) -> None:
        send_event("changed", **self.changes[0]._asdict(), more=len(self.changes) - 1)


def changed_file(row: Json, status: Optional[os.stat_result]) -> Optional[Change]:
    """How a file differs from its row, or None."""
    if status is None:
        return Change(row["path"], "gone", row["size"], 0)
    same = (status.st_size, status.st_mtime_ns) == (row["size"], row.get("mtime_ns"))
    return None if same else Change(row["path"], "rewritten", row["size"], status.st_size)


def status_of(path: str) -> Optional[os.stat_result]:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path)
    return None


class WatchedFolder:
    """The listed files of a source. A new file is a change, too, in a model's folder; not in an environment."""

    def __init__(
        self, folder: str, rows: List[Json], leave_out: Sequence[str], links_out: str, files: CourierFiles
    ) -> None:
        self.folder, self.rows, self.leave_out, self.links_out = folder, rows, leave_out, links_out
        self.wanted: Optional[Sequence[int]] = None if links_out == "keep" else range(len(rows))
        self.files = files
        self.lock = threading.Lock()
        self.reported = False
        threading.Thread(target=self._watch, daemon=True).start()

    def changes(self) -> List[Change]:
        rows = [self.rows[number] for number in self.wanted or () if self.rows[number]["kind"] == "file"]
        compared = (changed_file(row, status_of(os.path.join(self.folder, row["path"]))) for row in rows)
        return [change for change in compared if change is not None] + self._new()

    def _new(self) -> List[Change]:
        if self.links_out == "keep":
            return []
        try:
            rows = listing(self.folder, self.leave_out, self.links_out)
        except (OSError, CourierError):  # something disappeared meanwhile: the next check reports it
            return []
        known = {row["path"] for row in self.rows}
        return [Change(row["path"], "new", 0, row["size"]) for row in rows if row["path"] not in known]

    def is_same(self) -> bool:
        """Check once; a source that has changed sends nothing more, and reports that once."""
        return self._unchanged(self.changes())

    def may_send(self, item: Item, file: IO[bytes]) -> bool:
        """Whether an open file is still the listed one."""
        change = changed_file(self.rows[item.number], os.fstat(file.fileno()))
        return self._unchanged([change] if change else [])

    def hash_again(self, number: int) -> bool:
        """For a file that arrived damaged although its size and time are the same: whether its hash is, too."""
        row = self.rows[number]
        same = sha256_of(os.path.join(self.folder, row["path"]), lambda _: None) == row.get("sha256")
        return self._unchanged([] if same else [Change(row["path"], "rewritten", row["size"], row["size"])])

    def _unchanged(self, changes: Sequence[Change]) -> bool:
        if not changes:
            return True
        self.files.close()
        with self.lock:
            first, self.reported = not self.reported, True
        if first:
            ChangedError(changes).report()
        return False

    def _watch(self) -> None:
        """Check until something has changed."""
        while not self.reported:
            began_s = time.monotonic()
            with contextlib.suppress(OSError):
                if self.wanted is not None:
                    self.is_same()
            time.sleep(max(CHECK_S, CHECK_SHARE * (time.monotonic() - began_s)))
