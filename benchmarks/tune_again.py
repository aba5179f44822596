"""The same tuning several times over: is it the same choice each time?

    python benchmarks/tune_again.py MODEL [--runs 5] [--budget 150s] [--measure 3s] [--concurrency 16] \
        [--lengths 64,32] [--up "--context 512"] [--base "--max-num-seqs 2"] [--out FOLDER] [--lock FILE]

Each run is a `corral tune` of its own from the same flags, on the machine as it is: the load average before and after
is written beside its choice. With `--lock` each run waits for that file's lock, so that other work may come between
runs. Prints the choices, and how often the most frequent one was made; "no difference" is a choice. Runs whose result
is in FOLDER/runs.jsonl already are not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from process import CORRAL, corral_json


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def one_run(given: argparse.Namespace, number: int) -> dict[str, Any]:
    name = f"again-{os.getpid()}-{number}"
    prompt, output = given.lengths.split(",")
    command = [*CORRAL, "tune", given.model, "--name", name, "--concurrency", str(given.concurrency)]
    command += ["--input-len", prompt, "--output-len", output, "--measure", given.measure, "--budget", given.budget]
    words = [*shlex.split(given.up), *(["--", *shlex.split(given.base)] if given.base else [])]
    with locked(given.lock):
        before, began = os.getloadavg()[0], time.monotonic()
        subprocess.run([*command, *words], check=False)
        took, after = time.monotonic() - began, os.getloadavg()[0]
    report = corral_json("tune", "report", name, "--json")
    result = report["result"]
    return {
        "run": number,
        "outcome": result["outcome"],
        "choice": " ".join(f"{knob}={value}" for knob, value in result["best"]["choices"]) or "the base",
        "gain": result["gain"],
        "noise": round(result["noise"], 3),
        "trials": [
            [one["purpose"], one["setup"]["choices"], one["score"], one["took_s"]] for one in report["trials"]
        ],
        "took_s": round(took, 1),
        "load": [round(before, 1), round(after, 1)],
    }


def table(rows: list[dict[str, Any]]) -> None:
    print("| run | trials | choice | gain (95%) | starts differ by | load average |\n|---|---|---|---|---|---|")
    for row in rows:
        gain = row["gain"]
        words = f"{gain['value']:+.0%} ({gain['low']:+.0%} to {gain['high']:+.0%})" if gain else "–"
        load = f"{row['load'][0]} to {row['load'][1]}"
        found = f"{row['outcome']}: {row['choice']} | {words}"
        print(f"| {row['run']} | {len(row['trials'])} | {found} | {row['noise']:.0%} | {load} |", flush=True)
    if rows:
        [(choice, times)] = Counter(row["choice"] for row in rows).most_common(1)
        print(f"{choice}: {times} of {len(rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--budget", default="150s")
    parser.add_argument("--measure", default="3s")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--lengths", default="64,32")
    parser.add_argument("--up", default="", help="further options of corral tune")
    parser.add_argument("--base", default="--max-num-seqs 2", help="flags that tuning begins with")
    parser.add_argument("--out", type=Path, default=Path("tune-again"))
    parser.add_argument("--lock", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file: Path = given.out / "runs.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for number in range(len(rows) + 1, given.runs + 1):
        rows.append(one_run(given, number))
        with file.open("a") as out:
            out.write(json.dumps(rows[-1]) + "\n")
        table(rows)


if __name__ == "__main__":
    main()
