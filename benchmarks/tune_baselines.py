"""`corral tune` beside `vllm bench sweep serve`: the same settings, the same engine minutes, and who chose better.

    python benchmarks/tune_baselines.py MODEL [--budget 150s] [--measure 3s] [--concurrency 16] [--lengths 64,32] \
        [--up "--context 512"] [--base "--max-num-seqs 2"] [--run NAME] [--out FOLDER]

First `corral tune` runs (or `--run` names one that did). Then vLLM's own sweep, from the engine's environment, walks
all combinations of what tune may vary, one server after the other, until it has had as much time as tune took. It
has no budget, so it is interrupted then; it has no optimiser, so its choice is the combination with the most output
tokens per second. Then both choices are started afresh by `corral up` and measured by `corral bench`, in turns.

The sweep's servers are started with Corral's guard: loopback only, a key of this run's own in a private file, and
administrative paths closed, though the sweep turns vLLM's development mode on. Its client finds the key in its
environment. Its summary needs pandas: without, it fails after all was measured, and results are read from its files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from statistics import mean
from typing import Any

from flag_sets import measured
from process import CORRAL, corral_json, stop

from corral.deploy.lifecycle.decision import sized
from corral.lab.tune.knobs import BASE, KnobKind, Setup, tuned_request
from corral.lab.tune.race import verdict
from corral.lab.tune.store import TuneRun, find_run

NAME = "tune-baselines"


def combinations(found: TuneRun) -> Iterator[Setup]:
    """Everything that tune may vary, in the order of its knobs: the base first."""
    knobs = [knob for knob in found.spec.race.knobs if knob.kind is not KnobKind.BASELINE]
    for values in itertools.product(*((None, *knob.values) for knob in knobs)):
        setup = BASE
        for knob, value in zip(knobs, values, strict=True):
            setup = setup if value is None else setup.with_(knob.name, value)
        yield setup


def flags_of(found: TuneRun, setup: Setup) -> dict[str, Any]:
    """vLLM's flags for a setup, as the sweep takes them; empty where there is no plan for it."""
    spec = found.spec
    request = tuned_request(spec.request, spec.race.knobs, setup)
    try:
        plan = sized(request)[1].plan
    except Exception:
        return {}
    return as_parameters([*plan.engine_args, *request.extra_args])


def as_parameters(words: Sequence[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            name, joined, value = word[2:].partition("=")
            follows = words[at + 1] if at + 1 < len(words) else "--"
            made[name.replace("-", "_")] = value if joined else True if follows.startswith("--") else follows
    return made


def sweep(found: TuneRun, given: argparse.Namespace, seconds: float) -> dict[Setup, float]:
    """Output tokens per second of every combination that vLLM's sweep came to in that time."""
    folder: Path = given.out / "sweep"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    setups = {}
    for number, setup in enumerate(itertools.islice(combinations(found), given.most)):
        if flags := flags_of(found, setup):
            setups[str(number)] = (setup, {"_benchmark_name": str(number), **flags})
    (folder / "serve.json").write_text(json.dumps([flags for _, flags in setups.values()]))
    dry = corral_json("up", given.model, "--name", NAME, "--dry-run", "--json", *shlex.split(given.up))
    rank = dry["ranks"][0]
    command = sweep_command(rank, dry["served_name"], dry["model_path"], folder, given)
    began = time.monotonic()
    with (folder / "sweep.log").open("w") as log:
        process = subprocess.Popen(command, env=guarded(rank, folder), stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it kills its server, and keeps what is measured
            process.wait(timeout=60)
    print(f"vllm bench sweep: {time.monotonic() - began:.0f} s, exit code {process.returncode}", flush=True)
    return {setups[name][0]: rate for name, rate in results(folder)}


def sweep_command(
    rank: dict[str, Any], served: str, model: str, folder: Path, given: argparse.Namespace
) -> list[str]:
    argv: list[str] = rank["argv"]
    python = argv[: argv.index("-m")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    serve = [*argv[: argv.index("-m") + 2], model, f"--served-model-name={served}", "--host", "127.0.0.1"]
    serve += ["--port", port, "--middleware", "corral_guard.Guard", "--disable-uvicorn-access-log"]
    prompt, output = given.lengths.split(",")
    bench = [*python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    bench += ["--base-url", f"http://127.0.0.1:{port}", "--model", served, "--tokenizer", model]
    bench += ["--dataset-name", "random", "--random-input-len", prompt, "--random-output-len", output]
    bench += ["--max-concurrency", str(given.concurrency), "--num-prompts", str(given.prompts), "--ignore-eos"]
    return [
        *python, "-m", "vllm.benchmarks.sweep.serve",
        "--serve-cmd", shlex.join(serve), "--bench-cmd", shlex.join(bench), "--after-bench-cmd", "true",
        "--serve-params", str(folder / "serve.json"), "--num-runs", "1", "--continue-on-error",
        "-o", str(folder), "-e", "found",
    ]  # fmt: skip


def guarded(rank: dict[str, Any], folder: Path) -> dict[str, str]:
    """The environment of a rank, with a guard and a key of this run's own."""
    modules, key = folder / "modules", secrets.token_hex(32)
    modules.mkdir()
    for name in ("guard", "row_socket"):
        text = resources.files("corral").joinpath("node", f"{name}.py").read_text(encoding="utf-8")
        (modules / f"corral_{name}.py").write_text(text, encoding="utf-8")
    handle = os.open(folder / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(handle, key.encode())
    os.close(handle)
    env = {name: value for name, value in os.environ.items() if name not in rank["unset_env"]}
    env |= {name: value for name, value in rank["env"].items() if not name.startswith("CORRAL_")}
    return {**env, "PYTHONPATH": str(modules), "CORRAL_KEY_FILE": str(folder / "key"), "OPENAI_API_KEY": key}


def results(folder: Path) -> Iterator[tuple[str, float]]:
    for path in sorted((folder / "found").glob("**/run=*.json")):
        row = json.loads(path.read_text())
        if row.get("output_throughput"):
            yield str(row["_benchmark_name"]), float(row["output_throughput"])
    for path in sorted((folder / "found").glob("**/*failure.json")):
        print(f"vllm bench sweep failed: {json.loads(path.read_text())['error']}", flush=True)


def met(found: TuneRun, given: argparse.Namespace, setups: Sequence[Setup]) -> list[list[float]]:
    """Both choices in fresh starts, A B B A."""
    speeds: list[list[float]] = [[], []]
    prompt, output = (int(word) for word in given.lengths.split(","))
    for which in (0, 1, 1, 0):
        request = tuned_request(found.spec.request, found.spec.race.knobs, setups[which])
        fixed = [word for name, value in request.fixed.items() for word in ("--set", f"{name}={value}")]
        words = ["--name", NAME, "--restart", "0", "--json", *fixed, *shlex.split(given.up_bare)]
        corral_json("up", given.model, *words, "--", *request.extra_args)
        try:
            speeds[which].append(measured(NAME, given.concurrency, (prompt, output)))
        finally:
            stop(NAME)
    return speeds


def tuned(given: argparse.Namespace) -> TuneRun:
    if given.run:
        return find_run(given.run)
    name, (prompt, output) = f"baselines-{os.getpid()}", given.lengths.split(",")
    command = [*CORRAL, "tune", given.model, "--name", name, "--concurrency", str(given.concurrency)]
    command += ["--input-len", prompt, "--output-len", output, "--measure", given.measure, "--budget", given.budget]
    words = [*shlex.split(given.up), *(["--", *shlex.split(given.base)] if given.base else [])]
    subprocess.run([*command, *words], check=False)
    return find_run(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--budget", default="150s")
    parser.add_argument("--measure", default="3s")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=160, help="of each measurement of the sweep")
    parser.add_argument("--lengths", default="64,32")
    parser.add_argument("--up", default="", help="further options of corral up and corral tune")
    parser.add_argument("--up-bare", default="", help="those of them that are not fields of the plan")
    parser.add_argument("--base", default="--max-num-seqs 2", help="flags that tuning begins with")
    parser.add_argument("--run", default="", help="a tuning run that is over")
    parser.add_argument("--seconds", type=float, help="of the sweep (default: as long as tune took)")
    parser.add_argument("--most", type=int, default=200, help="combinations that the sweep is given, at most")
    parser.add_argument("--out", type=Path, default=Path("tune-baselines"))
    given = parser.parse_args()
    found = tuned(given)
    result = verdict(found.spec.race, found.trials())
    speeds = sweep(found, given, given.seconds or result.spent_s)
    whole = sum(1 for _ in combinations(found))
    theirs = max(speeds, key=lambda one: speeds[one], default=BASE)
    print(f"corral tune: {len(found.trials())} trials in {result.spent_s:.0f} s, its choice: {result.best}")
    print(f"vllm bench sweep: {len(speeds)} of {whole} combinations, its choice: {theirs}")
    row: dict[str, Any] = {"tune": str(result.best), "sweep": str(theirs), "spent_s": round(result.spent_s, 1),
                           "combinations": len(speeds), "of": whole}  # fmt: skip
    if theirs == result.best:
        print("the same choice")
    else:
        ours, other = met(found, given, (result.best, theirs))
        row |= {"tune_tokens_s": ours, "sweep_tokens_s": other}
        print(f"in fresh starts, tok/s: {mean(ours):,.0f} {ours} against {mean(other):,.0f} {other}")
    with (given.out / "baselines.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
