"""One runner per job: a lock file that names its holder, and is known to be stale when the holder is dead.

The file appears whole (a link to a finished file, which NFS and Lustre do in one step), so it is never half written.
A holder on this machine is dead when its process is; one on another machine when it has not touched the lock for
`SILENT_S`, measured by the file system's own clock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from corral.errors import ConflictError
from corral.files import discard_lock, lock_holder, try_lock
from corral.processes import Identity, own_identity

__all__ = ["JobLock", "beating", "holder_of"]

TOUCH_S = 10.0
SILENT_S = 120.0
POLL_S = 0.05


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


def holder_of(path: Path) -> Identity | None:
    """Who holds the lock; None when nobody does, or its holder is known to be dead."""
    found = lock_holder(path)
    return None if found is None or _is_stale(path, found) else found


class JobLock:
    """Holds a job while the `with` block runs; refuses when somebody else does, and says who.

    `patient` is asked, while somebody else holds it, whether to wait.
    """

    def __init__(self, path: Path, what: str, patient: Callable[[], bool] = lambda: False) -> None:
        self._path, self._what, self._patient = path, what, patient
        self._touched = 0.0

    @property
    def path(self) -> Path:
        return self._path

    def __enter__(self) -> JobLock:
        while not try_lock(self._path):
            found = lock_holder(self._path)
            if found is None:
                continue  # released in this moment
            if not _is_stale(self._path, found):
                if self._patient():
                    time.sleep(POLL_S)
                    continue
                raise ConflictError(
                    f"{self._what} is being worked on by process {found.pid} on {found.host}.",
                    "Let it finish, or stop it with `corral batch cancel`.",
                    pid=found.pid,
                    host=found.host,
                )
            discard_lock(self._path, found)
        self._touched = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # it is known to be stale once we are gone; how it ended is to be told
            if lock_holder(self._path) != own_identity():
                return  # it was taken over
            self._path.unlink(missing_ok=True)
            for left in self._path.parent.glob(f"{self._path.name}.*"):  # of runners that were killed just then
                left.unlink(missing_ok=True)

    def check(self) -> None:
        """Refuse to go on when somebody took the job over: this process was stopped for long, or cut off."""
        found = lock_holder(self._path)
        if found != own_identity():
            who = f"process {found.pid} on {found.host}" if found else "somebody who is gone again"
            raise ConflictError(
                f"{self._what} was taken over by {who} while this process was not heard of.",
                "Nothing was written since. Leave it to that process, or run the same command later.",
            )

    def touch(self) -> None:
        """Show that the holder lives; cheap enough to be called often."""
        now = time.monotonic()
        if now - self._touched > TOUCH_S:
            self._touched = now
            with contextlib.suppress(OSError):
                os.utime(self._path)


def _is_stale(path: Path, holder: Identity) -> bool:
    if holder.is_here():
        return holder.is_gone()
    probe = path.with_name(f"{path.name}.clock.{os.getpid()}")
    try:
        probe.touch()  # now, on the clock that stamped the lock
        return probe.stat().st_mtime - path.stat().st_mtime > SILENT_S
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
