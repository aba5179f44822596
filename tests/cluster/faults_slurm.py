"""The SLURM half of the fault table: a login host and three nodes with a real controller, and a stand-in engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.faults import LINK_S, Fault
from tests.cluster.test_slurm import PREEMPTION, SMALL, Login, logged_in
from tests.testbed.disk import small_disk
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm

PAIR = ("--nodes", "2", "--slurm", "nodelist=n1,n2", "--slurm", "requeue=false")
ONE = ("--slurm", "nodelist=n1", "--slurm", "requeue=false")
SCHEDULER = "only SLURM can tell, after SlurmdTimeout (6 s here) and its own round"
HOME_BYTES = 64 << 20
NODE_PLACES = ("/tmp", "/run", "/dev/shm")  # every node's own


@dataclass
class SlurmBed:
    """A user on the login host."""

    login: Login
    before: dict[str, set[str]]  # files of each node's own before anything ran there

    def up(self, name: str, options: Sequence[str]) -> None:
        done = self.login.corral("up", str(self.login.model), "--name", name, *SMALL, "--time", "10:00", *options)
        if done.returncode:
            raise RuntimeError(done.stderr)

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.login.status(name)
        return found

    def down(self, name: str) -> str:
        done = self.login.corral("down", name)
        return done.stderr.strip() if done.returncode else ""

    def left(self, name: str) -> list[str]:
        hosts = self.login.hosts
        mark = f"/{name}/"
        found = [
            f"process {line.split()[-1]} on {node}"
            for node in hosts.names
            for _, line in hosts.processes(node)
            if mark in line
        ]
        found += [f"job {job} in the queue" for job in self.login.queue() if job == f"corral-{name}"]
        for node in self.login.slurm.nodes:
            found += [f"{path} on {node}" for path in sorted(files_of(hosts, node) - self.before.get(node, set()))]
        folder = self.login.folder(name)
        found += [f"temporary file {path.name}" for path in folder.rglob("*") if ".tmp" in path.name]
        return found

    def agents(self, name: str, node: str) -> list[int]:
        """The agent of a deployment on a node, and its supervisor."""
        return [pid for pid, line in self.login.hosts.processes(node) if "agent.py" in line and f"/{name}/" in line]

    def engines(self, name: str, node: str) -> list[int]:
        launch = json.loads((self.login.folder(name) / "launch.json").read_text())["launch_id"]
        mark = f"CORRAL_LAUNCH={launch}".encode()
        return [
            pid
            for pid, line in self.login.hosts.processes(node)
            if "stub_engine.py" in line and mark in Path(f"/proc/{pid}/environ").read_bytes()
        ]


def files_of(hosts: Hosts, node: str) -> set[str]:
    if not hosts.pid(node):
        return set()
    look = ["find", *NODE_PLACES, "-xdev", "-type", "f", "-not", "-path", "*/munge*"]
    return set(hosts.exec(node, look, check=False).stdout.split("\n")) - {""}


@contextmanager
def bed(folder: Path) -> Iterator[SlurmBed]:
    names, home = ("login", "n1", "n2", "n3"), folder / "corral"
    with (
        small_disk(home, HOME_BYTES),
        Hosts(folder / "hosts", names, shared=[folder, home]) as hosts,
        Slurm(hosts, settings=PREEMPTION) as slurm,
        logged_in(hosts, slurm, home) as login,
    ):
        slurm.run("scontrol", "update", "PartitionName=debug", "PriorityTier=10")
        yield SlurmBed(login, {node: files_of(hosts, node) for node in slurm.nodes})


Strike = Callable[[SlurmBed, str], None]


def kill(pids: Sequence[int]) -> None:
    if not pids:
        raise RuntimeError("there is nothing to kill")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def scancel(bed: SlurmBed, name: str) -> None:
    bed.login.slurm.run("scancel", bed.login.job(name))


def kill_engine(node: str) -> Strike:
    return lambda bed, name: kill(bed.engines(name, node))


def kill_agents(node: str) -> Strike:
    return lambda bed, name: kill(bed.agents(name, node))


def kill_worker(bed: SlurmBed, name: str) -> None:
    """The agent alone; its supervisor lives on."""
    both = bed.agents(name, "n1")
    kill([pid for pid in both if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) in both])


def requeue(bed: SlurmBed, name: str) -> None:
    bed.login.slurm.run("scontrol", "requeue", bed.login.job(name))


def preempt(bed: SlurmBed, name: str) -> None:
    words = ["--job-name=rival", "-p", "debug", "-t5", "-o", "/dev/null", "--exclusive", "--nodelist=n1"]
    bed.login.slurm.run("sbatch", *words, "--wrap", "sleep 600")


def end_rival(bed: SlurmBed, name: str) -> None:
    bed.login.slurm.run("scancel", "--name=rival")


def fill_disk(bed: SlurmBed, name: str) -> None:
    """The file system of Corral's home is full for ten seconds: five heartbeats."""
    filler = bed.login.home / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    time.sleep(10)
    filler.unlink()


def power_off(node: str) -> Strike:
    return lambda bed, name: bed.login.hosts.power_off(node)


def restart(node: str) -> Strike:
    return lambda bed, name: bed.login.slurm.restart_node(node)


def still_serves(now: dict[str, Any]) -> bool:
    return now.get("state") == "ready"


FAULTS: tuple[Fault, ...] = (
    Fault("scancel", scancel, options=ONE),
    Fault("engine killed", kill_engine("n1"), options=ONE),
    Fault("head's engine of two killed", kill_engine("n1"), options=PAIR),
    Fault("second rank's engine killed", kill_engine("n2"), options=PAIR),
    Fault("agent killed, its supervisor not", kill_worker, options=ONE),
    Fault("agent and supervisor killed", kill_agents("n1"), options=ONE),
    Fault("head's agent and supervisor of two killed", kill_agents("n1"), options=PAIR),
    Fault("second rank's agent and supervisor killed", kill_agents("n2"), options=PAIR),
    Fault(
        "scontrol requeue",
        requeue,
        noticed=lambda now: now.get("state") in ("queued", "starting"),
        options=("--slurm", "nodelist=n1"),
    ),
    Fault(
        "preempted by a job of higher priority",
        preempt,
        None,
        heal=end_rival,
        options=ONE,
        why_no_goal="counted from the rival's `sbatch`",
    ),
    Fault(
        "controller (slurmctld) gone",
        lambda bed, name: bed.login.slurm.stop_controller(),
        None,
        noticed=still_serves,
        heal=lambda bed, name: bed.login.slurm.start_controller(),
        options=ONE,
        why_no_goal="nothing has failed",
    ),
    Fault(
        "disk of CORRAL_HOME full for 10 s",
        fill_disk,
        None,
        noticed=still_serves,
        options=ONE,
        why_no_goal="it serves on; looked at afterwards",
    ),
    Fault(
        "link of the second node cut",
        lambda bed, name: bed.login.hosts.cut("n2"),
        LINK_S,
        heal=lambda bed, name: bed.login.hosts.heal("n2"),
        options=PAIR,
    ),
    Fault(
        "second node powered off",
        power_off("n3"),
        LINK_S,
        heal=restart("n3"),
        options=("--nodes", "2", "--slurm", "nodelist=n1,n3", "--slurm", "requeue=false"),
    ),
    Fault(
        "only node's slurmd killed",
        lambda bed, name: bed.login.hosts.exec("n1", ["pkill", "-KILL", "-x", "slurmd"]),
        None,
        heal=restart("n1"),
        options=ONE,
        why_no_goal=SCHEDULER,
    ),
    Fault(
        "only node powered off",
        power_off("n2"),
        None,
        heal=restart("n2"),
        options=("--slurm", "nodelist=n2", "--slurm", "requeue=false"),
        why_no_goal=SCHEDULER,
    ),
    Fault(
        "time limit reached",
        lambda bed, name: None,
        None,
        options=("--slurm", "nodelist=n1", "--slurm", "signal_s=25", "--time", "1:00"),
        why_no_goal="a limit of one minute, counted from when it was ready",
    ),
)
