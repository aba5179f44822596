"""Do `corral bench run` and `vllm bench serve` say the same of one server? Both, in turns, with the same parameters.

    python benchmarks/bench_agreement.py --deployment NAME --vllm-python ENGINE/bin/python --tokenizer FOLDER

The turns are A B B A …, so that a drift of the machine hits both alike; each figure is the mean of the tool's turns,
and the last column their ratio. Exits 1 when a figure of the goal (5%) is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FIGURES = (
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "median_tpot_ms",
    "median_itl_ms",
    "median_e2el_ms",
)


def with_corral(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "corral", "bench", "run", "--json", "--seed", str(seed), "--warmup", "2"]
    command += ["--num-prompts", str(given.num_prompts), "--concurrency", str(given.concurrency)]
    command += ["--input-len", str(given.input_len), "--output-len", str(given.output_len)]
    command += ["--on", given.deployment] if given.deployment else ["--url", given.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    body: dict[str, Any] = json.loads(done.stdout)
    for problem in body["problems"]:
        print("  corral:", problem["text"])
    return body


def with_vllm(given: argparse.Namespace, url: str, key: str, model: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [given.vllm_python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
        command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", model]
        command += ["--tokenizer", given.tokenizer, "--dataset-name", "random", "--ignore-eos", "--seed", str(seed)]
        command += ["--random-input-len", str(given.input_len), "--random-output-len", str(given.output_len)]
        command += ["--num-prompts", str(given.num_prompts), "--max-concurrency", str(given.concurrency)]
        command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--num-warmups", "2", "--disable-tqdm"]
        command += ["--temperature", "0", "--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        env = {**os.environ, "OPENAI_API_KEY": key, "VLLM_TARGET_DEVICE": "cpu"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        body: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return body


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deployment")
    parser.add_argument("--url", default="")
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    from corral.resolve import resolve

    endpoint = resolve(given.deployment or None, url=given.url or None)
    ours, theirs = [], []
    for turn in range(given.turns):
        pair = [
            lambda n=turn: ours.append(with_corral(given, 1000 + n)),
            lambda n=turn: theirs.append(with_vllm(given, endpoint.root, endpoint.key() or "", endpoint.model, 2000 + n)),
        ]
        for step in pair if turn % 2 == 0 else reversed(pair):
            step()
    print(f"{'':20}{'vllm bench serve':>18}{'corral bench':>14}{'ratio':>9}   spread of the turns (vllm | corral)")
    missed = False
    for name in FIGURES:
        a, b = [r[name] for r in theirs], [r[name] for r in ours]
        ratio = statistics.mean(b) / statistics.mean(a)
        missed |= abs(ratio - 1) > 0.05
        spread = " | ".join(f"{(max(v) - min(v)) / statistics.mean(v):.1%}" for v in (a, b))
        print(f"{name:20}{statistics.mean(a):18.2f}{statistics.mean(b):14.2f}{ratio:9.3f}   {spread}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
