"""A lock: a file that names its holder, and is taken over when the holder is known to be dead.

The file appears in one step (a link to a finished file, which NFS and Lustre make atomically), so it is never half
written; flock has different meanings on different file systems. A holder whose process is visible from here (same
boot of the same machine, same process namespace) is dead when its process has ended. Any other holder, on another
machine or in a container, is dead when it has not touched the lock for `silent_s`, measured by the file system's own
clock. Without `silent_s`, such a holder counts as alive for ever.
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
from corral.base.files import make_dir
from corral.base.processes import Identity, own_identity
from corral.base.record import from_json
from corral.base.untrusted import parse_json

TOUCH_S = 10.0
SILENT_S = 120.0  # for holders that touch their locks
POLL_S = 0.05
NOBODY = Identity(pid=0, host="", boot_id="", start_ticks=0)
REPORT_AGAIN_S = 60.0


class Stillness:
    """How long a value has not changed, by this process's own clock: those of other machines differ, and jump."""

    def __init__(self) -> None:
        self._value: object = self
        self._since_s = 0.0

    def of(self, value: object) -> float:
        if value != self._value:
            self._value, self._since_s = value, time.monotonic()
        return time.monotonic() - self._since_s


class FileLock:
    """Holds a file while the `with` block runs.

    While another process holds it, `held` is called repeatedly: it raises to give up, or returns to wait. `watched`:
    a holder on another machine is dead only when this process itself has seen no touch for `silent_s`.
    """

    def __init__(
        self,
        path: Path,
        held: Callable[[Identity], None] | None = None,
        silent_s: float | None = None,
        beat_s: float | None = None,
        watched: bool = False,
    ) -> None:
        self.path, self._held, self._silent_s, self._beat_s = path, held, silent_s, beat_s
        self._watch = Stillness() if watched else None
        self._touched, self._inode = 0.0, 0
        self._beating = contextlib.ExitStack()

    def __enter__(self) -> Self:
        make_dir(self.path.parent)
        while not try_lock(self.path):
            holder = lock_holder(self.path)
            if holder is None:
                continue  # released in this moment
            if self._is_dead(holder):
                discard_lock(self.path, holder)
                continue
            if self._held:
                self._held(holder)
            time.sleep(POLL_S)
        self._touched = time.monotonic()
        self._inode = self.path.stat().st_ino
        if self._beat_s:
            self._beating.enter_context(heartbeat(self.path, self._beat_s))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beating.close()
        with contextlib.suppress(
            OSError
        ):  # it is known to be dead once this process ends; the block's own error matters more
            if self._is_ours():
                self.path.unlink(missing_ok=True)
                for left in self.path.parent.glob(f"{self.path.name}.*"):  # of processes that were killed meanwhile
                    if ".stale." not in left.name or _is_known_dead(
                        left
                    ):  # otherwise a live one's, about to be put back
                        left.unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        """Whether the lock was not taken over; by its inode where no descriptor is left to read it."""
        try:
            return lock_holder(self.path) == own_identity()
        except OSError:
            return self.path.stat().st_ino == self._inode

    def is_held(self) -> bool:
        """Whether no other process has taken it over; taken again where it is gone. OSError: that is unknown."""
        holder = lock_holder(self.path)
        return try_lock(self.path) if holder is None else holder == own_identity()

    def _is_dead(self, holder: Identity) -> bool:
        if self._watch is None or self._silent_s is None or holder == NOBODY or holder.is_among_ours():
            return _is_dead(self.path, holder, self._silent_s)
        with contextlib.suppress(FileNotFoundError):
            return self._watch.of((holder, self.path.stat().st_mtime_ns)) > self._silent_s
        return False

    def touch(self) -> None:
        """Show that the holder is alive; cheap enough to be called often."""
        now = time.monotonic()
        if now - self._touched > TOUCH_S:
            self._touched = now
            with contextlib.suppress(OSError):
                os.utime(self.path)


def exclusive_lock(path: Path, on_wait: Callable[[str], None], silent_s: float = SILENT_S) -> FileLock:
    """A lock that is waited for and touched while held; `on_wait` learns who holds it, at once and every minute."""
    return FileLock(path, _every_minute(path, on_wait), silent_s, TOUCH_S)


def wait_notice(what: str, say: Callable[[str], None] | None = None) -> Callable[[str], None]:
    """A function that says why a lock is waited for, through `say` or on stderr."""

    def notice(who: str) -> None:
        text = f"waiting to change {what}: {who} is doing so"
        if say:
            say(text)
        else:
            sys.stderr.write(f"corral: {text}\n")

    return notice


def _every_minute(path: Path, on_wait: Callable[[str], None]) -> Callable[[Identity], None]:
    reported_s: list[float] = []

    def held(holder: Identity) -> None:
        now = time.monotonic()
        if not reported_s or now - reported_s[-1] >= REPORT_AGAIN_S:
            reported_s.append(now)
            waited = f", for {now - reported_s[0]:.0f} s now" if len(reported_s) > 1 else ""
            on_wait(f"process {holder.pid} on {holder.host} (lock {path}){waited}")

    return held


@contextlib.contextmanager
def heartbeat(path: Path, every_s: float = TOUCH_S) -> Iterator[None]:
    """Touch a lock from a thread during a long task: a model loads, files are copied."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(every_s):
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
    holder = lock_holder(path)
    return None if holder is None or _is_dead(path, holder, silent_s) else holder


def try_lock(path: Path) -> bool:
    """Take the lock by a link to a finished file, so that it always names its holder; whether that worked."""
    written = path.with_name(f"{path.name}.{_own_name()}")
    written.write_text(json.dumps(vars(own_identity())))
    try:
        os.link(written, path)
    except (FileExistsError, FileNotFoundError):  # held, or the file was removed as a leftover: try again
        return False
    finally:
        written.unlink(missing_ok=True)
    return True


def _own_name() -> str:
    """A unique suffix: process numbers and host names alone are not unique."""
    return f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"


def discard_lock(path: Path, seen: Identity) -> None:
    """Remove a dead holder's lock, but never one that a third process has taken meanwhile."""
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
    """The holder that a lock file names; NOBODY for a file that is not a lock.

    A lock that exists and cannot be read (no file descriptor left, a disk that does not answer) says nothing about
    its holder: that error is raised.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError:
        if path.exists():
            raise
        return None  # removed while it was read; NFS reports that as another error
    try:
        found = parse_json(text, str(path))
        known = {field.name for field in dataclasses.fields(Identity)}  # a later Corral may write more
        return from_json(Identity, {name: found[name] for name in known & set(found)})
    except (DataError, TypeError):  # a lock is never half written: this is something else
        return NOBODY


def _is_known_dead(path: Path) -> bool:
    """Whether a lock that was put aside belongs to a process that has ended."""
    holder = lock_holder(path)
    return holder is not None and _is_dead(path, holder, None)


def _is_dead(path: Path, holder: Identity, silent_s: float | None) -> bool:
    if holder == NOBODY:
        return True
    if holder.is_among_ours():
        return holder.has_ended()
    return silent_s is not None and silence_s(path) > silent_s


def silence_s(path: Path) -> float:
    """How long a lock has not been touched, by the file system's clock; 0 where that is unknown."""
    probe = path.with_name(f"{path.name}.clock.{_own_name()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)
