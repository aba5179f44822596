"""What commands cost at two checkouts, in turns: `python benchmarks/command_time.py OLDER [NEWER] [--runs 20]`.

Both run in the environment of this script, so that only their source differs. Measured is processor time, user and
system together, because wall time on a busy machine says little; alternating runs share whatever else it does.
Prints best and median of each command and the ratio NEWER / OLDER of both; asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

COMMANDS = (
    ("--help",),
    ("plan", "llama-3.1-8b", "--gpus", "1xH200"),
    ("plan", "llama-3.1-405b", "--gpus", "8xH100", "--nodes", "4", "--explain"),
    ("ps",),
)


def processor_s(checkout: Path, words: tuple[str, ...], env: dict[str, str]) -> float:
    """User and system seconds of one command."""
    command = [sys.executable, "-m", "corral", *words]
    env = {**env, "PYTHONPATH": str(checkout / "src")}
    process = subprocess.Popen(command, cwd=checkout, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}: {errors.decode().strip()}")
    return used.ru_utime + used.ru_stime


def compared(older: Path, newer: Path, words: tuple[str, ...], env: dict[str, str], runs: int) -> str:
    """One row: milliseconds at both checkouts, and their ratios."""
    times: dict[Path, list[float]] = {older: [], newer: []}
    for checkout in times:
        processor_s(checkout, words, env)  # compiles its modules
    for run in range(runs):
        for checkout in (older, newer) if run % 2 else (newer, older):
            times[checkout].append(1000 * processor_s(checkout, words, env))
    (best, middle), (new_best, new_middle) = ((min(times[one]), median(times[one])) for one in (older, newer))
    figures = f"{best:>7.0f} {middle:>7.0f}   {new_best:>7.0f} {new_middle:>7.0f}"
    return f"{' '.join(words):<62} {figures}   {new_best / best:>5.2f} {new_middle / middle:>6.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("older", type=Path)
    parser.add_argument("newer", type=Path, nargs="?", default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--runs", type=int, default=20)
    given = parser.parse_args()
    print(f"{'ms of processor time':<62} {'older: best, median':>15}   {'newer: best, median':>15}   {'ratio':>8}")
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "CORRAL_HOME": home, "HF_HUB_OFFLINE": "1"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling would be most of what is measured
        for words in COMMANDS:
            print(compared(given.older.absolute(), given.newer.absolute(), words, env, given.runs), flush=True)


if __name__ == "__main__":
    main()
