"""The rows of a batch in blocks, and a feed that gives a runner the rows of blocks nobody else does.

The rows, in the order in which they are to be sent, are cut into blocks of equal size: so many that the last ones do
not keep anybody waiting, so large that claiming one is nothing beside doing it. A runner claims its next block when
it has sent the rows of the last, so its engine is never drained in between. When no block is free it looks for dead
runners.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from corral.base.record import load_json
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.sharing.parts import Others, Participant

SMALLEST, LARGEST = 16, 1024
PER_RUNNER = 64
LOOK_AGAIN_S = 0.5


@dataclass(frozen=True)
class Division:
    """How the rows are divided; the same for all runners."""

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
    """The blocks that somebody has claimed, dead or alive."""
    return {int(name) for name in os.listdir(folder.blocks) if name.isdigit()}  # noqa: PTH208 - names, thousands


class BlockFeed:
    """Gives rows of claimed blocks; `on_elsewhere` is told how many rows others were seen to have done."""

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

    def take(self) -> int | None:
        while True:
            for row in self._rows:
                if not self._done[row]:
                    return row
            block = self._next()
            if block is None:
                return None
            self._rows = iter(self._of(block))

    def look(self) -> None:
        """Learn what others have done."""
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
            self._not_before = now + LOOK_AGAIN_S
        return block

    def _claim(self) -> int | None:
        held = held_blocks(self._folder)
        taken: list[int] = []
        for block in range(len(self._finished)):
            if self._is_finished(block) or block in self._member.claims:
                continue
            if block in held:
                taken.append(block)
            elif self._got(block):
                return block
        return next((block for block in taken if self._member.free(block) and self._got(block)), None)

    def _got(self, block: int) -> bool:
        """Claim it; what its last holder did counts, perhaps all of it."""
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
