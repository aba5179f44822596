"""The crash test, for as long as you like: `python tests/soak_batch.py --kills 2000 [--rows N] [--runners 3]`.

Kills the runner with SIGKILL at random moments, tears its files in between, with every fault of the fake server on,
and compares the result with that of an undisturbed run, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.batch_harness import Nursery, Reins, control, fake_server, torment, torment_several, write_rows

FAULTS = ["status:code=503,p=0.03", "status:code=500,p=0.03", "reset:p=0.02", "reset:when=mid,p=0.02", "cut:p=0.02",
          "abort:p=0.02", "garbage:p=0.02", "split:p=0.05", "slow:p=0.05,factor=4"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=0, help="default: 25 per kill")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--runners", type=int, default=1, help="that work on it at once (--jobs)")
    given = parser.parse_args()
    count = given.rows or 25 * given.kills
    print(f"{given.kills} kills over {count} rows, seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as place, fake_server("--answer-tokens", "4-16") as url:
        folder = Path(place)
        rows, calm, output = folder / "rows.jsonl", folder / "calm.jsonl", folder / "out.jsonl"
        write_rows(rows, count)
        argv = ["batch", str(rows), "--url", url, "--backoff", "0.01", "--attempts", "50"]
        subprocess.run([sys.executable, "-m", "corral", *argv, "-o", str(calm)], check=True)
        control(url, "faults", {"faults": FAULTS})
        nurseries = [Nursery(folder / "log") for _ in range(given.runners)]
        words, chance = [*argv, "-o", str(output), "--concurrency", "4"], random.Random(given.seed)
        reins = Reins(url, count, given.kills)
        if given.runners == 1:
            ended = torment(nurseries[0], words, output, given.kills, chance, reins)
        else:
            words += ["--jobs", str(given.runners)]
            ended, _ = torment_several(nurseries, words, output, given.kills, chance, reins)
        for nursery in nurseries:
            nursery.close()
        same = sorted(calm.read_bytes().splitlines()) == sorted(output.read_bytes().splitlines())
        print(json.dumps({**vars(ended),
                          "byte_identical": same}))  # fmt: skip
        if ended.code or not same:
            sys.exit(1)


if __name__ == "__main__":
    main()
