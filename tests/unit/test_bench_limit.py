"""How far from the limit, what it costs, and how it is shown."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from corral.lab.bench.fingerprint import Fingerprint, differences
from corral.lab.bench.limit import cost_of, distance, roof
from corral.lab.bench.metrics import Spread, Summary
from corral.lab.bench.server_metrics import ServerDelta
from corral.lab.report.bench import bar, sparkline, timeline
from corral.lab.report.bench import histogram as row_of_blocks
from corral.lab.report.svg import Curve, chart, histogram, ticks
from corral.plan.choose import make_plan
from corral.plan.contract import Plan
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.models.facts import read_facts
from tests.unit.test_bench_figures import row

CALM = ServerDelta(0, 0.0, 0, 0, 0, 0, 16, 0.2, 0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(read_facts("llama-3.1-8b"), parse_gpus("1xH100"))


def summary(tokens_per_s: float, itl_ms: float, concurrency: float, ttft_ms: float = 100.0) -> Summary:
    def flat(value: float) -> Spread:
        return Spread(1000, value, value, 0.0, ((99.0, value),))

    lag, e2el, gap = flat(0.1), flat(ttft_ms + 255 * itl_ms), flat(itl_ms)
    return Summary(100.0, 1000, 0, 512_000, 256_000, tokens_per_s / 256, tokens_per_s, tokens_per_s * 3, None,
                   flat(ttft_ms), gap, gap, e2el, lag, lag, tokens_per_s, 16, concurrency)  # fmt: skip


def test_one_stream_of_an_8b_on_an_h100_is_judged_by_memory_bandwidth(plan: Plan) -> None:
    """16 GB a step at 3.35 TB/s is 4.8 ms: 6 ms between tokens is 80% of the bandwidth."""
    found = distance(plan, summary(165.0, 6.0, 1.0, ttft_ms=40.0), CALM)
    assert found is not None
    assert found.decode_share == pytest.approx(0.8, abs=0.03)
    assert found.limited_by == "memory bandwidth"
    assert found.prefill_share == pytest.approx(2 * 8.03e9 * 512 / 0.040 / 989e12, rel=0.05)
    assert "of memory bandwidth" in found.sentence


@pytest.mark.parametrize(
    ("server", "figures", "words"),
    [
        (replace(CALM, preemptions=3), summary(3000, 20.0, 64), "KV cache"),
        (replace(CALM, peak_waiting=9, peak_running=10_000), summary(3000, 20.0, 64), "max_num_seqs"),
        (CALM, summary(14_000, 30.0, 400), "arithmetic"),
        (CALM, summary(100, 30.0, 4), "few requests"),
        (replace(CALM, peak_waiting=3), summary(9_000, 20.0, 256), "scheduling"),  # the roofline has no more either
    ],
)
def test_the_likeliest_cause_is_named_with_advice(
    plan: Plan, server: ServerDelta, figures: Summary, words: str
) -> None:
    found = distance(plan, figures, server)
    assert found is not None
    assert words in found.limited_by
    assert found.advice


def streamed(concurrency: int, tokens_per_s: float) -> Summary:
    """128 + 128 tokens; most of the time between two tokens is a step."""
    whole = summary(tokens_per_s, 0.9 * concurrency / tokens_per_s * 1000, concurrency)
    return replace(whole, input_tokens=128_000, output_tokens=128_000, total_token_throughput=2 * tokens_per_s)


@pytest.mark.parametrize(
    ("concurrency", "tokens_per_s", "words"),
    [(1, 204.5, "bandwidth"), (16, 2_938, "bandwidth"), (64, 8_304, "few requests"), (256, 13_327, "API server")],
)
def test_the_api_server_is_named_only_where_it_was_the_limit_of_an_h200(
    concurrency: int, tokens_per_s: float, words: str
) -> None:
    """Measured points; docs/measurements/gpu-settings.md."""
    on_h200 = make_plan(read_facts("llama-3.1-8b"), parse_gpus("H200"))
    found = distance(on_h200, streamed(concurrency, tokens_per_s), replace(CALM, peak_running=concurrency), 1)
    assert found is not None
    assert words in found.limited_by


def test_more_api_servers_are_not_advised_to_who_has_them() -> None:
    on_h200 = make_plan(read_facts("llama-3.1-8b"), parse_gpus("H200"))
    one, four, unknown = (distance(on_h200, streamed(256, 13_327), CALM, n) for n in (1, 4, None))
    assert one is not None
    assert four is not None
    assert unknown is not None
    assert "--set api_servers=4" in one.advice
    assert "API server" not in four.limited_by
    assert (four.roof_tokens_per_s or 0) > (one.roof_tokens_per_s or 0)
    assert "API server" in unknown.limited_by
    assert "count" not in unknown.advice


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ((), None),
        (("--max-num-seqs 16",), 1),
        (("--enforce-eager", "--api-server-count 4"), 4),
        (("--api-server-count=2",), 2),
        (("--api_server_count 3",), 3),
    ],
)
def test_api_servers_are_counted_from_the_flags(flags: tuple[str, ...], count: int | None) -> None:
    assert Fingerprint({}, flags).api_servers == count


def test_the_roof_rises_with_concurrency(plan: Plan) -> None:
    roofs = [roof(plan, n, 512, 256) or 0.0 for n in (1, 4, 16, 64)]
    assert roofs == sorted(roofs)
    assert roofs[0] > 0


def test_pieces_that_were_read_together_still_tell_how_long_a_step_took(plan: Plan) -> None:
    """A busy client reads several at once: most of them have no gap before them."""
    even = summary(142, 7.0, 1)
    together = replace(even, itl=replace(even.itl, median=0.0))
    assert distance(plan, together, None) == distance(plan, even, None)


def test_an_unknown_gpu_has_no_limit(plan: Plan) -> None:
    unknown = replace(plan, inventory=replace(plan.inventory, gpu="Mystery"),
                      speed=replace(plan.speed, decode_tokens_per_s=None))  # fmt: skip
    assert distance(unknown, summary(100, 30.0, 4), None) is None


def test_cost_is_gpu_time_over_tokens() -> None:
    found = cost_of(summary(1000.0, 10.0, 10.0), gpus=8, price=3.0)
    assert found is not None
    assert found.gpu_hours_per_million_output == pytest.approx(8 * 1000 / 3600)
    assert found.money_per_million_output == pytest.approx(3 * 8 * 1000 / 3600)
    assert cost_of(summary(1000.0, 10.0, 10.0), gpus=0, price=None) is None


def test_fingerprints_differ_where_set_ups_do() -> None:
    a = Fingerprint({"engine": "vLLM 0.31", "address": "x"}, ("--max-num-seqs 16", "--enforce-eager"))
    b = Fingerprint({"engine": "vLLM 0.32", "address": "y"}, ("--max-num-seqs 32", "--enforce-eager"))
    assert differences(a, b) == [
        ("server.engine", "vLLM 0.31", "vLLM 0.32"),
        ("flags", "--max-num-seqs 16", "--max-num-seqs 32"),
    ]


# Drawing


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.0, 3.0), (0.0, 98765.0), (49.9, 50.4), (0.0, 1e-4)])
def test_ticks_cover_the_span_with_round_numbers(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert marks[0] <= low
    assert marks[-1] >= high
    assert 2 <= len(marks) <= 9


def test_charts_stay_inside_their_frame() -> None:
    drawn = chart("t", "x", "y", [Curve("a", ((1, 0.0), (256, 9000.0))), Curve("b<", ((1, 5.0),))], log_x=True)
    assert "b&lt;" in drawn
    for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn):
        assert 0 <= float(x) <= 420
        assert 0 <= float(y) <= 280
    assert chart("t", "x", "y", []) == ""
    assert histogram("t", "ms", []) == ""
    assert histogram("t", "ms", [5.0] * 9).count("<rect") == 1


def test_blocks_show_shapes() -> None:
    assert sparkline([0, 4, 8]) == " ▄█"
    assert len(sparkline(list(range(500)), width=40)) == 40
    assert row_of_blocks([1, 1, 1, 9], width=4)[0] == "█"
    assert bar(5, 10, 4) == "██"


def test_a_timeline_loses_no_token() -> None:
    rows = [row(n, n * 100.0, 50.0, 20, 10.0) for n in range(30)]
    over = timeline(rows, 3.3)
    assert sum(over.tokens_per_s) * over.step_s == pytest.approx(600)
    assert max(over.concurrency) == pytest.approx(2.4, abs=0.1)
