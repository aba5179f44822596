"""How much load one core of a generator gives: Corral's beside `vllm bench serve`, GuideLLM and aiperf.

    python benchmarks/bench_capacity.py --tokenizer FOLDER [--vllm-python P] [--guidellm BIN] [--aiperf BIN]

The fake server has one core, the tool under test another (taskset). Each tool offers an even rate in the open loop,
one rung after another, each higher than the last; the judge is the same for all: the server's own log. A request's
lag is how much later it arrived than the even schedule says; a rung is held when the P99 of the lag is below 5 ms and
every request arrived. `requests`: answers of one token. `chunks`: answers of 128 tokens, 5 ms apart.

`--cost` compares CPU time per request instead of rungs: it says the same on a machine that others use, too.
`--truth` measures Corral alone at 80% of a rate: TTFT as seen, minus TTFT as the server's log has it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from process import Process, fake_server

SECONDS = 3.0
KINDS = {"requests": (1, ("--ttft-ms", "20")), "chunks": (128, ("--ttft-ms", "20", "--itl-ms", "5"))}
Tool = Callable[[argparse.Namespace, str, float, int, int, Path], list[str]]  # its command line


def corral(_: argparse.Namespace, url: str, rate: float, count: int, tokens: int, __: Path) -> list[str]:
    command = [sys.executable, "-m", "corral", "bench", "run", "--url", url, "--arrival", "constant", "--json"]
    command += ["--request-rate", str(rate), "--num-prompts", str(count), "--output-len", str(tokens)]
    return [*command, "--input-len", "16", "--warmup", "0", "--name", "x"]


def vllm(given: argparse.Namespace, url: str, rate: float, count: int, tokens: int, _: Path) -> list[str]:
    command = [given.vllm_python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    command += ["--base-url", url, "--model", "fake", "--tokenizer", given.tokenizer, "--dataset-name", "random"]
    command += ["--random-input-len", "16", "--random-output-len", str(tokens), "--ignore-eos", "--disable-tqdm"]
    return [*command, "--num-prompts", str(count), "--request-rate", str(rate), "--burstiness", "inf"]


def guidellm(given: argparse.Namespace, url: str, rate: float, count: int, tokens: int, folder: Path) -> list[str]:
    command = [
        given.guidellm,
        "run",
        "--backend",
        f"kind=openai_http,target={url},model=fake,request_format=/v1/completions",
    ]
    command += ["--profile", f"kind=constant,rate={rate}", "--constraint", f"kind=max_requests,count={count}"]
    command += [
        "--data",
        f"kind=synthetic_text,prompt_tokens=16,output_tokens={tokens}",
        "--disable-console-interactive",
    ]
    return [
        *command,
        "--tokenizer",
        f"kind=huggingface_auto,model={given.tokenizer}",
        "--output",
        f"kind=json,path={folder}/g.json",
    ]


def aiperf(given: argparse.Namespace, url: str, rate: float, count: int, tokens: int, folder: Path) -> list[str]:
    command = [
        given.aiperf,
        "profile",
        "--model",
        "fake",
        "--url",
        url,
        "--endpoint-type",
        "completions",
        "--streaming",
    ]
    command += ["--request-rate", str(rate), "--request-rate-mode", "constant", "--request-count", str(count)]
    command += ["--isl", "16", "--osl", str(tokens), "--extra-inputs", "ignore_eos:true", "--ui", "none"]
    return [*command, "--tokenizer", given.tokenizer, "--artifact-dir", str(folder), "--num-dataset-entries", "200"]


TOOLS: dict[str, Tool] = {"corral": corral, "vllm": vllm, "guidellm": guidellm, "aiperf": aiperf}


def lags_ms(log: Path, rate: float, count: int) -> list[float]:
    """Lateness of the last `count` arrivals against an even schedule laid through the earliest of them."""
    arrivals = sorted(json.loads(line)["arrival_ns"] for line in log.read_text().splitlines())[-count:]
    late = [at - int(n * 1e9 / rate) for n, at in enumerate(arrivals)]
    first = min(late[: max(1, len(late) // 10)])  # connections are opened first: that is no lag of the schedule
    return sorted((at - first) / 1e6 for at in late)


def server_on_its_core(log: Path, options: tuple[str, ...]) -> contextlib.AbstractContextManager[Process]:
    """The fake server on a core of its own."""
    return fake_server("--log", str(log), "--no-prefix-cache", *options, prefix=("taskset", "-c", "1"))


def drive(given: argparse.Namespace, name: str, kind: str, rate: float, count: int, log: Path) -> tuple[float, str]:
    """Let a tool send `count` requests; its CPU seconds (children included), and how it ended if not well."""
    tokens, options = KINDS[kind]
    with tempfile.TemporaryDirectory() as place, server_on_its_core(log, options) as server:
        folder = Path(place)
        env = {**os.environ, "CORRAL_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"}
        if name != "aiperf":  # it takes a folder for a repository's name when offline
            env["HF_HUB_OFFLINE"] = "1"
        command = ["taskset", "-c", "0", *TOOLS[name](given, server.url, rate, count, tokens, folder)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=180, check=False)
        except subprocess.TimeoutExpired:
            return 0.0, "took over three minutes"
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    arrived = len(log.read_text().splitlines()) if log.is_file() else 0
    if arrived >= count:
        return cpu_s, ""
    words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["nothing"]
    return cpu_s, f"{arrived} of {count} arrived; exit {done.returncode}: {words[0][:150]}"


def rung(given: argparse.Namespace, name: str, kind: str, rate: float) -> tuple[bool, str]:
    """Whether a tool holds a rate, and what was seen."""
    count = max(50, int(rate * SECONDS))
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log.jsonl"
        _, problem = drive(given, name, kind, rate, count, log)
        if problem:
            return False, problem
        late = lags_ms(log, rate, count)
    p99 = late[int(len(late) * 0.99)]
    return p99 < 5.0, f"lag median {statistics.median(late):.2f} ms, P99 {p99:.2f} ms"


def cost(given: argparse.Namespace, name: str, kind: str) -> float | None:
    """CPU seconds per request: two runs of different length, so that starting up drops out."""
    tokens = KINDS[kind][0]
    rate, few, many = (100.0, 100, 900) if tokens == 1 else (20.0, 20, 180)
    if name == "corral":
        few, many, rate = few * 4, many * 8, rate * 8
    spent = []
    for count in (few, many):
        with tempfile.TemporaryDirectory() as place:
            cpu_s, problem = drive(given, name, kind, rate, count, Path(place) / "log.jsonl")
        if problem:
            print(f"  {name:9} {kind:9} {problem}", flush=True)
            return None
        spent.append(cpu_s)
    each = (spent[1] - spent[0]) / (many - few)
    print(
        f"  {name:9} {kind:9} {each * 1e6:9,.1f} µs of CPU a request, {each * 1e6 / tokens:8,.2f} µs a chunk",
        flush=True,
    )
    return each


def climb(given: argparse.Namespace, name: str, kind: str, begin: float) -> float:
    """The highest rung held: steps of 1.3 until one fails, then between the two until they are 8% apart."""
    held, rate, failed = 0.0, begin, 0.0
    for _ in range(given.rungs):
        good, words = rung(given, name, kind, rate)
        how = "held" if good else "NOT held"
        chunks = rate * KINDS[kind][0]
        print(f"  {name:9} {kind:9} {rate:9,.0f} req/s ({chunks:9,.0f} chunks/s): {how}; {words}", flush=True)
        if good:
            held = rate
        else:
            failed = rate
        if held and failed:
            if failed / held < 1.08:
                break
            rate = (held * failed) ** 0.5
        else:
            rate = rate * 1.3 if held else rate / 1.7
    return held


def truth(given: argparse.Namespace, rate: float, kind: str) -> None:
    """TTFT as Corral sees it against the server's log, request by request in order of arrival."""
    tokens, options = KINDS[kind]
    count = int(rate * SECONDS)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        log = folder / "log.jsonl"
        with server_on_its_core(log, options) as server:
            env = {**os.environ, "CORRAL_HOME": str(folder / "home")}
            command = [
                "taskset",
                "-c",
                "0",
                *corral(given, server.url, rate, count, tokens, folder),
                "--save-detailed",
            ]
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
        body: dict[str, Any] = json.loads(done.stdout)
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        real = [(row["first_ns"] - row["arrival_ns"]) / 1e6 for row in rows]
        seen = [t * 1000 for t in body["ttfts"]]
        print(f"truth at {rate:,.0f} req/s, {rate * tokens:,.0f} chunks/s (n = {len(seen)}): TTFT ms, seen | the log")
        for name, share in (("median", 0.5), ("P90", 0.9), ("P99", 0.99)):
            a, b = sorted(seen)[int(len(seen) * share)], sorted(real)[int(len(real) * share)]
            print(f"  {name:7} {a:8.2f} | {b:8.2f}   error {a - b:+.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--vllm-python", default="")
    parser.add_argument("--guidellm", default="")
    parser.add_argument("--aiperf", default="")
    parser.add_argument("--rungs", type=int, default=9)
    parser.add_argument("--only", default="corral,vllm,guidellm,aiperf")
    parser.add_argument("--kinds", default="requests,chunks")
    parser.add_argument("--begin", type=float, help="first rung, requests/s")
    parser.add_argument("--cost", action="store_true", help="CPU time per request instead: for busy machines")
    parser.add_argument("--truth", type=float, help="only this: errors at 80%% of this rate")
    given = parser.parse_args()
    if given.truth:
        for kind in given.kinds.split(","):
            truth(given, given.truth * 0.8, kind)
        return
    begins = {"corral": {"requests": 3000.0, "chunks": 500.0}}
    tools = [n for n in given.only.split(",") if n == "corral" or getattr(given, "vllm_python" if n == "vllm" else n)]
    for kind in given.kinds.split(","):
        if given.cost:
            costs = {name: cost(given, name, kind) for name in tools}
            held = {name: 1 / each for name, each in costs.items() if each and each > 0}
        else:
            begin = {n: given.begin or begins.get(n, {"requests": 300.0, "chunks": 40.0})[kind] for n in tools}
            held = {name: climb(given, name, kind, begin[name]) for name in tools}
        best = max((rate for name, rate in held.items() if name != "corral"), default=0.0)
        tokens = KINDS[kind][0]
        print(f"\n{kind}: {'what a core of CPU time gives' if given.cost else 'highest held, one core'}")
        for name, rate in held.items():
            ratio = f"{rate / best:6.2f} × the best peer" if best and name == "corral" else ""
            print(f"  {name:9} {rate:9,.0f} req/s {rate * tokens:11,.0f} chunks/s  {ratio}")


if __name__ == "__main__":
    main()
