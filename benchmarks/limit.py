"""Everything that is to be shown on one GPU about plans, `corral tune` and batches, in one visit.

    python benchmarks/limit.py MODEL --parts grid,tune,batch --out FOLDER --minutes 9.5 \
        [--up "--runtime venv --runtime-option path=/opt/vllm"] [--engine "--load-format dummy"]
    python benchmarks/limit.py MODEL --estimate                 # how long each part takes
    python benchmarks/limit.py --judge FOLDER [FOLDER …]        # what the results of one or more calls say

Parts, each of which fits a call of ten minutes on an H200 with 8B (a start takes 55 s there, the first 95 s):

grid    the plan's own flags and others, one start for each, at 1, 16, 64, 256 and 1,024 requests at once: what share
        of the best the plan reaches at each load. With `--beside 4` four of them start at once, each with a quarter
        of the memory, and are measured one after the other: a start takes longer than a measurement.
tune    `corral tune` from DigitalOcean's flags at 16 and at 256 requests at once, two workloads: what it gains, and
        what share of the best of `grid`, and of its own trials, its choice reaches.
batch   `corral batch` and `LLM.generate` in turns, five of each: short prompts with answers of 128 and of 16 tokens,
        and more prompts of 2,000 tokens than the prefix cache holds; in process, as with `--start`.

Every figure is written to FOLDER/limit.jsonl when it is found. Near the end of `--minutes` nothing new is begun, what
runs is stopped in order, and a later call with the same folder, or another, goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from statistics import mean
from typing import Any

from flag_sets import measured
from process import CORRAL, corral_json, stop
from tune_rivals import DIGITALOCEAN

PARTS = ("grid", "tune", "batch")
# the plan first; then each of what may be worth something, and all of it
SETS = (
    "",
    "--stream-interval 4",
    "--max-num-batched-tokens 16384",
    "--api-server-count 8 --stream-interval 4 --max-num-batched-tokens 16384",
)
FACTORS = {16: 4.2, 256: 1.7}  # of the plan's flags over DigitalOcean's, as `vllm bench serve` had it once
NAME = "limit"
STOPPING_S = 15.0  # kept back for stopping what runs


class Visit:
    """The time of one call, and the file that results go to."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.ends = given, time.monotonic() + given.minutes * 60
        given.out.mkdir(parents=True, exist_ok=True)
        self.file: Path = given.out / "limit.jsonl"

    def left_s(self) -> float:
        return float(self.ends - time.monotonic() - STOPPING_S)

    def write(self, **row: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row)[:200], flush=True)

    def has(self, **wanted: Any) -> bool:
        return any(wanted.items() <= row.items() for row in read([self.file.parent]))

    def up_words(self, *more: str) -> list[str]:
        engine = shlex.split(self.given.engine)
        also = [*more] if "--" in more else [*more, "--"]
        return [*shlex.split(self.given.up), *also, *engine]


def read(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """All rows of these folders; one that was cut off is none."""
    rows = []
    for folder in folders:
        for line in (folder / "limit.jsonl").read_text().splitlines() if (folder / "limit.jsonl").exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def grid(visit: Visit) -> None:
    """The sets of flags, `--beside` of them started at once; each is measured while the others have nothing to do."""
    given = visit.given
    sets = [flags for flags in given.flags or SETS
            if not all(visit.has(part="grid", flags=flags, at_once=at) for at in given.at)]  # fmt: skip
    needed = float(given.start_s) * (1.6 if given.beside > 1 else 1.0)
    for group in (sets[at : at + given.beside] for at in range(0, len(sets), given.beside)):
        if visit.left_s() < needed:
            print(f"grid: {', '.join(flags or 'the plan' for flags in group)}: no time", flush=True)
            continue
        began = time.monotonic()
        names = {f"{NAME}-{number}": flags for number, flags in enumerate(group)}
        try:
            with ThreadPoolExecutor(len(group)) as pool:
                started = dict(zip(names, pool.map(partial(start_of_set, visit), names.items()), strict=True))
            for at in given.at:
                for name, seconds in started.items():
                    row = {"part": "grid", "flags": names[name], "at_once": at}
                    if seconds and not visit.has(**row):
                        measure_set(visit, name, row, seconds)
        finally:
            with ThreadPoolExecutor(len(group)) as pool:
                list(pool.map(stop, names))
        took = time.monotonic() - began
        visit.write(part="took", what=f"{len(group)} sets", seconds=round(took, 1))
        needed = max(needed, 0.9 * took)


def start_of_set(visit: Visit, server: tuple[str, str]) -> float:
    """Seconds until it is ready, one of several with a KV cache of its share; 0: it did not start."""
    name, flags = server
    given, began = visit.given, time.monotonic()
    words, engine = ["--name", name, "--restart", "0", "--json"], shlex.split(flags)
    if given.beside > 1:
        words += ["--set", f"gpu_memory_utilization={0.9 / given.beside:.3f}"]  # so much is free, whoever came before
        engine = ["--kv-cache-memory-bytes", str(int(given.beside_kv_gib * 2**30)), *engine]
    try:
        corral_json("up", given.model, *visit.up_words(*words, "--", *engine))
    except SystemExit as error:
        visit.write(part="grid", flags=flags, failed=str(error))
        return 0.0
    return round(time.monotonic() - began, 1)


def measure_set(visit: Visit, name: str, row: dict[str, Any], start_s: float) -> None:
    try:
        rate = measured(name, row["at_once"], visit.given.lengths)
    except SystemExit as error:
        visit.write(part="grid", flags=row["flags"], failed=str(error))
        return
    visit.write(**row, tokens_s=round(rate, 1), start_s=start_s, beside=visit.given.beside)


def tune(visit: Visit) -> None:
    """From somebody's flags, for two workloads; the time that is left is shared."""
    given = visit.given
    wanted = [at for at in given.tune_at if not visit.has(part="tune", at_once=at)]
    context = [] if "--context" in given.up else ["--context", "8192"]  # without chunks a step holds a whole prompt
    for number, at in enumerate(wanted):
        budget_s = min(given.tune_s, visit.left_s() / (len(wanted) - number) - 10)
        if budget_s < 3 * given.start_s:
            print(f"tune at {at}: no time", flush=True)
            continue
        name = f"{NAME}-{at}-{os.getpid()}"  # a name that was taken would get a number, and the report another's
        command = [*CORRAL, "tune", given.model, "--name", name, "--concurrency", str(at)]
        command += ["--input-len", str(given.lengths[0]), "--output-len", str(given.lengths[1])]
        command += ["--measure", given.measure, "--budget", f"{budget_s:.0f}s"]
        began = time.monotonic()
        words = [*context, "--", *shlex.split(given.base)]
        within([*command, *visit.up_words(*words)], budget_s + 90, visit)
        report = corral_json("tune", "report", name, "--json")
        knobs = json.loads((Path(report["folder"]) / "tune.json").read_text())["race"]["knobs"]
        took = round(time.monotonic() - began, 1)
        visit.write(part="tune", at_once=at, seconds=took, report={**report, "knobs": knobs})


def batch(visit: Visit) -> None:
    """Servers, in process and over HTTP, in turns with the engine itself, each with less than half of the memory."""
    given, script = visit.given, Path(__file__).with_name("batch_engines.py")
    up = shlex.join(visit.up_words(*shlex.split(given.batch_up)))
    command = [sys.executable, str(script), "--together", "--context", "4096", "--model", given.model]
    command += ["--loads", given.loads, "--up", up, *(word for also in given.also for word in ("--also", also))]
    command += ["--warm-turns", str(given.warm_turns), "--repeat", str(given.turns), "--out", str(visit.file)]
    command += ["--skip", "threads", "--skip", "run-batch"]
    within(command, visit.left_s(), visit)


def within(command: list[str], seconds: float, visit: Visit) -> None:
    """Run it, its output to a file of its own too; past its time it is interrupted, as with Ctrl-C."""
    log = visit.file.with_name(f"{Path(command[1]).stem if len(command) > 1 else 'run'}-{time.monotonic_ns()}.log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout=min(seconds, max(1.0, visit.left_s())))
        except subprocess.TimeoutExpired:
            print(f"{shlex.join(command[:4])} … is interrupted: its time is over", flush=True)
            process.send_signal(signal.SIGINT)
            process.wait(timeout=120)
    print(log.read_text()[-2500:], flush=True)
    visit.write(part="took", what=shlex.join(command[2:5]), code=process.returncode)


# What it says


def judge(rows: list[dict[str, Any]]) -> None:
    print_grid([row for row in rows if row["part"] == "grid" and "tokens_s" in row])
    for row in rows:
        if row["part"] == "grid" and "failed" in row:
            print(f"failed: {row['flags']}: {row['failed']}")
    for row in rows:
        if row["part"] == "tune":
            print_tune(row, rows)
    print_batch([row for row in rows if row["part"] == "batch"])


def found(rows: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Mean rate by flags and load."""
    speeds: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        speeds.setdefault((row["flags"], row["at_once"]), []).append(row["tokens_s"])
    return {key: mean(values) for key, values in speeds.items()}


def print_grid(rows: list[dict[str, Any]]) -> None:
    speeds, loads = found(rows), sorted({row["at_once"] for row in rows})
    if not rows:
        return
    best = {at: max(rate for (_, load), rate in speeds.items() if load == at) for at in loads}
    print("\n| flags | " + " | ".join(map(str, loads)) + " |\n|---|" + "---|" * len(loads))
    for flags in dict.fromkeys(row["flags"] for row in rows):
        cells = [f"{speeds[flags, at]:,.0f} ({speeds[flags, at] / best[at]:.2f})" if (flags, at) in speeds else "–"
                 for at in loads]  # fmt: skip
        print(f"| {flags or 'the plan'} | " + " | ".join(cells) + " |")
    planned = {at: speeds["", at] / best[at] for at in loads if ("", at) in speeds}
    missed = [str(at) for at, share in planned.items() if share < 0.97]
    words = f"missed at {', '.join(missed)}" if missed else "met"
    print(f"The plan reaches at least {min(planned.values(), default=0):.2f} of the best (goal 0.97: {words})")


def print_tune(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """What one run chose, what it gained, and what share of the best it is."""
    report, at = row["report"], row["at_once"]
    trials = [one for one in report["trials"] if one["score"]]
    result = report["result"]
    chosen: dict[str, Any] = result["best"]
    base: dict[str, Any] = {"choices": []}
    of = {name: mean(one["score"] for one in trials if one["setup"] == setup) for name, setup in
          (("chosen", chosen), ("base", base)) if any(one["setup"] == setup for one in trials)}  # fmt: skip
    grid_best = max((one["tokens_s"] for one in rows if one["part"] == "grid" and one.get("at_once") == at
                     and "tokens_s" in one), default=0.0)  # fmt: skip
    best = max([grid_best, *(one["score"] for one in trials)], default=0.0)
    spent_s, failed = result["spent_s"], len(report["trials"]) - len(trials)
    whole = prod(1 + len(knob["values"]) for knob in report["knobs"] if knob["kind"] != "baseline")
    each_s = spent_s / max(1, len(report["trials"]))
    made = f"{len(trials)} trials in {spent_s / 60:.1f} min, {failed} failed starts"
    print(f"\ntune at {at}: {result['outcome']}, {made}")
    print(f"  its choice: {chosen['choices'] or 'the base'}")
    for name, rate in of.items():
        print(f"  {name}: {rate:,.0f} tok/s")
    if {"chosen", "base"} <= of.keys():
        factor = of["chosen"] / of["base"]
        print(f"  gain: {factor:.2f} × (seen before: {FACTORS.get(at, 1.0)} ×)")
    if best and "chosen" in of:
        print(f"  {of['chosen'] / best:.2f} of the best of all that was measured at this load (goal 0.97)")
    share = spent_s / (whole * each_s) if each_s else 0.0
    print(f"  {share:.1%} of the time of the {whole:,} combinations of its knobs, at {each_s:.0f} s each (goal 25%);")
    print("  of those, only the sets above and its own trials were measured")


def print_batch(rows: list[dict[str, Any]]) -> None:
    for load in dict.fromkeys(row["load"] for row in rows):
        speeds: dict[str, list[float]] = {}
        for row in rows:
            if row["load"] == load:
                speeds.setdefault(row["contender"], []).append(row["tokens_s"])
        print(f"\n{load}")
        whole = mean(speeds["LLM.generate"]) if "LLM.generate" in speeds else 0.0
        for name, values in speeds.items():
            share = f"{mean(values) / whole:.2f} of LLM.generate" if whole else ""
            print(f"  {name:26} {mean(values):10,.0f} tok/s  {share:22} {', '.join(f'{one:,.0f}' for one in values)}")


def estimate(given: argparse.Namespace) -> None:
    """Minutes of each part, by what starts and runs took on an H200 with 8B."""
    sets, start = len(given.flags or SETS), given.start_s
    loads = {1: 2.6, 16: 2.8, 64: 4.1, 256: 7.5, 1024: 19.0}  # seconds of a measurement
    each = start + sum(loads.get(at, 5.0) + 3.0 for at in given.at) + 4
    rows = (
        ("grid", sets * each + 40, f"{sets} starts of {start:.0f} s (the first 40 s more), {len(given.at)} loads"),
        ("tune", len(given.tune_at) * given.tune_s, f"{len(given.tune_at)} runs of {given.tune_s / 60:.1f} min"),
        (
            "batch",
            2 * start + 10 + given.turns * 2 * (11 + 20 + 9),
            f"two engines, {given.turns} turns of three loads, two runs of 11, 20 and 9 s",
        ),
    )
    for name, seconds, why in rows:
        if name in given.parts:
            print(f"{name:6} {seconds / 60:5.1f} min   {why}")
    print(f"{'all':6} {sum(seconds for name, seconds, _ in rows if name in given.parts) / 60:5.1f} min")


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--parts", default=",".join(PARTS), type=lambda text: tuple(text.split(",")))
    parser.add_argument("--out", type=Path, default=Path("limit"))
    parser.add_argument("--minutes", type=float, default=9.5, help="of this call")
    parser.add_argument("--up", default="", help="further options of corral up and corral tune")
    parser.add_argument("--engine", default="", help="further flags of vLLM, for all")
    parser.add_argument("--flags", action="append", default=[], help="a set of the grid, instead of the usual ones")
    parser.add_argument("--at", type=whole_numbers, default=(1, 16, 64, 256, 1024), help="requests at once")
    parser.add_argument("--lengths", type=whole_numbers, default=(128, 128), help="prompt and output tokens")
    parser.add_argument("--beside", type=int, default=1, help="so many sets of the grid start at once")
    parser.add_argument("--beside-kv-gib", type=float, default=12.0, help="KV cache of each of these")
    parser.add_argument("--start-s", type=float, default=55.0, help="that a start is expected to take")
    parser.add_argument("--base", default=DIGITALOCEAN, help="flags that tuning begins with")
    parser.add_argument("--tune-at", type=whole_numbers, default=(16, 256))
    parser.add_argument("--tune-s", type=float, default=270.0, help="budget of each tuning run")
    parser.add_argument("--measure", default="4s", help="of a trial of the screen")
    parser.add_argument(
        "--loads",
        default="offline:2000x128,offline:220x64x2000,offline:8000x16",
        help="of the batches (see batch_engines.py)",
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--warm-turns", type=int, default=0, help="before them, which do not count")
    parser.add_argument("--batch-up", default="--set gpu_memory_utilization=0.45 --goal throughput")
    parser.add_argument("--also", action="append", default=[], help="one more server of batches, with these words")
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--judge", nargs="+", type=Path, metavar="FOLDER")
    return parser


def main() -> None:
    parser = options()
    given = parser.parse_args()
    if given.estimate:
        estimate(given)
        return
    if given.judge:
        judge(read(given.judge))
        return
    if not given.model or set(given.parts) - set(PARTS):
        parser.error(f"name a model, and parts of {', '.join(PARTS)}")
    visit, todo = Visit(given), dict[str, Callable[[Visit], None]](grid=grid, tune=tune, batch=batch)
    estimate(given)
    for name in given.parts:
        began = time.monotonic()
        todo[name](visit)
        visit.write(part="took", what=name, seconds=round(time.monotonic() - began, 1))
    judge(read([given.out]))


if __name__ == "__main__":
    main()
