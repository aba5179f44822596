"""Results on their way to disk: gathered while the last group is being synced, then committed together.

One group is under way at a time, in a thread, so that the event loop never waits for a disk. The pause between groups
grows with what a sync costs (a tenth of the time at most, never over a second), so slow shared file systems get few
large groups and fast disks many small ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from corral.base.errors import CorralError, DataError
from corral.use.batch.core.ledger import Ledger, LedgerEntry

SHORTEST_S, LONGEST_S = 0.03, 1.0
FULL_BYTES = 16 << 20


class WriteBuffer:
    """Collects entries and commits them in groups."""

    def __init__(self, ledger: Ledger, on_commit: Callable[[int], None]) -> None:
        self._ledger, self._on_commit = ledger, on_commit
        self._waiting: list[LedgerEntry] = []
        self._waiting_bytes = self._flying_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="corral-commit")
        self._running: asyncio.Task[None] | None = None
        self.failure: CorralError | None = None

    @property
    def full(self) -> bool:
        """Whether the disk does not keep up, so that no more should be asked for."""
        return self._waiting_bytes + self._flying_bytes > FULL_BYTES

    def add(self, entry: LedgerEntry) -> None:
        self._waiting.append(entry)
        self._waiting_bytes += len(entry.line)
        if self._running is None and self.failure is None:
            self._running = asyncio.get_running_loop().create_task(self._work())

    async def drain(self) -> None:
        """Wait until everything that was added counts; raises what went wrong."""
        while self._running is not None:
            await asyncio.shield(self._running)
        self._thread.shutdown()
        if self.failure:
            raise self.failure

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                self._flying_bytes, self._waiting_bytes = self._waiting_bytes, 0
                began = time.monotonic()
                await loop.run_in_executor(self._thread, self._ledger.commit, group)
                took = time.monotonic() - began
                self._flying_bytes = 0
                self._on_commit(len(group))
                await asyncio.sleep(min(LONGEST_S, max(SHORTEST_S, 9 * took)))
        except Exception as error:  # whatever it is, its group does not count: nobody may think it does
            self.failure = error if isinstance(error, CorralError) else _told(error)
        finally:
            self._running = None


def _told(error: Exception) -> DataError:
    reason = error if isinstance(error, OSError) else repr(error)
    return DataError(
        f"results cannot be written: {reason}.",
        "Everything up to here is kept. Remove the cause, then run the same command again; it continues.",
        errno=error.errno if isinstance(error, OSError) else None,
    )
