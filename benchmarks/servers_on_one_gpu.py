"""One server against several on the same GPU with the same memory in all: output tokens/s by requests at once.

    python benchmarks/servers_on_one_gpu.py MODEL [--servers 2] [--memory 0.9] [--at 256,1024] [--turns 2] \
        [--up "--runtime venv --runtime-option path=/opt/vllm -- --load-format dummy"] [--out result.json]

In each turn one server with all the memory is started and measured, then `--servers` of them with an equal share
each. Several are loaded at once by as many generators (`corral bench run`), each with its share of the requests, as
an ideal balancer would: what a gateway adds is not in these figures. Prints each figure as it is found.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

from process import CORRAL, corral_json, stop


def start(model: str, names: list[str], memory: float, most: int, up: str) -> None:
    """One after the other: vLLM measures the free memory while it starts."""
    for name in names:
        words = ["--name", name, "--concurrency", str(most), "--set", f"gpu_memory_utilization={memory:.3f}"]
        found = corral_json("up", model, *words, "--json", *shlex.split(up), codes=(0,))
        print(f"  {name}: ready after {found['timings']['engine_ready_s']} s, {found['observed']}", flush=True)


def measured(names: list[str], running: int, lengths: tuple[int, int]) -> dict[str, float]:
    each, rounds = running // len(names), 4
    words = ["--concurrency", str(each), "--num-prompts", str(each * rounds), "--warmup", str(min(each, 64))]
    words += ["--input-len", str(lengths[0]), "--output-len", str(lengths[1]), "--json"]
    runs = [
        subprocess.Popen([*CORRAL, "bench", "run", "--deployment", name, *words], stdout=subprocess.PIPE, text=True)
        for name in names
    ]
    found = [json.loads(run.communicate()[0]) for run in runs]
    return {
        "tokens_s": sum(one["output_throughput"] for one in found),
        "ttft_p99_ms": max(one["p99_ttft_ms"] for one in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.9, help="of the GPU, in all")
    parser.add_argument("--at", default="256,1024", help="requests at once, in all")
    parser.add_argument("--lengths", default="128,128", help="prompt and output tokens")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--up", default="", help="further arguments of corral up")
    parser.add_argument("--out", type=Path, help="every figure, as JSON, written as it goes")
    options = parser.parse_args()
    loads = [int(word) for word in options.at.split(",")]
    prompt, output = (int(word) for word in options.lengths.split(","))
    rows: list[dict[str, Any]] = []
    for turn in range(options.turns):
        for count in (1, options.servers):
            names = [f"one-gpu-{number}" for number in range(count)]
            try:
                start(options.model, names, options.memory / count, max(loads) // count, options.up)
                for running in loads:
                    figures = measured(names, running, (prompt, output))
                    rows.append({"turn": turn, "servers": count, "at_once": running, **figures})
                    print(f"turn {turn + 1}  {count} servers  {running} at once: {figures}", flush=True)
                    if options.out:
                        options.out.write_text(json.dumps(rows, indent=1))
            finally:
                for name in names:
                    stop(name)
    for running in loads:
        rates = {
            count: mean(row["tokens_s"] for row in rows if (row["servers"], row["at_once"]) == (count, running))
            for count in (1, options.servers)
        }
        print(f"{running} at once: {rates[options.servers] / rates[1]:.2f} of one server with {options.servers}")


if __name__ == "__main__":
    main()
