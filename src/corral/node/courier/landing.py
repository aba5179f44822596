"""Where bytes become files: a file gets its name only after its hash was right, whoever it came from."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict

from .depot import Depot, Digest, Item
from .folders import Tree
from .hashes import Hashes
from .sources import as_connection_errors
from .talk import TroubleError, tell

BLOCK_BYTES = 256 << 10
ATTEMPTS = 4  # per file, after a wrong hash


class Landing:
    """Writes what arrives into the folder; `heard` is called whenever something did."""

    def __init__(self, tree: Tree, depot: Depot, hashes: Hashes, heard: Callable[[], None]) -> None:
        self.tree, self.depot, self.hashes, self.heard = tree, depot, hashes, heard
        self.digests: Dict[int, Digest] = {}
        self.arrived_bytes = 0

    def make(self, item: Item) -> None:
        """Links, empty folders and empty files need nobody."""
        if item.kind == "folder":
            self.tree.make(item.path)
        elif item.kind == "link":
            self.tree.link(item.path, item.target)
        else:
            self.keep_small(item, b"", "this node")
        self.depot.grow(item, item.size, done=True)

    def keep_small(self, item: Item, body: bytes, source: str) -> None:
        digest = Digest(item)
        digest.update(body)
        if not item.fits(digest):
            return self.complain(item, source)
        handle = self.tree.open(item.path, item.part_name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(handle, memoryview(body))
            self.arrived_bytes += len(body)
            self.name(item, handle, digest.sha256.hexdigest())
        finally:
            os.close(handle)
        return None

    def resume(self, item: Item) -> None:
        """Continue the part that is here: its bytes are read once, for the hash."""
        if item.number in self.digests:
            return
        digest = Digest(item)
        have = 0
        handle = self.tree.open(item.path, item.part_name, os.O_RDWR | os.O_CREAT)
        with os.fdopen(handle, "r+b", buffering=0) as part:
            part.truncate(min(item.size, os.fstat(handle).st_size))
            while have < item.size:
                block = part.read(1 << 20)
                if not block:
                    break
                digest.update(block)
                have += len(block)
                self.heard()
        self.digests[item.number] = digest
        self.depot.grow(item, have)

    def stream(self, item: Item, response: Any, source: str) -> None:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        digest = self.digests[item.number]
        handle = self.tree.open(item.path, item.part_name, os.O_WRONLY)
        try:
            os.lseek(handle, item.have, os.SEEK_SET)
            while item.have < item.size:
                with as_connection_errors():
                    count = response.readinto(buffer[: min(BLOCK_BYTES, item.size - item.have)])
                if not count:
                    raise ConnectionError("stopped in the middle of a file")
                self.append(item, digest, handle, buffer[:count])
            self.settle(item, digest, handle, source)
        finally:
            os.close(handle)

    def take_block(self, item: Item, body: bytes) -> None:
        handle = self.tree.open(item.path, item.part_name, os.O_WRONLY)
        try:
            os.lseek(handle, item.have, os.SEEK_SET)
            self.append(item, self.digests[item.number], handle, memoryview(body))
            if item.have == item.size:
                self.settle(item, self.digests[item.number], handle, "this machine")
        finally:
            os.close(handle)

    def append(self, item: Item, digest: Digest, handle: int, block: memoryview) -> None:
        write_all(handle, block)
        digest.update(block)
        self.arrived_bytes += len(block)
        self.heard()
        self.depot.grow(item, item.have + len(block))

    def settle(self, item: Item, digest: Digest, handle: int, source: str) -> None:
        """The file is whole: judge it by its hash, and only then give it its name."""
        del self.digests[item.number]
        if not item.fits(digest):
            self.tree.unlink(item.path, item.part_name)
            self.depot.reset(item)
            return self.complain(item, source)
        os.fsync(handle)
        self.name(item, handle, digest.sha256.hexdigest())
        return None

    def name(self, item: Item, handle: int, sha256: str) -> None:
        os.fchmod(handle, item.mode)
        if item.mtime_ns is not None:  # compiled Python files are valid only for their source's time
            os.utime(handle, ns=(item.mtime_ns, item.mtime_ns))
        with self.depot.changed:
            self.tree.rename(item.path, item.part_name)
            self.depot.grow(item, item.size, done=True)
        self.hashes.put(item.path, item.final_path, sha256)

    def complain(self, item: Item, source: str) -> None:
        item.damaged += 1
        tell("damaged", file=item.number, path=item.path, source=source)
        if item.damaged >= ATTEMPTS:
            raise TroubleError(f"{item.path} came {ATTEMPTS} times with a wrong hash, last from {source}.")


def write_all(handle: int, block: memoryview) -> None:
    while block:
        block = block[os.write(handle, block) :]
