"""Do `corral bench run` and `vllm bench serve` say the same of one server? Both at once, with the same parameters.

    python benchmarks/bench_agreement.py --deployment NAME --vllm-python ENGINE/bin/python --tokenizer FOLDER

Both load the server at the same time, each with the same concurrency, lengths and number of prompts, and begin
together: whatever the machine does meanwhile, it does to both. (One after the other they differ by what changes on a
machine within a minute; docs/measurements/bench.md has the figures.) Lengths vary, because with equal ones all
requests end in the same step, and the tool whose next request arrives first has the shorter TTFT every time. Prints
both tools' figures and their ratio; exits 1 when a figure misses the goal of 5%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from corral.client.client import run
from corral.client.endpoint import Endpoint
from corral.lab.bench.measure import Bench, Finished
from corral.lab.bench.metrics import vllm_keys
from corral.lab.bench.spec import LoadShape, Spec, Workload
from corral.serve.resolve import resolve

FIGURES = (
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "median_tpot_ms",
    "median_itl_ms",
    "median_e2el_ms",
)


def vllm_command(given: argparse.Namespace, endpoint: Endpoint, folder: str, seed: int) -> list[str]:
    command = [given.vllm_python, "-u", "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    command += ["--base-url", endpoint.root, "--endpoint", "/v1/completions", "--model", endpoint.model]
    command += ["--tokenizer", given.tokenizer, "--dataset-name", "random", "--ignore-eos", "--seed", str(seed)]
    command += ["--random-input-len", str(given.input_len), "--random-output-len", str(given.output_len)]
    command += ["--random-range-ratio", str(given.range_ratio)]
    command += ["--num-prompts", str(given.num_prompts), "--max-concurrency", str(given.concurrency)]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--num-warmups", "2", "--disable-tqdm"]
    return [*command, "--temperature", "0", "--save-result", "--result-dir", folder, "--result-filename", "r.json"]


async def together(given: argparse.Namespace, endpoint: Endpoint, turn: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One turn: vLLM's tool in its process; ours begins when it says that it begins."""
    work = Workload(
        num_prompts=given.num_prompts, input_len=given.input_len, output_len=given.output_len,
        range_ratio=given.range_ratio, seed=turn,
    )  # fmt: skip
    spec = Spec(work, LoadShape(concurrency=given.concurrency), warmup=2)
    env = {**os.environ, "OPENAI_API_KEY": endpoint.key() or "none"}
    with tempfile.TemporaryDirectory() as folder:
        async with Bench(endpoint) as bench:
            warm = replace(spec, workload=replace(work, num_prompts=2, seed=10_000 + turn))
            await bench.run(warm, _made(Path(folder) / "warm"))
            peer = await asyncio.create_subprocess_exec(
                *vllm_command(given, endpoint, folder, 5000 + turn), env=env,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            assert peer.stdout is not None
            tail: list[str] = []
            async for line in peer.stdout:
                tail.append(line.decode())
                if b"Starting main benchmark run" in line:
                    break
            draining = asyncio.get_running_loop().create_task(peer.stdout.read())
            ours: Finished = await bench.run(replace(spec, warmup=0), _made(Path(folder) / "run"))
            rest = (await draining).decode()
            if await peer.wait():
                raise SystemExit("".join(tail)[-2000:] + rest[-2000:])
            theirs: dict[str, Any] = json.loads((Path(folder) / "r.json").read_text())
            return vllm_keys(ours.run.summary), theirs


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deployment")
    parser.add_argument("--url")
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--range-ratio", type=float, default=0.5, help="equal lengths would lock the tools in step")
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    endpoint = resolve(given.deployment, url=given.url)
    pairs = [run(together(given, endpoint, turn)) for turn in range(given.turns)]
    print(f"{'':20}{'vllm bench serve':>18}{'corral bench':>14}{'ratio':>9}   ratio of each turn")
    missed = False
    for name in FIGURES:
        ours, theirs = [a[name] for a, _ in pairs], [b[name] for _, b in pairs]
        ratio = statistics.mean(ours) / statistics.mean(theirs)
        missed |= abs(ratio - 1) > 0.05
        each = "  ".join(f"{a / b:.3f}" for a, b in zip(ours, theirs, strict=True))
        print(f"{name:20}{statistics.mean(theirs):18.2f}{statistics.mean(ours):14.2f}{ratio:9.3f}   {each}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
