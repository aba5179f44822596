"""What the plan says of this CPU against what `corral bench` finds, at 1, 4 and 32 requests at once.

    python benchmarks/cpu_plan_accuracy.py [--model smollm2] [--at 1,4,32] [--each 3] [--set weights=bf16]

Starts the model as a user does (which measures the CPU where that was not done), asks `corral plan` for each load,
and measures it. On a quiet machine: what else computes makes the server slower than it is. Exits 1 when a ratio is
off by more than a quarter. Engine, model and what was measured are those of CORRAL_HOME.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from process import corral_json, stop

TOLERANCE = 0.25
PROMPT, OUTPUT = 128, 128


def planned(model: str, fixed: list[str], running: int) -> Any:
    words = ["--concurrency", str(running), "--input-len", str(PROMPT), "--output-len", str(OUTPUT)]
    return corral_json("plan", model, *words, *fixed, "--json")


def benched(name: str, running: int, rounds: int) -> Any:
    words = ["--concurrency", str(running), "--num-prompts", str(running * rounds), "--warmup", str(running)]
    words += ["--input-len", str(PROMPT), "--output-len", str(OUTPUT), "--json"]
    return corral_json("bench", "run", "--deployment", name, *words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--at", default="1,4,32", help="requests at once")
    parser.add_argument("--each", type=int, default=3, help="requests of each place in a measurement")
    parser.add_argument("--set", dest="fixed", action="append", default=[], help="a field of the plan")
    options = parser.parse_args()
    fixed = [word for pair in options.fixed for word in ("--set", pair)]
    name = "cpu-plan-accuracy"
    corral_json("up", options.model, "--name", name, "--restart", "0", *fixed, "--json")
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    worst = 0.0
    try:
        for running in map(int, options.at.split(",")):
            plan, found = planned(options.model, fixed, running), benched(name, running, options.each)
            said, is_ = plan["speed"]["throughput_tokens_per_s"], found["output_throughput"]
            worst = max(worst, abs(said / is_ - 1))
            first, found_first = plan["speed"]["ttft_s"], found["median_ttft_ms"] / 1000
            print(
                f"{running:>4} at once: planned {said:.3g}, found {is_:.3g} output tokens/s, ratio {said / is_:.2f};"
                f" first token planned {first:.3g} s (alone), found {found_first:.3g} s;"
                f" {plan['precision']['compute']}, {plan['speed']['basis']}",
                flush=True,
            )
    finally:
        stop(name)
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
