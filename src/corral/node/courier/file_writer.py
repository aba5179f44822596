"""Where bytes become files: a file gets its name only after its hash was right, whoever it came from.

Parts that nobody will continue: of an earlier version of a file, of a pull that was given up.

Only names that the courier itself gives are deleted, in folders that the manifest names, while this courier holds the
folder's lock; where a file system has no locks, only what nobody has written to for a day. A folder inside that
another courier holds is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from .files import CourierFiles, Digest, Item
from .folder import Tree
from .hashes import Hashes
from .manifest import OWN_FILES
from .protocol import TroubleError, tell
from .sources import as_connection_errors

BLOCK_BYTES = 256 << 10
ATTEMPTS = 4  # per file, after a wrong hash


class Landing:
    """Writes what arrives into the folder; `heard` is called whenever something did."""

    def __init__(self, tree: Tree, depot: CourierFiles, hashes: Hashes, heard: Callable[[], None]) -> None:
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


PARTS = OWN_FILES[1]
QUIET_S = 86400.0  # without locks: what was written to within this time may be somebody's
GIVEN_UP_S = 7 * 86400.0  # of other models in Corral's own folder: a pull may be continued after a weekend


def take_lock(handle: int) -> Optional[bool]:
    """A folder's lock: True when it is held now, False when somebody else has it, None where there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def lock(handle: int) -> Iterator[Optional[bool]]:
    """`take_lock`, until the block ends."""
    held = take_lock(handle)
    try:
        yield held
    finally:
        if held:
            fcntl.flock(handle, fcntl.LOCK_UN)


def remove_leftovers(tree: Tree, items: Sequence[Item], held: Optional[bool]) -> int:
    """Delete the parts that no item will continue; how many bytes that gave back."""
    freed = 0
    for above, (path, names, stems) in _folders(items).items():
        with contextlib.suppress(FileNotFoundError), tree.parent(path) as (handle, _):
            ours = take_lock(handle) if above else held  # it goes with the handle
            if ours is not False:
                freed += _sweep(handle, names, stems, 0.0 if ours else QUIET_S)
    return freed


def _folders(items: Sequence[Item]) -> Dict[str, Tuple[str, Set[str], Tuple[str, ...]]]:
    """For every folder one path in it, the parts that may be continued, and the beginnings of further ones."""
    found: Dict[str, Tuple[str, Set[str], List[str]]] = {}
    for item in items:
        _, names, stems = found.setdefault(os.path.dirname(item.path), (item.path, set(), []))
        if item.kind == "file" and not item.done:
            if item.sha256 or item.git_sha1:
                names.add(item.part_name)
            else:  # its hash comes later: until then, any part of it may be the one
                stems.append(item.part_stem)
    return {above: (path, names, tuple(stems)) for above, (path, names, stems) in found.items()}


def _sweep(handle: int, names: Set[str], stems: Tuple[str, ...], quiet_s: float) -> int:
    freed = 0
    with os.scandir(handle) as entries:
        old = [entry for entry in entries if fnmatch.fnmatch(entry.name, PARTS)
               and entry.name not in names and not (stems and entry.name.startswith(stems))]  # fmt: skip
    for entry in old:
        with contextlib.suppress(OSError):
            found = os.stat(entry.name, dir_fd=handle, follow_symlinks=False)
            if time.time() - found.st_mtime >= quiet_s:
                os.unlink(entry.name, dir_fd=handle)
                freed += found.st_size
    return freed


def remove_given_up(folder: str) -> int:
    """In the folders beside this one, all of them Corral's own: parts that nobody has touched for a week."""
    freed, above = 0, os.path.dirname(os.path.abspath(folder))
    with contextlib.suppress(OSError):
        for entry in os.scandir(above):
            if entry.is_dir(follow_symlinks=False) and entry.path != os.path.abspath(folder):
                freed += _remove_below(entry.path)
    return freed


def _remove_below(folder: str) -> int:
    freed = 0
    with contextlib.suppress(OSError), opened(folder) as handle, lock(handle) as ours:
        if ours is False:
            return 0
        for here, _, names in os.walk(folder):
            if fnmatch.filter(names, PARTS):
                with opened(here) as inner:
                    freed += _sweep(inner, set(), (), GIVEN_UP_S)
    return freed


@contextlib.contextmanager
def opened(folder: str) -> Iterator[int]:
    """A folder as a descriptor."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)
