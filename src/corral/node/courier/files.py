"""The files of a manifest as they are on this node, complete or arriving, and sending them meanwhile."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import threading
import time
from typing import IO, Any, Callable, List, Optional, Tuple

from .folder import Tree
from .manifest import LONGEST_NAME
from .protocol import Json


class Item:
    """One file of the manifest: how many of its bytes are here, and where."""

    def __init__(self, number: int, row: Json, tree: Tree) -> None:
        self.number, self.path, self.size = number, str(row["path"]), int(row["size"])
        self.kind, self.mode = str(row["kind"]), int(row.get("mode", 0o644))
        self.mtime_ns: Optional[int] = row.get("mtime_ns")
        self.target = str(row.get("target", ""))
        self.sha256, self.git_sha1 = row.get("sha256"), row.get("git_sha1")
        self.final_path = tree.resolve(self.path)
        self.current_path = self.final_path  # where the bytes are now
        self.have_bytes, self.done, self.generation, self.damaged = 0, False, 0, 0
        self.claimed = False

    @property
    def part_name(self) -> str:
        """Its name while it is incomplete: beside the final one, and short enough for any file system."""
        mark = hashlib.sha1(f"{self.size}:{self.sha256 or self.git_sha1}".encode()).hexdigest()[:8]  # noqa: S324
        return f"{self.part_stem}{mark}.corral-part"

    @property
    def part_stem(self) -> str:
        """The beginning of the names of all its parts, whichever version of it they belong to."""
        name = os.path.basename(self.final_path)
        if len(os.fsencode(name)) > LONGEST_NAME - 30:
            name = hashlib.sha1(os.fsencode(name)).hexdigest()  # noqa: S324
        return f".{name}."

    @property
    def part(self) -> str:
        return os.path.join(os.path.dirname(self.final_path), self.part_name)

    def matches(self, digest: "Digest") -> bool:
        if self.sha256:
            return hmac.compare_digest(digest.sha256.hexdigest(), self.sha256)
        return hmac.compare_digest(digest.git.hexdigest(), str(self.git_sha1))


class Digest:
    """The hash that a file is checked by, updated block by block."""

    def __init__(self, item: Item) -> None:
        self.sha256 = hashlib.sha256()
        self.git = hashlib.sha1(b"blob %d\0" % item.size)  # noqa: S324
        self.with_git = not item.sha256

    def update(self, block: Any) -> None:
        self.sha256.update(block)
        if self.with_git:
            self.git.update(block)


def always(_: Item, __: IO[bytes]) -> bool:
    return True


class CourierFiles:
    """The items of one folder; senders wait here for bytes that have not arrived yet."""

    def __init__(self, items: List[Item], uplink_bytes_per_s: float = 0) -> None:
        self.items = items
        self.changed = threading.Condition()
        self.uplink, self.free_at_s = uplink_bytes_per_s, 0.0
        self.sent_bytes, self.active_s = 0, time.monotonic()
        self.closed = False
        self.may_send: Callable[[Item, IO[bytes]], bool] = always  # whether a file may still be sent

    def close(self) -> None:
        """Nothing more will come: senders stop waiting, and their receivers ask another courier."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def grow(self, item: Item, have_bytes: int, done: bool = False) -> None:
        with self.changed:
            item.have_bytes, item.done = have_bytes, done
            item.current_path = item.final_path if done else item.part
            self.active_s = time.monotonic()
            self.changed.notify_all()

    def reset(self, item: Item) -> None:
        with self.changed:
            item.have_bytes, item.generation = 0, item.generation + 1
            self.changed.notify_all()

    def open(self, item: Item, offset: int, timeout_s: float) -> Tuple[IO[bytes], int]:
        """The file, once it has bytes after `offset`, and the number of this attempt at it."""
        with self.changed:
            ready = self.changed.wait_for(lambda: self.closed or item.done or item.have_bytes > offset, timeout_s)
            self._refuse_when_closed()
            if not ready:
                raise TimeoutError(item.path)
            return open(item.current_path, "rb", buffering=0), item.generation

    def available(self, item: Item, offset: int, generation: int, timeout_s: float) -> int:
        with self.changed:
            self.changed.wait_for(
                lambda: self.closed or item.done or item.have_bytes > offset or item.generation != generation,
                timeout_s,
            )
            self._refuse_when_closed()
            if item.generation != generation:
                raise ConnectionError(f"{item.path} is fetched again")
            return item.size if item.done else item.have_bytes

    def _refuse_when_closed(self) -> None:
        if self.closed:
            raise ConnectionError("this courier sends nothing more")

    def send(self, sock: socket.socket, item: Item, offset: int, end: int, timeout_s: float) -> None:
        if offset >= end:
            return
        file, generation = self.open(item, offset, timeout_s)
        with file:
            while offset < end:
                until = min(end, self.available(item, offset, generation, timeout_s))
                if until <= offset:
                    raise TimeoutError(item.path)
                portion = self.portion(until - offset)
                if not self.may_send(item, file):
                    raise ConnectionError(f"{item.path} changed")
                count = sock.sendfile(file, offset, portion)
                if not count:
                    raise ConnectionError(f"{item.path} is shorter than it was")
                offset += count
                self.sent_bytes += count
                self.active_s = time.monotonic()
            self.may_send(item, file)  # the last bytes may have been of another version

    def portion(self, wanted: int) -> int:
        """How many bytes may be sent now: all, unless the uplink is limited."""
        if not self.uplink:
            return min(wanted, 16 << 20)
        count = min(wanted, max(16 << 10, int(self.uplink / 50)))
        with self.changed:
            start_s = max(time.monotonic(), self.free_at_s)
            self.free_at_s = start_s + count / self.uplink
        time.sleep(max(0.0, start_s - time.monotonic()))
        return count
