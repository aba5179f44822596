"""Hashes of files: computed once, and remembered while the file is what it was."""

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
from typing import Any, Callable, Dict, List, Optional, Sequence

from .protocol import Json, Pace, tell
from .watched import Change, ChangedError, changed_file, status_of

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
