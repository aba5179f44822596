"""`corral batch`, over HTTP and `--in-process`, beside `LLM.generate`, `vllm run-batch` and 20 threads of requests.

One machine, one engine, one run: the server that Corral starts is measured with `corral batch` (over HTTP, and
with `--in-process`) and the threads script in turn (in both orders), then stopped; then the engine itself runs
the same prompts in process with the same settings, and `vllm run-batch` does. Both are warmed up by 160 short
answers. Printed are output tokens per second without start-up, and the ratios. With `--together` the engine in
process is there beside the server and they take turns, run by run: give each less than half of the memory then
(`--up "--set gpu_memory_utilization=0.45"`). `--also WORDS` starts one more server beside them, with these words for
`corral up`, which takes its turns too. Of `corral batch`, a load that begins with `offline:` or `http:` runs in that
way alone.

    python benchmarks/batch_engines.py [--rows 96] [--tokens 64] [--model smollm2] [--skip run-batch] [--together]
                                       [--loads 6000x128,offline:20000x16,1500x128x2000]
                                       [--up "--runtime venv --runtime-option path=/opt/vllm -- --load-format dummy"]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from process import corral, corral_json

NAME = "batchtest-speed"
CORRAL, IN_PROCESS = "corral batch", "corral batch --in-process"
WAYS = {"http": CORRAL, "offline": IN_PROCESS}
THREADS, OFFLINE_ENGINE = "20 threads + requests", "LLM.generate"
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
    llm = LLM(**json.loads(sys.argv[1]))
    print("RESULT 0", flush=True)
    for line in sys.stdin:  # prompts in a file, and how many tokens each
        ask = json.load(open(line.strip()))
        params = SamplingParams(temperature=0, max_tokens=ask["tokens"], ignore_eos=True)
        began = time.perf_counter()
        found = llm.generate(ask["prompts"], params, use_tqdm=False)
        took = time.perf_counter() - began
        print("RESULT", sum(len(f.outputs[0].token_ids) for f in found) / took, flush=True)
"""


@dataclass(frozen=True)
class Load:
    """So many rows of so many output tokens; their prompts of about so many tokens."""

    rows: int
    tokens: int
    prompt_tokens: int = 0  # as many as a first sentence has
    way: str = ""  # of `corral batch`: one alone, or both

    @classmethod
    def read(cls, text: str) -> Load:
        way, _, sizes = text.rpartition(":")
        if way not in ("", *WAYS):
            raise argparse.ArgumentTypeError(f"{way}: is none of {', '.join(WAYS)}")
        rows, tokens, *prompt = map(int, sizes.split("x"))
        return cls(rows, tokens, prompt[0] if prompt else 0, way)

    def contenders(self, skip: list[str]) -> list[str]:
        """Of the server."""
        ours = [WAYS[self.way]] if self.way else [CORRAL, *([] if "offline" in skip else [IN_PROCESS])]
        return [*ours, *([] if "threads" in skip else [THREADS])]

    def prompts(self) -> list[str]:
        topics = ["the sea", "a small town", "old machines", "a long winter", "two friends", "the first railway"]
        found = []
        for n in range(self.rows):
            further = " ".join(f"{(n * 7919 + at * 104729) % 9973}" for at in range(self.prompt_tokens // 3))
            found.append(f"Story number {n}, {further} about {topics[n % len(topics)]}. It begins like this:")
        return found


WARM_UP = Load(160, 8)


@dataclass(frozen=True)
class Server:
    """One that Corral started, and how it differs from the first."""

    name: str
    endpoint: dict[str, str]
    also: str = ""

    @classmethod
    def start(cls, name: str, model: str, words: list[str], also: str = "") -> Server:
        corral("up", model, "--name", name, "--json", *shlex.split(also), *words)
        return cls(name, corral_json("status", name, "--json")["endpoint"], also)

    def called(self, contender: str) -> str:
        return f"{contender} ({self.also})" if self.also else contender


def with_corral(server: Server, rows: Path, place: Path, tokens: int, *more: str) -> float:
    """Output tokens per second of `corral batch`, by its own summary: first request to last commit."""
    done = corral("batch", str(rows), "-o", str(place), "--deployment", server.name, "--max-tokens", str(tokens),
                  "--temperature", "0", "--param", "ignore_eos=true", "--json", *more)  # fmt: skip
    summary = json.loads(done.splitlines()[-1])
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


class Engine:
    """`LLM.generate` in the engine's own environment, with the settings of the server."""

    def __init__(self, spec: dict[str, Any], place: Path) -> None:
        rank = spec["ranks"][0]
        argv: list[str] = rank["argv"]
        engine = {"model": spec["model_path"], "enable_prefix_caching": True}
        engine["enforce_eager"] = "--enforce-eager" in argv
        for flag, read in ENGINE_FLAGS.items():
            if flag in argv:
                engine[flag[2:].replace("-", "_")] = read(argv[argv.index(flag) + 1])
        (place / "offline.py").write_text(OFFLINE)
        self._place, self._log = place, (place / "offline.log").open("w")
        self._process = subprocess.Popen(
            [*_python(argv), str(place / "offline.py"), json.dumps(engine)],
            env=_all_cores(rank), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._result()

    def run(self, prompts: list[str], tokens: int) -> float:
        ask = self._place / "ask.json"
        ask.write_text(json.dumps({"prompts": prompts, "tokens": tokens}))
        assert self._process.stdin is not None
        print(ask, file=self._process.stdin, flush=True)
        return self._result()

    def _result(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT"):
                return float(line[7:])
        raise SystemExit("LLM.generate: " + (self._place / "offline.log").read_text()[-2000:])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


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


def served(prompts: list[str], load: Load, place: Path, server: Server, contender: str) -> float:
    """One run against a server."""
    if contender == THREADS:
        endpoint = server.endpoint
        url, key = endpoint["base_url"] + "/completions", Path(endpoint["key_file"]).read_text().strip()
        return with_threads(prompts, url, key, endpoint["model"], load.tokens)
    rows = place / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    more = ["--in-process"] if contender == IN_PROCESS else []
    output = place / f"out-{time.monotonic_ns()}.jsonl"  # no run goes on with another's
    return with_corral(server, rows, output, load.tokens, *more)


def table(load: Load, speeds: dict[str, list[float]]) -> None:
    ours = [mean(speeds[name]) if name in speeds else None for name in (CORRAL, IN_PROCESS)]
    print(f"\n{load}\n{'contender':30} {'out tok/s':>10} {'corral / it':>12} {'--in-process / it':>15}   each run")
    for name, found in speeds.items():
        each = ", ".join(f"{speed:,.0f}" for speed in found)
        ratios = [f"{one / mean(found):.2f}" if one else "" for one in ours]
        print(f"{name:30} {mean(found):10.1f} {ratios[0]:>12} {ratios[1]:>15}   {each}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--loads", help="several loads: ROWSxTOKENS or ROWSxTOKENSxPROMPT_TOKENS, comma between")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", default="2048")
    parser.add_argument("--seqs", type=int, help="max_num_seqs of the server (default: the plan's)")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each (default 2)")
    parser.add_argument("--warm-turns", type=int, default=0, help="runs of each load before, which do not count")
    parser.add_argument("--together", action="store_true", help="the engine in process takes turns with the server")
    parser.add_argument("--up", default="", help="further words for `corral up`")
    parser.add_argument("--also", action="append", default=[], metavar="WORDS", help="one more server with these")
    parser.add_argument("--out", type=Path, help="every run as one line of JSON, written as it goes")
    parser.add_argument("--skip", action="append", default=[], choices=["threads", "llm", "run-batch", "offline"])
    given = parser.parse_args()
    loads = [*map(Load.read, given.loads.split(","))] if given.loads else [Load(given.rows, given.tokens)]
    setup = ["--context", given.context, *(["--set", f"max_num_seqs={given.seqs}"] if given.seqs else [])]
    speeds: dict[Load, dict[str, list[float]]] = {load: {} for load in loads}

    def note(load: Load, contender: str, speed: float, turn: int = 0) -> None:
        part = "batch" if turn >= 0 else "warming"
        if turn >= 0:
            speeds[load].setdefault(contender, []).append(speed)
        print(f"{load}  {contender}: {speed:.1f} tok/s{'' if turn >= 0 else ', warming up'}", flush=True)
        if given.out:
            row = {"part": part, "load": str(load), "contender": contender, "tokens_s": round(speed, 1)}
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        place, words = Path(folder), [*setup, *shlex.split(given.up)]
        spec = corral_json("up", given.model, "--name", NAME, "--dry-run", "--json", *words)
        servers: list[Server] = []
        engine: Engine | None = None
        try:
            for number, also in enumerate(["", *given.also]):
                servers.append(Server.start(f"{NAME}-{number}", given.model, words, also))
                served(loads[0].prompts()[:160], WARM_UP, place, servers[-1], CORRAL)
            if given.together:
                engine = Engine(spec, place)
                engine.run(loads[0].prompts()[:160], WARM_UP.tokens)
            for load in loads:
                prompts = load.prompts()
                for turn in range(-given.warm_turns, given.repeat):
                    contenders = [(server, one) for server in servers for one in load.contenders(given.skip)]
                    for server, contender in contenders if turn % 2 == 0 else reversed(contenders):
                        speed = served(prompts, load, place, server, contender)
                        note(load, server.called(contender), speed, turn)
                    if engine:
                        note(load, OFFLINE_ENGINE, engine.run(prompts, load.tokens), turn)
                if engine:
                    table(load, speeds[load])
        finally:
            for server in servers:
                with contextlib.suppress(SystemExit):
                    corral("down", server.name)
            if engine:
                engine.close()
        if engine is None and "llm" not in given.skip:
            engine = Engine(spec, place)
            engine.run(loads[0].prompts()[:160], WARM_UP.tokens)
            for load in loads:
                for _ in range(given.repeat):
                    note(load, OFFLINE_ENGINE, engine.run(load.prompts(), load.tokens))
            engine.close()
        if "run-batch" not in given.skip:
            own, whole = with_run_batch(spec, loads[0].prompts(), loads[0].tokens, place)
            note(loads[0], "vllm run-batch (own work)", own)
            note(loads[0], "vllm run-batch (with start)", whole)
    for load in loads:
        table(load, speeds[load])


if __name__ == "__main__":
    main()
