"""How long `corral ps`, `status` and `down` take while something does not answer. As root, on simulated hosts.

    python -m tests.cluster.command_times [ssh] [slurm] [--only WORD]...

A fleet on four hosts over ssh, with a node switched off; a fleet of two jobs and a single job on SLURM, with a node
switched off, a `squeue` that takes 8 s, and without a controller. Each condition has a fleet of its own, because it
ends with `down`. The exit code is 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.cluster.fleet_faults import open_herd
from tests.cluster.test_slurm_handover import SMALL, Cluster
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm

GOALS_S = {"ps": 2.0, "status": 2.0, "down": 10.0}
SLOW_S = 8
Corral = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Timed:
    """One command under one condition."""

    condition: str
    words: tuple[str, ...]
    seconds: float
    code: int
    text: str
    load: float  # of the machine, over the last minute

    @property
    def is_late(self) -> bool:
        return self.seconds > GOALS_S[self.words[0]]


def time_commands(condition: str, corral: Corral, fleet: str, member: str) -> Iterator[Timed]:
    """The commands in the order in which somebody types them who wonders what is wrong."""
    for words in (("ps",), ("ps",), ("status", fleet), ("status", member), ("down", fleet), ("ps",)):
        began = time.monotonic()
        done = corral(*words)
        seconds, lines = time.monotonic() - began, (done.stdout + done.stderr).strip().splitlines()
        load = os.getloadavg()[0]
        yield Timed(condition, words, seconds, done.returncode, "\n".join(lines), load)


def nothing() -> None:
    """The healthy case."""


# over ssh


def on_ssh(only: list[str]) -> Iterator[Timed]:
    with TemporaryDirectory(prefix="times-") as name, open_herd(Path(name)) as herd:
        conditions = {"ssh, healthy": nothing, "ssh, a node off": lambda: herd.hosts.power_off("n2")}
        for condition, begin in conditions.items():
            if only and not any(word in condition for word in only):
                continue
            herd.up()
            member = next(one for one in herd.states() if herd.host_of(one) == "n2")
            begin()
            yield from time_commands(condition, herd.corral, "herd", member)
            if not herd.hosts.pid("n2"):
                herd.hosts.power_on("n2")
            herd.corral("down", "--all")


# on SLURM


class SlowCluster(Cluster):
    """A cluster whose `squeue` may be slow for the commands of its user."""

    slow = False

    @property
    def env(self) -> dict[str, str]:
        first = f"{self.home.parent}/slow:" if self.slow else ""
        return {**super().env, "PATH": first + os.environ["PATH"]}

    def write_slow_squeue(self) -> None:
        path = self.home.parent / "slow" / "squeue"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\nsleep {SLOW_S}\nexec /usr/bin/squeue "$@"\n')
        path.chmod(0o755)


@contextmanager
def open_slow_cluster(folder: Path) -> Iterator[SlowCluster]:
    with Hosts(folder / "hosts", ("login", "n1", "n2"), shared=[folder]) as hosts, Slurm(hosts) as slurm:
        cluster = SlowCluster(hosts, slurm, folder)
        cluster.write_slow_squeue()
        yield cluster
        cluster.corral("down", "--all")


def on_slurm(only: list[str]) -> Iterator[Timed]:
    with TemporaryDirectory(prefix="times-") as name, open_slow_cluster(Path(name)) as cluster:

        def slow() -> None:
            cluster.slow = True

        conditions = {
            "SLURM, healthy": nothing,
            f"SLURM, `squeue` takes {SLOW_S} s": slow,
            "SLURM, no controller": cluster.slurm.stop_controller,
            "SLURM, a node off": lambda: cluster.hosts.power_off("n2"),
        }
        for condition, begin in conditions.items():
            if only and not any(word in condition for word in only):
                continue
            for words in (("--name", "solo"), ("--name", "herd", "--replicas", "2", "--env", "LOAD_S=0.2")):
                done = cluster.corral("up", str(cluster.model), *words, *SMALL, "--time", "30:00", "--json")
                assert done.returncode == 0, done.stderr
            begin()
            yield from time_commands(condition, cluster.corral, "herd", "solo")
            cluster.slow = False
            if cluster.slurm.run("pgrep", "-x", "slurmctld", check=False).returncode:
                cluster.slurm.start_controller()
            cluster.corral("down", "--all")
            if not cluster.hosts.pid("n2"):
                cluster.slurm.restart_node("n2")
                cluster.slurm.wait_idle(120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("beds", nargs="*", metavar="BED", help="ssh or slurm")
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    parser.add_argument("--text", action="store_true", help="also what each command printed")
    given = parser.parse_args()
    beds = {"ssh": on_ssh, "slurm": on_slurm}
    rows = []
    for bed in given.beds or beds:
        for row in beds[bed](given.only):
            rows.append(row)
            print(
                json.dumps([row.condition, *row.words, round(row.seconds, 1), row.code]), file=sys.stderr, flush=True
            )
            if given.text:
                print(row.text, file=sys.stderr, flush=True)
    print("| condition | command | took | goal | exit code | load |\n|---|---|---|---|---|---|")
    for row in rows:
        goal = f"{GOALS_S[row.words[0]]:g} s"
        cells = (row.condition, f"`{' '.join(row.words)}`", f"{row.seconds:.1f} s", goal, row.code, f"{row.load:.1f}")
        print(f"| {' | '.join(map(str, cells))} |")
    sys.exit(any(row.is_late for row in rows))


if __name__ == "__main__":
    main()
