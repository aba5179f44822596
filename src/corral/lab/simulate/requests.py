"""Requests of a simulated load, made one at a time; finished ones are forgotten.

In an open loop the send times are known beforehand; in a closed loop a request is sent when another is answered.
Requests of one `group` begin with the same `shared` tokens.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from corral.client.trace import read_trace
from corral.lab.bench.datasets import varied
from corral.lab.bench.load import drawn_gaps
from corral.lab.bench.spec import LoadShape, Workload


@dataclass(slots=True)
class SimRequest:
    """One request."""

    number: int
    at_s: float
    prompt: int
    output: int
    group: int = -1  # -1: no other request shares its beginning
    shared: int = 0
    grows: bool = False  # the next of its group begins with all of it, its answer included
    turns: int = 0  # of its conversation that are still to come


class RequestSource(Protocol):
    """The requests of a simulation, in the order of their times."""

    @property
    def next_s(self) -> float:
        """The time of the next request; infinite where there is none now."""

    def next_request(self) -> SimRequest: ...

    def finished(self, request: SimRequest, at_s: float) -> None: ...


class OpenLoop:
    """Requests whose times are known; with `most`, at most so many run at once and the others wait at the sender."""

    def __init__(self, requests: Iterable[SimRequest], most: int | None = None) -> None:
        self._requests, self._most, self._running = iter(requests), most, 0
        self._next: SimRequest | None = None
        self._free_s = 0.0
        self.next_s = math.inf
        self._advance()

    def _advance(self) -> None:
        self._next = next(self._requests, None)
        self._due()

    def _due(self) -> None:
        full = self._most is not None and self._running >= self._most
        self.next_s = math.inf if self._next is None or full else max(self._next.at_s, self._free_s)

    def next_request(self) -> SimRequest:
        assert self._next is not None
        found, found.at_s = self._next, self.next_s
        self._running += 1
        self._advance()
        return found

    def finished(self, request: SimRequest, at_s: float) -> None:
        if self._most is not None and self._running >= self._most:
            self._free_s = at_s  # another may be sent from now on
        self._running -= 1
        if self._most is not None:
            self._due()


class ClosedLoop:
    """So many requests at once; the next is sent when one is answered. A conversation goes on with its next turn."""

    def __init__(
        self,
        requests: Iterable[SimRequest],
        concurrency: int,
        until_s: float = math.inf,
        added: int = 0,
        starts_s: Sequence[float] = (),  # of the first ones, where they were not all sent at once
    ) -> None:
        self._requests, self._until_s, self._added = iter(requests), until_s, added
        self._due: list[tuple[float, int, SimRequest]] = []
        self._number = 0
        self.next_s = math.inf
        for number in range(concurrency):
            self._send_next(starts_s[number] if number < len(starts_s) else 0.0)

    def _send_next(self, at_s: float) -> None:
        found = next(self._requests, None) if at_s < self._until_s else None
        if found is not None:
            self._push(found, at_s)

    def _push(self, request: SimRequest, at_s: float) -> None:
        request.at_s = at_s
        self._number += 1
        heapq.heappush(self._due, (at_s, self._number, request))
        self.next_s = self._due[0][0]

    def next_request(self) -> SimRequest:
        found = heapq.heappop(self._due)[2]
        self.next_s = self._due[0][0] if self._due else math.inf
        return found

    def finished(self, request: SimRequest, at_s: float) -> None:
        if not request.turns:
            self._send_next(at_s)
            return
        history = request.prompt + request.output
        next_turn = SimRequest(
            request.number, at_s, history + self._added, request.output, request.group, history, True,
            request.turns - 1,
        )  # fmt: skip
        self._push(next_turn, at_s)


class FirstOf:
    """The first `count` requests of a load."""

    def __init__(self, source: RequestSource, count: int) -> None:
        self._source, self._left = source, count

    @property
    def next_s(self) -> float:
        return self._source.next_s if self._left else math.inf

    def next_request(self) -> SimRequest:
        self._left -= 1
        return self._source.next_request()

    def finished(self, request: SimRequest, at_s: float) -> None:
        self._source.finished(request, at_s)


def synthetic(workload: Workload, times_s: Iterator[float]) -> Iterator[SimRequest]:
    """The requests of a made-up dataset: as many as the workload says, or as there are times."""
    dice = random.Random(workload.seed)  # noqa: S311 - not for secrets
    for number, at_s in zip(range(workload.num_prompts), times_s, strict=False):
        prompt = varied(workload.input_len, workload.range_ratio, dice)
        output = varied(workload.output_len, workload.range_ratio, dice)
        if workload.dataset == "prefix_repetition":
            group = number % workload.num_prefixes
            yield SimRequest(number, at_s, workload.prefix_len + prompt, output, group, workload.prefix_len)
        elif workload.dataset == "multi_turn":
            yield SimRequest(number, at_s, prompt, output, number, 0, True, workload.turns - 1)
        else:
            yield SimRequest(number, at_s, prompt, output)


def _times(load: LoadShape, seed: int) -> Iterator[float]:
    """Send times without end, drawn as `corral bench` draws them (which scales the gaps of a run to its length)."""
    at = 0.0
    for gap in drawn_gaps(load, seed):
        if load.seconds is not None and at >= load.seconds:
            return
        at += gap
        yield at


def source_of(workload: Workload, load: LoadShape) -> RequestSource:
    """The load that a spec describes."""
    if load.rate is None:
        forever = iter(lambda: 0.0, None)
        closed = load.concurrency or workload.num_prompts
        return ClosedLoop(synthetic(workload, forever), closed, load.seconds or math.inf, workload.input_len)
    return OpenLoop(synthetic(workload, _times(load, workload.seed)), load.concurrency)


def trace_requests(path: str, speed: float = 1.0) -> Iterator[SimRequest]:
    """The requests of a trace, line by line; its first is sent at once."""
    begin_s = None
    for number, one in enumerate(read_trace(path, ordered=True)):
        begin_s = one.time_s if begin_s is None else begin_s
        lengths = max(1, one.prompt_tokens), max(1, one.output_tokens)
        yield SimRequest(number, (one.time_s - begin_s) / speed, *lengths)
