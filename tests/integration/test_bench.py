"""Bench against a fake server whose true latencies are known, and against real vLLM."""

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

from tests.integration.conftest import FAST, Corral


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


def test_figures_agree_with_the_servers_true_latencies(tmp_path: Path) -> None:
    """Medians within 1% or 1 ms of what the server itself logged."""
    log = tmp_path / "truth.jsonl"
    with fake("--ttft-ms", "40", "--itl-ms", "8", "--jitter", "0.4", "--log", str(log)) as url:
        body = bench("run", "--url", url, "--request-rate", "40", "--num-prompts", "200", "--output-len", "20",
                     "--warmup", "0")  # fmt: skip
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert body["completed"] == len(rows) == 200
    first = [(row["first_ns"] - row["arrival_ns"]) / 1e6 for row in rows]
    whole = [(row["last_ns"] - row["arrival_ns"]) / 1e6 for row in rows]
    each = [(row["last_ns"] - row["first_ns"]) / 1e6 / (row["completion_tokens"] - 1) for row in rows]
    for name, true in (("ttft", first), ("e2el", whole), ("tpot", each)):
        assert body[f"median_{name}_ms"] == pytest.approx(statistics.median(true), rel=0.01, abs=1.0), name


def test_the_search_finds_the_knee_of_a_server_with_a_scripted_capacity() -> None:
    with fake("--ttft-ms", "400", "--requests-per-s", "80") as url:  # slow, so that a busy machine is quick enough
        found = bench("search", "--url", url, "--slo", "ttft_p90=2s", "--arrival", "constant", "--input-len", "16",
                      "--output-len", "2", "--probe-seconds", "6", "--percentiles", "50")  # fmt: skip
    assert found["findings"]["best"] == pytest.approx(80, rel=0.05)
    assert found["findings"]["probes_made"] <= 12


@pytest.mark.engine
def test_real_vllm_is_measured_with_exact_lengths(corral: Corral, tiny_model: Path) -> None:
    corral.run("up", str(tiny_model), "--name", "measured", *FAST)
    try:
        done = corral.run("bench", "run", "--on", "measured", "--concurrency", "4", "--num-prompts", "24",
                          "--input-len", "20", "--output-len", "8", "--percentiles", "50", "--json",
                          "--name", "real", check=False)  # fmt: skip
        body = json.loads(done.stdout)
        assert body["completed"] == 24, body
        assert body["total_output_tokens"] == 24 * 8
        assert body["total_input_tokens"] == 24 * 20
        kinds = {problem["kind"] for problem in body["problems"]}
        assert kinds <= {"generator_lag", "warm_up"}, body["problems"]  # true on a busy machine
        known = corral.json("bench", "report", "real")
        assert known["server"]["generation_tokens"] == 24 * 8
        assert known["server"]["prefix_hit_share"] == pytest.approx(0.0, abs=0.05)
        assert known["fingerprint"]["server"]["deployment"] == "measured"
        assert known["limit"]["limited_by"]
        key = (corral.home / "deployments" / "measured" / "key").read_text().strip()
        for path in (corral.home / "bench" / "real").iterdir():
            assert key not in path.read_text()
    finally:
        corral.run("down", "measured")
