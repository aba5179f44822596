"""One page of metrics has one meaning: Corral's reader and the node's are held to the same table."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.client.metrics import Reading, cache_config, parse
from corral.fake.metrics import Metrics
from corral.node.exposition import LONGEST_LINE, live_figures, samples

BOTH = ("running", "waiting", "kv_use", "prompt_tokens", "generated_tokens")

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
vllm:generation_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="1",model_name="m"} 1.5e+03
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:request_success_total{engine="0",finished_reason="stop"} 5.0
vllm:request_success_total{engine="0",finished_reason="length"} 6.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 9.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="odd \\"name\\" {x}"} 2.5
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10.0
vllm:cache_config_info{block_size="128",num_gpu_blocks="100",cache_dtype="auto",engine="0"} 1.0
vllm:cache_config_info{block_size="128",num_gpu_blocks="50",cache_dtype="auto",engine="1"} 1.0
python_info{version="3.11"} 1.0
nonsense
vllm:prompt_tokens_total{engine="0"} NaN-ish
"""

PAGES: dict[str, tuple[str, dict[str, float]]] = {
    "two engines": (PAGE, {"running": 7, "waiting": 1, "kv_use": 0.3, "generated_tokens": 2500}),
    "empty": ("", {}),
    "not vLLM's": ("process_cpu_seconds_total 3\n", {}),
    "a timestamp is no value": (
        'vllm:generation_tokens_total{engine="0"} 12 1712345678901\nvllm:num_requests_running 7 1712345678901\n',
        {"generated_tokens": 12, "running": 7},
    ),
    "an OpenMetrics timestamp": ("vllm:prompt_tokens_total 5.0 1712345678.901\n", {"prompt_tokens": 5}),
    "an exemplar": (
        'vllm:prompt_tokens_total{a="b"} 5 # {trace_id="x"} 9 1712345678.9\n# EOF\n',
        {"prompt_tokens": 5},
    ),
    "braces, quotes and spaces in a label": (
        'vllm:num_requests_running{model_name="a} 9 \\"b\\" {c} \\\\"} 7\n',
        {"running": 7},
    ),
    "an escaped line feed, and other separators": (
        'vllm:num_requests_running{m="a\\nb\u2028vllm:num_requests_running 5\x0b\x85"} 2\n',
        {"running": 2},
    ),
    "spaces, tabs, a trailing comma, CR LF": (
        'vllm:num_requests_running { engine = "0" , m="x" , }\t2  \r\nvllm:num_requests_waiting\t4\r\n',
        {"running": 2, "waiting": 4},
    ),
    "no number at all": (
        "vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nvllm:prompt_tokens_total -Inf\n"
        "vllm:kv_cache_usage_perc 1e999\nvllm:generation_tokens_total 1_0\n",
        {},
    ),
    "one engine is NaN": (
        'vllm:kv_cache_usage_perc{engine="0"} NaN\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n',
        {"kv_use": 0.4},
    ),
    "numbers that cannot be meant": (
        "vllm:num_requests_running -3\nvllm:num_requests_waiting 1e300\nvllm:prompt_tokens_total 1.2.3\n"
        "vllm:generation_tokens_total .\n",
        {},
    ),
    "half a line": ('vllm:num_requests_running{engine="0" 3\nvllm:num_requests_waiting{a="b\nvllm:prompt_tok', {}),
    "words after the value": ("vllm:num_requests_running 3 and more\n", {}),
    "a name that only begins so": ("vllm:num_requests_running_max 9\nxvllm:num_requests_running 9\n", {}),
    "no space before the value": ("vllm:num_requests_running-3\n", {}),
    "a series twice": (
        'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="0"} 4\n',
        {"running": 4},
    ),
    "the name of KV use before 0.10": ("vllm:gpu_cache_usage_perc 0.6\n", {"kv_use": 0.6}),
    "both names of KV use": ("vllm:gpu_cache_usage_perc 0.6\nvllm:kv_cache_usage_perc 0.2\n", {"kv_use": 0.2}),
    "a comment that looks like a sample": ("#vllm:num_requests_running 3\n # vllm:num_requests_running 3\n", {}),
    "a line without an end": (
        f'vllm:num_requests_running{{m="{"x" * LONGEST_LINE}"}} 3\nvllm:num_requests_waiting 1\n',
        {"waiting": 1},
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_both_readers_read_a_page_alike(name: str) -> None:
    text, expected = PAGES[name]
    reading = parse(text.encode(), 1.0)
    ours = {field: value for field in BOTH if (value := getattr(reading, field)) is not None}
    assert ours == pytest.approx(expected)
    assert live_figures(text.encode()) == pytest.approx(expected)
    assert reading.known == bool(expected)


def test_what_only_corrals_reader_tells() -> None:
    reading = parse(PAGE.encode(), 1.0)
    assert reading.kv_use_fullest == 0.5
    assert reading.kv_tokens == 128 * 150
    assert (reading.ttft_sum_s, reading.ttft_count) == (2.5, 10)
    assert (reading.preemptions, reading.finished, reading.prompt_tokens) == (7, 11, None)
    assert parse(b"", 1.0) == Reading(1.0)
    assert cache_config(PAGE.encode())["num_gpu_blocks"] == "100"
    huge = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="' + b"9" * 5000 + b'"} 1\n'
    assert parse(huge, 1.0).kv_tokens is None


def test_labels_are_unescaped() -> None:
    (one,) = samples(b'x{a="1,b=\\"2\\"",c="\\\\n\\n"} 1\n', ("x",))
    assert one.labels == {"a": '1,b="2"', "c": "\\n\n"}


def test_the_fake_servers_page_survives_an_odd_model_name() -> None:
    text = Metrics(prompt_tokens=10).text(
        'a"} 5\n\\', {"num_requests_running": 3.0, "kv_cache_usage_perc": 0.5}, 4, {}
    )
    reading = parse(text.encode(), 0.0)
    assert (reading.running, reading.kv_use, reading.preemptions, reading.prompt_tokens) == (3, 0.5, 4, 10)


WORDS = st.sampled_from(
    ["vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info", '{a="b"}', "{", "}", '"',
     "\\", ",", "=", " ", "\t", "\n", "\r", "#", "1", "-1", "1e308", "NaN", "+Inf", "0.5", "1712345678901", "é", "\0"]
)  # fmt: skip


@given(st.lists(WORDS | st.text(max_size=5), max_size=60).map("".join))
def test_whatever_comes_both_readers_agree_and_nothing_breaks(text: str) -> None:
    page = text.encode("utf-8", "replace")
    reading = parse(page, 0.0)
    theirs = live_figures(page)
    assert {field: value for field in BOTH if (value := getattr(reading, field)) is not None} == {
        field: int(value) if field in ("running", "waiting") else value for field, value in theirs.items()
    }
    assert all(math.isfinite(value) for value in theirs.values())
