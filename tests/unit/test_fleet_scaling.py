"""How many members a fleet needs: properties of the rule, and days replayed through it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.base.errors import DataError
from corral.client.trace import TracedRequest
from corral.lab.simulate.fleet_trace import ReplaySetting, clairvoyant_s, simulate
from corral.serve.fleet.scaling import IDLE_LEADS, LEAST_IDLE_S, Course, Demand, needed, next_size, rate
from tests.unit.conftest import in_process

CALM = Demand(0.0, 0.0, 0.0, 0, 1000.0, 60.0, 1, 8, 1)

demands = st.builds(
    Demand,
    now_s=st.floats(0, 1e6),
    rate=st.floats(0, 1e5),
    backlog_tokens=st.floats(0, 1e8),
    waiting=st.integers(0, 1000),
    capacity=st.floats(0, 1e5),
    lead_s=st.floats(0, 5000),
    least=st.integers(1, 4),
    most=st.integers(4, 16),
    wanted=st.integers(1, 16),
)


@given(demand=demands)
def test_never_beyond_the_limits(demand: Demand) -> None:
    _, decision = next_size(Course(), demand)
    if decision is None:
        assert demand.least <= demand.wanted <= demand.most
    else:
        assert demand.least <= decision.wanted <= demand.most
        assert decision.wanted != demand.wanted
        assert decision.why


@given(demand=demands, more=st.floats(1, 10))
def test_more_work_never_needs_fewer(demand: Demand, more: float) -> None:
    assert needed(replace(demand, rate=demand.rate * more)) >= needed(demand)
    assert needed(replace(demand, backlog_tokens=demand.backlog_tokens * more)) >= needed(demand)


@given(demand=demands)
def test_it_grows_exactly_when_requests_would_wait_for_longer_than_a_member_takes(demand: Demand) -> None:
    demand = replace(
        demand, wanted=demand.least, most=20, capacity=max(1.0, demand.capacity), lead_s=max(1.0, demand.lead_s)
    )
    horizon = 8 * demand.lead_s
    have = demand.wanted * demand.capacity
    wait_s = max(0.0, demand.backlog_tokens + (demand.rate - have) * horizon) / have
    _, decision = next_size(Course(), demand)
    grows = decision is not None and decision.wanted > demand.wanted
    if not math.isclose(wait_s, demand.lead_s, rel_tol=1e-6):
        assert grows == (wait_s > demand.lead_s)


def test_members_are_handed_back_after_idle_time_only() -> None:
    idle_s = IDLE_LEADS * 60
    course, demand = Course(), replace(CALM, wanted=4)
    for second in range(int(idle_s)):
        course, decision = next_size(course, replace(demand, now_s=float(second)))
        assert decision is None
    course, decision = next_size(course, replace(demand, now_s=idle_s))
    assert decision is not None
    assert decision.wanted == 1
    assert "enough for the last 120 s" in decision.why


def test_what_was_needed_meanwhile_stays() -> None:
    course, demand = Course(), replace(CALM, wanted=4)
    for second in range(121):
        tokens = 1500.0 if second == 50 else 0.0
        course, decision = next_size(course, replace(demand, now_s=float(second), rate=tokens))
    assert decision is not None
    assert decision.wanted == 2


def test_a_load_that_swings_faster_than_members_come_changes_nothing() -> None:
    course, wanted, changes = Course(), 4, 0
    for second in range(1000):
        swing = 3500.0 if (second // 20) % 2 else 500.0
        course, decision = next_size(course, replace(CALM, now_s=float(second), rate=swing, wanted=wanted))
        if decision:
            wanted, changes = decision.wanted, changes + 1
    assert changes == 0
    assert LEAST_IDLE_S < IDLE_LEADS * 60


@given(seed=st.integers(0, 1000), lead_s=st.sampled_from([10.0, 60.0, 300.0]))
def test_no_thrash_whatever_comes(seed: int, lead_s: float) -> None:
    """After it grew, it does not shrink within the idle time: what was started is used."""
    dice = random.Random(seed)
    course, wanted, grown = Course(), 1, -math.inf
    for second in range(600):
        load = dice.choice([0.0, 200.0, 2500.0, 8000.0]) if second % dice.choice([5, 40, 170]) == 0 else 900.0
        demand = replace(CALM, now_s=float(second), rate=load, lead_s=lead_s, wanted=wanted)
        course, decision = next_size(course, demand)
        if decision is None:
            continue
        if decision.wanted < wanted:
            assert second - grown >= max(LEAST_IDLE_S, IDLE_LEADS * lead_s)
        else:
            grown = second
        wanted = decision.wanted


def test_an_unknown_capacity_decides_nothing() -> None:
    assert next_size(Course(), replace(CALM, capacity=0.0, rate=1e6, backlog_tokens=1e9))[1] is None


def test_rates() -> None:
    assert rate([], 30.0) == 0
    assert rate([300] * 12, 30.0) == 60
    assert rate([0] * 6 + [300] * 6, 30.0) == 60  # what began just now counts in full
    assert rate([300] * 6 + [0] * 6, 30.0) == 0  # how long it is idle is counted by the course


def test_what_comes_quickly_is_asked_for_on_less_evidence() -> None:
    tokens = [0] * 8 + [300] * 2
    assert rate(tokens, 3.0) == rate(tokens, 10.0) == 60
    assert rate(tokens, 20.0) == 30
    assert rate(tokens, 3600.0) == rate(tokens, 60.0) == 12


# days


def day(seed: int, peak: float, hours: float = 24.0, tokens: int = 1500, swing: float = 0.9) -> list[TracedRequest]:
    """Requests of a day: few at night, most in the afternoon; `peak` tokens/s at its height."""
    dice, found, now_s = random.Random(seed), [], 0.0
    while now_s < hours * 3600:
        part = (1 - math.cos(2 * math.pi * now_s / (hours * 3600))) / 2
        now_s += dice.expovariate(peak * (1 - swing + swing * part) / tokens)
        found.append(TracedRequest(now_s, max(1, round(dice.expovariate(1 / tokens))), 0))
    return found


@pytest.mark.parametrize(
    ("seed", "load_s", "queue_s"), [(1, 60.0, 0.0), (1, 20.0, 40.0), (201, 120.0, 240.0), (202, 60.0, 0.0)]
)
def test_a_day_is_followed_for_little_more_than_a_clairvoyant_pays(seed: int, load_s: float, queue_s: float) -> None:
    """The constants were chosen on seeds 1 to 3; those from 200 on were not looked at meanwhile."""
    setting = ReplaySetting(1, 8, 1000.0, load_s, queue_s)
    outcome = simulate(day(seed, 6500.0, hours=6, tokens=3000), setting)  # its hours four times as quick as a day's
    assert outcome.ratio <= 1.3, outcome
    assert outcome.longest_wait_s <= 2 * setting.lead_s, outcome
    assert outcome.p99_wait_s <= setting.lead_s, outcome
    sizes = [change.wanted for change in outcome.changes]
    assert max(sizes) >= 6
    assert len(sizes) <= 60  # it follows, and does not thrash
    assert sizes[-1] <= 2


def test_a_step_is_followed_within_one_load_time() -> None:
    setting = ReplaySetting(1, 8, 1000.0, 120.0)
    trace = [TracedRequest(t / 2, 250, 0) for t in range(1200)]  # 500 tokens/s for ten minutes,
    trace += [TracedRequest(600 + t / 4, 1000, 0) for t in range(7200)]  # then 4,000 for half an hour
    outcome = simulate(trace, setting)
    first = next(change for change in outcome.changes if change.wanted >= 4)
    assert 600 < first.time_s <= 600 + setting.load_s


def test_a_clairvoyant_pays_what_is_needed_and_its_starts() -> None:
    setting = ReplaySetting(1, 4, 100.0, 10.0)
    flat = [TracedRequest(float(t), 90, 0) for t in range(100)]
    assert clairvoyant_s(flat, setting) == 100
    twice = [TracedRequest(float(t), 180 if 50 <= t < 70 else 90, 0) for t in range(100)]
    assert clairvoyant_s(twice, setting) == 100 + 20 + 10


def test_a_trace_without_requests_or_without_end_is_refused() -> None:
    setting = ReplaySetting(1, 1, 1.0, 1.0)
    with pytest.raises(DataError, match="no request"):
        simulate([], setting)
    with pytest.raises(DataError, match="lasts 11,574 days") as caught:  # milliseconds that are called seconds
        simulate([TracedRequest(0.0, 1, 1), TracedRequest(1e9, 1, 1)], setting)
    assert "milliseconds" in caught.value.remedy


def test_a_trace_is_replayed_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({"time_s": t / 2, "tokens": 900}) + "\n" for t in range(1200)))
    run = in_process(capsys, "fleet", "simulate", str(file), "--capacity", "500", "--load-time", "20")
    code, out, _ = run("--replicas", "1..6", "--json")
    body = json.loads(out)
    assert code == 0
    assert body["requests"] == 1200
    assert max(change["wanted"] for change in body["changes"]) >= 4
    code, out, _ = run()
    assert code == 0
    assert "members  with 1 member requests would wait" in out
    assert "of a schedule that knows the whole trace" in out
    code, _, _ = run("--replicas", "0")
    assert code == 2
