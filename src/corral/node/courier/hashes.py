"""Hashes of files: computed once, and remembered while the file is what it was.

A source as it is watched: whether it is still what was listed, by size and time of its files, and by its names.

A file that is written to while it is copied arrives with bytes of two versions, which its hash finds out only at the
end, and at every further attempt. Here that is noticed where the file is: before its bytes go out, and by a look at
all that is wanted every second or so (less often where a look takes long).

What became of a listed file: whether it is still the one that was listed, by its size and time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import socket
import tempfile
import threading
import time
from typing import IO, Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from .files import CourierFiles, Item
from .folder import listing
from .protocol import Json, Pace, TroubleError, tell

HASHES_FILE = ".corral-hashes.json"


class Hashes:
    """Known hashes of a folder's files, valid while a file's size, times and inode are what they were."""

    def __init__(self, folder: str, own: bool) -> None:
        self.store = os.path.join(folder, HASHES_FILE)  # travels with the data, also to other nodes that see it
        if not own and not os.path.exists(self.store):
            cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            name = f"{socket.gethostname()}:{os.path.realpath(folder)}"
            self.store = os.path.join(cache, "corral", "hashes", hashlib.sha1(name.encode()).hexdigest() + ".json")  # noqa: S324
        self.lock = threading.Lock()
        self.known: Dict[str, List[Any]] = {}
        with contextlib.suppress(OSError, ValueError, RecursionError), open(self.store, encoding="utf-8") as file:
            found = json.load(file)  # who may write here may lie; a lie about a hash is a file fetched anew
            if isinstance(found, dict):
                self.known = {path: row for path, row in found.items() if isinstance(row, list) and len(row) == 5}

    def get(self, path: str, full_path: str) -> Optional[str]:
        found = self.known.get(path)
        return str(found[0]) if found and found[1:] == self.key(full_path) else None

    def put(self, path: str, full_path: str, sha256: str) -> None:
        with self.lock:
            self.known[path] = [sha256, *self.key(full_path)]

    @staticmethod
    def key(full_path: str) -> List[int]:
        found = os.stat(full_path)
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]

    def save(self) -> None:
        with contextlib.suppress(OSError):  # a folder that cannot be written to is hashed again next time
            os.makedirs(os.path.dirname(self.store), exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".corral-hashes.", dir=os.path.dirname(self.store))
            with os.fdopen(handle, "w", encoding="utf-8") as file, self.lock:
                json.dump(self.known, file)
            os.chmod(temporary, 0o644)
            os.replace(temporary, self.store)


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
        return git_sha1(file.read())


def git_sha1(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()  # noqa: S324


def promised_hash(full_path: str) -> Optional[str]:
    """A hub cache names large files by their hash."""
    if not os.path.islink(full_path):
        return None
    real = os.path.realpath(full_path)
    name = os.path.basename(real)
    named = os.path.basename(os.path.dirname(real)) == "blobs" and re.fullmatch("[0-9a-f]{64}", name)
    return name if named else None


def hash_files(folder: str, rows: Sequence[Json], how: str, hashes: Hashes) -> None:
    """Put `sha256` into the rows. `known`: only what is known already; `all`: hash the rest; `again`: hash all."""
    todo = []
    for row in rows:
        if row["kind"] != "file":
            continue
        full_path = os.path.join(folder, row["path"])
        found = None if how == "again" else hashes.get(row["path"], full_path) or promised_hash(full_path)
        if found:
            row["sha256"] = found
        elif how != "known":
            todo.append(row)
    pace = Pace(lambda done, total: tell("hashing", done=done, total=total), sum(row["size"] for row in todo))

    changes: List[Change] = []

    def add(count: int) -> None:
        if changes:  # for nobody wants the others any more
            raise ChangedError(changes)
        pace.add(count)

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
