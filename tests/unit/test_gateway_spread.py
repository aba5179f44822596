"""Sixteen servers, prefixes by Zipf's law, each policy: load and first tokens, in virtual time.

A server has seats; a request there takes its uncached prompt at the prefill rate, then its tokens one by one. What
does not find a seat waits in line. The policies are the gateway's own; caches are exact and without end.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from corral.serve.gateway.policies import OUTPUT_WEIGHT, POLICIES, make_policy
from corral.serve.gateway.prompt import Holdings, RoutedPrompt, TokenScale, read_prompt

SERVERS, SEATS, PREFILL, STEP_S, TOKENS, PREFIX = 16, 8, 2000.0, 0.05, 16, 600
WARM = 2500


@dataclass(eq=False)
class Server:
    work_tokens: float = 0.0
    recent: float = 0.0
    holdings: Holdings = field(default_factory=Holdings)
    running: int = 0
    cached: set[int] = field(default_factory=set)
    requests: int = 0
    busy_s: float = 0.0


def prompts(kind: str, prefixes: int) -> list[RoutedPrompt]:
    found = []
    for number in range(prefixes):
        ids = [number * 1000 + i for i in range(PREFIX)]
        text = " ".join(f"p{number}w{i}" for i in range(PREFIX * 4 // 8))
        prompt = str(ids) if kind == "ids" else f'"{text}"'
        body = f'{{"prompt": {prompt}, "max_tokens": {TOKENS}}}'.encode()
        found.append(read_prompt(body, lambda _: TokenScale()))
    return found


@dataclass
class Result:
    first_s: list[float]
    requests: list[int]
    busy_s: list[float]
    hits: float

    def late(self) -> float:
        """P99, once prefixes have found their places."""
        warm = sorted(self.first_s[WARM:])
        return warm[int(0.99 * len(warm))]

    def spread(self) -> tuple[float, float]:
        return _uneven(self.requests), _uneven(self.busy_s)


def _uneven(loads: Sequence[float]) -> float:
    return max(loads) / (sum(loads) / len(loads))


def simulate(route: str, kind: str, rate: float, count: int = 6000, prefixes: int = 64, seed: int = 1) -> Result:
    rng, policy = random.Random(seed), make_policy(route)
    servers, known = [Server() for _ in range(SERVERS)], prompts(kind, prefixes)
    weights = [1 / (number + 1) for number in range(prefixes)]
    events: list[tuple[float, int, str, Any]] = []
    at = 0.0
    for number, which in enumerate(rng.choices(range(prefixes), weights, k=count)):
        at += rng.expovariate(rate)
        events.append((at, number, "comes", which))
    heapq.heapify(events)
    order, waiting = count, deque[tuple[float, int]]()
    first: list[float] = []
    hits = 0

    def begin(now: float, came: float, which: int) -> bool:
        nonlocal order, hits
        free = [one for one in servers if one.running < SEATS]
        if not free:
            return False
        prompt = known[which]
        server = policy.choose(free, prompt)
        expected = prompt.tokens - prompt.tokens_until(server.holdings.depth(prompt.blocks))
        server.holdings.hold(prompt.blocks, expected)
        uncached = 10 if which in server.cached else PREFIX
        hits += which in server.cached
        server.cached.add(which)
        output = OUTPUT_WEIGHT * prompt.output_tokens
        server.work_tokens += expected + output
        server.running += 1
        server.requests += 1
        prefill = 0.02 + uncached / PREFILL
        first.append(now - came + prefill)
        server.busy_s += prefill + TOKENS * STEP_S
        heapq.heappush(events, (now + prefill, order, "first", (server, expected)))
        heapq.heappush(events, (now + prefill + TOKENS * STEP_S, order + 1, "ends", (server, output)))
        order += 2
        return True

    while events:
        now, _, what, about = heapq.heappop(events)
        if what == "comes":
            if waiting or not begin(now, now, about):
                waiting.append((now, about))
        elif what == "first":
            about[0].work_tokens -= about[1]
        else:
            about[0].work_tokens -= about[1]
            about[0].running -= 1
            while waiting and begin(now, *waiting[0]):
                waiting.popleft()
    return Result(first, [one.requests for one in servers], [one.busy_s for one in servers], hits / count)


@pytest.mark.parametrize(("kind", "rate"), [("text", 30.0), ("text", 60.0), ("ids", 100.0)])
def test_prefix_routing_is_even_and_has_the_lowest_late_first_token(kind: str, rate: float) -> None:
    found = {name: simulate(name, kind, rate) for name in POLICIES}
    prefix = found.pop("prefix")
    assert max(prefix.spread()) <= 1.2
    assert all(prefix.late() < other.late() for other in found.values())
    assert all(prefix.hits > other.hits for other in found.values())
