"""One server that requests may be sent to: its connections, and whether it is avoided for a while."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from corral.client.peer_check import PeerCheck
from corral.deploy.deployment.state import State
from corral.serve.proxy.upstream import Upstream

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


class Waiter(Protocol):
    """A request, as the members see it: it waits for one of them, or for the answer of one."""

    def attempt(self) -> None:
        """Something has changed: try again."""

    def give_up(self, silent_since_s: float, why: str = "the server has ended") -> None:
        """An answer that has not moved since then will not move again."""


def told_if_all_failed(members: Sequence[Member]) -> str:
    """What became of each member when all have failed; empty while one is left, or none is known yet."""
    if not members or any(one.state is not State.FAILED for one in members):
        return ""
    told = "; ".join(f"{one.name} has failed ({one.text or 'no reason is known'})" for one in members)
    return f"no server is left: {told}. Start it again with `corral up`."


@dataclass(eq=False)
class Member:
    """One server that requests may be sent to: a deployment at one address."""

    name: str
    url: str
    state: State
    text: str = ""
    was_ready: bool = False
    declined: bool = False  # it said that it drains
    down_until_s: float = 0.0
    pause_s: float = 0.0
    idle: list[Upstream] = field(default_factory=list)
    active: set[Waiter] = field(default_factory=set)

    @functools.cached_property
    def doorkeeper(self) -> PeerCheck:
        return PeerCheck(self.url)

    @functools.cached_property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    @functools.cached_property
    def host(self) -> bytes:
        return urlsplit(self.url).netloc.encode()

    def rank(self) -> int:
        """How gladly a new request is given to it: 2 ready, 1 perhaps, 0 not."""
        if self.declined or not self.url:
            return 0
        if self.state is State.READY:
            return 2
        return 1 if self.state is State.UNKNOWN and self.was_ready else 0

    def failed(self, now_s: float) -> None:
        """Avoid it for a moment, longer each time."""
        if now_s >= self.down_until_s:  # several requests that meet one failure are one failure
            self.pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, self.pause_s * 2))
            self.down_until_s = now_s + self.pause_s

    def worked(self) -> None:
        self.pause_s = self.down_until_s = 0.0

    def take_back(self, connection: Upstream) -> bool:
        """Keep a connection for the next request, if there may be one."""
        if not self.rank():
            return False
        self.idle.append(connection)
        return True

    def lost(self, connection: Upstream) -> None:
        with contextlib.suppress(ValueError):
            self.idle.remove(connection)

    def close_idle(self) -> None:
        for connection in self.idle:
            connection.drop()
        self.idle.clear()
