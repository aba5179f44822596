"""The limits of every HTTP server of Corral's own: the gateway, the proxy, the console, the batch service.

A client whose key is unknown is refused at the end of a request's head: no byte of its body is kept. What a client
sends must advance, what it is sent must be read, and a connection that is being closed has a few seconds. Where a
server has as many connections as it serves, those that have shown no key make room, the oldest of the address that
has most of them first; one key cannot take all. The length of a head is bounded in `client.http1`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

SWEEP_S = 1.0
LARGEST_SHARE = 0.75  # of the connections, for one key
MADE_ROOM = 32  # one of so many connections is ended at once where room is needed: finding them costs a walk over all


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What one connection may do, and how many there may be."""

    connections: int = 512
    head_s: float = 30.0  # from the first byte of a head to its last
    idle_s: float = 30.0  # before a request, and between two
    read_s: float = 30.0  # in which a body advances by at least `slowest_bytes_per_s`
    slowest_bytes_per_s: int = 16_384
    unread_s: float = 120.0  # in which some of what was written is read
    closing_s: float = 5.0  # for the last bytes in both directions


LIMITS = ServerLimits()


class ConnectionPhase(enum.Enum):
    """What a connection is in the middle of."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"
    CLOSING = "closing"


class ConnectionProgress:
    """Whether a connection advances; all times are monotonic."""

    __slots__ = ("_bytes", "_since_s", "_unread_bytes", "_unread_since_s", "phase")

    def __init__(self, now_s: float) -> None:
        self.phase, self._since_s = ConnectionPhase.IDLE, now_s
        self._bytes = self._unread_bytes = 0
        self._unread_since_s = now_s

    def enter(self, phase: ConnectionPhase, now_s: float) -> None:
        self.phase, self._since_s, self._bytes = phase, now_s, 0

    def received(self, count: int) -> None:
        """So many bytes of a body."""
        self._bytes += count

    def excuse(self, away_s: float) -> None:
        """The server itself did not run for so long."""
        self._since_s += away_s
        self._unread_since_s += away_s

    def is_stuck(self, limits: ServerLimits, now_s: float, unread_bytes: int) -> bool:
        """Whether its phase, or the reading of what was written, has not advanced for too long."""
        if unread_bytes:
            if not self._unread_bytes or unread_bytes < self._unread_bytes:
                self._unread_since_s = now_s
            patience_s = limits.closing_s if self.phase is ConnectionPhase.CLOSING else limits.unread_s
            if now_s - self._unread_since_s > patience_s:
                return True
        self._unread_bytes = unread_bytes
        spent_s = now_s - self._since_s
        if self.phase is ConnectionPhase.BODY:
            if spent_s <= limits.read_s:
                return False
            enough = self._bytes >= limits.slowest_bytes_per_s * limits.read_s
            self._since_s, self._bytes = (now_s, 0) if enough else (self._since_s, self._bytes)
            return not enough
        if self.phase is ConnectionPhase.ANSWER or (self.phase is ConnectionPhase.CLOSING and unread_bytes):
            return False
        return spent_s > {ConnectionPhase.IDLE: limits.idle_s, ConnectionPhase.HEAD: limits.head_s}.get(
            self.phase, limits.closing_s
        )

    @property
    def is_unread(self) -> bool:
        """Whether something written waited to be read when it was last looked at."""
        return self._unread_bytes > 0


class TimeAway:
    """How long a loop that should have come round did not: the process was stopped, suspended, or kept busy."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s, self._last_s = interval_s, 0.0

    def since_last(self, now_s: float) -> float:
        """Seconds beyond the interval since the last call; 0 for delays that are usual."""
        last, self._last_s = self._last_s, now_s
        away_s = now_s - last - self._interval_s
        return away_s if last and away_s > self._interval_s else 0.0


class ServedConnection(Protocol):
    """A connection, as the table of all sees it."""

    address: str  # of the client
    owner: Hashable  # whose key it has shown; None: none yet
    progress: ConnectionProgress

    def sweep(self, now_s: float) -> None:
        """End it where it does not advance."""

    def end_for_room(self) -> None:
        """Close at once: another connection needs the room."""


C = TypeVar("C", bound=ServedConnection)


class ConnectionTable(Generic[C]):
    """The connections of a server, oldest first."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self._all: dict[C, None] = {}
        self._owned: Counter[Hashable] = Counter()
        self._away = TimeAway(SWEEP_S)
        self._most_of_one = max(1, int(LARGEST_SHARE * limits.connections))

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, connection: C) -> bool:
        return connection in self._all

    def all(self) -> list[C]:
        return list(self._all)

    def add(self, connection: C) -> bool:
        """List a new connection; False: there are too many, and none that could make room."""
        has_room = len(self._all) < self.limits.connections or self._make_room()
        self._all[connection] = None
        return has_room

    def discard(self, connection: C) -> None:
        if connection in self._all:
            del self._all[connection]
            if connection.owner is not None:
                self._disown(connection.owner)

    def show_key(self, connection: C, owner: Hashable) -> bool:
        """A key was shown on a connection; False: its owner has as many connections as one may."""
        if connection.owner != owner:
            if connection.owner is not None:
                self._disown(connection.owner)
            connection.owner = owner
            self._owned[owner] += 1
        return self._owned[owner] <= self._most_of_one

    def sweep(self, now_s: float) -> float:
        """To be called every `SWEEP_S`; seconds for which the server itself did not run before."""
        away_s = self._away.since_last(now_s)
        for connection in self.all():
            connection.progress.excuse(away_s)
            connection.sweep(now_s)
        return away_s

    def _disown(self, owner: Hashable) -> None:
        self._owned[owner] -= 1
        if self._owned[owner] <= 0:
            del self._owned[owner]

    def _make_room(self) -> bool:
        strangers = [one for one in self._all if one.owner is None]
        if strangers:
            most = Counter(one.address for one in strangers).most_common(1)[0][0]
            ending = [one for one in strangers if one.address == most]
        else:
            idle = [one for one in self._all if one.progress.phase is ConnectionPhase.IDLE]
            owners = Counter(one.owner for one in idle)
            ending = [one for one in idle if one.owner == owners.most_common(1)[0][0]]
        for one in ending[: max(1, self.limits.connections // MADE_ROOM)]:
            self.discard(one)
            one.end_for_room()
        return bool(ending)


class HeldBytes:
    """The bodies that a server keeps in memory: of all, and of each key."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self.most, self.most_of_one = most, most_of_one
        self._of: dict[Hashable, int] = {}
        self.total = 0

    def take(self, owner: Hashable, count: int) -> str:
        """Keep so many more; a sentence where that is too much, and nothing is kept."""
        held = self._of.get(owner, 0) + count
        if held > self.most_of_one:
            return f"the unanswered requests of this key hold more than {self.most_of_one:,} bytes"
        if self.total + count > self.most:
            return "too many large requests at once"
        self._of[owner] = held
        self.total += count
        return ""

    def release(self, owner: Hashable, count: int) -> None:
        if not count:
            return
        self.total -= count
        held = self._of.pop(owner, 0) - count
        if held > 0:
            self._of[owner] = held
