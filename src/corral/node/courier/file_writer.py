"""Writes what arrives: a file gets its name only after its hash was right, whoever sent it. Removes stale parts.

A part is stale when nobody will continue it: one of an earlier version of a file, or of a pull that was given up.
Only names that the courier itself gives are deleted, in folders that the manifest names, while this courier holds the
folder's lock; where a file system has no locks, only what was not written to for a day. A folder that another courier
has locked is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import time
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from .files import CourierFiles, Digest, Item
from .folder import Tree, open_folder
from .hashes import HashCache
from .manifest import OWN_FILES
from .protocol import CourierError, send_event

ATTEMPTS = 4  # per file, after a wrong hash
PARTS = OWN_FILES[1]
STALE_S = 86400.0  # without locks: a part written to within this time may be in use
ABANDONED_S = 7 * 86400.0  # of other models in Corral's own folder: a pull may be continued after a weekend


class FileWriter:
    """Writes into the folder what arrives; `on_data` is called for every piece."""

    def __init__(self, tree: Tree, files: CourierFiles, hashes: HashCache, on_data: Callable[[], None]) -> None:
        self.tree, self.files, self.hashes, self.on_data = tree, files, hashes, on_data
        self.digests: Dict[int, Digest] = {}
        self.arrived_bytes = 0

    def make(self, item: Item) -> None:
        """Make a link, an empty folder or an empty file, which need no source."""
        if item.kind == "folder":
            self.tree.make(item.path)
        elif item.kind == "link":
            self.tree.link(item.path, item.target)
        else:
            self.write_small(item, b"", "this node")
        self.files.grow(item, item.size, done=True)

    def write_small(self, item: Item, body: bytes, source: str) -> None:
        digest = Digest(item)
        digest.update(body)
        if not item.matches(digest):
            self.note_damaged(item, source)
            return
        handle = self.tree.open(item.path, item.part_name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(handle, memoryview(body))
            self.arrived_bytes += len(body)
            self.publish(item, handle, digest.sha256.hexdigest())
        finally:
            os.close(handle)

    def resume(self, item: Item) -> None:
        """Continue the part that is here; its bytes are read once, for the hash."""
        if item.number in self.digests:
            return
        digest = Digest(item)
        have_bytes = 0
        handle = self.tree.open(item.path, item.part_name, os.O_RDWR | os.O_CREAT)
        with os.fdopen(handle, "r+b", buffering=0) as part:
            part.truncate(min(item.size, os.fstat(handle).st_size))
            while have_bytes < item.size:
                block = part.read(1 << 20)
                if not block:
                    break
                digest.update(block)
                have_bytes += len(block)
                self.on_data()
        self.digests[item.number] = digest
        self.files.grow(item, have_bytes)

    def write(self, item: Item, blocks: Iterable[memoryview], source: str) -> None:
        """Append blocks to a part; the file gets its name once it is complete."""
        digest = self.digests[item.number]
        handle = self.tree.open(item.path, item.part_name, os.O_WRONLY)
        try:
            os.lseek(handle, item.have_bytes, os.SEEK_SET)
            for block in blocks:
                write_all(handle, block)
                digest.update(block)
                self.arrived_bytes += len(block)
                self.on_data()
                self.files.grow(item, item.have_bytes + len(block))
            if item.have_bytes == item.size:
                self.check(item, digest, handle, source)
        finally:
            os.close(handle)

    def check(self, item: Item, digest: Digest, handle: int, source: str) -> None:
        """Check a complete file by its hash, and only then give it its name."""
        del self.digests[item.number]
        if not item.matches(digest):
            self.tree.unlink(item.path, item.part_name)
            self.files.reset(item)
            self.note_damaged(item, source)
            return
        os.fsync(handle)
        self.publish(item, handle, digest.sha256.hexdigest())

    def publish(self, item: Item, handle: int, sha256: str) -> None:
        """Give a checked file its name."""
        os.fchmod(handle, item.mode)
        if item.mtime_ns is not None:  # compiled Python files are valid only for their source's time
            os.utime(handle, ns=(item.mtime_ns, item.mtime_ns))
        with self.files.changed:
            self.tree.rename(item.path, item.part_name)
            self.files.grow(item, item.size, done=True)
        self.hashes.put(item.path, item.final_path, sha256)

    def note_damaged(self, item: Item, source: str) -> None:
        item.damaged += 1
        send_event("damaged", file=item.number, path=item.path, source=source)
        if item.damaged >= ATTEMPTS:
            raise CourierError(f"{item.path} came {ATTEMPTS} times with a wrong hash, last from {source}.")


def write_all(handle: int, block: memoryview) -> None:
    while block:
        block = block[os.write(handle, block) :]


def try_lock(handle: int) -> Optional[bool]:
    """Lock a folder: True when it is ours now, False when another process has it, None where there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def lock(handle: int) -> Iterator[Optional[bool]]:
    """`try_lock`, until the block ends."""
    held = try_lock(handle)
    try:
        yield held
    finally:
        if held:
            fcntl.flock(handle, fcntl.LOCK_UN)


def remove_stale_parts(tree: Tree, items: Sequence[Item], held: Optional[bool]) -> int:
    """Delete the parts that no item will continue; the bytes freed."""
    freed = 0
    for above, (path, names, stems) in _folders(items).items():
        with contextlib.suppress(FileNotFoundError), tree.parent(path) as (handle, _):
            ours = try_lock(handle) if above else held  # released with the handle
            if ours is not False:
                freed += _remove_parts(handle, names, stems, 0.0 if ours else STALE_S)
    return freed


def _folders(items: Sequence[Item]) -> Dict[str, Tuple[str, Set[str], Tuple[str, ...]]]:
    """For every folder one path in it, the parts to keep, and the beginnings of the names of further ones."""
    found: Dict[str, Tuple[str, Set[str], List[str]]] = {}
    for item in items:
        _, names, stems = found.setdefault(os.path.dirname(item.path), (item.path, set(), []))
        if item.kind == "file" and not item.done:
            if item.sha256 or item.git_sha1:
                names.add(item.part_name)
            else:  # its hash comes later: until then, any of its parts may be the right one
                stems.append(item.part_stem)
    return {above: (path, names, tuple(stems)) for above, (path, names, stems) in found.items()}


def _remove_parts(handle: int, names: Set[str], stems: Tuple[str, ...], age_s: float) -> int:
    freed = 0
    with os.scandir(handle) as entries:
        stale = [entry for entry in entries if fnmatch.fnmatch(entry.name, PARTS)
                 and entry.name not in names and not (stems and entry.name.startswith(stems))]  # fmt: skip
    for entry in stale:
        with contextlib.suppress(OSError):
            status = os.stat(entry.name, dir_fd=handle, follow_symlinks=False)
            if time.time() - status.st_mtime >= age_s:
                os.unlink(entry.name, dir_fd=handle)
                freed += status.st_size
    return freed


def remove_abandoned_parts(folder: str) -> int:
    """Delete parts that were not touched for a week in the folders beside this one, which are all Corral's."""
    freed, above = 0, os.path.dirname(os.path.abspath(folder))
    with contextlib.suppress(OSError):
        for entry in os.scandir(above):
            if entry.is_dir(follow_symlinks=False) and entry.path != os.path.abspath(folder):
                freed += _remove_below(entry.path)
    return freed


def _remove_below(folder: str) -> int:
    freed = 0
    with contextlib.suppress(OSError), open_folder(folder) as handle, lock(handle) as ours:
        if ours is False:
            return 0
        for here, _, names in os.walk(folder):
            if fnmatch.filter(names, PARTS):
                with open_folder(here) as inner:
                    freed += _remove_parts(inner, set(), (), ABANDONED_S)
    return freed
