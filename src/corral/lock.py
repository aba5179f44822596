"""One lock: a file that names its holder, and is taken over when the holder is known to be dead.

The file appears whole (a link to a finished file, which NFS and Lustre do in one step), so it is never half written;
flock would mean different things on different file systems. A holder on this machine is dead when its process is; one
on another machine when it has not touched the lock for `silent_s`, measured by the file system's own clock. Without
`silent_s` a holder elsewhere counts as alive for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from corral.processes import Identity, own_identity

__all__ = [
    "SILENT_S",
    "TOUCH_S",
    "FileLock",
    "beating",
    "discard_lock",
    "exclusive_lock",
    "holder_of",
    "lock_holder",
    "try_lock",
]

TOUCH_S = 10.0
SILENT_S = 120.0  # for holders that touch their locks
POLL_S = 0.05


class FileLock:
    """Holds a file while the `with` block runs.

    While somebody else holds it, `held` is called again and again: it refuses by raising, or returns to wait.
    """

    def __init__(
        self, path: Path, held: Callable[[Identity], None] | None = None, silent_s: float | None = None
    ) -> None:
        self.path, self._held, self._silent_s = path, held, silent_s
        self._touched = 0.0

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while not try_lock(self.path):
            found = lock_holder(self.path)
            if found is None:
                continue  # released in this moment
            if _is_dead(self.path, found, self._silent_s):
                discard_lock(self.path, found)
                continue
            if self._held:
                self._held(found)
            time.sleep(POLL_S)
        self._touched = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # it is known to be dead once we are gone; how it ended is to be told
            if lock_holder(self.path) == own_identity():
                self.path.unlink(missing_ok=True)
                for left in self.path.parent.glob(f"{self.path.name}.*"):  # of processes that were killed just then
                    if ".stale." not in left.name:  # may be a living one's, on its way back
                        left.unlink(missing_ok=True)

    def touch(self) -> None:
        """Show that the holder lives; cheap enough to be called often."""
        now = time.monotonic()
        if now - self._touched > TOUCH_S:
            self._touched = now
            with contextlib.suppress(OSError):
                os.utime(self.path)


def exclusive_lock(path: Path, on_wait: Callable[[str], None]) -> FileLock:
    """A lock that is waited for; who holds it is told once, through `on_wait`."""
    told: list[Identity] = []

    def held(holder: Identity) -> None:
        if not told:
            told.append(holder)
            on_wait(f"process {holder.pid} on {holder.host} (lock {path})")

    return FileLock(path, held)


@contextlib.contextmanager
def beating(path: Path) -> Iterator[None]:
    """Touch a lock from a thread while something long is done: a model loads, files are copied."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(TOUCH_S):
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name="corral-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def holder_of(path: Path, silent_s: float | None = SILENT_S) -> Identity | None:
    """Who holds the lock; None when nobody does, or its holder is known to be dead."""
    found = lock_holder(path)
    return None if found is None or _is_dead(path, found, silent_s) else found


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


def _is_dead(path: Path, holder: Identity, silent_s: float | None) -> bool:
    if holder.is_here():
        return holder.is_gone()
    if silent_s is None:
        return False
    probe = path.with_name(f"{path.name}.clock.{os.getpid()}")
    try:
        probe.touch()  # now, on the clock that stamped the lock
        return probe.stat().st_mtime - path.stat().st_mtime > silent_s
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
