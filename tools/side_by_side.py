"""Runs several `make` targets at once (`make test`), and keeps the output of each together.

    python tools/side_by_side.py lint,docs fuzz,e2e

Each argument is a lane; the targets of a lane run one after the other. A target's output goes to
.scratch/make/TARGET.txt and is printed when the target ends; once a minute a line says which are running. After a
failure nothing more is started, the running targets are waited for, and the exit code is 1. Ctrl-C reaches every
target, as it does under `make` alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LOGS = Path(".scratch") / "make"
LINE_EVERY_S = 60


@dataclass
class Target:
    """One target that has been started."""

    name: str
    began_s: float
    log: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, name: str) -> Target:
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"{name}.txt"
        with log.open("wb") as out:
            process = subprocess.Popen(["make", name], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        return cls(name, time.monotonic(), log, process)

    def took(self) -> str:
        return f"{time.monotonic() - self.began_s:,.0f} s"

    def report(self) -> None:
        """Print its output, and how it ended."""
        code = self.process.returncode
        say(f"{self.log.read_text(errors='replace').rstrip()}\n=== {self.name}: ", end="")
        say(f"passed after {self.took()}" if code == 0 else f"FAILED (exit code {code}) after {self.took()}")


def say(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def run(lanes: list[list[str]]) -> int:
    """Run until every lane is done or, after a failure, until the running targets have ended."""
    running: dict[int, Target] = {}
    failed = False
    try:
        last_line_s = time.monotonic()
        while True:
            for lane, names in enumerate(lanes):
                if lane not in running and names and not failed:
                    running[lane] = Target.start(names.pop(0))
                    say(f"=== {running[lane].name}: started; its output goes to {running[lane].log}")
            if not running:
                return int(failed)
            for lane in [lane for lane, target in running.items() if target.process.poll() is not None]:
                target = running.pop(lane)
                target.report()
                failed |= target.process.returncode != 0
            if time.monotonic() - last_line_s > LINE_EVERY_S:
                last_line_s = time.monotonic()
                say("=== running: " + ", ".join(f"{one.name} for {one.took()}" for one in running.values()))
            time.sleep(0.2)
    except KeyboardInterrupt:  # the terminal sent it to the targets too, and they clean up
        end(running.values())
        raise
    except BaseException:
        for target in running.values():
            target.process.terminate()  # `make` forwards it
        end(running.values())
        raise


def end(targets: Iterable[Target]) -> None:
    for target in targets:
        target.process.wait()
        target.report()


def main(arguments: list[str]) -> int:
    os.environ.pop("MAKELEVEL", None)  # the targets print what they would print under `make TARGET`
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run([lane.split(",") for lane in arguments])
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
