"""One runner per job: a lock file that names its holder, and is known to be stale when the holder is dead.

The file appears whole (a link to a finished file, which NFS and Lustre do in one step), so it is never half written.
A holder on this machine is dead when its process is; one on another machine when it has not touched the lock for
`SILENT_S`, measured by the file system's own clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from types import TracebackType

from corral.errors import ConflictError
from corral.processes import Identity, own_identity

__all__ = ["JobLock", "holder_of"]

TOUCH_S = 10.0
SILENT_S = 120.0


def holder_of(path: Path) -> Identity | None:
    """Who holds the lock; None when nobody does, or its holder is known to be dead."""
    found = _read(path)
    return None if found is None or _is_stale(path, found) else found


class JobLock:
    """Holds a job while the `with` block runs; refuses when somebody else does, and says who."""

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what
        self._touched = 0.0

    def __enter__(self) -> JobLock:
        mine = self._path.with_name(f"{self._path.name}.{own_identity().host}.{os.getpid()}")
        mine.write_text(json.dumps(vars(own_identity())))
        try:
            while not self._link(mine):
                found = _read(self._path)
                if found is None:
                    continue  # released in this moment
                if not _is_stale(self._path, found):
                    raise ConflictError(
                        f"{self._what} is being worked on by process {found.pid} on {found.host}.",
                        "Let it finish, or stop it with `corral batch cancel`.",
                        pid=found.pid,
                        host=found.host,
                    )
                _discard(self._path, found)
        finally:
            mine.unlink(missing_ok=True)
        self._touched = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _read(self._path) != own_identity():
            return  # it was taken over
        self._path.unlink(missing_ok=True)
        for left in self._path.parent.glob(f"{self._path.name}.*"):  # of runners that were killed just then
            left.unlink(missing_ok=True)

    def check(self) -> None:
        """Refuse to go on when somebody took the job over: this process was stopped for long, or cut off."""
        found = _read(self._path)
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

    def _link(self, mine: Path) -> bool:
        try:
            os.link(mine, self._path)
        except FileExistsError:
            return False
        except FileNotFoundError:  # a runner that ended swept our file away: make it again
            mine.write_text(json.dumps(vars(own_identity())))
            return False
        return True


def _read(path: Path) -> Identity | None:
    try:
        return Identity(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        return Identity(0, "?", "", 0)


def _is_stale(path: Path, holder: Identity) -> bool:
    if holder.is_here():
        return holder.is_gone()
    if holder.host == "?":
        return True
    probe = path.with_name(f"{path.name}.clock.{os.getpid()}")
    try:
        probe.touch()  # now, on the clock that stamped the lock
        return probe.stat().st_mtime - path.stat().st_mtime > SILENT_S
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)


def _discard(path: Path, seen: Identity) -> None:
    """Remove a dead holder's lock, but never one that a third process has taken in the meantime."""
    aside = path.with_name(f"{path.name}.stale.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if _read(aside) != seen:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()
