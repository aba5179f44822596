"""Requests that wait for a member: each key gets its share of the tokens, not of the requests.

Start-time fair queueing: a key's next request starts, on a clock of tokens served, where its last one ended, or now
if the key had nothing waiting. The lowest start is next. So a key with ten thousand waiting requests delays another's
first by one of its own, and a key that was away has no claim on the time before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_IDLE_KEYS = 10_000


class FairQueue(Generic[T]):
    """First in, first out within a key."""

    def __init__(self) -> None:
        self._waiting: dict[str, OrderedDict[T, float]] = {}
        self._ends: dict[str, float] = {}  # where each key's last request ended
        self._now = 0.0
        self.count = 0  # of all that wait

    def __len__(self) -> int:
        return self.count

    def waiting(self) -> dict[str, int]:
        """How many wait, by key."""
        return {key: len(items) for key, items in self._waiting.items() if items}

    def served(self, key: str, tokens: float) -> None:
        """A request of the key begins, waiting or not."""
        start = max(self._now, self._ends.get(key, 0.0))
        self._now = start
        self._ends[key] = start + tokens
        if len(self._ends) > MOST_IDLE_KEYS:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now or name in self._waiting}

    def correct(self, key: str, tokens: float) -> None:
        """A request took that many tokens more (or less) than expected."""
        if key in self._ends:
            self._ends[key] += tokens

    def push(self, key: str, item: T, tokens: float) -> None:
        items = self._waiting.get(key)
        if not items:
            items = self._waiting[key] = OrderedDict()
            self._ends[key] = max(self._now, self._ends.get(key, 0.0))
        items[item] = tokens
        self.count += 1

    def put_back(self, key: str, item: T, tokens: float) -> None:
        """Its turn came and no member had room: it is the first of its key again."""
        self.push(key, item, tokens)
        self._waiting[key].move_to_end(item, last=False)

    def remove(self, key: str, item: T) -> None:
        items = self._waiting.get(key)
        if items and item in items:
            del items[item]
            self._removed(key, items)

    def pop(self, but: Collection[str] = ()) -> T | None:
        """The next request, of none of these keys; `served` is to be called when it begins."""
        keys = [key for key in self._waiting if key not in but] if but else self._waiting
        if not keys:
            return None
        key = min(keys, key=self._start)
        items = self._waiting[key]
        item, _ = items.popitem(last=False)
        self._removed(key, items)
        return item

    def oldest(self) -> list[T]:
        """The first of each key."""
        return [next(iter(items)) for items in self._waiting.values() if items]

    def _start(self, key: str) -> float:
        return self._ends.get(key, 0.0)

    def _removed(self, key: str, items: OrderedDict[T, float]) -> None:
        self.count -= 1
        if not items:
            del self._waiting[key]
