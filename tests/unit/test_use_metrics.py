"""A server's metrics: parsed, added up, compared; and several servers watched at once."""

from __future__ import annotations

import pytest

from corral.client.client import run
from corral.client.endpoint import Endpoint
from corral.client.metrics import Load, Reading, parse
from corral.fake import FakeServer
from corral.llm.llm import LLM
from corral.llm.top import Watch

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
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 9.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="odd \\"name\\" {x}"} 2.5
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10.0
vllm:cache_config_info{block_size="128",num_gpu_blocks="100",cache_dtype="auto",engine="0"} 1.0
python_info{version="3.11"} 1.0
nonsense
vllm:prompt_tokens_total{engine="0"} NaN-ish
"""


def test_a_page() -> None:
    reading = parse(PAGE, 1.0)
    assert (reading.running, reading.waiting) == (7, 1)
    assert reading.kv_use == pytest.approx(0.3)
    assert reading.kv_tokens == 12800
    assert reading.generated_tokens == 2500
    assert (reading.ttft_sum_s, reading.ttft_count) == (2.5, 10)
    assert reading.prompt_tokens is None
    assert parse("", 1.0) == Reading(1.0)


def test_speeds_are_differences() -> None:
    before = Reading(10.0, generated_tokens=100, prompt_tokens=0, ttft_sum_s=1.0, ttft_count=2)
    after = Reading(12.0, generated_tokens=300, prompt_tokens=50, ttft_sum_s=1.6, ttft_count=5)
    load = Load.between(before, after)
    assert load.generated_tokens_per_s == 100
    assert load.prompt_tokens_per_s == 25
    assert load.ttft_s == pytest.approx(0.2)
    assert load.prefix_hit_share is None
    restarted = Load.between(after, before)
    assert restarted.generated_tokens_per_s is None
    assert Load.between(before, Reading(12.0, generated_tokens=100, ttft_sum_s=1.0, ttft_count=2)).ttft_s is None


def test_servers_are_watched_side_by_side() -> None:
    async def looks(watch: Watch) -> None:
        first = await watch.look()
        assert [line.name for line in first] == ["alive", "dead"]
        assert first[0].reading is not None
        assert first[0].load is None
        assert first[1].reading is None
        assert "cannot be reached" in first[1].problem
        async with LLM(endpoint).aio as llm:
            await llm.complete("a", max_tokens=9, ignore_eos=True)
        (alive, _) = await watch.look()
        assert alive.load is not None
        assert alive.load.generated_tokens_per_s
        assert alive.load.ttft_s is not None
        watch.set([("dead", dead)])
        assert [line.name for line in await watch.look()] == ["dead"]
        await watch.close()

    with FakeServer() as server:
        endpoint, dead = Endpoint(server.url, "fake"), Endpoint("http://127.0.0.1:9", "m")
        run(looks(Watch([("alive", endpoint), ("dead", dead)])))
