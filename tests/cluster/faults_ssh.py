"""The ssh half of the fault table: two nodes with real sshd that share no files, and a stand-in engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.faults import LINK_S, PROCESS_S, Fault
from tests.cluster.ssh_bench import NODES, Bench, open_bench

NODE_PLACES = ("/tmp", "/run", "/dev/shm")  # every node's own, as is the home there
OF_THE_TESTBED = ("/sshd", "/lock")
GOES_ON = "the server lives on, as it must"


@dataclass
class SshBed:
    """A user's machine before two nodes.

    Until `down`, a deployment that failed keeps its journal, its logs and its agent's source on the nodes, for
    `corral status` and `corral logs`; processes, keys and temporary files count as left behind even then.
    """

    bench: Bench
    node_home: Path
    ended: set[str] = field(default_factory=set)  # those that `down` was run for

    def up(self, name: str, options: Sequence[str]) -> None:
        done = self.bench.run("up", "--on", "apart", str(self.bench.model), "--name", name, *options)
        if done.returncode:
            raise RuntimeError(done.stderr)

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.bench.status(name)
        return found

    def down(self, name: str) -> str:
        done = self.bench.run("down", name)
        self.ended.add(name)
        return done.stderr.strip() if done.returncode else ""

    def left(self, name: str) -> list[str]:
        """Processes of it anywhere, its tunnel here, and files of the nodes' own: keys, parts, temporary ones."""
        hosts = self.bench.hosts
        found = [f"process {line.split()[-1]} on {host}" for host in NODES for _, line in hosts.processes(host)]
        for host in NODES:
            files = self._files(host)
            found += [f"{path} on {host}" for path in files if name in self.ended or is_left(path)]
        return found

    def _files(self, host: str) -> list[str]:
        if not self.bench.hosts.pid(host):
            return []
        look = ["find", *NODE_PLACES, str(self.node_home / "nodes"), "-xdev", "-type", "f"]
        paths = self.bench.hosts.exec(host, look, check=False).stdout.split("\n")
        return sorted(path for path in paths if path and not any(word in path for word in OF_THE_TESTBED))

    def pids(self, host: str, word: str) -> list[int]:
        return [pid for pid, line in self.bench.hosts.processes(host) if word in line]

    def holder(self, name: str) -> int:
        """The process that holds the tunnel's near end."""
        return int(json.loads((self.bench.folder(name) / "tunnel.json").read_text())["holder"]["pid"])


def is_left(path: str) -> bool:
    """Whether a file on a node is none that a failed deployment may keep there."""
    file = Path(path)
    return "nodes" not in file.parts or file.name in ("key", "token") or file.name.endswith(".tmp")


@contextmanager
def bed(folder: Path) -> Iterator[SshBed]:
    with open_bench(folder) as bench:
        home = folder / "local"  # on every node: empty, and its own
        profiles = Path(bench.env["HOME"]) / ".config/corral/profiles"
        profiles.mkdir(parents=True)
        text = f'target = "ssh"\n[ssh]\nhosts = {json.dumps(NODES)}\n[storage]\nhome = "{home}"\n'
        (profiles / "apart.toml").write_text(text)
        yield SshBed(bench, home)


Strike = Callable[[SshBed, str], None]


def kill(pids: Sequence[int]) -> None:
    if not pids:
        raise RuntimeError("there is nothing to kill")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def kill_engine(host: str) -> Strike:
    return lambda bed, name: kill(bed.pids(host, "stub_engine.py"))


def kill_agents(host: str) -> Strike:
    return lambda bed, name: kill(bed.pids(host, "agent.py"))


def kill_worker(bed: SshBed, name: str) -> None:
    """The agent alone; its supervisor lives on."""
    both = bed.pids("node1", "agent.py")
    kill([pid for pid in both if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) in both])


def cut(host: str) -> Strike:
    return lambda bed, name: bed.bench.hosts.cut(host)


def power_off(host: str) -> Strike:
    return lambda bed, name: bed.bench.hosts.power_off(host)


def stop_engine(bed: SshBed, name: str) -> None:
    for pid in bed.pids("node2", "stub_engine.py"):
        os.kill(pid, signal.SIGSTOP)


def kill_sshd(bed: SshBed, name: str) -> None:
    """The listener, and the connections that are open."""
    bed.bench.hosts.exec("node1", ["pkill", "-KILL", "-x", "sshd"], check=False)


def start_sshd(bed: SshBed, name: str) -> None:
    bed.bench.hosts._start_sshd("node1")


def kill_tunnel(bed: SshBed, name: str) -> None:
    found = subprocess.run(["pgrep", "-P", str(bed.holder(name))], capture_output=True, text=True).stdout.split()
    kill([int(pid) for pid in found])


def mend(bed: SshBed, name: str) -> None:
    bed.bench.mend()


def serves(now: dict[str, Any]) -> bool:
    return now.get("state") == "ready" and now.get("answers") is True


def unknown_or_failed(now: dict[str, Any]) -> bool:
    return now.get("state") in ("unknown", "failed", "stopped")


FAULTS: tuple[Fault, ...] = (
    Fault("head's engine killed", kill_engine("node1")),
    Fault("second rank's engine killed", kill_engine("node2")),
    Fault("head's agent killed, its supervisor alive", kill_worker),
    Fault("head's agent and supervisor killed", kill_agents("node1")),
    Fault("second rank's agent and supervisor killed", kill_agents("node2")),
    Fault("second rank's engine stopped (SIGSTOP)", stop_engine, LINK_S),
    Fault("link of the second node cut", cut("node2"), LINK_S, heal=mend),
    Fault("link of the head cut", cut("node1"), LINK_S, heal=mend),
    Fault("second node without power", power_off("node2"), LINK_S, heal=mend),
    Fault("head without power", power_off("node1"), LINK_S, heal=mend),
    Fault("sshd of the head killed", kill_sshd, PROCESS_S + 4, unknown_or_failed, start_sshd,
          why_no_goal="unknown until ssh is back; its agents go on"),
    Fault("the tunnel's ssh killed", kill_tunnel, None, serves, why_no_goal=GOES_ON),
)  # fmt: skip
