"""The servers of one model, and the requests that wait for one of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from corral.deploy.deployment.state import State
from corral.fake.metrics import LATENCY_BOUNDS, TTFT_BOUNDS, Histogram
from corral.serve.fleet.record import Judgement
from corral.serve.gateway.asks import TokenScale
from corral.serve.gateway.fair_queue import FairQueue
from corral.serve.gateway.policies import Policy
from corral.serve.gateway.serving import ServingMember
from corral.serve.proxy.member import told_if_all_failed

LOOK_AGAIN_S = 0.1
BIN_S, BINS = 5.0, 12


class Queued(Protocol):
    """A request that waits."""

    arrived_s: float

    def try_now(self) -> bool:
        """Its turn has come: whether somebody took it."""


class Arrivals:
    """Requests and their tokens in each five seconds of the last minute."""

    def __init__(self) -> None:
        self._bins: deque[list[float]] = deque()  # number of the five seconds, requests, tokens

    def note(self, now_s: float, tokens: float) -> None:
        number = now_s // BIN_S
        if not self._bins or self._bins[-1][0] != number:
            self._bins.append([number, 0, 0])
            while len(self._bins) > BINS:
                self._bins.popleft()
        self._bins[-1][1] += 1
        self._bins[-1][2] += tokens

    def bins(self, now_s: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Requests and tokens, oldest first."""
        last = now_s // BIN_S
        known = {one[0]: one for one in self._bins}
        rows = [known.get(number, [0, 0, 0]) for number in (last - back for back in range(BINS - 1, -1, -1))]
        return tuple(int(one[1]) for one in rows), tuple(int(one[2]) for one in rows)


class ModelPool:
    """One model: who serves it, who is next."""

    def __init__(self, model: str, policy: Policy, loop: asyncio.AbstractEventLoop) -> None:
        self.model, self.policy, self._loop = model, policy, loop
        self.members: list[ServingMember] = []
        self.ready: list[ServingMember] = []  # those that get requests
        self.queue: FairQueue[Queued] = FairQueue()
        self.scale = TokenScale()
        self.arrivals = Arrivals()
        self.ttft, self.e2e, self.queued = (
            Histogram(TTFT_BOUNDS),
            Histogram(LATENCY_BOUNDS),
            Histogram(LATENCY_BOUNDS),
        )
        self._pumping = False
        self._alarm: asyncio.TimerHandle | None = None

    def sort_out(self) -> None:
        """Who gets requests now: the ready ones, or if there is none those that may be."""
        grades = [(one.grade(), one) for one in self.members]
        best = max((grade for grade, _ in grades), default=0)
        self.ready = [one for grade, one in grades if grade == best] if best else []
        self.pump_soon()

    def free(self, now_s: float, width: int) -> list[ServingMember]:
        """Who can take a request now."""
        return [one for one in self.ready if one.down_until_s <= now_s and one.has_seats(width)]

    def crowded(self) -> bool:
        """Whether somebody is ready, and only full."""
        now_s = self._loop.time()
        return any(one.down_until_s <= now_s and not one.has_seats(1) for one in self.ready)

    def pump_soon(self) -> None:
        """Give on what waits, once the current work of the loop is done: connections are free by then."""
        if self.queue.count and not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        now = self._loop.time()
        while self.queue and self.free(now, 1):
            item = self.queue.pop()
            if item is None or not item.try_now():
                break
        self.look_again()

    def look_again(self) -> None:
        """While requests wait, members that are avoided for a moment come back without anybody saying so."""
        if self.queue and self._alarm is None:
            self._alarm = self._loop.call_later(LOOK_AGAIN_S, self._alarmed)

    def _alarmed(self) -> None:
        self._alarm = None
        self._pump()

    def oldest_wait_s(self) -> float:
        now = time.monotonic()
        return max((now - one.arrived_s for one in self.queue.oldest()), default=0.0)

    def standing(self) -> str:
        """All members in words."""
        return ", ".join(map(_words, self.members)) or f"no server of {self.model} is running"

    def all_failed(self) -> str:
        return told_if_all_failed(self.members)

    def close(self) -> None:
        if self._alarm:
            self._alarm.cancel()


def _words(member: ServingMember) -> str:
    if member.state is State.READY and member.judged is Judgement.HUNG:
        return f"{member.name} is hung"
    if member.state is State.READY and (member.declined or member.leaving):
        return f"{member.name} is draining"
    return f"{member.name} is {member.state}"
