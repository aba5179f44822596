"""One lock: a file that names its holder, and is taken over when the holder is known to be dead.

The file appears whole (a link to a finished file, which NFS and Lustre do in one step), so it is never half written;
flock would mean different things on different file systems. A holder whose process can be seen from here (the same
boot of the same machine, the same process namespace) is dead when its process is. Any other, on another machine, one
of the same name, or in a container, is dead when it has not touched the lock for `silent_s`, measured by the file
system's own clock. Without `silent_s` such a holder counts as alive for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from corral.base.errors import DataError
from corral.base.processes import Identity, own_identity
from corral.base.record import from_json
from corral.base.untrusted import parse_json

TOUCH_S = 10.0
SILENT_S = 120.0  # for holders that touch their locks
POLL_S = 0.05
NOBODY = Identity(pid=0, host="", boot_id="", start_ticks=0)
TELL_AGAIN_S = 60.0


class FileLock:
    """Holds a file while the `with` block runs.

    While somebody else holds it, `held` is called again and again: it refuses by raising, or returns to wait.
    """

    def __init__(
        self,
        path: Path,
        held: Callable[[Identity], None] | None = None,
        silent_s: float | None = None,
        beats: bool = False,
    ) -> None:
        self.path, self._held, self._silent_s, self._beats = path, held, silent_s, beats
        self._touched, self._inode = 0.0, 0
        self._beating = contextlib.ExitStack()

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
        self._inode = self.path.stat().st_ino
        if self._beats:
            self._beating.enter_context(beating(self.path))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beating.close()
        with contextlib.suppress(OSError):  # it is known to be dead once we are gone; how it ended is to be told
            if self._is_ours():
                self.path.unlink(missing_ok=True)
                for left in self.path.parent.glob(f"{self.path.name}.*"):  # of processes that were killed just then
                    if ".stale." not in left.name or _is_known_dead(left):  # else a living one's, on its way back
                        left.unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        """Whether nobody took the lock over; told by the file itself where no descriptor is left to read it."""
        try:
            return lock_holder(self.path) == own_identity()
        except OSError:
            return self.path.stat().st_ino == self._inode

    def touch(self) -> None:
        """Show that the holder lives; cheap enough to be called often."""
        now = time.monotonic()
        if now - self._touched > TOUCH_S:
            self._touched = now
            with contextlib.suppress(OSError):
                os.utime(self.path)


def exclusive_lock(path: Path, on_wait: Callable[[str], None], silent_s: float = SILENT_S) -> FileLock:
    """A lock that is waited for and touched while held; `on_wait` is told who holds it, at once and every minute."""
    return FileLock(path, _every_minute(path, on_wait), silent_s, beats=True)


def telling(what: str, say: Callable[[str], None] | None = None) -> Callable[[str], None]:
    """What tells whoever waits for a lock why: through `say`, or on stderr."""

    def waits(who: str) -> None:
        text = f"waiting to change {what}: {who} is doing so"
        if say:
            say(text)
        else:
            sys.stderr.write(f"corral: {text}\n")

    return waits


def _every_minute(path: Path, on_wait: Callable[[str], None]) -> Callable[[Identity], None]:
    told_s: list[float] = []

    def held(holder: Identity) -> None:
        now = time.monotonic()
        if not told_s or now - told_s[-1] >= TELL_AGAIN_S:
            told_s.append(now)
            waited = f", for {now - told_s[0]:.0f} s now" if len(told_s) > 1 else ""
            on_wait(f"process {holder.pid} on {holder.host} (lock {path}){waited}")

    return held


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
    written = path.with_name(f"{path.name}.{_own_name()}")
    written.write_text(json.dumps(vars(own_identity())))
    try:
        os.link(written, path)
    except (FileExistsError, FileNotFoundError):  # held, or our file was swept away as a leftover: try again
        return False
    finally:
        written.unlink(missing_ok=True)
    return True


def _own_name() -> str:
    """What no other process calls a file, wherever it runs: numbers of processes and names of machines repeat."""
    return f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"


def discard_lock(path: Path, seen: Identity) -> None:
    """Remove a dead holder's lock, but never one that a third process has taken in the meantime."""
    aside = path.with_name(f"{path.name}.stale.{_own_name()}")
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
        found = parse_json(text, str(path))
        known = {field.name for field in dataclasses.fields(Identity)}  # a later Corral may say more
        return from_json(Identity, {name: found[name] for name in known & set(found)})
    except (DataError, TypeError):  # no lock of ours is ever torn: something else wrote it
        return NOBODY


def _is_known_dead(path: Path) -> bool:
    """Whether a lock that was put aside is of somebody who ended: whoever put it there was killed just then."""
    found = lock_holder(path)
    return found is not None and _is_dead(path, found, None)


def _is_dead(path: Path, holder: Identity, silent_s: float | None) -> bool:
    if holder == NOBODY:
        return True
    if holder.is_among_ours():
        return holder.has_ended()
    return silent_s is not None and silence_s(path) > silent_s


def silence_s(path: Path) -> float:
    """How long a lock has not been touched, on the clock that stamped it; 0 where that cannot be told."""
    probe = path.with_name(f"{path.name}.clock.{_own_name()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)
