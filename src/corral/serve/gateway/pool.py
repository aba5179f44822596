"""The members that serve one model, and the requests that wait for one of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from corral.node.exposition import LATENCY_BOUNDS, TTFT_BOUNDS, Histogram
from corral.serve.gateway.member import Member, failure_summary
from corral.serve.gateway.policies import Policy, few_for
from corral.serve.gateway.prompt import RoutedPrompt, TokenScale
from corral.serve.gateway.queue import FairQueue
from corral.serve.gateway.usage import KeyUser

RETRY_S = 0.1
BIN_S, BINS = 5.0, 12


class QueuedRequest(Protocol):
    """A request that waits."""

    arrived_s: float
    user: KeyUser

    @property
    def is_limited(self) -> bool:
        """Whether it cannot go to every server of its model."""

    def try_now(self) -> bool:
        """Its turn has come; whether a member got it."""


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
    """One model: the members that serve it, the requests that wait, and how long its requests took."""

    def __init__(
        self,
        model: str,
        policy: Policy,
        loop: asyncio.AbstractEventLoop,
        on_choice: Callable[[Member], None] | None = None,
    ) -> None:
        self.model, self.policy, self._loop, self._on_choice = model, policy, loop, on_choice
        self.members: list[Member] = []
        self.ready: list[Member] = []  # those that get requests
        self.queue: FairQueue[QueuedRequest] = FairQueue()
        self.scale = TokenScale()
        self.arrivals = Arrivals()
        self.ttft, self.e2e = Histogram(TTFT_BOUNDS), Histogram(LATENCY_BOUNDS)
        self.queued = Histogram(LATENCY_BOUNDS)
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def regroup(self) -> None:
        """Find out which members get requests now: the ready ones, or if there is none those that may be."""
        levels = [(one.readiness(), one) for one in self.members]
        best = max((level for level, _ in levels), default=0)
        self.ready = [one for level, one in levels if level == best] if best else []
        if self.failure_summary():
            self._refuse_waiting()
        self.start_waiting_soon()

    def free(self, now_s: float, width: int) -> list[Member]:
        """The members that have room for a request now."""
        return [one for one in self.ready if one.down_until_s <= now_s and one.has_seats(width)]

    def choose(self, members: Sequence[Member], prompt: RoutedPrompt) -> Member:
        """One of these members, as the policy says."""
        if self._on_choice is None and len(members) > 1 and self.model in members[0].adapters:
            members = few_for(self.model, members, prompt)
        member = members[0] if len(members) == 1 else self.policy.choose(members, prompt)
        if self._on_choice is not None:
            self._on_choice(member)
        return member

    def only_full(self) -> bool:
        """Whether members are ready and only full: such a wait ends by itself."""
        now_s = self._loop.time()
        return any(one.down_until_s <= now_s and not one.has_seats(1) for one in self.ready)

    # requests that wait

    def start_waiting_soon(self) -> None:
        """Start waiting requests once the current work of the loop is done: connections are free by then."""
        if self.queue.count and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._start_waiting)

    def _start_waiting(self) -> None:
        self._scheduled = False
        now = self._loop.time()
        passed_over: set[str] = set()  # keys that are not good for the servers that have room
        while self.queue and self.free(now, 1):
            request = self.queue.pop(passed_over)
            if request is None:
                break
            if not request.try_now():
                if not request.is_limited:
                    break
                passed_over.add(request.user.name)
        self.retry_later()

    def retry_later(self) -> None:
        """While requests wait, try again regularly: a member that is avoided for a moment comes back unannounced."""
        if self.queue and self._timer is None:
            self._timer = self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._timer = None
        self._start_waiting()

    def _refuse_waiting(self) -> None:
        """All members have failed: waiting requests are answered with the reasons, because none is held then."""
        while (request := self.queue.pop()) is not None:
            request.try_now()

    def oldest_wait_s(self) -> float:
        now = time.monotonic()
        return max((now - one.arrived_s for one in self.queue.oldest()), default=0.0)

    # for people

    def status_text(self, members: Sequence[Member] | None = None) -> str:
        """The states of all members, or of these."""
        shown = self.members if members is None else members
        return ", ".join(one.status_text() for one in shown) or f"no server of {self.model} is running"

    def failure_summary(self) -> str:
        return failure_summary(self.members)

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()
