"""Runners that work on one batch at once: who they are, what each has written, which blocks of rows each does.

No file has two writers. Every runner writes a part of its own (ledger, results, errors) and reads the ledgers of the
others, so what is done is what any ledger says. Blocks of rows are claimed, so that a row is done once; a claim only
saves work: when a runner that was thought dead comes back, its rows are done twice, and the first result counts when
the parts are put together.

A claim is a hard link to the runner's `holder` file, made in one step also on NFS and Lustre. All its claims are the
same file: one touch keeps all of them alive, and a look at any tells who holds it and when that one was last heard.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from corral.base.lock import TOUCH_S, discard_lock, holder_of, lock_holder, try_lock
from corral.base.processes import Identity
from corral.use.batch.core.folder import BatchFolder, PartFolder, sync_dir
from corral.use.batch.core.ledger import Finder, read_ledger
from corral.use.batch.core.records import RECORD_BYTES
from corral.use.batch.core.table import Table


def all_parts(folder: BatchFolder) -> list[PartFolder]:
    """What runners have written, dead or alive."""
    with contextlib.suppress(FileNotFoundError):
        return [PartFolder(folder.output, folder.live, path.name) for path in sorted(folder.parts.iterdir())]
    return []


def runners_of(folder: BatchFolder) -> list[Identity]:
    """Who works on it now."""
    found = (holder_of(part.holder) for part in all_parts(folder))
    return [holder for holder in found if holder is not None]


def bury(part: PartFolder) -> None:
    """Take the claims of a runner away that is known to be dead; what it wrote counts."""
    found = lock_holder(part.holder)
    if found is None:
        return
    job = BatchFolder(part.output)
    with contextlib.suppress(FileNotFoundError):
        for claim in job.blocks.iterdir():
            if lock_holder(claim) == found:
                claim.unlink(missing_ok=True)
    part.holder.unlink(missing_ok=True)


def claim_path(folder: BatchFolder, block: int) -> Path:
    return folder.blocks / f"{block:06}"


class Participant:
    """This process as one of the runners of a batch, from `join` to `leave`."""

    def __init__(self, folder: BatchFolder) -> None:
        self._folder = folder
        name = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(3)}"
        self.part = PartFolder(folder.output, folder.live, name)
        self.claims: set[int] = set()
        self.lost = False  # the batch was put together without us
        self._touched = 0.0

    def join(self) -> None:
        self._folder.blocks.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.part.path.mkdir(parents=True, mode=0o700)
        while not try_lock(self.part.holder):
            pass  # a leftover of the same name was swept away
        sync_dir(self._folder.parts)
        self._touched = time.monotonic()

    def leave(self) -> None:
        """Give back all claims; what was written stays, and an empty part goes."""
        for block in self.claims:
            self._unlink_own(claim_path(self._folder, block))
        self.claims.clear()
        self.part.holder.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if not self.part.ledger.exists() or not self.part.ledger.stat().st_size:
                for path in (self.part.ledger, self.part.results, self.part.errors):
                    path.unlink(missing_ok=True)
                self.part.path.rmdir()

    def _unlink_own(self, claim: Path) -> None:
        with contextlib.suppress(OSError):
            if self._is_own(claim):
                claim.unlink()

    def _is_own(self, claim: Path) -> bool:
        try:
            return claim.samefile(self.part.holder)
        except OSError:
            return False

    def touch(self) -> None:
        """Show that this runner lives, and see whether it still counts."""
        now = time.monotonic()
        try:
            if now - self._touched > TOUCH_S:
                os.utime(self.part.holder)
                self._touched = now
            elif not self.part.holder.exists():
                self.lost = True
        except FileNotFoundError:
            self.lost = True
        except OSError:
            pass  # the file system is away for a moment

    def claim(self, block: int) -> bool:
        """Take a block that nobody has."""
        path = claim_path(self._folder, block)
        try:
            os.link(self.part.holder, path)
        except FileExistsError:
            if not self._is_own(path):  # NFS may have done it and lost the answer
                return False
        except FileNotFoundError:
            self.lost = True
            return False
        self.claims.add(block)
        return True

    def free(self, block: int) -> bool:
        """Take the claim of a dead runner away; whether the block may be claimed now."""
        path = claim_path(self._folder, block)
        found = lock_holder(path)
        if found is not None:
            if holder_of(path) is not None:
                return False
            discard_lock(path, found)
        return True


class Others:
    """What the other runners have done, read from their ledgers as these grow."""

    def __init__(self, folder: BatchFolder, table: Table, own: str, done: bytearray) -> None:
        self._folder, self._own, self._done = folder, own, done
        self._find = Finder(table)
        self._read: dict[str, int] = {}

    def refresh(self) -> int:
        """Mark what is done since the last time; the number of rows."""
        new, done = 0, self._done
        for row in self._rows():
            if row >= 0 and not done[row]:
                done[row] = 1
                new += 1
        return new

    def _rows(self) -> Iterator[int]:
        for part in all_parts(self._folder):
            if part.name == self._own:
                continue
            at = self._read.get(part.name, 0)
            for record in read_ledger(part, at):
                at += RECORD_BYTES
                yield self._find(record)
            self._read[part.name] = at
