"""Short measurements of one server, for `corral simulate validate`: three to fit, the others to hold out.

    python benchmarks/simulate_runs.py --set h200-8b --deployment NAME --into FOLDER     # about 5 minutes
    python benchmarks/simulate_runs.py --thin FOLDER --into RUNS.tar.gz               # what a fit needs
    corral simulate validate FOLDER/*

The runs vary what a simulation is asked about: rates, lengths, concurrencies, bursts, shared prefixes. The sets are
sized for 8B in bf16 and 70B in FP8 on one H200, and for a 135M model on a few cores. The server is kept busy for
`--warm` seconds before, in case it is slower when it was just started; the three to fit to are made first, in the
middle and last. On a shared machine, whose pace changes from minute to minute, `--passes 3` makes those runs again in
which steps took longer or shorter than the same kind of step in the others; what is kept is decided by that alone,
whatever is predicted. Every run is a run of `corral bench` with its rows; `--thin` keeps of a
row's times the first and the last token, on which alone the fit rests.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import tarfile
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log2
from pathlib import Path
from statistics import median

from corral.client.client import run
from corral.client.endpoint import Endpoint
from corral.lab.bench import store
from corral.lab.bench.measure import Bench
from corral.lab.bench.metrics import read_rows, write_rows
from corral.lab.bench.spec import LoadShape, Spec, Workload
from corral.serve.resolve import resolve

SHARED = "prefix_repetition"


def spec_of(seconds: float, input_len: int, output_len: int, most: int = 2000, **given: object) -> Spec:
    """One measurement; a rate decides how many requests there are, a closed loop sends for `seconds`."""
    load_keys = {"concurrency", "rate", "arrival", "burstiness"}
    load = LoadShape(seconds=seconds, **{k: v for k, v in given.items() if k in load_keys})  # type: ignore[arg-type]
    count = max(1, round(load.rate * seconds)) if load.rate else most
    work = {k: v for k, v in given.items() if k not in load_keys}
    workload = Workload(num_prompts=count, input_len=input_len, output_len=output_len, **work)  # type: ignore[arg-type]
    return Spec(workload, load, warmup=min(16, load.concurrency or 4), percentiles=(50.0, 90.0, 95.0, 99.0))


def gpu(
    s: float, crowds: tuple[int, int, int, int, int], rates: tuple[float, ...], rare: float, often: float
) -> dict[str, Spec]:
    """Crowds: a few, some, the one to fit to (more than seats), many with short and many with long answers."""
    few, some, fit, short, long = crowds
    middle, hard, shared = rates[2] * 0.4, rates[2] * 0.24, rates[2] * 0.48
    found = {
        "fit-1-alone": spec_of(s, 512, 128, 40, concurrency=1, range_ratio=0.5),
        "fit-2-crowd": spec_of(s, 256, 128, 4000, concurrency=fit, range_ratio=0.5),
        "fit-3-rate": spec_of(s, 1024, 128, rate=middle, range_ratio=0.9),
        f"held-01-at-once-{few}": spec_of(s, 512, 128, concurrency=few),
        f"held-02-at-once-{some}": spec_of(s, 512, 128, concurrency=some, range_ratio=0.5),
        f"held-03-at-once-{short}": spec_of(s, 512, 64, 4000, concurrency=short, range_ratio=0.3),
        "held-04-long-prompts": spec_of(s, 6000, 64, rate=rare, range_ratio=0.3),
        "held-05-short": spec_of(s, 64, 48, rate=often, range_ratio=0.5),
        "held-06-bursts": spec_of(s, 512, 128, rate=middle, arrival="gamma", burstiness=0.25),
        "held-07-hard-bursts": spec_of(s, 256, 128, rate=hard, arrival="gamma", burstiness=0.1),
        "held-08-shared-prefix": spec_of(s, 128, 64, rate=shared, prefix_len=2048, num_prefixes=8, dataset=SHARED),
        f"held-09-at-once-{long}": spec_of(s, 256, 128, 4000, concurrency=long, range_ratio=0.5),
    }  # fmt: skip
    return found | {f"held-{n}-rate-{rate:g}": spec_of(s, 512, 128, rate=rate) for n, rate in enumerate(rates, 10)}


def h200_8b(s: float) -> dict[str, Spec]:
    return gpu(s, (8, 32, 160, 192, 256), (10.0, 30.0, 50.0, 70.0, 90.0, 110.0), 4.0, 60.0)


def h200_70b(s: float) -> dict[str, Spec]:
    return gpu(s, (4, 16, 160, 96, 128), (2.0, 4.0, 6.0, 8.0, 10.0, 12.0), 0.5, 10.0)


def cpu(s: float) -> dict[str, Spec]:
    return {
        "fit-1-alone": spec_of(s, 64, 16, 200, concurrency=1, range_ratio=0.5),
        "fit-2-crowd": spec_of(s, 64, 24, 600, concurrency=32, range_ratio=0.5),
        "fit-3-rate": spec_of(s, 160, 12, rate=1.0, range_ratio=0.9),
        "held-01-at-once-2": spec_of(s, 64, 16, 400, concurrency=2),
        "held-02-at-once-4": spec_of(s, 64, 24, 400, concurrency=4, range_ratio=0.5),
        "held-03-at-once-12": spec_of(s, 48, 16, 600, concurrency=12, range_ratio=0.3),
        "held-04-rate-1": spec_of(s, 64, 16, rate=1.0),
        "held-05-rate-2": spec_of(s, 64, 16, rate=2.0),
        "held-06-rate-2.5": spec_of(s, 64, 16, rate=2.5),
        "held-07-rate-3": spec_of(s, 64, 16, rate=3.0),
        "held-08-long-prompts": spec_of(s, 400, 8, rate=0.5, range_ratio=0.3),
        "held-09-short": spec_of(s, 16, 8, rate=4.0, range_ratio=0.5),
        "held-10-bursts": spec_of(s, 64, 16, rate=1.8, arrival="gamma", burstiness=0.25),
        "held-11-hard-bursts": spec_of(s, 64, 16, rate=1.4, arrival="gamma", burstiness=0.1),
        "held-12-shared-prefix": spec_of(s, 32, 12, rate=1.5, prefix_len=256, num_prefixes=2, dataset=SHARED),
        "held-13-rate-3.5": spec_of(s, 64, 16, rate=3.5),
        "held-14-rate-4.5": spec_of(s, 64, 16, rate=4.5),
        "held-15-at-once-24": spec_of(s, 64, 16, 600, concurrency=24),
        "held-16-rate-5.5": spec_of(s, 64, 16, rate=5.5),
        "held-17-rate-6.5": spec_of(s, 64, 16, rate=6.5),
        "held-18-rate-8": spec_of(s, 64, 16, rate=8.0),
    }  # fmt: skip


SETS = {"h200-8b": h200_8b, "h200-70b": h200_70b, "cpu": cpu}


def spread(names: list[str]) -> list[str]:
    """The runs to fit to first, in the middle and last: machines get quicker and slower within such a set."""
    fits, held = ([name for name in names if name.startswith("fit") is wanted] for wanted in (True, False))
    places = {round(n * len(held) / max(1, len(fits) - 1)): name for n, name in enumerate(fits)}
    return [one for n, name in enumerate([*held, ""]) for one in (places.get(n, ""), name) if one]


@dataclass(frozen=True)
class Attempt:
    """One measurement of one load; what its steps without prompts took, by how many were decoding (its logarithm)."""

    name: str
    folder: Path
    steps_s: dict[int, list[float]]

    def pace(self, usual_s: dict[int, float]) -> float:
        """How long a step took, against the same kind of step in all attempts."""
        shares = [one / usual_s[size] for size, times in self.steps_s.items() if size in usual_s for one in times]
        return median(shares) if shares else 1.0


def attempt_of(folder: Path) -> Attempt:
    """Times between two tokens of a request between which no prompt was computed, by the size of the crowd."""
    rows = [row for row in read_rows(folder / "rows.jsonl") if row.chunk_ns]
    firsts, lasts = sorted(row.chunk_ns[0] for row in rows), sorted(row.chunk_ns[-1] for row in rows)
    steps_s: dict[int, list[float]] = {}
    for row in rows:
        for before, after in pairwise(row.chunk_ns):
            begun = bisect_right(firsts, before)
            if begun == bisect_right(firsts, after + (after - before) // 4):  # tokens of one step come one by one
                running = begun - bisect_left(lasts, after)
                steps_s.setdefault(round(6 * log2(running)), []).append((after - before) / 1e9)
    return Attempt(folder.name, folder, steps_s)


def usual(attempts: list[Attempt]) -> dict[int, float]:
    """What a step of so many sequences takes in the median of the attempts that had such steps, three at least."""
    seen: dict[int, list[float]] = {}
    for one in attempts:
        for size, times in one.steps_s.items():
            seen.setdefault(size, []).append(median(times))
    return {size: median(times) for size, times in seen.items() if len(times) >= 3}


def steadiest(attempts: list[Attempt]) -> dict[str, tuple[Attempt, float]]:
    """Of each load the attempt in which the machine was nearest to its usual pace, and that pace."""
    usual_s, found = usual(attempts), dict[str, tuple[Attempt, float]]()
    for one in attempts:
        pace = one.pace(usual_s)
        if one.name not in found or abs(pace - 1) < abs(found[one.name][1] - 1):
            found[one.name] = one, pace
    return found


async def measure(endpoint: Endpoint, specs: dict[str, Spec], warm: Spec | None, given: argparse.Namespace) -> None:
    """Every load once; then those again in which the machine had another pace than usual."""
    tries, began = given.into.with_name(f"{given.into.name}-tries"), time.monotonic()
    attempts = [attempt_of(rows.parent) for rows in sorted(tries.glob("*/*/rows.jsonl"))]  # of a call before
    number = len({one.folder.parent for one in attempts})
    async with Bench(endpoint) as bench:
        if warm is not None:
            await bench.run(warm, store.new_folder("warm", tries, "warm"))
        for turn in range(number, number + given.passes):
            for name in unsteady([*specs], attempts, given.steady):
                seed = specs[name].workload.seed + 100 * turn  # prompts are cached
                spec = replace(specs[name], workload=replace(specs[name].workload, seed=seed))
                folder = store.new_folder(name, tries / str(turn), name)
                done = await bench.run(spec, folder)
                attempts.append(attempt_of(folder))
                s, load = done.run.summary, os.getloadavg()[0]
                print(
                    f"{time.monotonic() - began:6.1f} s  {name:22}  {s.completed:5} requests, {s.failed} failed,"
                    f" {s.output_throughput:8.1f} tok/s, TTFT P50 {s.ttft.median:8.1f} ms,"
                    f" E2EL {s.e2el.mean:9.1f} ms, {done.run.verdict}, load average {load:.1f}",
                    flush=True,
                )
    keep(attempts, given.into)


def unsteady(names: list[str], attempts: list[Attempt], allowed: float) -> list[str]:
    """The loads of which no attempt was made at the usual pace."""
    chosen = steadiest(attempts)
    return [name for name in names if name not in chosen or abs(chosen[name][1] - 1) > allowed]


def keep(attempts: list[Attempt], into: Path) -> None:
    for name, (one, pace) in steadiest(attempts).items():
        shutil.copytree(one.folder, into / name)
        print(f"  {name:22} steps took {pace:.2f} of the usual, pass {one.folder.parent.name}")


def thin(folder: Path, into: Path) -> None:
    """The runs with two times of each request, without the server's samples, as one archive."""
    with tarfile.open(into, "w:gz", compresslevel=9) as archive:
        for one in sorted(path for path in folder.iterdir() if (path / "run.json").is_file()):
            rows = read_rows(one / "rows.jsonl")
            for row in rows:
                row.chunk_ns = [row.chunk_ns[0], row.chunk_ns[-1]] if len(row.chunk_ns) > 1 else row.chunk_ns
            small = one / "rows.thin"
            write_rows(small, rows)
            document = json.loads((one / "run.json").read_text()) | {"heartbeat_ms": []}
            for name, data in (
                ("rows.jsonl", small.read_bytes()),
                ("run.json", json.dumps(document).encode()),
            ):
                entry = tarfile.TarInfo(f"{one.name}/{name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
            small.unlink()
    print(f"{into}: {into.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=list(SETS), default="h200-8b")
    parser.add_argument("--deployment", help="the deployment to measure (default: the only ready one)")
    parser.add_argument("--url", help="a server that Corral did not start")
    parser.add_argument("--key-file")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which each run sends requests")
    parser.add_argument(
        "--warm", type=float, default=20.0, metavar="SECONDS", help="of all lengths before the first run"
    )
    parser.add_argument("--seed", type=int, default=1000, help="a second time needs another: prompts are cached")
    parser.add_argument("--passes", type=int, default=1, help="the second and later ones only repeat")
    parser.add_argument("--steady", type=float, default=0.04, help="by which the machine's pace may be off in a run")
    parser.add_argument("--only", default="", help="runs whose name contains one of these, with commas")
    parser.add_argument("--thin", type=Path, metavar="FOLDER", help="pack runs that were measured before")
    parser.add_argument("--into", type=Path, required=True)
    given = parser.parse_args()
    if given.thin:
        thin(given.thin, given.into)
        return
    endpoint = resolve(given.deployment, url=given.url, key_file=given.key_file)
    wanted = given.only.split(",")
    specs = {
        name: replace(spec, workload=replace(spec.workload, seed=given.seed + number), label=name)
        for number, (name, spec) in enumerate(SETS[given.set](given.seconds).items())
        if any(part in name for part in wanted)
    }
    specs = {name: specs[name] for name in spread([*specs])}
    crowd = SETS[given.set](given.warm)["fit-2-crowd"]
    mixed = replace(crowd, workload=replace(crowd.workload, seed=given.seed - 1, range_ratio=0.9), label="warm")
    run(measure(endpoint, specs, mixed if given.warm else None, given))


if __name__ == "__main__":
    main()
