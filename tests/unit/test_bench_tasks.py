"""Models whose answers have no tokens are measured with requests of their task: no TTFT, no TPOT."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from corral.base.errors import UsageError
from corral.base.files import write_atomic
from corral.base.processes import own_identity
from corral.base.record import dump_json
from corral.client.client import run
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle.deployments import Record
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from corral.lab.bench.measure import Bench
from corral.lab.bench.spec import Spec, Workload
from corral.lab.bench.store import find, load_run
from tests.unit.test_bench_runs import bench

__all__ = ["bench"]


@pytest.fixture(scope="module")
def server():
    with FakeServer(FakeOptions(control=True)) as running:
        yield running


@pytest.mark.parametrize("task", ["embed", "rerank", "classify"])
def test_rates_and_latency_of_a_task_without_tokens(bench, server, task: str) -> None:
    options = (
        "--task",
        task,
        "--num-prompts",
        "60",
        "--concurrency",
        "4",
        "--input-len",
        "32",
        "--percentiles",
        "90",
    )
    done = bench("run", "--url", server.url, *options, "--json")
    figures = done.json()
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (60, 0, 0)
    assert figures["total_input_tokens"] == pytest.approx(60 * 32, rel=0.1)
    assert figures["request_throughput"] > 0
    assert figures["input_throughput"] > 0
    assert figures["p90_e2el_ms"] >= figures["median_e2el_ms"] > 0
    assert not [name for name in figures if "ttft" in name or "tpot" in name or "itl" in name]
    kinds = {problem.kind for problem in load_run(find("last")).problems}
    assert kinds <= {"generator_lag", "warm_up"}  # a busy machine
    shown = bench("report", "last").out
    assert f"{task}, random 32 tokens" in shown
    assert "input tok/s" in shown
    assert "E2EL" in shown
    for word in ("TTFT", "TPOT", "output tok/s"):
        assert word not in shown


def test_a_sweep_of_embeddings_as_a_table_and_a_page(bench, server, tmp_path: Path) -> None:
    options = ("--task", "embed", "--concurrency", "1,4", "--num-prompts", "16")
    done = bench("sweep", "--url", server.url, *options)
    assert "in tok/s" in done.out
    assert "TTFT" not in done.out
    page = tmp_path / "r.html"
    for run_name in ("last", f"{find('last')}/p01"):
        bench("report", run_name, "-o", str(page))
        text = page.read_text().partition("Definitions")[0]
        assert "nput tok" in text
        assert "TTFT" not in text
        assert "Time per output token" not in text
    same = bench("compare", f"{find('last')}/p01", f"{find('last')}/p02", "--json").json()
    assert {one["name"] for one in same["figures"]} <= {"request_throughput", "median_e2el_ms"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("run", "--slo", "ttft=1s"), "ttft cannot be limited: the model embeds"),
        (("run", "--slo", "e2el=1s,tpot=1s"), "tpot cannot be limited"),
        (("run", "--chat"), "--chat is for models that write"),
        (("run", "--dataset", "multi_turn"), "--dataset multi_turn is for models that write"),
        (("search", "--slo", "ttft_p90=1s"), "ttft cannot be limited"),
    ],
)
def test_what_has_no_meaning_for_embeddings_is_refused(
    bench, server, arguments: tuple[str, ...], problem: str
) -> None:
    done = bench(*arguments, "--task", "embed", "--url", server.url)
    assert (done.code, problem in done.err) == (2, True)


def test_the_limit_of_an_embedding_server_is_found_by_its_latency(
    bench, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.lab.bench.series._DISTURBANCES", ())  # a busy machine
    done = bench("search", "--slo", "e2el_p50=60s", "--task", "embed", "--url", server.url, "--over", "concurrency",
                 "--saturate", "4", "--max-probes", "2", "--probe-seconds", "0.2", "--json")  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(done.out)["findings"]["best"] >= 1


def test_failures_of_embeddings_are_counted_apart(bench) -> None:
    with FakeServer() as plain:
        done = bench("run", "--url", plain.url, "--task", "classify", "--num-prompts", "10", "--concurrency", "2",
                     "--input-len", "9000", "--warmup", "0", "--json")  # fmt: skip
    assert done.json()["failed"] == 10
    assert done.code == 1


def test_the_task_is_that_of_the_deployment(server) -> None:
    folder = DeploymentFolder.of("embeds")
    folder.create()
    record = Record("embeds", "id", "fake", "fake", "local", time.time(), own_identity(), task="embed")
    write_atomic(folder.record, dump_json(record))
    write_atomic(folder.endpoint, dump_json(Endpoint(f"{server.url}/v1", "fake", None)))
    bench = Bench(Endpoint(f"{server.url}/v1", "fake", None))

    async def task() -> str:
        async with bench:
            return bench.task

    assert run(task()) == "embed"


def test_a_model_that_transcribes_is_refused() -> None:
    with pytest.raises(UsageError, match="that transcribes cannot be measured"):
        Spec(Workload()).for_task("transcribe")
