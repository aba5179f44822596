"""What the order of rows is worth: time of one batch in input order and longest-first, same server, same rows.

The fake server runs 16 sequences at once, a token every 4 ms; row lengths are drawn from a heavy-tailed distribution
(8 to 512 tokens), a long one among the last in input order, as happens to everybody.

    python benchmarks/batch_order.py [--rows 400] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    command = [sys.executable, "-m", "corral", "fake-server", "--until-eof", "--answer-tokens", "all",
               "--max-seqs", "16", "--itl-ms", "4"]  # fmt: skip
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        url = json.loads(server.stdout.readline())["url"]
        lengths = [min(512, int(8 * chance.paretovariate(1.0))) for _ in range(given.rows)]
        lengths[-3] = 512
        ideal = 0.004 * max(sum(lengths) / 16, max(lengths))
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.jsonl"
            lines = [json.dumps({"prompt": f"row {n}", "max_tokens": length}) for n, length in enumerate(lengths)]
            rows.write_text("\n".join(lines) + "\n")
            print(f"{'order':14} {'s':>7} {'of the ideal':>13}   (ideal {ideal:.2f} s)")
            for order in ("input", "longest-first"):
                argv = ["batch", str(rows), "-o", f"{folder}/{order}.jsonl", "--url", url, "--order", order, "--json"]
                done = subprocess.run(
                    [sys.executable, "-m", "corral", *argv], capture_output=True, text=True, check=True
                )
                took = json.loads(done.stdout.splitlines()[-1])["wall_s"]
                print(f"{order:14} {took:7.2f} {took / ideal:13.2f}", flush=True)
    finally:
        server.stdin.close()
        server.wait(10)


if __name__ == "__main__":
    main()
