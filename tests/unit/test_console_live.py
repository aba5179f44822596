"""The Live view's figures: percentiles of the last minute, sums, an hour that stays small, batches and tunes."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from corral.client.metrics import Reading, percentile, read_latencies
from corral.console import live
from corral.console.context import HOUR_S, ConsoleContext, History
from corral.console.live import Figures, GpuLoad, JobProgress, Jobs, figures_of, gpu_figures, parse_gpus_load, sums_of
from corral.fake.metrics import Metrics
from corral.use.llm.top import Line, Watch, ready_servers
from tests.console_home import make, make_fleet


def page(*ttft_s: float) -> bytes:
    metrics = Metrics()
    for value in ttft_s:
        metrics.ttft.add(value)
        metrics.itl.add(value / 10)
    return metrics.text("m", {}, 0, {"block_size": "16"}).encode()


def test_percentiles_are_of_what_came_between() -> None:
    old, new = read_latencies(page(*[5.0] * 100)), read_latencies(page(*[5.0] * 100, *[0.03] * 90, *[0.9] * 10))
    half, most = (percentile(old.ttft, new.ttft, share) for share in (0.5, 0.95))
    assert half is not None
    assert most is not None
    assert half < 0.05 < 0.5 < most < 1.1
    assert percentile(new.ttft, new.ttft, 0.5) is None  # nothing came
    assert percentile(new.ttft, old.ttft, 0.5) is None  # it was restarted
    assert percentile(old.tpot, new.tpot, 0.5) is not None


def test_what_is_beyond_every_bucket_is_told_as_the_last_bound() -> None:
    assert percentile({}, {1.0: 0.0, math.inf: 5.0}, 0.5) == 1.0


def test_a_hostile_page_gives_nothing() -> None:
    text = b'vllm:time_to_first_token_seconds_bucket{le="nan"} 3\nvllm:time_to_first_token_seconds_bucket{le="x"} 3\n'
    assert read_latencies(text).ttft == {}


def test_all_servers_as_one() -> None:
    one: Figures = {"tok_s": 10.0, "kv": 0.5, "running": 1.0}
    other: Figures = {"tok_s": 5.0, "kv": 0.9, "running": None}
    found = sums_of([one, other])
    assert (found["tok_s"], found["kv"], found["running"], found["ttft_p50"]) == (15.0, 0.9, 1.0, None)
    silent = figures_of(Line("n", "m", "u", None, None, "no answer"))
    assert set(silent.values()) == {None}


def test_an_hour_stays_an_hour_over_ten_thousand_events() -> None:
    history = History()
    for second in range(10_000):
        history.add(1000.0 + second, {"a": float(second), "b": None})
    assert history.points < 2 * 1.2 * HOUR_S / 5
    points = history.series("a")
    assert points[-1][0] - points[0][0] <= HOUR_S * 1.1
    assert history.series("b")[-1][1] is None
    history.add(1e9, {"c": 1.0})
    assert history.names() == ["c"]  # nobody adds to the others any more


def test_many_names_push_the_oldest_out() -> None:
    history = History(most_series=3)
    for number in range(10):
        history.add(float(number), {str(number): 1.0})
    assert history.names() == ["7", "8", "9"]


def test_gpus_that_do_not_say_everything() -> None:
    found = parse_gpus_load("0, NVIDIA H100, 312.5, 70000, 81559, 98\n1, <b>X</b>, [N/A], 1, 2, [N/A]\nnonsense\n")
    assert [(one.index, one.power_w, one.use) for one in found] == [(0, 312.5, 0.98), (1, None, None)]


def test_figures_of_gpus_are_each_ones_and_those_of_all() -> None:
    one, other = GpuLoad(0, "a", 300.0, 71680.0, 81559.0, 0.9), GpuLoad(2, "b", None, 61440.0, 81559.0, None)
    found = gpu_figures([one, other])
    assert [found[f"power {name}"] for name in ("0", "2", "mean", "most")] == [300.0, None, 300.0, 300.0]
    assert [found[f"memory {name}"] for name in ("2", "mean", "most")] == [60.0, 65.0, 70.0]
    assert gpu_figures([])["power mean"] is None


def test_a_fleet_stands_before_its_members_and_is_not_counted_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path))
    for name in ("alone", "herd-1", "herd-2"):
        make(name).agent().course(("starting", 1), ("ready", 9)).serves(f"http://{name}:8000/v1")
    make_fleet("herd", "m", ("herd-1", "herd-2"), "http://127.0.0.1:9000")
    servers = ready_servers()
    assert [(one.name, one.fleet, one.members) for one in servers] == [
        ("herd", "", 2), ("herd-1", "herd", 0), ("herd-2", "herd", 0), ("alone", "", 0)]  # fmt: skip
    assert servers[0].endpoint.base_url == "http://127.0.0.1:9000/v1"

    async def look(watch: Watch) -> list[Line]:
        reading = Reading(0.0, running=2, waiting=0)
        return [Line(name, "m", "u", reading, None) for name in watch._clients]

    monkeypatch.setattr(Watch, "read", look)
    desk = ConsoleContext(home=tmp_path)
    told = asyncio.run(live._Live(desk)._read())
    assert [(row["name"], row["fleet"], row["members"]) for row in told["servers"]][:2] == [
        ("herd", "", 2), ("herd-1", "herd", 0)]  # fmt: skip
    assert told["all"]["running"] == 6.0  # of three servers: the gateway has the same requests once more
    assert {"running herd", "running herd-1", "running all servers"} <= set(desk.history.names())


def test_a_batchs_rate_is_what_was_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path))
    now = [100.0]
    jobs = Jobs(lambda: now[0])
    assert jobs.read() == []
    first = jobs._paced("k", JobProgress("batch", "o", "running", 10, 100, "rows", 0, "m"))
    assert first.rate is None
    now[0] = 110.0
    second = jobs._paced("k", JobProgress("batch", "o", "running", 30, 100, "rows", 1, "m"))
    assert (second.rate, second.eta_s) == (2.0, 35.0)
