"""How long things take before a model answers: `make bench-start`. Prints figures; asserts nothing.

    python benchmarks/start.py [--runs 3] [--no-engine]

1. `corral --help`, `corral plan`, and `corral ps` with 50 deployments: wall time of the whole command.
2. `corral up smollm2`, several times in the user's own CORRAL_HOME: what the engine needs until its first completion
   (the agent's own clock), what the command adds to it, and decode speed afterwards with one and with 32 streams.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from process import CORRAL

from corral.client.client import COMPLETIONS, Client, run
from corral.client.endpoint import Endpoint


def timed(command: list[str], env: dict[str, str], runs: int) -> tuple[float, float]:
    """(best, median) wall seconds of a command."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run(command, env=env, check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    return min(times), statistics.median(times)


def fifty_deployments(home: Path) -> None:
    """Fifty ended deployments with journals of ordinary length."""
    for number in range(50):
        folder = home / "deployments" / f"d{number}"
        (folder / "rank0").mkdir(parents=True)
        identity = {"pid": 1, "host": "elsewhere", "boot_id": "b", "start_ticks": 1}
        record = {"name": f"d{number}", "launch_id": "x", "model": "m", "served_name": "m", "target": "local",
                  "created_s": time.time(), "created_by": identity, "engine": "cpu-0.32.0"}  # fmt: skip
        (folder / "deployment.json").write_text(json.dumps(record))
        (folder / "rank0" / "agent.json").write_text(json.dumps(identity))
        head = {"t": time.time(), "rank": 0, "elapsed_s": 1.0}
        events = [{**head, "kind": "phase", "phase": "loading", "done": n, "total": 191} for n in range(191)]
        events.append({**head, "kind": "state", "state": "stopped", "reason": "requested"})
        (folder / "rank0" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def commands(runs: int) -> None:
    print(f"{'command':<34} {'best ms':>8} {'median ms':>10}")
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "CORRAL_HOME": folder, "HF_HUB_OFFLINE": "1"}
        fifty_deployments(Path(folder))
        for name, words in (
            ("corral --help", ["--help"]),
            ("corral ps -a (50 deployments)", ["ps", "-a"]),
            ("corral plan llama-3.1-405b", ["plan", "llama-3.1-405b", "--gpus", "8xH100", "--nodes", "2"]),
        ):
            best, median = timed([*CORRAL, *words], env, runs)
            print(f"{name:<34} {best * 1e3:>8.0f} {median * 1e3:>10.0f}")


def decode(endpoint: Endpoint) -> tuple[float, float]:
    """Output tokens per second with one stream and with 32."""

    async def measure(streams: int, tokens: int) -> float:
        body = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        async with Client(endpoint) as client:
            await client.request(COMPLETIONS, {**body, "prompt": "warm up", "max_tokens": 8})
            began = time.perf_counter()
            waiting = [
                client.send(COMPLETIONS, {**body, "prompt": f"Tell me about {n}. " * 20}) for n in range(streams)
            ]
            replies = [await future for future in waiting]
            took = time.perf_counter() - began
        return sum(reply.usage.completion_tokens or 0 for reply in replies if reply.usage) / took

    return run(measure(1, 128)), run(measure(32, 128))


def starts(runs: int) -> None:
    name = "bench-start"
    headings = ("whole s", "engine s", "added s", "1 stream tok/s", "32 streams tok/s")
    print(f"\n{'corral up smollm2':<18} " + " ".join(f"{heading:>16}" for heading in headings))
    for number in range(runs):
        subprocess.run([*CORRAL, "down", name], capture_output=True, check=False)
        began = time.perf_counter()
        up = subprocess.run([*CORRAL, "up", "smollm2", "--name", name, "--json"], check=True, capture_output=True)
        whole = time.perf_counter() - began
        document = json.loads(up.stdout)
        engine = document["timings"]["engine_ready_s"]
        staging = sum(document["timings"].get(f"{phase}_s", 0) for phase in ("installing_engine", "fetching_model"))
        one, many = decode(Endpoint(**document["endpoint"]))
        added = whole - staging - engine
        figures = (whole, engine, added, one, many)
        print(f"start {number + 1:<12} " + " ".join(f"{figure:>16.1f}" for figure in figures))
    subprocess.run([*CORRAL, "down", name, "--purge"], capture_output=True, check=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-engine", action="store_true", help="only the commands, no server")
    options = parser.parse_args()
    commands(max(5, options.runs))
    if not options.no_engine:
        starts(options.runs)
