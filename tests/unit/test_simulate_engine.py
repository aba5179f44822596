"""The simulated engine: nothing is lost, nothing is made up, and jumps change nothing."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.lab.bench.spec import LoadShape, Workload, parse_slos
from corral.lab.report.simulate import behind_sentence
from corral.lab.simulate.engine import EngineShape, SimEngine, SimSequence
from corral.lab.simulate.outcome import SimOutcome
from corral.lab.simulate.requests import ClosedLoop, OpenLoop, SimRequest, source_of
from corral.lab.simulate.steptime import DecodeCost, FittedSteps, cpu_steps
from corral.lab.simulate.world import MemberModel, ScalingModel, simulate_load
from corral.plan.models.facts import read_facts

STEPS = FittedSteps(5e-3, 30e-6, 3e-9, 20e-6, attend_s=1e-9, launch_s=9e-3, graph_tokens=64)


def test_a_step_beyond_the_largest_graph_takes_as_long_as_its_launches() -> None:
    assert STEPS.mixed(10, 0, 50, 0) < STEPS.launch_s  # 60 tokens
    assert STEPS.mixed(10, 0, 60, 0) == STEPS.launch_s  # 70
    assert STEPS.mixed(10, 0, 1000, 0) == pytest.approx(STEPS.decode(10).one(0) + 1000 * 20e-6)


def test_on_a_cpu_few_rows_take_as_long_as_reading_and_many_as_long_as_multiplying() -> None:
    """As a Neoverse-N1 decodes SmolLM2: 50 ms with 1, 54 with 4, 198 with 32, 695 with 128 sequences."""
    steps = cpu_steps(read_facts("smollm2", offline=True), alone_s=50e-3, prompt_s=3.5e-3, first_s=40e-3)
    alone, few, crowd, full = (steps.decode(running).one(0) for running in (1, 4, 32, 128))
    assert alone == pytest.approx(50e-3, rel=0.1)
    assert few < 1.4 * alone
    assert (full - crowd) / 96 == pytest.approx((695 - 198) / 96e3, rel=0.2)
    assert steps.mixed(1, 80, 64, 32 * 64) == pytest.approx(258e-3, rel=0.1)  # with a prompt of 64 tokens
    assert steps.slowed(2.0).decode(4).one(0) == pytest.approx(2 * few)


def test_a_step_counts_whole_tiles() -> None:
    """As matrix products do: one token more than two tiles costs a third."""
    tiled = replace(STEPS, tile_tokens=256, launch_s=0.0)
    assert tiled.mixed(10, 0, 503, 0) == tiled.mixed(10, 0, 758, 0) > tiled.mixed(10, 0, 502, 0)
    assert tiled.mixed(10, 0, 40, 0) < tiled.mixed(10, 0, 50, 0)  # within a graph
    assert STEPS.slowed(2.0).launch_s == 2 * STEPS.launch_s
    assert STEPS.slowed(2.0).graph_tokens == STEPS.graph_tokens


class Naive:
    """The same rules, one step and one sequence at a time."""

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape

    def run(self, requests: list[SimRequest]) -> dict[int, tuple[float, float]]:
        now, order, waiting = 0.0, 0, list(requests)
        running: list[int] = []
        found: dict[int, tuple[float, float]] = {}
        size, decided_s = self.shape.block_size, math.inf
        state: dict[int, list[int]] = {}  # number -> computed, target, made, order

        def blocks(number: int, further: int = 0) -> int:
            computed, target, _, _ = state[number]
            held = target if computed < target else computed + further
            return -(-max(held, target) // size)

        firsts: dict[int, float] = {}
        by_number = {one.number: one for one in requests}
        while waiting or running:
            here = [one for one in waiting if one.at_s <= now]
            if not running and not here:
                now = min(one.at_s for one in waiting)
                continue
            if not running:
                decided_s = math.inf
            decoding = [n for n in running if state[n][0] >= state[n][1]]
            preempted = False
            while sum(blocks(n, 1) for n in running) > self.shape.blocks:
                last = max(running, key=lambda n: state[n][3])
                running.remove(last)
                made = state[last][2]
                state[last] = [0, by_number[last].prompt + made, made, 0]
                waiting.insert(0, by_number[last])
                preempted = True
                decoding = [n for n in running if state[n][0] >= state[n][1]]
            budget, chunks = self.shape.token_budget - len(decoding), []
            for n in running:
                take = min(budget, state[n][1] - state[n][0])
                if take > 0:
                    chunks.append((n, take))
                    budget -= take
            while budget > 0 and not preempted and len(running) < self.shape.max_seqs:
                one = next((r for r in waiting if r.at_s <= now), None)
                if one is None or (self.shape.lookahead and one.at_s > decided_s):
                    break
                state.setdefault(one.number, [0, one.prompt, 0, 0])
                needed = -(-state[one.number][1] // size)
                if sum(blocks(n, 1) for n in running) + needed > self.shape.blocks:
                    break
                order += 1
                state[one.number][3] = order
                waiting.remove(one)
                running.append(one.number)
                take = min(budget, state[one.number][1])
                chunks.append((one.number, take))
                budget -= take
            decided_s = now
            kv = sum(state[n][0] for n in decoding)
            if chunks:
                attended = sum(take * state[n][0] + take * take // 2 for n, take in chunks)
                now += STEPS.mixed(len(decoding), kv, sum(take for _, take in chunks), attended)
            else:
                now += STEPS.decode(len(decoding)).one(kv)
            for n in decoding:
                state[n][0] += 1
                state[n][2] += 1
            for n, take in chunks:
                state[n][0] += take
                if state[n][0] == state[n][1]:
                    state[n][2] += 1
                    firsts.setdefault(n, now)
            for n in [n for n in running if state[n][2] >= by_number[n].output]:
                running.remove(n)
                found[n] = (firsts[n], now)
        return found


class Watch:
    def __init__(self) -> None:
        self.firsts: dict[int, float] = {}
        self.found: dict[int, tuple[float, float]] = {}

    def first_token(self, sequence: SimSequence, at_s: float) -> None:
        self.firsts[sequence.request.number] = at_s

    def finished(self, sequence: SimSequence, at_s: float) -> None:
        assert sequence.request.number not in self.found, "finished twice"
        self.found[sequence.request.number] = (self.firsts[sequence.request.number], at_s)


def jumped(shape: EngineShape, requests: list[SimRequest]) -> dict[int, tuple[float, float]]:
    watch = Watch()
    engine = SimEngine(shape, STEPS, watch)
    for one in requests:
        while engine.end_s < one.at_s:
            engine.settle()
        engine.add(SimSequence(one), one.at_s)
    while engine.end_s < math.inf:
        engine.settle()
    assert engine.running == 0
    assert not engine.waiting
    assert engine._free(0) == shape.blocks, "blocks were lost"
    return watch.found


def made_up(seed: int, count: int, rate: float) -> list[SimRequest]:
    dice, at, found = random.Random(seed), 0.0, []
    for number in range(count):
        at += dice.expovariate(rate)
        found.append(SimRequest(number, at, dice.randint(1, 300), dice.randint(1, 60)))
    return found


SHAPES = st.builds(
    EngineShape,
    token_budget=st.sampled_from([64, 256, 2048]),
    max_seqs=st.sampled_from([2, 8, 64]),
    block_size=st.sampled_from([4, 16]),
    blocks=st.sampled_from([100, 150, 100_000]),
    lookahead=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 10**6), rate=st.sampled_from([3.0, 30.0, 300.0]))
def test_jumps_change_nothing(shape: EngineShape, seed: int, rate: float) -> None:
    if shape.block_size == 4:
        shape = replace(shape, blocks=shape.blocks * 4)
    requests = made_up(seed, 25, rate)
    slow, fast = Naive(shape).run(requests), jumped(shape, requests)
    assert slow.keys() == fast.keys()
    for number, (first_s, end_s) in slow.items():
        assert math.isclose(fast[number][0], first_s, rel_tol=1e-6), number
        assert math.isclose(fast[number][1], end_s, rel_tol=1e-6), number


LOADS = st.one_of(
    st.builds(LoadShape, rate=st.sampled_from([2.0, 40.0]), arrival=st.sampled_from(["poisson", "constant"])),
    st.builds(LoadShape, rate=st.sampled_from([20.0]), arrival=st.just("gamma"), burstiness=st.just(0.2)),
    st.builds(LoadShape, rate=st.sampled_from([40.0]), concurrency=st.sampled_from([1, 8])),
    st.builds(LoadShape, concurrency=st.sampled_from([1, 7, 100])),
)
WORKLOADS = st.builds(
    Workload,
    dataset=st.sampled_from(["random", "prefix_repetition", "multi_turn"]),
    num_prompts=st.sampled_from([1, 40, 90]),
    input_len=st.sampled_from([1, 60, 500]),
    output_len=st.sampled_from([1, 40]),
    range_ratio=st.sampled_from([0.0, 0.5]),
    prefix_len=st.sampled_from([0, 200]),
    num_prefixes=st.sampled_from([1, 5]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=80, deadline=None)
@given(
    shape=SHAPES, work=WORKLOADS, load=LOADS, members=st.integers(1, 4), data=st.sampled_from([1, 2]),
    policy=st.sampled_from(["prefix", "least-work", "round-robin"]),
)  # fmt: skip
def test_nothing_is_lost_and_the_same_seed_says_the_same(
    shape: EngineShape, work: Workload, load: LoadShape, members: int, data: int, policy: str
) -> None:
    if load.rate is not None and work.dataset == "multi_turn":
        load = LoadShape(concurrency=5)
    model = MemberModel(shape, STEPS, data)
    found = simulate_load(source_of(work, load), model, members, policy)
    turns = work.turns if work.dataset == "multi_turn" else 1
    assert found.completed + found.refused == found.sent
    assert found.refused or found.sent == work.num_prompts * turns
    # tokens: each prompt is computed or found in the cache, and again with what was made where it was preempted
    assert found.computed_tokens + found.cached_tokens >= found.input_tokens
    if not found.preemptions and not found.refused:
        assert found.computed_tokens + found.cached_tokens == found.input_tokens
    if not work.range_ratio and not found.refused:
        assert found.output_tokens == found.completed * work.output_len
    assert found == simulate_load(source_of(work, load), model, members, policy)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rate=st.sampled_from([5.0, 50.0, 500.0]), members=st.integers(1, 3))
def test_twice_the_members_are_never_worse(seed: int, rate: float, members: int) -> None:
    """Round robin over twice the members: each has every other request of what one had, so all end no later.

    In this sense: the mean of E2EL, and the time at which the last request is done, up to the length of a step.
    """
    work = Workload(num_prompts=60, input_len=200, output_len=30, range_ratio=0.5, seed=seed)
    model = MemberModel(EngineShape(token_budget=512, max_seqs=16, blocks=1000), STEPS)
    few, many = (
        simulate_load(source_of(work, LoadShape(rate=rate)), model, count, "round-robin")
        for count in (members, 2 * members)
    )
    step_ms = 1000 * STEPS.mixed(16, 16 * 345, 512, 512 * 345)
    assert many.latencies["e2el"]["mean"] <= few.latencies["e2el"]["mean"] + step_ms
    assert many.duration_s <= few.duration_s + step_ms / 1000


def test_a_decode_cost_sums_what_its_steps_cost() -> None:
    for cost in (DecodeCost(1e-3, 1e-6), DecodeCost(1e-3, 1e-6, 3e-3), DecodeCost(1e-3, 0.0, 2e-3)):
        for steps in (1, 2, 7, 100, 1000):
            whole = sum(cost.one(500 + 3 * n) for n in range(steps))
            assert math.isclose(cost.span(500, 3, steps), whole, rel_tol=1e-9)
        assert cost.span(500, 3, cost.steps_within(500, 3, 0.1, 1000)) >= 0.1
        assert cost.span(500, 3, cost.steps_within(500, 3, 0.1, 1000) - 1) < 0.1


def test_a_request_longer_than_the_cache_is_refused_and_counted() -> None:
    requests = [SimRequest(0, 0.0, 100, 10), SimRequest(1, 0.0, 5000, 10)]
    slos = parse_slos("ttft_p99=10s")
    found = simulate_load(OpenLoop(requests), MemberModel(EngineShape(blocks=50), STEPS), slos=slos)
    assert (found.sent, found.completed, found.refused) == (2, 1, 1)
    assert [one.met for one in found.slos] == [True]
    assert not found.meets


def test_a_shared_prefix_is_computed_once_and_only_while_it_is_kept() -> None:
    requests = [SimRequest(n, n * 1.0, 1040, 4, 0, 1024) for n in range(4)]
    model = MemberModel(EngineShape(blocks=1000), STEPS)
    found = simulate_load(OpenLoop([replace(one) for one in requests]), model)
    assert found.cached_tokens == 3 * 1024
    without = MemberModel(EngineShape(blocks=1000, prefix_cache=False), STEPS)
    assert simulate_load(OpenLoop([replace(one) for one in requests]), without).cached_tokens == 0
    others = [SimRequest(10 + n, n + 0.5, 1500, 4) for n in range(3)]  # between them, more than the cache holds
    mixed = sorted([*(replace(one) for one in requests), *others], key=lambda one: one.at_s)
    crowded = simulate_load(OpenLoop(mixed), MemberModel(EngineShape(blocks=100), STEPS))
    assert crowded.cached_tokens == 0


def test_a_conversation_finds_what_was_said_before() -> None:
    work = Workload("multi_turn", num_prompts=1, input_len=100, output_len=60, turns=3)
    found = simulate_load(source_of(work, LoadShape(concurrency=1)), MemberModel(EngineShape(), STEPS))
    assert found.completed == 3
    assert found.cached_tokens == 159 // 16 * 16 + 319 // 16 * 16  # all but the last token has keys and values


def test_an_api_server_that_streams_slowly_is_the_limit() -> None:
    work = Workload(num_prompts=200, input_len=10, output_len=50)
    quick = simulate_load(source_of(work, LoadShape(concurrency=50)), MemberModel(EngineShape(), STEPS))
    shape = EngineShape(stream_s=1e-3)
    slow = simulate_load(source_of(work, LoadShape(concurrency=50)), MemberModel(shape, STEPS))
    assert quick.output_throughput > 5000
    assert 850 < slow.output_throughput <= 1001


def test_a_fleet_grows_with_its_load_and_shrinks_after_it() -> None:
    def load() -> list[SimRequest]:
        busy = [SimRequest(n, 10 + n / 40, 500, 100) for n in range(8000)]
        return [*busy, *(SimRequest(8000 + n, 220 + n * 2.0, 500, 100) for n in range(200))]

    model = MemberModel(EngineShape(max_seqs=32), STEPS)
    scaling = ScalingModel(1, 6, capacity=9000.0, lead_s=10.0)
    found = simulate_load(OpenLoop(load()), model, 1, scaling=scaling)
    assert found.completed == 8200
    assert 2 <= found.members <= 6
    assert found.moments[-1].members < max(one.members for one in found.moments)
    fixed = simulate_load(OpenLoop(load()), model, found.members)
    assert found.member_s < fixed.member_s


def test_a_closed_loop_ends_when_its_time_is_over() -> None:
    endless = iter(SimRequest(n, 0.0, 50, 20) for n in range(10**9))
    found = simulate_load(ClosedLoop(endless, 4, until_s=3.0), MemberModel(EngineShape(), STEPS))
    assert 3.0 < found.duration_s < 4.0
    assert 3 < found.mean_running <= 4


def test_a_server_that_falls_behind_meets_nothing_for_long() -> None:
    work = Workload(num_prompts=3000, input_len=500, output_len=100, range_ratio=0.5)
    model, slos = MemberModel(EngineShape(), STEPS), parse_slos("ttft_p99=60s")

    def at(rate: float) -> SimOutcome:
        return simulate_load(source_of(work, LoadShape(rate=rate)), model, slos=slos)

    most = simulate_load(source_of(work, LoadShape(concurrency=400)), model).request_throughput
    easy, hard, burst = (
        at(0.8 * most),
        at(2 * most),
        simulate_load(source_of(work, LoadShape(concurrency=400)), model),
    )
    assert easy.gained == 0.0 == burst.gained  # a closed loop waits for its answers
    assert easy.meets
    assert hard.gained == pytest.approx(0.5, abs=0.1)  # half of what comes
    assert [one.met for one in hard.slos] == [True]  # in so short a time
    assert not hard.meets
    assert "requests arrive each second and" in behind_sentence(hard)
    assert behind_sentence(easy) == ""
