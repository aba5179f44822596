"""A server's metrics compared over time, several servers watched at once (their text: `test_metrics_text`)."""

from __future__ import annotations

import pytest

from corral.client.client import run
from corral.client.endpoint import Endpoint
from corral.client.metrics import Load, Reading
from corral.fake.server import FakeServer
from corral.use.llm.llm import LLM
from corral.use.llm.top import Watch


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
        first = await watch.read()
        assert [line.name for line in first] == ["alive", "dead"]
        assert first[0].reading is not None
        assert first[0].load is None
        assert first[1].reading is None
        assert "cannot be reached" in first[1].problem
        async with LLM(endpoint).aio as llm:
            await llm.complete("a", max_tokens=9, ignore_eos=True)
        (alive, _) = await watch.read()
        assert alive.load is not None
        assert alive.load.generated_tokens_per_s
        assert alive.load.ttft_s is not None
        watch.set([("dead", dead)])
        assert [line.name for line in await watch.read()] == ["dead"]
        await watch.close()

    with FakeServer() as server:
        endpoint, dead = Endpoint(server.url, "fake"), Endpoint("http://127.0.0.1:9", "m")
        run(looks(Watch([("alive", endpoint), ("dead", dead)])))
