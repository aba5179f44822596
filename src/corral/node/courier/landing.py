"""Where bytes become files: a file gets its name only after its hash was right, whoever it came from."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Dict

from .depot import Depot, Digest, Item
from .folders import inside
from .hashes import Hashes
from .sources import as_connection_errors
from .talk import TroubleError, tell

BLOCK_BYTES = 256 << 10
ATTEMPTS = 4  # per file, after a wrong hash


class Landing:
    """Writes what arrives into the folder; `heard` is called whenever something did."""

    def __init__(self, folder: str, depot: Depot, hashes: Hashes, heard: Callable[[], None]) -> None:
        self.folder, self.depot, self.hashes, self.heard = folder, depot, hashes, heard
        self.digests: Dict[int, Digest] = {}
        self.arrived_bytes = 0

    def make(self, item: Item) -> None:
        """Links, empty folders and empty files need nobody."""
        os.makedirs(os.path.dirname(item.place), exist_ok=True)
        if item.kind == "folder":
            os.makedirs(item.place, exist_ok=True)
        elif item.kind == "link":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(item.place)
            os.symlink(item.target, item.place)
        else:
            self.keep_small(item, b"", "this node")
        self.depot.grow(item, item.size, done=True)

    def keep_small(self, item: Item, body: bytes, source: str) -> None:
        digest = Digest(item)
        digest.update(body)
        if not item.fits(digest):
            return self.complain(item, source)
        inside(self.folder, item.path)
        os.makedirs(os.path.dirname(item.place), exist_ok=True)
        with open(item.part, "wb", buffering=0) as file:
            file.write(body)
        self.arrived_bytes += len(body)
        self.name(item, item.part, digest.sha256.hexdigest())
        return None

    def resume(self, item: Item) -> None:
        """Continue the part that is here: its bytes are read once, for the hash."""
        if item.number in self.digests:
            return
        inside(self.folder, item.path)  # once more: a link of this very list may lead out by now
        os.makedirs(os.path.dirname(item.place), exist_ok=True)
        digest = Digest(item)
        with open(item.part, "ab+", buffering=0) as part:
            part.truncate(min(item.size, os.path.getsize(item.part)))
            part.seek(0)
            have = 0
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
        handle = os.open(item.part, os.O_WRONLY)
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
        handle = os.open(item.part, os.O_WRONLY)
        try:
            os.lseek(handle, item.have, os.SEEK_SET)
            self.append(item, self.digests[item.number], handle, memoryview(body))
            if item.have == item.size:
                self.settle(item, self.digests[item.number], handle, "this machine")
        finally:
            os.close(handle)

    def append(self, item: Item, digest: Digest, handle: int, block: memoryview) -> None:
        written = 0
        while written < len(block):
            written += os.write(handle, block[written:])
        digest.update(block)
        self.arrived_bytes += len(block)
        self.heard()
        self.depot.grow(item, item.have + len(block))

    def settle(self, item: Item, digest: Digest, handle: int, source: str) -> None:
        """The file is whole: judge it by its hash, and only then give it its name."""
        del self.digests[item.number]
        if not item.fits(digest):
            os.unlink(item.part)
            self.depot.reset(item)
            return self.complain(item, source)
        os.fsync(handle)
        self.name(item, item.part, digest.sha256.hexdigest())
        return None

    def name(self, item: Item, part: str, sha256: str) -> None:
        os.chmod(part, item.mode)
        if item.mtime_ns is not None:  # compiled Python files are valid only for their source's time
            os.utime(part, ns=(item.mtime_ns, item.mtime_ns))
        with self.depot.changed:
            os.replace(part, item.place)
            self.depot.grow(item, item.size, done=True)
        self.hashes.put(item.path, item.place, sha256)

    def complain(self, item: Item, source: str) -> None:
        item.damaged += 1
        tell("damaged", file=item.number, path=item.path, source=source)
        if item.damaged >= ATTEMPTS:
            raise TroubleError(f"{item.path} came {ATTEMPTS} times with a wrong hash, last from {source}.")
