"""The members of a chain as the proxy sees them: who takes new requests, who is avoided for a while, who has ended.

Two sources: what is known of the deployments (`update`, every second or two), and what the proxy meets itself: a
refused connection sets a member aside for a moment, a "draining" answer for good. The newest ready member takes all
new requests; one of unknown state that was ready before comes after those that are known to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from corral.client.http1 import Headers
from corral.deploy.deployment.state import ENDED, State
from corral.serve.proxy.member import Member, Waiter, told_if_all_failed
from corral.serve.proxy.request import Request


@dataclass(frozen=True)
class MemberReading:
    """What is known of one deployment of the chain."""

    name: str
    state: State
    url: str = ""  # without /v1; empty when it has no address
    text: str = ""


class Members:
    """The chain, oldest first, and the requests that wait for one of it to be ready: the route of all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, say: Callable[[str], None]) -> None:
        self._loop, self._say = loop, say
        self.all: list[Member] = []
        self.current: Member | None = None
        self.switch_overs = 0
        self._waiting: dict[Waiter, None] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def update(self, readings: list[MemberReading]) -> None:
        """Take over what is known now; connections and marks of a member at the same address stay."""
        before = {(one.name, one.url): one for one in self.all}
        found = []
        for reading in readings:
            member = before.get((reading.name, reading.url))
            if member is None and not reading.url:  # ended: it has no address any more, but may have requests
                member = next((one for one in before.values() if one.name == reading.name), None)
            if member is None:
                member = Member(reading.name, reading.url, reading.state)
            before.pop((member.name, member.url), None)
            member.state, member.text = reading.state, reading.text
            if reading.state in (State.QUEUED, State.STARTING, State.LOADING):  # it lives again
                member.declined = member.was_ready = False
            member.was_ready = member.was_ready or reading.state is State.READY
            found.append(member)
        for gone in before.values():  # another address, or out of the chain: its running requests go on
            gone.state = State.STOPPED
            gone.close_idle()
        kept = [one for one in before.values() if one.active]
        self.all = [*kept, *found]
        for member in self.all:
            if member.state in ENDED:
                member.close_idle()
        self.wake()

    def choose(self, now_s: float) -> Member | None:
        """Who takes a new request now."""
        best: Member | None = None
        for member in self.all:  # of equals the newest
            if member.down_until_s <= now_s and member.rank() and (best is None or member.rank() >= best.rank()):
                best = member
        if best is not None and best is not self.current:
            if self.current is not None:
                self.switch_overs += 1
                self._say(f"new requests go to {best.name}")
            self.current = best
        return best

    def other(self, member: Member, now_s: float) -> bool:
        """Whether somebody else is ready."""
        return any(one is not member and one.rank() and one.down_until_s <= now_s for one in self.all)

    def standing(self) -> str:
        """All members in words."""
        words = [f"{one.name} is {'draining' if one.declined and one.state is State.READY else one.state}"
                 for one in self.all]  # fmt: skip
        return ", ".join(words) or "there is no deployment"

    def all_failed(self) -> str:
        return told_if_all_failed(self.all)

    def parts(self, request: Request, member: Member) -> list[bytes | bytearray]:
        """The key goes on untouched: the server decides about it."""
        return request.parts(member.host)

    def crowded(self) -> bool:
        return False

    def answers(self, member: Member, status: int, headers: Headers) -> bytes:
        return b""

    def moves(self, now_s: float, data: list[bytes]) -> None:
        """Nothing is learned from answers."""

    def leaves(self, member: Member) -> None:
        """Nothing is counted for a member."""

    def ends(self, status: int, whole: bool) -> None:
        """Nothing is counted for a client."""

    def last_words(self, message: str) -> bytes:
        return b""

    # waiting

    def wait(self, waiter: Waiter) -> None:
        """Wake this request when something changes."""
        self._waiting[waiter] = None
        self._set_alarm()

    def forget(self, waiter: Waiter) -> None:
        self._waiting.pop(waiter, None)

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            waiter.attempt()

    def _set_alarm(self) -> None:
        """Look again when the first member that is avoided may be tried once more."""
        if self._alarm is not None:
            return
        times = [one.down_until_s for one in self.all if one.rank() and one.down_until_s]
        if times:
            self._alarm = self._loop.call_later(max(0.0, min(times) - self._loop.time()) + 0.001, self._alarmed)

    def _alarmed(self) -> None:
        self._alarm = None
        self.wake()

    def close(self) -> None:
        if self._alarm:
            self._alarm.cancel()
