"""One runner per job: the lock of a batch, which its holder touches while it works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from corral.base.errors import ConflictError
from corral.base.lock import SILENT_S, FileLock, lock_holder
from corral.base.processes import Identity, own_identity


class BatchLock(FileLock):
    """Holds a job while the `with` block runs; refuses when somebody else does, and says who.

    `patient` is asked, while somebody else holds it, whether to wait.
    """

    def __init__(self, path: Path, what: str, patient: Callable[[], bool] = lambda: False) -> None:
        super().__init__(path, self._refuse, SILENT_S)
        self._what, self._patient = what, patient

    def _refuse(self, holder: Identity) -> None:
        if not self._patient():
            raise ConflictError(
                f"{self._what} is being worked on by process {holder.pid} on {holder.host}.",
                "Let it finish, or stop it with `corral batch cancel`.",
                pid=holder.pid,
                host=holder.host,
            )

    def check(self) -> None:
        """Refuse to go on when somebody took the job over: this process was stopped for long, or cut off."""
        found = lock_holder(self.path)
        if found != own_identity():
            who = f"process {found.pid} on {found.host}" if found else "somebody who is gone again"
            raise ConflictError(
                f"{self._what} was taken over by {who} while this process was not heard of.",
                "Nothing was written since. Leave it to that process, or run the same command later.",
            )
