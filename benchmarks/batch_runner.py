"""The runner's own ceiling: rows per second, memory and resume time of `corral batch` against the fake server.

The fake server answers at once, in a process of its own. Figures per size: rows/s of a first run (check, send,
commit), rows per CPU second of the runner (what one core gives when the server is not the limit), peak memory; then
the time that a second run of the finished job takes (the resume scan: index, ledger, files).

    python benchmarks/batch_runner.py [--rows 20000 --rows 1000000] [--tokens 8]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

from process import CORRAL, fake_server


def write_rows(path: Path, count: int, tokens: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            prompt = f"Row {number}. The quick brown fox jumps over the lazy dog; say what it thinks of that."
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
            row = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")


def measured(*argv: str) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak MB of one `corral` command."""
    began = time.perf_counter()
    process = subprocess.Popen([*CORRAL, *argv], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"corral {argv[0]} ended with {process.returncode}: {said[-2000:]}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--folder", help="Where files are written (default: a temporary folder).")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    with fake_server("--no-prefix-cache", "--answer-tokens", f"{given.tokens}-{given.tokens}") as server:
        print(f"{'rows':>10} {'rows/s':>8} {'rows/s per core':>16} {'peak MB':>8} {'resume s':>9} {'its MB':>7}")
        for count in given.rows or [20_000]:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                rows, output = Path(folder) / "rows.jsonl", Path(folder) / "out.jsonl"
                write_rows(rows, count, given.tokens)
                argv = ["batch", str(rows), "-o", str(output), "--url", server.url]
                wall, cpu, peak = measured(*argv)
                with output.open("rb") as file:
                    found = sum(1 for _ in file)
                assert found == count, f"{found} lines for {count} rows"
                again, _, peak_again = measured(*argv)
                first = f"{count:10,} {count / wall:8,.0f} {count / cpu:16,.0f} {peak:8.0f}"
                print(f"{first} {again:9.2f} {peak_again:7.0f}", flush=True)


if __name__ == "__main__":
    main()
