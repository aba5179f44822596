"""Bench against a fake server whose true latencies are known; against real vLLM in test_serving.py."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Corral


@contextmanager
def fake(*options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "corral", "fake-server", "--until-eof", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdin
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.stdin.close()


def bench(*words: str) -> Any:
    command = [sys.executable, "-m", "corral", "bench", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_figures_are_those_of_the_servers_own_log(tmp_path: Path) -> None:
    """A request leaves before it arrives and its tokens are written before they are seen, so that no quantile of what
    the client saw lies below the server's own; the first token is seen before the last one is written."""
    log = tmp_path / "truth.jsonl"
    with fake("--ttft-ms", "40", "--itl-ms", "20", "--jitter", "0.4", "--log", str(log)) as url:
        body = bench("run", "--url", url, "--request-rate", "40", "--num-prompts", "200", "--output-len", "20",
                     "--warmup", "0", "--save-detailed")  # fmt: skip
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert body["completed"] == len(rows) == 200
    first = sorted((row["first_ns"] - row["arrival_ns"]) / 1e9 for row in rows)
    whole = sorted((row["last_ns"] - row["arrival_ns"]) / 1e9 for row in rows)
    for seen, written in ((body["ttfts"], first), (body["latencies"], whole)):
        assert all(mine >= theirs for mine, theirs in zip(sorted(seen), written, strict=True))
    assert statistics.median(first) * 1e3 <= body["median_ttft_ms"] < statistics.median(whole) * 1e3
    assert body["median_ttft_ms"] == pytest.approx(statistics.median(body["ttfts"]) * 1e3)
    assert body["median_e2el_ms"] == pytest.approx(statistics.median(body["latencies"]) * 1e3)
    each = [(all_s - first_s) / 19 for first_s, all_s in zip(body["ttfts"], body["latencies"], strict=True)]
    assert body["median_tpot_ms"] == pytest.approx(statistics.median(each) * 1e3)


def test_the_search_stops_at_the_capacity_of_a_server() -> None:
    with fake("--ttft-ms", "400", "--requests-per-s", "80") as url:  # slow, so that a busy machine is quick enough
        found = bench("search", "--url", url, "--slo", "ttft_p90=2s", "--arrival", "constant", "--input-len", "16",
                      "--output-len", "2", "--probe-seconds", "6", "--percentiles", "50")  # fmt: skip
    findings = found["findings"]
    assert 0 < findings["best"] <= 84  # no machine gets more out of it; one that is busy may get less
    assert findings["first_failure"] > findings["best"]
    assert findings["probes_made"] <= 12


VLLMS_OWN = """
import json, sys, warnings
warnings.simplefilter("ignore")
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.serve import calculate_metrics
d = json.load(sys.stdin)
outputs = [
    RequestFuncOutput(success=bool(ttft), latency=latency, output_tokens=output, ttft=ttft, itl=itl, prompt_len=input,
                      start_time=start)
    for ttft, latency, output, itl, input, start
    in zip(d["ttfts"], d["latencies"], d["output_lens"], d["itls"], d["input_lens"], d["start_times"])
]
m, _ = calculate_metrics([], outputs, d["duration"], None, [50.0, 90.0, 99.0], {"ttft": 60.0, "tpot": 8.1})
found = {"request_goodput": m.request_goodput, "max_output_tokens_per_s": m.max_output_tokens_per_s,
         "max_concurrent_requests": m.max_concurrent_requests, "completed": m.completed, "failed": m.failed,
         "total_input_tokens": m.total_input, "total_output_tokens": m.total_output}
for key in ("request_throughput", "output_throughput", "total_token_throughput"):
    found[key] = getattr(m, key)
for metric in ("ttft", "tpot", "itl", "e2el"):
    for kind in ("mean", "median", "std"):
        found[f"{kind}_{metric}_ms"] = float(getattr(m, f"{kind}_{metric}_ms"))
    for p, value in getattr(m, f"percentiles_{metric}_ms"):
        found[f"p{p:g}_{metric}_ms"] = float(value)
print("RESULT" + json.dumps(found))
"""


@pytest.mark.engine
def test_figures_are_what_vllms_own_code_makes_of_the_same_rows(corral: Corral) -> None:
    """Definitions, not stopwatches: our rows through `vllm.benchmarks.serve.calculate_metrics`."""
    with fake("--ttft-ms", "40", "--itl-ms", "8", "--jitter", "0.4", "--fault", "cut:every=9") as url:
        body = bench("run", "--url", url, "--request-rate", "60", "--num-prompts", "150", "--output-len", "12",
                     "--range-ratio", "0.9", "--save-detailed", "--percentiles", "50,90,99", "--warmup", "0",
                     "--slo", "ttft=60ms,tpot=8.1ms")  # fmt: skip
    python = corral.engine / "bin" / "python"
    done = subprocess.run([str(python), "-c", VLLMS_OWN], input=json.dumps(body), capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.rpartition("RESULT")[2])
    assert theirs["failed"] > 0
    for metric in ("ttft", "tpot", "itl", "e2el"):  # nothing of what is compared below is missing on their side
        assert {f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p50", "p90", "p99")} <= theirs.keys()
    for key, value in theirs.items():
        assert body[key] == pytest.approx(value, rel=1e-6, abs=1e-6), key
