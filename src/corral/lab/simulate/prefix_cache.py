"""The blocks of finished requests that stay in an engine's KV cache; the oldest are evicted first.

Only groups of requests with a common beginning are followed; blocks of requests that share nothing take room and are
evicted in the order in which they were left.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    blocks: int = 0  # whole blocks that it holds
    users: int = 0  # running requests that read it


class PrefixCache:
    """Blocks by group; those that no request uses may be evicted at any time."""

    __slots__ = ("_entries", "_left", "_nameless", "_size", "idle_blocks", "pinned_blocks")

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._entries: dict[int, _Entry] = {}
        self._left: OrderedDict[int, int] = OrderedDict()  # group, or a number below -1, -> blocks; the oldest first
        self._nameless = -1
        self.pinned_blocks = self.idle_blocks = 0

    def hit(self, group: int, tokens: int) -> int:
        """How many blocks of the first `tokens` are there."""
        entry = self._entries.get(group)
        return min(entry.blocks, tokens // self._size) if entry else 0

    def further_pinned(self, group: int, blocks: int) -> int:
        """How many more blocks are in use once a request uses the group's first `blocks`."""
        entry = self._entries.get(group)
        if entry is None:
            return blocks
        return max(0, blocks - entry.blocks) if entry.users else max(blocks, entry.blocks)

    def use(self, group: int, blocks: int) -> None:
        """A request reads or writes the group's first `blocks`, until `release`."""
        entry = self._entries.setdefault(group, _Entry())
        if not entry.users:
            self.idle_blocks -= self._left.pop(group, 0)
            self.pinned_blocks += entry.blocks
        entry.users += 1
        if blocks > entry.blocks:
            self.pinned_blocks += blocks - entry.blocks
            entry.blocks = blocks

    def release(self, group: int, grown_blocks: int = 0) -> None:
        """A request is over; with `grown_blocks` it leaves more of its group than there was."""
        entry = self._entries[group]
        entry.users -= 1
        if grown_blocks > entry.blocks:
            self.pinned_blocks += grown_blocks - entry.blocks
            entry.blocks = grown_blocks
        if not entry.users:
            self.pinned_blocks -= entry.blocks
            self.idle_blocks += entry.blocks
            self._left[group] = entry.blocks

    def leave(self, blocks: int) -> None:
        """Keep the blocks of a request that shares none of them."""
        if blocks > 0:
            self._nameless -= 1
            self._left[self._nameless] = blocks
            self.idle_blocks += blocks

    def shrink(self, room: int) -> None:
        """Evict unused blocks until at most `room` are left."""
        while self.idle_blocks > max(0, room):
            group, blocks = self._left.popitem(last=False)
            self.idle_blocks -= blocks
            if group >= 0:
                del self._entries[group]
