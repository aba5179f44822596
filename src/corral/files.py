"""Writing files so that a crash leaves the old content or the new, and only the owner can read them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from corral.node.files import write_atomic
from corral.processes import Identity, own_identity

__all__ = ["discard_lock", "exclusive_lock", "lock_holder", "make_private_dir", "try_lock", "write_atomic"]


def make_private_dir(path: Path) -> None:
    """Make a folder, and its missing parents, that only the owner may enter."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)


@contextlib.contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[str], None], poll_s: float = 0.5) -> Iterator[None]:
    """Hold `path` as a lock file; wait for its holder (told once through `on_wait`), and take over from a dead one.

    A file created exclusively, not flock: it works the same on NFS and Lustre.
    """
    told = False
    path.parent.mkdir(parents=True, exist_ok=True)
    while not try_lock(path):
        holder = lock_holder(path)
        if holder is not None and holder.is_gone():
            discard_lock(path, holder)
            continue
        if not told:
            who = f"process {holder.pid} on {holder.host}" if holder else "another process"
            on_wait(f"{who} (lock {path})")
            told = True
        time.sleep(poll_s)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it is known to be stale once we are gone
            if lock_holder(path) == own_identity():
                path.unlink(missing_ok=True)


def try_lock(path: Path) -> bool:
    """A link to a file already written: the lock is never seen without its holder's name."""
    written = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}")
    written.write_text(json.dumps(vars(own_identity())))
    try:
        os.link(written, path)
    except (FileExistsError, FileNotFoundError):  # held, or our file was swept away as a leftover: try again
        return False
    finally:
        written.unlink(missing_ok=True)
    return True


def discard_lock(path: Path, seen: Identity) -> None:
    """Remove a dead holder's lock, but never one that a third process has taken in the meantime."""
    aside = path.with_name(f"{path.name}.stale.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        if lock_holder(path) != seen:
            return
        path.rename(aside)
        if lock_holder(aside) != seen:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def lock_holder(path: Path) -> Identity | None:
    """Who is written in a lock file; a file that nobody could have written as a lock names somebody long gone.

    A lock that is there and cannot be read (no file descriptor left, a disk that is away) says nothing about its
    holder: that error is raised.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError:
        if path.exists():
            raise
        return None  # removed while it was read, as NFS tells it
    try:
        body: dict[str, Any] = json.loads(text)
        return Identity(**body)
    except (ValueError, TypeError):  # no lock of ours is ever torn: something else wrote it
        return Identity(pid=0, host=socket.gethostname(), boot_id="", start_ticks=0)
