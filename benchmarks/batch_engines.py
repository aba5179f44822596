"""`corral batch` beside vLLM's own offline `LLM.generate`, `vllm run-batch`, and the 20-thread requests script.

One machine, one engine, one run: the server that Corral starts is measured with `corral batch` and the threads script
in turn (in both orders), then stopped; then the engine itself runs the same prompts in process with the same
settings, and `vllm run-batch` does. Both are warmed up by 160 short answers. Printed are output tokens per second
without start-up, and the ratios.

    python benchmarks/batch_engines.py [--rows 96] [--tokens 64] [--model smollm2] [--skip run-batch]
                                       [--up "--runtime venv --runtime-option path=/opt/vllm -- --load-format dummy"]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NAME = "batchtest-speed"
ENGINE_FLAGS: dict[str, Callable[[str], Any]] = {
    "--dtype": str,
    "--load-format": str,
    "--max-model-len": int,
    "--max-num-batched-tokens": int,
    "--max-num-seqs": int,
    "--gpu-memory-utilization": float,
    "--kv-cache-memory-bytes": int,
}
OFFLINE = """
import json, sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    ask = json.load(open(sys.argv[1]))
    llm = LLM(**ask["engine"])
    params = SamplingParams(temperature=0, max_tokens=ask["tokens"], ignore_eos=True)
    few = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.generate(ask["prompts"][:160], few, use_tqdm=False)
    for _ in range(ask["repeat"]):
        began = time.perf_counter()
        found = llm.generate(ask["prompts"], params, use_tqdm=False)
        took = time.perf_counter() - began
        print("RESULT", sum(len(f.outputs[0].token_ids) for f in found) / took, flush=True)
"""


def prompts_of(count: int) -> list[str]:
    topics = ["the sea", "a small town", "old machines", "a long winter", "two friends", "the first railway"]
    return [f"Story number {n}, about {topics[n % len(topics)]}. It begins like this:" for n in range(count)]


def corral(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "corral", *arguments], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"corral {arguments[0]}: {done.stderr}")
    return done


def with_corral(rows: Path, place: Path, tokens: int) -> float:
    """Output tokens per second of `corral batch`, by its own summary: first request to last commit."""
    place.unlink(missing_ok=True)
    done = corral("batch", str(rows), "-o", str(place), "--deployment", NAME, "--max-tokens", str(tokens),
                  "--temperature", "0", "--param", "ignore_eos=true", "--json")  # fmt: skip
    summary = json.loads(done.stdout.splitlines()[-1])
    return float(summary["output_tokens"] / summary["wall_s"])


def with_threads(prompts: list[str], url: str, key: str, model: str, tokens: int) -> float:
    """The script of the workshops: 20 threads, `requests`, all answers in memory."""
    import requests

    counted = [0]
    guard = threading.Lock()

    def one(prompt: str) -> None:
        body: Any = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = requests.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=600)
        with guard:
            counted[0] += answer.json()["usage"]["completion_tokens"]

    began = time.perf_counter()
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(one, prompts))
    return counted[0] / (time.perf_counter() - began)


def with_engine(spec: dict[str, Any], prompts: list[str], tokens: int, repeat: int, place: Path) -> list[float]:
    """`LLM.generate` in the engine's own environment, with the settings of the server."""
    rank = spec["ranks"][0]
    argv: list[str] = rank["argv"]
    engine = {"model": spec["model_path"], "enable_prefix_caching": True}
    for flag, read in ENGINE_FLAGS.items():
        if flag in argv:
            engine[flag[2:].replace("-", "_")] = read(argv[argv.index(flag) + 1])
    ask = {"engine": engine, "prompts": prompts, "tokens": tokens, "repeat": repeat}
    (place / "ask.json").write_text(json.dumps(ask))
    (place / "offline.py").write_text(OFFLINE)
    command = [*_python(argv), str(place / "offline.py"), str(place / "ask.json")]
    done = subprocess.run(command, env=_all_cores(rank), capture_output=True, text=True, timeout=900, check=False)
    speeds = [float(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if len(speeds) != repeat:
        raise SystemExit(f"LLM.generate: {done.stderr[-2000:]}")
    return speeds


def with_run_batch(spec: dict[str, Any], prompts: list[str], tokens: int, place: Path) -> tuple[float, float]:
    """`vllm run-batch`: tokens per second over its own work (from its progress log) and over its whole life."""
    rank = spec["ranks"][0]
    argv: list[str] = rank["argv"]
    rows, output = place / "run-batch.jsonl", place / "run-batch-out.jsonl"
    with rows.open("w") as file:
        for number, prompt in enumerate(prompts):
            body = {"model": spec["model_path"], "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                    "messages": [{"role": "user", "content": prompt}]}  # fmt: skip
            row = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    flags = [word for flag in ENGINE_FLAGS if flag in argv for word in (flag, argv[argv.index(flag) + 1])]
    command = [*_python(argv), "-m", "vllm.entrypoints.openai.run_batch", "-i", str(rows), "-o", str(output),
               "--model", spec["model_path"], *flags]  # fmt: skip
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=_all_cores(rank), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    started, log = None, []
    for line in process.stdout:
        log.append(line)
        if started is None and "Running batch" in line:
            started = time.perf_counter()
    process.wait()
    ended = time.perf_counter()
    if process.returncode or not output.exists():
        raise SystemExit("run-batch: " + "".join(log[-20:]))
    counted = 0
    for answer in output.read_text().splitlines():
        counted += json.loads(answer)["response"]["body"]["usage"]["completion_tokens"]
    return counted / (ended - (started or began)), counted / (ended - began)


def _python(argv: list[str]) -> list[str]:
    """The words that start the engine's Python."""
    return argv[: argv.index("-m")]


def _all_cores(rank: dict[str, Any]) -> dict[str, str]:
    """As Corral's launcher does on small machines: vLLM's automatic binding would leave a core idle."""
    return {**_env(rank), "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}


def _env(rank: dict[str, Any]) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in rank["unset_env"]}
    return {**env, **{name: value for name, value in rank["env"].items() if name != "PYTHONPATH"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seqs", type=int, help="max_num_seqs of the server (default: the plan's)")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each (default 2)")
    parser.add_argument("--up", default="", help="further words for `corral up`")
    parser.add_argument("--skip", action="append", default=[], choices=["threads", "llm", "run-batch"])
    given = parser.parse_args()
    prompts = prompts_of(given.rows)
    names = ["corral batch", "20 threads + requests"]
    speeds: dict[str, list[float]] = {name: [] for name in names if name == names[0] or "threads" not in given.skip}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows = place / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        setup = ["--name", NAME, "--context", "2048"]
        setup += ["--set", f"max_num_seqs={given.seqs}"] if given.seqs else []
        more = shlex.split(given.up)
        spec = json.loads(corral("up", given.model, *setup, "--dry-run", *more).stdout)
        corral("up", given.model, *setup, "--json", *more)
        try:
            status = json.loads(corral("status", NAME, "--json").stdout)
            url = status["endpoint"]["base_url"].removesuffix("/v1") + "/v1/completions"
            key = Path(status["endpoint"]["key_file"]).read_text().strip()
            warm = place / "warm.jsonl"
            warm.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts[:160]))
            with_corral(warm, place / "warm-out.jsonl", 8)
            turns = [0] * given.repeat if "threads" in given.skip else [0, 1, 1, 0] * (given.repeat // 2)
            for turn in turns:
                name = names[turn]
                if turn:
                    speed = with_threads(prompts, url, key, status["endpoint"]["model"], given.tokens)
                else:
                    speed = with_corral(rows, place / f"out{len(speeds[name])}.jsonl", given.tokens)
                speeds[name].append(speed)
                print(f"{name}: {speed:.1f} tok/s", flush=True)
        finally:
            corral("down", NAME)
        if "llm" not in given.skip:
            speeds["LLM.generate"] = with_engine(spec, prompts, given.tokens, given.repeat, place)
        if "run-batch" not in given.skip:
            own, whole = with_run_batch(spec, prompts, given.tokens, place)
            speeds["vllm run-batch (own work)"], speeds["vllm run-batch (with start)"] = [own], [whole]
    ours = sum(speeds["corral batch"]) / len(speeds["corral batch"])
    print(f"\n{'contender':30} {'out tok/s':>10} {'corral / it':>12}   each run")
    for name, found in speeds.items():
        mean = sum(found) / len(found)
        print(f"{name:30} {mean:10.1f} {ours / mean:12.2f}   {', '.join(f'{speed:,.0f}' for speed in found)}")


if __name__ == "__main__":
    main()
