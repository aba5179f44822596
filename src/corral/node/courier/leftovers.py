"""Parts that nobody will continue: of an earlier version of a file, of a pull that was given up.

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
from typing import Dict, Iterator, List, Optional, Sequence, Set, Tuple

from .depot import Item
from .folders import Tree
from .manifest import OWN_FILES

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
