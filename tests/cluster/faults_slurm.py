"""The SLURM half of the fault table: a login host and three nodes with a real controller, and a stand-in engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.faults import LINK_S, Fault
from tests.cluster.test_slurm import PREEMPTION, SMALL, Login, logged_in, request
from tests.testbed.disk import Served, served_folder, small_disk
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm

PAIR = ("--nodes", "2", "--slurm", "nodelist=n1,n2", "--slurm", "requeue=false")
ONE = ("--slurm", "nodelist=n1", "--slurm", "requeue=false")
SCHEDULER = "only SLURM can tell, after SlurmdTimeout (6 s here) and its own round"
HUNG = ("--hung", "10")
PATIENCE = "an idle engine of several is asked for a token every 5 s and has 10 s to answer"
BUSY = "with `--hung 10`, counted from a request that is never answered"
HOME_BYTES = 64 << 20
FULL_S = 10.0
GIVEN_UP_S = 60.0  # a job that ends stays in the queue until SLURM gives up a node that does not answer: 27 to 40 s
NODE_PLACES = ("/tmp", "/run", "/dev/shm")  # every node's own


@dataclass
class SlurmBed:
    """A user on the login host."""

    login: Login
    before: dict[str, set[str]]  # files of each node's own before anything ran there
    elsewhere: Login | None = None  # the same user with a home on a file system that can hang
    server: Served | None = None  # that file system
    asking: list[Any] = field(default_factory=list)  # commands that wait for an answer

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
            f"{line.split()[0]} of {line.split()[-1]} on {node}"
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
        """A deployment's engines on a node; a stand-in head is ready before its second rank has begun: waited for."""
        for _ in range(100):
            if found := self._engines(name, node):
                return found
            time.sleep(0.1)
        return []

    def _engines(self, name: str, node: str) -> list[int]:
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
    names, home, distant = ("login", "n1", "n2", "n3"), folder / "corral", folder / "net"
    with (
        small_disk(home, HOME_BYTES, 0o700),
        served_folder(distant, folder / "behind") as server,
        Hosts(folder / "hosts", names, shared=[folder, home, distant]) as hosts,
        Slurm(hosts, settings=PREEMPTION) as slurm,
        logged_in(hosts, slurm, home) as login,
        logged_in(hosts, slurm, distant / "corral", login.model) as elsewhere,
    ):
        slurm.run("scontrol", "update", "PartitionName=debug", "PriorityTier=10")
        before = {node: files_of(hosts, node) for node in slurm.nodes}
        yield SlurmBed(login, before, elsewhere, server)


def served(bed: SlurmBed) -> SlurmBed:
    """The same cluster with a home on a file system that is a process."""
    assert bed.elsewhere
    return SlurmBed(bed.elsewhere, bed.before, server=bed.server)


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


def signal_engine(node: str, number: signal.Signals) -> Strike:
    def strike(bed: SlurmBed, name: str) -> None:
        for pid in bed.engines(name, node):
            os.kill(pid, number)

    return strike


def hang_and_ask(bed: SlurmBed, name: str) -> None:
    """The engine looks well, and a request gets no token."""
    signal_engine("n1", signal.SIGUSR1)(bed, name)
    bed.asking.append(bed.login.start("complete", "Once", "--deployment", name))


def answer_nobody(bed: SlurmBed, name: str) -> None:
    for asking in bed.asking:
        asking.communicate(timeout=120)
    bed.asking.clear()


def fill_disk(bed: SlurmBed, name: str) -> None:
    with contextlib.suppress(OSError), (bed.login.home / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def empty_disk(bed: SlurmBed, name: str) -> None:
    (bed.login.home / "filler").unlink()


def fill_for_a_while(bed: SlurmBed, name: str) -> str:
    """The file system of Corral's home is full for ten seconds: five heartbeats."""
    fill_disk(bed, name)
    time.sleep(FULL_S)
    meanwhile = bed.status(name)
    empty_disk(bed, name)
    return f"while it was full: {meanwhile.get('state')}"


def kill_on_a_full_disk(bed: SlurmBed, name: str) -> None:
    fill_disk(bed, name)
    kill(bed.engines(name, "n1"))


def hang_home(bed: SlurmBed, name: str) -> str:
    """Nothing of Corral's home can be read or written for ten seconds; a `corral status` waits meanwhile."""
    assert bed.server
    endpoint = json.loads((bed.login.folder(name) / "endpoint.json").read_text())
    key = Path(endpoint["key_file"]).read_text().strip()
    bed.server.hang()
    try:
        asking = bed.login.start("status", name, "--json")
        time.sleep(FULL_S)
        answered = request(endpoint["base_url"], key)
    finally:
        bed.server.go_on()
    told = asking.communicate(timeout=120)[1].strip()
    return f"meanwhile the server answered {answered}, and `status` said: {told}"


def power_off(node: str) -> Strike:
    return lambda bed, name: bed.login.hosts.power_off(node)


def kill_slurmd(bed: SlurmBed, name: str) -> None:
    bed.login.hosts.exec("n1", ["pkill", "-KILL", "-x", "slurmd"])


def restart(node: str) -> Strike:
    return lambda bed, name: bed.login.slurm.restart_node(node)


def still_serves(now: dict[str, Any]) -> bool:
    return now.get("state") == "ready"


FAULTS: tuple[Fault, ...] = (
    Fault("scancel", scancel, options=ONE),
    Fault("engine killed", kill_engine("n1"), options=ONE),
    Fault("engine ends with code 0", signal_engine("n1", signal.SIGUSR2), options=ONE),
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
        fill_for_a_while,
        None,
        noticed=still_serves,
        options=ONE,
        why_no_goal="it serves on",
    ),
    Fault("engine killed on a full disk", kill_on_a_full_disk, heal=empty_disk, options=ONE),
    Fault(
        "file system of CORRAL_HOME hangs for 10 s",
        hang_home,
        None,
        noticed=still_serves,
        options=ONE,
        why_no_goal="it serves on",
        on=served,
    ),
    Fault("head's engine of two stopped (SIGSTOP)", signal_engine("n1", signal.SIGSTOP), LINK_S, options=PAIR),
    Fault("second rank's engine stopped (SIGSTOP)", signal_engine("n2", signal.SIGSTOP), LINK_S, options=PAIR),
    Fault(
        "only engine stopped (SIGSTOP)",
        signal_engine("n1", signal.SIGSTOP),
        None,
        options=(*ONE, *HUNG),
        why_no_goal="with `--hung 10`",
    ),
    Fault(
        "head's engine of two hung: /health says 200, no token comes",
        signal_engine("n1", signal.SIGUSR1),
        None,
        options=PAIR,
        why_no_goal=PATIENCE,
    ),
    Fault(
        "only engine hung: /health says 200, no token comes",
        hang_and_ask,
        None,
        heal=answer_nobody,
        options=(*ONE, *HUNG),
        why_no_goal=BUSY,
    ),
    Fault(
        "link of the second node cut",
        lambda bed, name: bed.login.hosts.cut("n2"),
        LINK_S,
        heal=lambda bed, name: bed.login.hosts.heal("n2"),
        options=PAIR,
        down_meanwhile=True,
        cleared_s=GIVEN_UP_S,
    ),
    Fault(
        "link of the head cut",
        lambda bed, name: bed.login.hosts.cut("n1"),
        LINK_S,
        heal=lambda bed, name: bed.login.hosts.heal("n1"),
        options=PAIR,
        down_meanwhile=True,
        cleared_s=2 * GIVEN_UP_S,
        out_of_reach=True,
        why_no_goal="while it is cut, SLURM's own `srun` stays on n1, and goes once the node is back",
    ),
    Fault(
        "second node powered off",
        power_off("n3"),
        LINK_S,
        heal=restart("n3"),
        cleared_s=GIVEN_UP_S,
        options=("--nodes", "2", "--slurm", "nodelist=n1,n3", "--slurm", "requeue=false"),
    ),
    Fault(
        "only node's slurmd killed",
        kill_slurmd,
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
