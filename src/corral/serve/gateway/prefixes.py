"""Who holds which beginning of a prompt: bounded in memory, corrected by what the answers say.

A prompt is cut at fixed places that lie further apart the deeper they are (every 128 bytes up to 2 KiB, then every
sixteenth of the way), and each place is known by one hash of all that comes before it. Two prompts that begin alike
have the same first hashes. The hash is keyed by the process, so nobody can make two prompts collide.

A member holds what it computed until it has computed more than its cache takes since then. How much that is comes
from its metrics, and from its answers: a prompt that was expected to be cached and was not has a known age.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

FIRST_STEP_BYTES, DEEPEST_BYTES = 128, 1 << 21
MOST_PLACES = 60_000  # remembered of a member, twice
WINDOW = 256  # requests over which a beginning counts as shared
FEWEST = 16  # requests before anything does
SHARED_BY = 0.8


def _positions() -> list[int]:
    found, at = [], 0
    while at < DEEPEST_BYTES:
        at += max(FIRST_STEP_BYTES, at // 16 // FIRST_STEP_BYTES * FIRST_STEP_BYTES)
        found.append(at)
    return found


POSITIONS = _positions()  # in bytes; the n-th hash of a prompt stands for its first POSITIONS[n] bytes
_SPANS = list(pairwise([0, *POSITIONS]))


def block_hashes(data: bytes, seed: int) -> list[int]:
    """The hashes of a prompt's beginnings; `seed` stands for what comes before it (tools, the kind of prompt)."""
    found, chain = [], seed
    for start, end in _SPANS[: bisect_right(POSITIONS, len(data))]:
        chain = hash((chain, data[start:end]))
        found.append(chain)
    return found


class Holdings:
    """What one member holds, by its own count of tokens computed."""

    __slots__ = ("_limit", "_old", "_young", "capacity_tokens", "clock")

    def __init__(self, limit: int = MOST_PLACES) -> None:
        self._young: dict[int, float] = {}
        self._old: dict[int, float] = {}
        self._limit = limit
        self.clock = 0.0
        self.capacity_tokens = float("inf")

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def _touched(self, block: int) -> float | None:
        found = self._young.get(block)
        return self._old.get(block) if found is None else found

    def depth(self, blocks: list[int]) -> int:
        """How many of a prompt's first places it holds; who holds one holds all before it."""
        since, young, old = self.clock - self.capacity_tokens, self._young, self._old
        low, high = 0, len(blocks)
        middle = high - 1  # a prompt is often held to its last place
        while low < high:
            touched = young.get(blocks[middle]) or old.get(blocks[middle])
            if touched is not None and touched >= since:
                low = middle + 1
            else:
                high = middle
            middle = (low + high) // 2
        return low

    def hold(self, blocks: list[int], computed_tokens: float) -> None:
        """It was given a prompt, and computes this much of it."""
        self.clock += computed_tokens
        if len(self._young) + len(blocks) > self._limit:
            self._old, self._young = self._young, {}
        young, clock = self._young, self.clock
        for block in blocks:
            young[block] = clock

    def forget(self) -> None:
        """It was started anew: its cache is empty."""
        self._young, self._old = {}, {}

    def age(self, block: int) -> float | None:
        """How many tokens it has computed since it last computed or used this place."""
        touched = self._touched(block)
        return None if touched is None else self.clock - touched

    def learn(self, age_tokens: float, cached: bool) -> None:
        """A place of that age was in its cache, or was not: the cache takes at least, or at most, so much."""
        if cached:
            self.capacity_tokens = max(self.capacity_tokens, age_tokens)
        elif age_tokens < self.capacity_tokens:
            low = age_tokens if self.capacity_tokens == float("inf") else self.capacity_tokens * 0.75
            self.capacity_tokens = max(age_tokens, low)


class SharedBeginnings:
    """Which beginnings nearly every request of a model has: to hold them tells no member from another."""

    __slots__ = ("_before", "_before_requests", "_now", "_requests")

    def __init__(self) -> None:
        self._now: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._requests = self._before_requests = 0

    def note(self, blocks: list[int], members: int) -> int:
        """Count a prompt; how many of its first places are shared so widely that all members come to hold them."""
        if self._requests >= WINDOW:
            self._before, self._before_requests, self._now, self._requests = self._now, self._requests, {}, 0
        requests = self._requests + self._before_requests
        self._requests += 1
        now, before = self._now, self._before
        known = requests >= FEWEST and members > 1
        least = requests * SHARED_BY if known else float("inf")
        shared, wide = 0, True
        for block in blocks:
            seen = now.get(block, 0)
            now[block] = seen + 1
            if wide:
                wide = seen + before.get(block, 0) > least
                shared += wide
        return shared
