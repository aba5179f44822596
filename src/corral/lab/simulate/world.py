"""Simulated time: requests, the gateway's own routing and scaling code, and the engines of every member.

A member is one deployment: `data` engines behind its API servers, which give a request to the engine with the fewest
waiting (each counts for four) and running, as vLLM does. Members are chosen by `corral.serve.gateway.policies` with
the gateway's account of outstanding work; requests wait at the gateway while every member's seats are taken. With
`scaling`, `corral.serve.fleet.scaling` decides every second how many members there are.

Not covered: members that fail, several gateways, keys with limits of their own.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from corral.lab.bench.spec import Slo
from corral.lab.simulate.engine import EngineShape, SimEngine, SimSequence
from corral.lab.simulate.outcome import Moment, Recorder, SimOutcome
from corral.lab.simulate.requests import RequestSource, SimRequest
from corral.lab.simulate.steptime import FittedSteps, StepTime
from corral.serve.fleet.scaling import Course, Demand, next_size, rate
from corral.serve.gateway.policies import OUTPUT_WEIGHT, make_policy
from corral.serve.gateway.pool import Arrivals
from corral.serve.gateway.prompt import ID_BYTES, POSITIONS, Holdings, RoutedPrompt


@dataclass(frozen=True)
class MemberModel:
    """One deployment, as far as a simulation needs it."""

    shape: EngineShape
    steps: StepTime
    data: int = 1

    @property
    def seats(self) -> int:
        return self.shape.max_seqs * self.data

    def slowed(self, factor: float) -> MemberModel:
        """The same with all fitted times so many times longer."""
        shape, steps = self.shape, self.steps
        assert isinstance(steps, FittedSteps)
        longer = replace(
            shape, wake_s=shape.wake_s * factor, request_s=shape.request_s * factor, stream_s=shape.stream_s * factor
        )
        return replace(self, shape=longer, steps=steps.slowed(factor))


@dataclass(frozen=True)
class ScalingModel:
    """A fleet that follows its load."""

    least: int
    most: int
    capacity: float  # tokens/s of one member, prompt and answer
    lead_s: float


def simulate_load(
    source: RequestSource,
    model: MemberModel,
    members: int = 1,
    policy: str = "prefix",
    slos: Sequence[Slo] = (),
    scaling: ScalingModel | None = None,
    recorder: Recorder | None = None,
) -> SimOutcome:
    """Run a load to its end."""
    return _World(source, model, members, policy, recorder or Recorder(slos), scaling).run()


@dataclass(eq=False)
class _Member:
    """As a policy sees it (`serve.gateway.policies.RoutableMember`)."""

    number: int
    engines: list[SimEngine]
    since_s: float
    work_tokens: float = 0.0
    recent: float = 0.0
    holdings: Holdings = field(default_factory=Holdings)
    width: int = 0
    leaving: bool = False


class _World:
    def __init__(
        self,
        source: RequestSource,
        model: MemberModel,
        members: int,
        policy: str,
        recorder: Recorder,
        scaling: ScalingModel | None,
    ) -> None:
        self.source, self.model, self.policy = source, model, make_policy(policy)
        self.recorder, self.scaling = recorder, scaling
        self.members: dict[int, _Member] = {}
        self.takers: list[_Member] = []  # those that get requests
        self.queue: deque[SimRequest] = deque()
        self.events: list[tuple[float, int, SimEngine]] = []
        self.coming: deque[float] = deque()
        self.course, self.arrivals = Course(), Arrivals()
        self.now_s = self.member_s = 0.0
        self.next_look_s = 1.0 if scaling else math.inf
        self.most = self.serial = self.born = 0
        self.left = [0, 0, 0]  # computed, cached, preemptions of members that are gone
        for _ in range(members):
            self._join()

    def run(self) -> SimOutcome:
        source, events, request_s = self.source, self.events, self.model.shape.request_s
        while True:
            arrival_s, event_s = source.next_s + request_s, events[0][0] if events else math.inf
            if self.next_look_s < min(arrival_s, event_s) < math.inf:
                self._look()
            elif arrival_s <= event_s:
                if arrival_s == math.inf:
                    break
                self.now_s = arrival_s
                self._arrive(source.take())
            else:
                self._settle(*heapq.heappop(events)[::2])
        for member in list(self.members.values()):
            self._part(member)
        computed, cached, preemptions = self.left
        return self.recorder.outcome(computed, cached, preemptions, self.most, self.member_s)

    def _settle(self, at_s: float, engine: SimEngine) -> None:
        if engine.end_s != at_s:  # it was cut short by an arrival
            return
        self.now_s = at_s
        engine.settle()
        self._announce(engine)
        while self.queue and self._route(self.queue[0]):
            self.queue.popleft()
        if at_s >= self.recorder.next_moment_s:
            self.recorder.moment(self._moment())

    def _announce(self, engine: SimEngine) -> None:
        if engine.end_s < math.inf:
            self.serial += 1
            heapq.heappush(self.events, (engine.end_s, self.serial, engine))

    # requests

    def _arrive(self, request: SimRequest) -> None:
        self.recorder.sent += 1
        if self.scaling:
            self.arrivals.note(self.now_s, request.prompt + request.output)
        if not self.takers[0].engines[0].fits(request):
            self.recorder.refused += 1
            self.source.finished(request, self.now_s)
        elif self.queue or not self._route(request):
            self.queue.append(request)

    def _route(self, request: SimRequest) -> bool:
        """Give it to a member; False where nobody has a seat."""
        seats = self.model.seats
        free = [one for one in self.takers if one.width < seats]
        if not free:
            return False
        sequence = SimSequence(request)
        member = free[0]
        if len(self.takers) > 1:
            prompt = RoutedPrompt(
                None, _places(request), request.prompt, 1 / ID_BYTES, 0, request.output, 1, True
            )  # fmt: skip
            member = free[0] if len(free) == 1 else self.policy.choose(free, prompt)
            _account(member, prompt, sequence)
        member.width += 1
        sequence.member = member.number
        engine = member.engines[0]
        if len(member.engines) > 1:
            engine = min(member.engines, key=lambda one: 4 * len(one.waiting) + one.running)
        engine.add(sequence, self.now_s)
        self._announce(engine)
        return True

    def first_token(self, sequence: SimSequence, at_s: float) -> None:
        self.members[sequence.member].work_tokens -= sequence.prefill_work

    def finished(self, sequence: SimSequence, at_s: float) -> None:
        request, member = sequence.request, self.members[sequence.member]
        member.width -= 1
        member.work_tokens = member.work_tokens - sequence.output_work if member.width else 0.0
        member.holdings.clock += request.output
        self.recorder.finished(at_s, request.at_s, sequence.first_s, request.prompt, request.output)
        self.source.finished(request, at_s)
        if member.leaving and not member.width:
            self._part(member)

    # members

    def _join(self) -> None:
        engines = [SimEngine(self.model.shape, self.model.steps, self) for _ in range(self.model.data)]
        member = _Member(self.born, engines, self.now_s)
        self.born += 1
        self.members[member.number] = member
        self.takers.append(member)
        self.most = max(self.most, len(self.members))

    def _part(self, member: _Member) -> None:
        end_s = max(self.now_s, self.recorder.last_s) if not member.leaving else self.now_s
        self.member_s += end_s - member.since_s
        for one in member.engines:
            for place, value in enumerate((one.computed_tokens, one.cached_tokens, one.preemptions)):
                self.left[place] += value
        del self.members[member.number]

    def _look(self) -> None:
        """What the keeper of a fleet does, once a second."""
        scaling = self.scaling
        assert scaling is not None
        self.now_s = self.next_look_s
        self.next_look_s += 1.0
        while self.coming and self.coming[0] <= self.now_s:
            self.coming.popleft()
            self._join()
        requests, tokens = self.arrivals.bins(self.now_s)
        usual = sum(tokens) / sum(requests) if sum(requests) else 0.0
        running = sum([one.width for one in self.members.values()])
        wanted = len(self.takers) + len(self.coming)
        demand = Demand(
            self.now_s, rate(tokens[:-1]), (running / 2 + len(self.queue)) * usual, len(self.queue), scaling.capacity,
            scaling.lead_s, scaling.least, scaling.most, wanted,
        )  # fmt: skip
        self.course, decision = next_size(self.course, demand)
        if decision is not None:
            self._resize(decision.wanted)

    def _resize(self, wanted: int) -> None:
        assert self.scaling is not None
        while len(self.takers) + len(self.coming) < wanted:
            self.coming.append(self.now_s + self.scaling.lead_s)
        while len(self.takers) + len(self.coming) > max(1, wanted):
            if self.coming:
                self.coming.pop()
                continue
            member = min(self.takers, key=lambda one: one.width)
            self.takers.remove(member)
            member.leaving = True
            if not member.width:
                self._part(member)

    def _moment(self) -> Moment:
        engines = [engine for member in self.members.values() for engine in member.engines]
        return Moment(
            self.now_s,
            sum([one.kv_use for one in engines]) / len(engines),
            sum([one.running for one in engines]),
            sum([len(one.waiting) for one in engines]) + len(self.queue),
            self.left[2] + sum([one.preemptions for one in engines]),
            len(self.takers),
        )


def _account(member: _Member, prompt: RoutedPrompt, sequence: SimSequence) -> None:
    """A request counts as a member's work as in `serve.gateway.request`."""
    depth = member.holdings.depth(prompt.blocks) if prompt.blocks else 0
    computed = max(1.0, prompt.tokens - prompt.tokens_until(depth))
    member.holdings.hold(prompt.blocks, computed)
    sequence.prefill_work, sequence.output_work = computed, OUTPUT_WEIGHT * prompt.output_tokens
    member.work_tokens += sequence.prefill_work + sequence.output_work


def _places(request: SimRequest) -> list[int]:
    """The hashes by which the gateway would know its beginning; what nobody shares is not worth one."""
    return _hashes(request.group, request.shared) if request.group >= 0 else []


@lru_cache(4096)
def _hashes(group: int, shared: int) -> list[int]:
    return [hash((group, place)) for place in range(bisect_right(POSITIONS, shared * ID_BYTES))]
