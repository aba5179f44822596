"""The ssh half of the fault table: two nodes with real sshd that share no files, and a stand-in engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.faults import LINK_S, PROCESS_S, Fault
from tests.cluster.ssh_bench import NODES, Bench, open_bench

NODE_PLACES = ("/tmp", "/run", "/dev/shm")  # every node's own, as is the home there
OF_THE_TESTBED = ("/sshd", "/lock", "/behind")
GOES_ON = "the server lives on, as it must"
PATIENCE = "an idle engine is asked for a token every 5 s and has 10 s to answer"
DISK_BYTES = 64 << 20
FULL_S = 10.0


@dataclass
class SshBed:
    """A user's machine before two nodes.

    Until `down`, a deployment that failed keeps its journal, its logs and its agent's source on the nodes, for
    `corral status` and `corral logs`; processes, keys and temporary files count as left behind even then.
    """

    bench: Bench
    node_home: Path
    profile: str = "apart"
    ended: set[str] = field(default_factory=set)  # those that `down` was run for

    def up(self, name: str, options: Sequence[str]) -> None:
        done = self.bench.run("up", "--on", self.profile, str(self.bench.model), "--name", name, *options)
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
        profiles = Path(bench.env["HOME"]) / ".config/corral/profiles"
        profiles.mkdir(parents=True)
        homes = {"apart": folder / "local", "small": folder / "mine"}  # on every node: empty, and its own
        for name, home in homes.items():
            text = f'target = "ssh"\n[ssh]\nhosts = {json.dumps(NODES)}\n[storage]\nhome = "{home}"\n'
            (profiles / f"{name}.toml").write_text(text)
        yield SshBed(bench, homes["apart"])


def small(bed: SshBed) -> SshBed:
    """The same nodes with a small empty disk for their home."""
    found = SshBed(bed.bench, bed.node_home.parent / "mine", "small", bed.ended)
    for host in NODES:
        bed.bench.hosts.limit_disk(host, found.node_home, DISK_BYTES)
    return found


def served(bed: SshBed) -> SshBed:
    """The same nodes; the head's home is on a file system that is a process."""
    found = SshBed(bed.bench, bed.node_home.parent / "mine", "small", bed.ended)
    bed.bench.hosts.ignored.add("bindfs")
    bed.bench.hosts.exec("node1", ["mkdir", "-p", "/run/behind"])
    bed.bench.hosts.exec("node1", ["bindfs", "-o", "nonempty", "/run/behind", str(found.node_home)])
    return found


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


def signal_engine(host: str, number: signal.Signals) -> Strike:
    def strike(bed: SshBed, name: str) -> None:
        for pid in bed.pids(host, "stub_engine.py"):
            os.kill(pid, number)

    return strike


def fill_disk(bed: SshBed, name: str) -> None:
    filler = bed.node_home / "filler"
    bed.bench.hosts.exec("node1", ["dd", "if=/dev/zero", f"of={filler}", "bs=64k"], check=False)


def empty_disk(bed: SshBed, name: str) -> None:
    bed.bench.hosts.exec("node1", ["rm", "-f", str(bed.node_home / "filler")])


def fill_for_a_while(bed: SshBed, name: str) -> str:
    fill_disk(bed, name)
    time.sleep(FULL_S)
    meanwhile = bed.status(name)
    empty_disk(bed, name)
    return f"while it was full: {meanwhile['state']}"


def kill_on_a_full_disk(bed: SshBed, name: str) -> None:
    fill_disk(bed, name)
    kill(bed.pids("node1", "stub_engine.py"))


def hang_disk(bed: SshBed, name: str) -> None:
    bed.bench.hosts.exec("node1", ["pkill", "-STOP", "-x", "bindfs"])


def let_disk_go_on(bed: SshBed, name: str) -> None:
    """And nothing has failed meanwhile."""
    time.sleep(FULL_S)
    bed.bench.hosts.exec("node1", ["pkill", "-CONT", "-x", "bindfs"])
    bed.bench.wait(name, serves)


def kill_sshd(bed: SshBed, name: str) -> None:
    """The listener, and the connections that are open."""
    bed.bench.hosts.exec("node1", ["pkill", "-KILL", "-x", "sshd"], check=False)


def start_sshd(bed: SshBed, name: str) -> None:
    bed.bench.hosts._start_sshd("node1")


def change_host_key(bed: SshBed, name: str) -> None:
    bed.bench.hosts.change_host_key("node1")
    bed.bench.hosts.exec("node1", ["pkill", "-KILL", "-f", "^sshd: root"], check=False)


def trust_again(bed: SshBed, name: str) -> None:
    bed.bench.hosts.trust("node1")


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
    Fault("head's engine ends with code 0", signal_engine("node1", signal.SIGUSR2)),
    Fault("second rank's engine ends with code 0", signal_engine("node2", signal.SIGUSR2)),
    Fault("head's agent killed, its supervisor alive", kill_worker),
    Fault("head's agent and supervisor killed", kill_agents("node1")),
    Fault("second rank's agent and supervisor killed", kill_agents("node2")),
    Fault("head's engine stopped (SIGSTOP)", signal_engine("node1", signal.SIGSTOP), LINK_S),
    Fault("second rank's engine stopped (SIGSTOP)", signal_engine("node2", signal.SIGSTOP), LINK_S),
    Fault("head's engine hung: /health says 200, no token comes", signal_engine("node1", signal.SIGUSR1), None,
          why_no_goal=PATIENCE),
    Fault("disk of the head's node full for 10 s", fill_for_a_while, None, serves, on=small, why_no_goal=GOES_ON),
    Fault("head's engine killed on a full disk", kill_on_a_full_disk, heal=empty_disk, on=small),
    Fault("file system of the head's node hangs", hang_disk, PROCESS_S + 4, unknown_or_failed, let_disk_go_on,
          on=served, why_no_goal="ready again afterwards; nothing has failed"),
    Fault("link of the second node cut", cut("node2"), LINK_S, heal=mend, down_meanwhile=True),
    Fault("link of the head cut", cut("node1"), LINK_S, heal=mend, down_meanwhile=True),
    Fault("second node without power", power_off("node2"), LINK_S, heal=mend, down_meanwhile=True),
    Fault("head without power", power_off("node1"), LINK_S, heal=mend, down_meanwhile=True),
    Fault("sshd of the head killed", kill_sshd, PROCESS_S + 4, unknown_or_failed, start_sshd,
          why_no_goal="unknown until ssh is back; its agents go on"),
    Fault("host key of the head changed, connections closed", change_host_key, PROCESS_S + 4, unknown_or_failed,
          trust_again, why_no_goal="unknown until the key is confirmed; its agents go on"),
    Fault("the tunnel's ssh killed", kill_tunnel, None, serves, why_no_goal=GOES_ON),
)  # fmt: skip
