"""Schedules, metrics, the gate, the search and comparisons: all pure, all with known answers."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.base.errors import DataError, UsageError
from corral.client.metrics import cache_config, parse
from corral.fake.metrics import Metrics
from corral.lab.bench.compare import Side, compare
from corral.lab.bench.gate import judge, needed, verdict
from corral.lab.bench.load import send_times
from corral.lab.bench.metrics import (
    RequestRow,
    details,
    percentile,
    read_rows,
    spread,
    statistic,
    summarise,
    vllm_keys,
    write_rows,
)
from corral.lab.bench.series import Probe, Searching, backlog_slope, passes, steady_rate
from corral.lab.bench.server_metrics import ServerDelta, sample_of
from corral.lab.bench.spec import LoadShape, Spec, Workload, parse_percentiles, parse_slos

MS = 1_000_000


def row(
    n: int = 0, at_ms: float = 0.0, ttft_ms: float = 50.0, tokens: int = 5, gap_ms: float = 10.0, **more: object
) -> RequestRow:
    asked = int(at_ms * MS)
    chunks = [asked + int((ttft_ms + i * gap_ms) * MS) for i in range(tokens)]
    made = RequestRow(n, asked, asked, asked, chunks[-1] if chunks else asked, chunks, 100, tokens, 100, tokens)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def failure(n: int = 0, kind: str = "ServerGone") -> RequestRow:
    return RequestRow(n, 0, 0, 0, 0, error=kind, message="gone")


# Schedules


@pytest.mark.parametrize("arrival", ["poisson", "constant", "gamma"])
def test_a_schedule_offers_exactly_the_rate_and_is_repeatable(arrival: str) -> None:
    load = LoadShape(rate=20.0, arrival=arrival, burstiness=0.5)
    times = send_times(load, 1000, seed=7)
    assert times == send_times(load, 1000, seed=7)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1000 / 20 * 1e9, rel=1e-6)
    assert (times == send_times(load, 1000, seed=8)) == (arrival == "constant")


def test_burstiness_is_the_gammas_shape() -> None:
    def variation(load: LoadShape) -> float:
        times = [0, *send_times(load, 20_000, seed=3)]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return statistics.pstdev(gaps) / statistics.fmean(gaps)

    assert variation(LoadShape(rate=1.0)) == pytest.approx(1.0, rel=0.05)
    assert variation(LoadShape(rate=1.0, arrival="gamma", burstiness=4.0)) == pytest.approx(0.5, rel=0.05)
    assert variation(LoadShape(rate=1.0, arrival="gamma", burstiness=0.25)) == pytest.approx(2.0, rel=0.08)


def test_a_ramp_ends_at_its_last_rate() -> None:
    times = send_times(LoadShape(rate=1.0, arrival="ramp", ramp_to=10.0), 100, seed=0)
    assert times[0] == pytest.approx(1e9)
    assert times[-1] - times[-2] == pytest.approx(1e8)


def test_a_trace_keeps_its_own_times() -> None:
    load = LoadShape(arrival="trace", speed=2.0)
    assert send_times(load, 3, 0, [5.0, 6.0, 9.0]) == [0, 500_000_000, 2_000_000_000]
    with pytest.raises(UsageError, match="backwards"):
        send_times(load, 2, 0, [6.0, 5.0])
    with pytest.raises(UsageError, match="a time for every request"):
        send_times(load, 2, 0, [6.0, None])


# Specs


def test_service_levels_are_read_with_units() -> None:
    one, two, three = parse_slos("ttft_p99.0=1s, tpot_median=50ms,e2el=2000")
    assert (one.key, one.limit_ms) == ("p99_ttft_ms", 1000.0)
    assert (two.key, two.limit_ms) == ("median_tpot_ms", 50.0)
    assert (three.key, three.limit_ms) == ("p99_e2el_ms", 2000.0)


@pytest.mark.parametrize("text", ["", "ttft", "speed=3", "ttft_p100=1s", "ttft_p99=fast"])
def test_a_service_level_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_slos(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Workload(dataset="randon"),
        lambda: Workload(num_prompts=0),
        lambda: Workload(dataset="custom"),
        lambda: LoadShape(concurrency=0),
        lambda: LoadShape(rate=-1.0),
        lambda: LoadShape(arrival="ramp", rate=1.0),
        lambda: parse_percentiles("99,101"),
    ],
)
def test_what_cannot_be_measured_is_refused(make: object) -> None:
    with pytest.raises(UsageError):
        make()  # type: ignore[operator]


# Metrics


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_lie_between_neighbours(values: list[float], p: float) -> None:
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    found = percentile(ordered, p)
    assert ordered[math.floor(at)] - 1e-6 <= found <= ordered[math.ceil(at)] + 1e-6


def test_definitions_are_those_of_vllm_bench_serve() -> None:
    rows = [row(0, 0.0, 50.0, 5, 10.0), row(1, 20.0, 70.0, 3, 20.0), failure(2)]
    s = summarise(rows, 2.0, (50.0, 99.0), parse_slos("ttft=60,tpot=15,itl=0.001"))  # no request has one single ITL
    assert (s.completed, s.failed, s.errors) == (2, 1, {"ServerGone": 1})
    assert (s.input_tokens, s.output_tokens) == (200, 8)
    assert (s.request_throughput, s.output_throughput, s.total_token_throughput) == (1.0, 4.0, 104.0)
    assert s.request_goodput == 0.5
    assert (s.ttft.mean, s.ttft.median, s.ttft.std) == pytest.approx((60.0, 60.0, 10.0))
    assert (s.tpot.mean, s.e2el.mean) == pytest.approx((15.0, 100.0))
    assert s.itl.count == 6  # gaps of all requests together
    assert s.itl.mean == pytest.approx(80 / 6)
    assert s.max_output_tokens_per_s == 8
    assert s.max_concurrent_requests == 2
    keys = vllm_keys(s)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p50", "p99")} <= set(keys)
    assert statistic(s, parse_slos("ttft_p99=1s")[0]) == pytest.approx(69.8)


def test_an_answer_of_one_token_has_no_tpot() -> None:
    s = summarise([row(tokens=1), row(tokens=3, gap_ms=10.0)], 1.0)
    assert s.tpot.count == 1
    assert s.tpot.mean == 10.0


@pytest.mark.parametrize("promise", ["tpot_p99=50ms", "tpot_mean=50ms", "itl_median=9ms"])
def test_a_promise_about_the_time_between_tokens_needs_two(promise: str) -> None:
    with pytest.raises(UsageError, match="no answer had the two tokens"):
        statistic(summarise([row(tokens=1)], 1.0), parse_slos(promise)[0])


def test_nothing_measured_gives_zeros_not_a_crash() -> None:
    s = summarise([failure()], 1.0)
    assert (s.completed, s.output_throughput, s.ttft.count) == (0, 0.0, 0)
    assert spread([], (99.0,)).count == 0


def test_details_have_one_entry_for_each_request() -> None:
    found = details([row(0), failure(1)])
    assert {len(values) for values in found.values()} == {2}
    assert found["ttfts"] == [0.05, 0.0]


def test_a_summary_can_be_made_again_from_saved_rows(tmp_path) -> None:
    rows = [row(n, n * 7.0, 40.0 + n, 4 + n % 3, 9.0) for n in range(20)] + [failure(20)]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert summarise(read_rows(tmp_path / "rows.jsonl"), 3.0) == summarise(rows, 3.0)
    (tmp_path / "rows.jsonl").write_bytes(b'{"n":0}\n')
    with pytest.raises(DataError, match="line 1"):
        read_rows(tmp_path / "rows.jsonl")


# The server's own words


def test_vllms_metrics_page_is_read() -> None:
    text = Metrics(prompt_tokens=10, prefix_queries=8, prefix_hits=2).text(
        "m", {"num_requests_running": 3.0, "kv_cache_usage_perc": 0.5}, 4, {"block_size": "16", "engine": "0"}
    )
    sample = sample_of(parse(text.encode(), 1.5))
    assert sample is not None
    assert (sample.running, sample.kv_use, sample.preemptions) == (3.0, 0.5, 4.0)
    assert (sample.prefix_hits, sample.prompt_tokens, sample.at_s) == (2.0, 10.0, 1.5)
    assert cache_config(text.encode()) == {"block_size": "16", "engine": "0"}
    assert sample_of(parse(b"# nothing here\n", 0.0)) is None


# The gate

QUIET = ServerDelta(0, 0.0, 100, 5, 1, 0, 1, 0.1, 0)


def kinds(spec: Spec, rows: list[RequestRow], server: ServerDelta | None = None, **more: object) -> dict[str, str]:
    beats = more.pop("beats", [0.0001] * 100)
    s = summarise(rows, 1.0, (99.0,), heartbeat_s=beats)  # type: ignore[arg-type]
    return {p.kind: p.severity for p in judge(spec, rows, s, server, **more)}  # type: ignore[arg-type]


SPEC = Spec(Workload(), LoadShape(concurrency=2), percentiles=(50.0,))
GOOD = [row(n, n * 10.0) for n in range(100)]


def test_a_clean_run_is_valid() -> None:
    assert kinds(SPEC, GOOD, replace(QUIET, finished=100, prompt_tokens=10_000)) == {}
    assert verdict([]) == "valid"


def test_every_problem_is_named() -> None:
    assert kinds(SPEC, [failure()])["zero_tokens"] == "invalid"
    assert kinds(SPEC, [*GOOD, *(failure(n) for n in range(5))])["failures"] == "invalid"
    assert kinds(SPEC, GOOD, beats=[0.02] * 100)["generator_lag"] == "invalid"
    late = [row(n, n * 10.0, sent_ns=int((n * 10 + 30) * MS)) for n in range(100)]
    assert kinds(SPEC, late)["generator_lag"] == "invalid"
    short = [row(n, asked_output=9) for n in range(100)]
    assert kinds(SPEC, short)["output_lengths"] == "invalid"
    assert "output_lengths" not in kinds(replace(SPEC, workload=Workload(ignore_eos=False)), short)
    assert kinds(SPEC, [row(n, asked_input=90 + n % 2) for n in range(100)])["input_lengths"] == "caution"
    assert kinds(SPEC, GOOD, exact=False)["words"] == "caution"
    assert kinds(SPEC, GOOD, replace(QUIET, prefix_hit_share=0.5))["prefix_cache"] == "invalid"
    shared = replace(SPEC, workload=Workload(dataset="prefix_repetition"))
    assert "prefix_cache" not in kinds(shared, GOOD, replace(QUIET, prefix_hit_share=0.5))
    assert kinds(replace(SPEC, percentiles=(99.0,)), GOOD[:30])["few_samples"] == "caution"
    cold = [row(n, n * 10.0, gap_ms=100.0 if n < 2 else 10.0) for n in range(50)]
    assert kinds(SPEC, cold)["warm_up"] == "caution"
    assert kinds(SPEC, GOOD, replace(QUIET, running_before=2))["other_traffic"] == "invalid"
    assert kinds(SPEC, GOOD, replace(QUIET, finished=150))["other_traffic"] == "invalid"
    assert kinds(SPEC, GOOD, replace(QUIET, preemptions=3))["preemptions"] == "caution"
    assert kinds(SPEC, GOOD, stopped="the server went away")["stopped"] == "invalid"


def test_p99_of_thirty_requests_is_not_enough() -> None:
    assert needed(99.0) == 500
    assert needed(90.0) == 50
    assert needed(50.0) == 10


# The search: a server of known capacity, simulated without a clock


def queue_rows(rate: float, capacity: float, count: int, rng: random.Random | None = None) -> list[RequestRow]:
    """One server that starts a request every 1/capacity seconds; first tokens follow after 20 ms."""
    at = free = 0.0
    rows = []
    for n in range(count):
        at += rng.expovariate(rate) if rng else 1 / rate
        free = max(free, at)
        rows.append(row(n, at * 1000, (free - at) * 1000 + 20.0, 2, 5.0))
        free += 1 / capacity
    return rows


@pytest.mark.parametrize("capacity", [0.7, 13.0, 400.0])
@pytest.mark.parametrize("guess", [0.5, 1.0, 1.6])  # what the saturating probe made of it
def test_the_search_finds_a_known_knee_within_5_percent_in_12_probes(capacity: float, guess: float) -> None:
    searching = Searching(capacity * guess, most=12)
    slos = parse_slos("ttft_p99=2s")
    while (offered := searching.next()) is not None:
        rows = queue_rows(offered, capacity, 600)
        passed, why = passes(slos, summarise(rows, rows[-1].done_ns / 1e9), rows, open_loop=True)
        searching.add(Probe(offered, passed, why))
    assert searching.best == pytest.approx(capacity, rel=0.05)
    assert len(searching.probes) <= 12


def test_equal_answers_that_end_in_one_burst_do_not_start_the_search_too_high() -> None:
    burst = [row(n, 0.0, 38_000.0 + 20 * n, 2, 500.0) for n in range(64)]  # all sent at once, done after 40 s
    assert steady_rate(burst, 64) == pytest.approx(1.6, rel=0.05)
    queued = [row(n, 0.0, 1000.0 * (n // 4 + 1), 2, 1.0) for n in range(64)]  # four each second
    assert steady_rate(queued, 64) == pytest.approx(4.0, rel=0.1)


def test_the_search_over_whole_numbers_ends_at_neighbours() -> None:
    searching = Searching(64.0, whole=True)
    while (offered := searching.next()) is not None:
        searching.add(Probe(offered, offered <= 23))
    assert (searching.best, searching.worst) == (23, 24)


def test_a_promise_that_nothing_keeps_ends_the_search_without_an_answer() -> None:
    searching = Searching(100.0)
    while (offered := searching.next()) is not None:
        searching.add(Probe(offered, False, "too slow"))
    assert searching.best is None
    assert len(searching.probes) <= 12


def test_a_growing_queue_is_seen_even_while_the_promise_still_holds() -> None:
    rng = random.Random(5)
    over, under = queue_rows(105.0, 100.0, 500, rng), queue_rows(60.0, 100.0, 500, rng)
    assert backlog_slope(over) > 0.015
    assert backlog_slope(under) < 0.015
    slos = parse_slos("ttft_p99=60s")
    assert passes(slos, summarise(under, 10.0), under, open_loop=True)[0]
    passed, why = passes(slos, summarise(over, 10.0), over, open_loop=True)
    assert not passed
    assert "queue grew" in why


# Comparisons


def noisy(mean_gap: float, seed: int) -> tuple[RequestRow, ...]:
    rng = random.Random(seed)
    return tuple(
        row(n, n * 10.0, 50 * rng.lognormvariate(0, 0.1), 8, mean_gap * rng.uniform(0.8, 1.2)) for n in range(600)
    )


def side(*gaps_and_seeds: tuple[float, int]) -> Side:
    rows = tuple(noisy(gap, seed) for gap, seed in gaps_and_seeds)
    return Side(tuple(summarise(r, 10.0) for r in rows), rows)


def verdicts(a: Side, b: Side) -> dict[str, str]:
    return {d.name: d.verdict for d in compare(a, b)}


def test_equal_runs_differ_by_noise_and_slower_ones_do_not() -> None:
    same = verdicts(side((10.0, 1)), side((10.0, 2)))
    assert same["median_tpot_ms"] == same["median_ttft_ms"] == "noise"
    slower = verdicts(side((10.0, 1)), side((11.0, 2)))
    assert slower["median_tpot_ms"] == "worse"
    assert slower["median_ttft_ms"] == "noise"


def test_repeats_use_the_spread_between_runs() -> None:
    steady = side((10.0, 1), (10.0, 2), (10.0, 3))
    assert verdicts(steady, side((8.0, 4), (8.0, 5), (8.0, 6)))["median_tpot_ms"] == "better"
    scattered = side((8.0, 7), (10.0, 8), (12.5, 9))  # a run-to-run spread that hides any change
    assert verdicts(steady, scattered)["median_tpot_ms"] == "noise"


def test_percentiles_of_too_few_requests_are_not_compared() -> None:
    few = Side((summarise(GOOD, 1.0),), (tuple(GOOD),))
    assert "p99_ttft_ms" not in verdicts(few, few)
    assert "median_ttft_ms" in verdicts(few, few)


def test_shorter_answers_are_not_better() -> None:
    long, short = side((10.0, 1)), side((10.0, 2))
    cut = tuple(replace_tokens(one, 4) for one in short.rows[0])
    found = verdicts(long, Side((summarise(cut, 10.0),), (cut,)))
    assert found["median_e2el_ms"] == "other lengths"
    assert found["median_ttft_ms"] == "noise"


def replace_tokens(one: RequestRow, tokens: int) -> RequestRow:
    """The same request, ended after fewer tokens."""
    chunks = one.chunk_ns[:tokens]
    return RequestRow(one.n, one.intended_ns, one.asked_ns, one.sent_ns, chunks[-1], chunks, 100, tokens, 100, tokens)
