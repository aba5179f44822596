"""What nodes are, asked of all of them at once: hosts -> NodeFacts.

The asking is one script over ssh (`node/survey.py`); the answer is a frozen record. A part of it that failed on a
node is in `NodeFacts.errors` and its fields are empty; a host that could not be asked at all is an error of its own.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from corral.errors import CorralError, UnreachableError
from corral.record import from_json, to_json
from corral.shell import Completed
from corral.ssh import FAN_OUT, Ssh, each

__all__ = [
    "OLDEST_PYTHON",
    "Asked",
    "Disk",
    "GpuFacts",
    "GpuProcess",
    "Here",
    "Interface",
    "Limits",
    "NodeFacts",
    "PathFacts",
    "RdmaPort",
    "ReadSpeed",
    "TakenPort",
    "survey",
    "survey_host",
]

OLDEST_PYTHON = (3, 8)


@dataclass(frozen=True)
class Asked:
    """What is asked of every node beside what is always told. Paths may begin with `~`."""

    disks: tuple[str, ...] = ()  # free space of the file systems that hold these
    paths: tuple[str, ...] = ()  # whether these are there, and what they weigh
    nonces: tuple[str, ...] = ()  # what these small files say
    ports: tuple[int, ...] = ()  # which of these are taken, and by whom
    free_ports: int = 0  # how many free ones to find
    read: str = ""  # a path whose storage is read for 3 s at most
    limit_s: float = 20.0  # for any one part of the survey


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    kind: str = "ethernet"  # loopback ethernet infiniband bond bridge veth docker tun virtual
    ipv4: tuple[str, ...] = ()  # address/prefix
    up: bool = True
    carrier: bool | None = True  # None: not known
    speed_mbps: int = 0  # 0: not known
    mtu: int = 1500
    driver: str = ""
    ipv6: tuple[str, ...] = ()


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA adapter."""

    device: str
    port: int = 1
    state: str = "active"
    link_layer: str = "infiniband"  # infiniband | ethernet
    rate_gbps: float = 0.0
    netdev: str = ""


@dataclass(frozen=True)
class GpuFacts:
    index: int
    name: str
    uuid: str
    memory_bytes: int
    used_bytes: int
    driver: str


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU; `user` is empty when it runs where we cannot look."""

    gpu: int
    pid: int
    user: str
    command: str
    used_bytes: int


@dataclass(frozen=True)
class TakenPort:
    port: int
    pid: int  # 0: somebody else's process, whose number only its owner may see
    user: str
    command: str


@dataclass(frozen=True)
class Disk:
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class PathFacts:
    exists: bool
    readable: bool = True
    size_bytes: int = 0
    files: int = 0
    whole: bool = True  # False: there was no time to count everything


@dataclass(frozen=True)
class ReadSpeed:
    file: str
    read_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.read_bytes / self.seconds


@dataclass(frozen=True)
class Limits:
    """Resource limits of a process that ssh starts; -1: none."""

    memlock_bytes: int = -1
    memlock_bytes_hard: int = -1
    nofile: int = -1
    nofile_hard: int = -1


@dataclass(frozen=True)
class NodeFacts:
    """One node. `clock_ahead_s` is its clock against this machine's, known to within `clock_error_s`."""

    host: str  # as the user calls it
    hostname: str = ""
    python: str = ""
    python_path: str = ""
    home: str = ""
    user: str = ""
    machine: str = ""
    boot_id: str = ""
    cores: int = 0
    memory_bytes: int = 0
    memory_available_bytes: int = 0
    limits: Limits = field(default_factory=Limits)
    tools: dict[str, str] = field(default_factory=dict)
    hf_token: bool = False
    interfaces: tuple[Interface, ...] = ()
    default_interface: str = ""
    rdma: tuple[RdmaPort, ...] = ()
    taken_ports: tuple[TakenPort, ...] = ()
    free_ports: tuple[int, ...] = ()
    gpus: tuple[GpuFacts, ...] = ()
    gpu_processes: tuple[GpuProcess, ...] = ()
    cuda_driver: str = ""
    disks: dict[str, Disk] = field(default_factory=dict)
    shm: Disk | None = None
    paths: dict[str, PathFacts] = field(default_factory=dict)
    nonces: dict[str, str] = field(default_factory=dict)
    read_speed: ReadSpeed | None = None
    began_s: float = 0.0
    ended_s: float = 0.0
    errors: dict[str, str] = field(default_factory=dict)
    clock_ahead_s: float = 0.0
    clock_error_s: float = 0.0
    asked_s: float = 0.0  # how long the answer took

    def interface(self, name: str) -> Interface | None:
        return next((row for row in self.interfaces if row.name == name), None)


class Here:
    """This machine, asked as a host is asked."""

    def run(self, host: str, argv: Sequence[str], stdin: bytes = b"", timeout_s: float = 60) -> Completed:
        try:
            done = subprocess.run(list(argv), input=stdin, capture_output=True, timeout=timeout_s, check=False)
        except FileNotFoundError:
            return Completed(tuple(argv), 127, "", f"{argv[0]}: not found")
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"`{argv[0]}` did not end within {timeout_s:g} s.", "Try again later.") from None
        out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        return Completed(tuple(argv), done.returncode, out, err)

    def python(
        self, host: str, source: str, arguments: Sequence[str] = (), stdin: bytes = b"", timeout_s: float = 60
    ) -> Completed:
        return self.run(host, [sys.executable, "-I", "-c", source, *arguments], stdin, timeout_s)


def survey(
    ssh: Ssh | Here, hosts: Sequence[str], asked: Asked | None = None, timeout_s: float = 30, width: int = FAN_OUT
) -> dict[str, NodeFacts | CorralError]:
    """Ask all hosts at once, at most `width` at a time."""
    asked = asked or Asked()
    return each(hosts, lambda host: survey_host(ssh, host, asked, timeout_s), width)


def survey_host(ssh: Ssh | Here, host: str, asked: Asked, timeout_s: float = 30) -> NodeFacts:
    """Ask one host."""
    # a part that hangs must be reported by the node, not cut off with the whole answer
    asked = dataclasses.replace(asked, limit_s=max(0.5, min(asked.limit_s, timeout_s - 2)))
    source = importlib.resources.files("corral.node").joinpath("survey.py").read_text(encoding="utf-8")
    began, asked_at = time.monotonic(), time.time()
    done = ssh.python(host, source, [json.dumps(to_json(asked))], timeout_s=timeout_s)
    return read_answer(host, done, asked_at, time.monotonic() - began)


def read_answer(host: str, done: Completed, asked_at_s: float, took_s: float) -> NodeFacts:
    """The node's words as facts. Shells that greet every command (a noisy .bashrc) are read past."""
    if done.code == 127:
        raise CorralError(
            f"{host} has no python3.", "Install Python 3.8 or later there; nothing else is needed.", host=host
        )
    line = next((row for row in reversed(done.stdout.splitlines()) if row.startswith("{")), "")
    if done.code != 0 or not line:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise CorralError(
            f"{host} could not be looked at: its python3 said {said!r}.",
            f"Corral needs Python 3.8 or later there: ssh {host} python3 --version",
            host=host,
        )
    try:
        body = json.loads(line)
    except json.JSONDecodeError:
        raise UnreachableError(f"the answer of {host} was cut off.", "Try again.", host=host) from None
    ahead, error = _clock(asked_at_s, body["began_s"], body["ended_s"], took_s)
    body |= {"host": host, "clock_ahead_s": ahead, "clock_error_s": error, "asked_s": took_s}
    return from_json(NodeFacts, body, f"the answer of {host}")


def _clock(asked_s: float, began_s: float, ended_s: float, took_s: float) -> tuple[float, float]:
    """How far the node's clock is ahead, and how well that is known: the way there and back counts as equal."""
    way = max(0.0, took_s - (ended_s - began_s))
    return ((began_s - asked_s) + (ended_s - asked_s - took_s)) / 2, way / 2
