"""The runners that work on one batch at once: who they are, what each has written, which blocks of rows each does.

No file has two writers. Every runner writes a part of its own (ledger, results, errors) and reads the ledgers of the
others: a row is done when any ledger has it. The rows, in the order in which they are sent, are cut into blocks of
equal size: small enough that no runner waits long for the last ones, large enough that a claim costs little beside
the work. A runner claims its next block when it has sent the rows of the last one, so its engine never runs dry. When
no block is free, it looks for claims of dead runners. A claim only saves work: when a runner that was thought dead
comes back, its rows are done twice, and the first result counts when the parts are put together.

A claim is a hard link to the runner's `holder` file, which is made in one step also on NFS and Lustre. All claims of
a runner are the same file: one touch keeps them all alive, and any of them says who holds it and since when it is
silent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.base.lock import TOUCH_S, discard_lock, holder_of, lock_holder, try_lock
from corral.base.processes import Identity
from corral.base.record import load_json
from corral.use.batch.core.folder import BatchFolder, PartFolder, sync_dir
from corral.use.batch.core.ledger import Finder, read_ledger
from corral.use.batch.core.records import RECORD_BYTES
from corral.use.batch.core.table import Table


def all_parts(folder: BatchFolder) -> list[PartFolder]:
    """The parts of all runners, dead or alive."""
    with contextlib.suppress(FileNotFoundError):
        return [PartFolder(folder.output, folder.live, path.name) for path in sorted(folder.parts.iterdir())]
    return []


def runners_of(folder: BatchFolder) -> list[Identity]:
    """Who works on the batch now."""
    holders = (holder_of(part.holder) for part in all_parts(folder))
    return [holder for holder in holders if holder is not None]


def remove_claims(part: PartFolder) -> None:
    """Remove the claims of a runner that is known to be dead; its results count."""
    holder = lock_holder(part.holder)
    if holder is None:
        return
    with contextlib.suppress(FileNotFoundError):
        for claim in BatchFolder(part.output).blocks.iterdir():
            if lock_holder(claim) == holder:
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
        self.lost = False  # the batch was put together without this runner
        self._touched = 0.0

    def join(self) -> None:
        self._folder.blocks.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.part.path.mkdir(parents=True, mode=0o700)
        while not try_lock(self.part.holder):
            pass  # a leftover of the same name was swept away
        sync_dir(self._folder.parts)
        self._touched = time.monotonic()

    def leave(self) -> None:
        """Remove all claims, and the part if it is empty."""
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
        """Show that this runner lives, and notice when the batch was put together without it."""
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
        """Claim a block that no one has."""
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
        """Remove the claim of a dead runner; whether the block may be claimed now."""
        path = claim_path(self._folder, block)
        holder = lock_holder(path)
        if holder is not None:
            if holder_of(path) is not None:
                return False
            discard_lock(path, holder)
        return True


class Others:
    """The rows that other runners have done, read from their ledgers as these grow."""

    def __init__(self, folder: BatchFolder, table: Table, own: str, done: bytearray) -> None:
        self._folder, self._own, self._done = folder, own, done
        self._find = Finder(table)
        self._read: dict[str, int] = {}

    def refresh(self) -> int:
        """Mark the rows done since the last call; their number."""
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


SMALLEST, LARGEST = 16, 1024
PER_RUNNER = 64
RETRY_S = 0.5


@dataclass(frozen=True)
class Division:
    """How the rows are cut into blocks; the same for all runners."""

    size: int
    row_order: str
    digest: str

    def count(self, rows: int) -> int:
        return -(-rows // self.size)


def block_size(rows: int, runners: int) -> int:
    return min(LARGEST, max(SMALLEST, rows // (PER_RUNNER * runners)))


def load_division(folder: BatchFolder) -> Division | None:
    with contextlib.suppress(FileNotFoundError):
        return load_json(Division, folder.division)
    return None


def held_blocks(folder: BatchFolder) -> set[int]:
    """The blocks that are claimed, by runners dead or alive."""
    return {int(name) for name in os.listdir(folder.blocks) if name.isdigit()}  # noqa: PTH208 - names, thousands


class BlockFeed:
    """Gives the rows of claimed blocks; `on_elsewhere` is called with the number of rows that others did."""

    def __init__(
        self,
        folder: BatchFolder,
        member: Participant,
        division: Division,
        order: Sequence[int],
        done: bytearray,
        others: Others,
        on_elsewhere: Callable[[int], None],
    ) -> None:
        self._folder, self._member, self._others, self._on_elsewhere = folder, member, others, on_elsewhere
        self._order, self._done, self._size = order, done, division.size
        self._finished = bytearray(division.count(len(order)))
        self._rows: Iterator[int] = iter(())
        self._not_before = 0.0

    def next_row(self) -> int | None:
        while True:
            for row in self._rows:
                if not self._done[row]:
                    return row
            block = self._next()
            if block is None:
                return None
            self._rows = iter(self._of(block))

    def refresh(self) -> None:
        """Show that this runner lives, and learn what others have done."""
        self._member.touch()
        self._on_elsewhere(self._others.refresh())

    def _next(self) -> int | None:
        now = time.monotonic()
        if now < self._not_before or self._member.lost:
            return None
        try:
            block = self._claim()
        except FileNotFoundError:  # the batch was put together
            self._member.lost, block = True, None
        if block is None:
            self._not_before = now + RETRY_S
        return block

    def _claim(self) -> int | None:
        held = held_blocks(self._folder)
        claimed: list[int] = []
        for block in range(len(self._finished)):
            if self._is_finished(block) or block in self._member.claims:
                continue
            if block in held:
                claimed.append(block)
            elif self._got(block):
                return block
        return next((block for block in claimed if self._member.free(block) and self._got(block)), None)

    def _got(self, block: int) -> bool:
        """Claim a block; False when another runner has it, or when its last holder had finished it."""
        if not self._member.claim(block):
            return False
        self._on_elsewhere(self._others.refresh())
        return not self._is_finished(block)

    def _is_finished(self, block: int) -> bool:
        if not self._finished[block] and all(self._done[row] for row in self._of(block)):
            self._finished[block] = 1
        return bool(self._finished[block])

    def _of(self, block: int) -> Sequence[int]:
        return self._order[block * self._size : (block + 1) * self._size]
