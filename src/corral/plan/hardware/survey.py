"""What nodes are, asked of all of them at once: hosts -> NodeFacts.

The asking is one script over ssh (`node/survey`); the answer is a frozen record. A part of it that failed on a
node is in `NodeFacts.errors` and its fields are empty; a host that could not be asked at all is an error of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Interface
from pathlib import Path

from corral.base.bundle import bundle
from corral.base.errors import CorralError, DataError, UnreachableError
from corral.base.files import write_atomic
from corral.base.record import from_json, to_json
from corral.base.shell import Completed, capture
from corral.base.ssh import FAN_OUT, MOST_OUTPUT_BYTES, Ssh, each
from corral.base.untrusted import last_object, plain

OLDEST_PYTHON = (3, 8)
MOST_ANSWER_BYTES = 8 << 20
MOST = 1 << 60  # of bytes, cores, megabits
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.:@+-]{1,64}")  # of an interface or adapter; it becomes an environment variable


@dataclass(frozen=True)
class Asked:
    """What is asked of every node beside what is always told. Paths may begin with `~`."""

    disks: tuple[str, ...] = ()  # free space of the file systems that hold these
    write: tuple[str, ...] = ()  # whether a file can be made, written and removed in these folders
    paths: tuple[str, ...] = ()  # whether these are there, and what they weigh
    nonces: tuple[str, ...] = ()  # what these small files say
    fingerprints: tuple[str, ...] = ()  # what these folders hold, in digests
    samples: bool = False  # of what their files hold, too: these are read
    ports: tuple[int, ...] = ()  # which of these are taken, and by whom
    free_ports: int = 0  # how many free ones to find
    launches: bool = False  # which processes and containers carry a launch id
    read: tuple[str, ...] = ()  # paths; the storage of the first that is there is read for 3 s at most
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
class RunningLaunch:
    """Processes that carry one launch id; `folder` is that of their agent, where one runs."""

    id: str
    pids: tuple[int, ...]
    command: str  # of the first of them
    folder: str = ""


@dataclass(frozen=True)
class RunningContainer:
    client: str
    id: str
    launch: str


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
class FolderFacts:
    """What a folder holds, in digests: equal ones stand for equal folders."""

    files: int = 0
    unreadable: str = ""  # the first file that cannot be read
    listed: str = ""  # of names and sizes
    identities: str = ""  # of inodes and times of change as well: the very same files
    contents: str = ""  # of samples of what they hold; empty when nobody asked


@dataclass(frozen=True)
class ReadSpeed:
    file: str
    read_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.read_bytes / self.seconds


@dataclass(frozen=True)
class NodeLimits:
    """Resource limits of a process that ssh starts; -1: none."""

    memlock_bytes: int = -1
    memlock_bytes_hard: int = -1
    nofile: int = -1
    nofile_hard: int = -1


@dataclass(frozen=True)
class Readiness:
    """The distribution of a node, and what is there for GPUs and containers."""

    distribution: str = ""  # as /etc/os-release says
    like: tuple[str, ...] = ()
    release: str = ""
    codename: str = ""
    nvidia_devices: int = 0  # GPUs on the bus, with or without a driver
    nvswitches: int = 0
    driver: str = ""
    fabric_manager: bool = False
    docker_socket: str = "none"  # answers, refuses, silent, none; own: the user's daemon, or one elsewhere
    docker_group: bool = False
    docker_nvidia: bool = False
    cdi: bool = False


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
    cpuinfo: str = ""  # of its first processor, as its kernel prints it
    memory_bytes: int = 0
    memory_available_bytes: int = 0
    limits: NodeLimits = field(default_factory=NodeLimits)
    tools: dict[str, str] = field(default_factory=dict)
    hf_token: bool = False
    readiness: Readiness = field(default_factory=Readiness)
    interfaces: tuple[Interface, ...] = ()
    default_interface: str = ""
    rdma: tuple[RdmaPort, ...] = ()
    taken_ports: tuple[TakenPort, ...] = ()
    free_ports: tuple[int, ...] = ()
    gpus: tuple[GpuFacts, ...] = ()
    gpu_processes: tuple[GpuProcess, ...] = ()
    cuda_driver: str = ""
    launches: tuple[RunningLaunch, ...] = ()
    containers: tuple[RunningContainer, ...] = ()
    disks: dict[str, Disk] = field(default_factory=dict)
    shm: Disk | None = None
    written: dict[str, str] = field(default_factory=dict)  # why not, by folder; empty where it can be
    paths: dict[str, PathFacts] = field(default_factory=dict)
    nonces: dict[str, str] = field(default_factory=dict)
    fingerprints: dict[str, FolderFacts] = field(default_factory=dict)
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
            code, said, complained = capture(list(argv), stdin, timeout_s, MOST_OUTPUT_BYTES)
        except FileNotFoundError:
            return Completed(tuple(argv), 127, "", f"{argv[0]}: not found")
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"`{argv[0]}` did not end within {timeout_s:g} s.", "Try again later.") from None
        return Completed(tuple(argv), code, said.decode("utf-8", "replace"), complained.decode("utf-8", "replace"))

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


def all_or_error(found: Mapping[str, NodeFacts | CorralError]) -> dict[str, NodeFacts]:
    """Every node's facts; one error that names each node that could not be asked."""
    errors = {host: error for host, error in found.items() if isinstance(error, CorralError)}
    if errors:
        first = next(iter(errors.values()))
        message = " ".join(error.message for error in errors.values())
        raise type(first)(message, first.remedy, hosts=list(errors))
    return {host: facts for host, facts in found.items() if isinstance(facts, NodeFacts)}


def survey_host(ssh: Ssh | Here, host: str, asked: Asked, timeout_s: float = 30) -> NodeFacts:
    """Ask one host."""
    # a part that hangs must be reported by the node, not cut off with the whole answer
    asked = dataclasses.replace(asked, limit_s=max(0.5, min(asked.limit_s, timeout_s - 2)))
    began, asked_at = time.monotonic(), time.time()
    done = ssh.python(host, bundle("node/survey"), [json.dumps(to_json(asked))], timeout_s=timeout_s)
    return read_answer(host, done, asked_at, time.monotonic() - began)


def read_answer(host: str, done: Completed, asked_at_s: float, took_s: float) -> NodeFacts:
    """The node's words as facts. Shells that greet every command (a noisy .bashrc) are read past."""
    if done.code == 127:
        raise CorralError(
            f"{host} has no python3.", "Install Python 3.8 or later there; nothing else is needed.", host=host
        )
    if done.code != 0 or "{" not in done.stdout:
        said = done.last_line or "nothing"
        raise CorralError(
            f"{host} could not be looked at: its python3 said {plain(said, 300)!r}.",
            f"Corral needs Python 3.8 or later there: ssh {host} python3 --version",
            host=host,
        )
    what = f"the answer of {host}"
    try:
        body = last_object(done.stdout, what, MOST_ANSWER_BYTES)
    except DataError as error:
        raise UnreachableError(f"{error.message.rstrip('.')}: was it cut off?", "Try again.", host=host) from None
    facts = _with_plain_names(from_json(NodeFacts, {**body, "host": host, "asked_s": took_s}, what))
    _refuse_impossible(facts)
    ahead_s, error_s = _clock(asked_at_s, facts.began_s, facts.ended_s, took_s)
    return dataclasses.replace(facts, clock_ahead_s=ahead_s, clock_error_s=error_s)


def _with_plain_names(facts: NodeFacts) -> NodeFacts:
    """Without interfaces and adapters whose names could not stand in an environment variable."""
    interfaces = tuple(row for row in facts.interfaces if PLAIN_NAME.fullmatch(row.name))
    rdma = tuple(port for port in facts.rdma if PLAIN_NAME.fullmatch(port.device))
    return dataclasses.replace(facts, interfaces=interfaces, rdma=rdma)


def _refuse_impossible(facts: NodeFacts) -> None:
    """Values that would reach a path, an address or a division elsewhere."""
    ports = (*facts.free_ports, *(taken.port for taken in facts.taken_ports))
    numbers = [pid for launch in facts.launches for pid in launch.pids]
    numbers += [facts.cores, facts.memory_bytes, facts.memory_available_bytes]
    numbers += [facts.readiness.nvidia_devices, facts.readiness.nvswitches]
    numbers += [number for gpu in facts.gpus for number in (gpu.index, gpu.memory_bytes, gpu.used_bytes)]
    numbers += [number for disk in facts.disks.values() for number in (disk.total_bytes, disk.free_bytes)]
    numbers += [number for path in facts.paths.values() for number in (path.size_bytes, path.files)]
    numbers += [number for row in facts.interfaces for number in (row.speed_mbps, row.mtu)]
    wrong: list[object] = [port for port in ports if not 0 < port < 65536]
    wrong += [number for number in numbers if not 0 <= number <= MOST]
    wrong += [port.rate_gbps for port in facts.rdma if not 0 <= port.rate_gbps <= MOST]
    wrong += [text for row in facts.interfaces for text in row.ipv4 if not _is_ipv4(text)]
    if facts.home and (not facts.home.startswith("/") or ".." in facts.home.split("/")):
        wrong.append(facts.home)
    if facts.read_speed and not (facts.read_speed.seconds > 0 and 0 <= facts.read_speed.read_bytes <= MOST):
        wrong.append(facts.read_speed.seconds)
    if wrong:
        what = f"the answer of {facts.host} holds {str(wrong[0])[:100]!r}, which cannot be."
        raise DataError(what, "Look at the node.", host=facts.host)


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Interface(text)
    except ValueError:
        return False
    return True


def _clock(asked_s: float, began_s: float, ended_s: float, took_s: float) -> tuple[float, float]:
    """How far the node's clock is ahead, and how well that is known: the way there and back counts as equal."""
    way = max(0.0, took_s - (ended_s - began_s))
    return ((began_s - asked_s) + (ended_s - asked_s - took_s)) / 2, way / 2


@contextlib.contextmanager
def marked_folders(
    folders: Sequence[Path], failed: Callable[[OSError], None] = lambda _: None
) -> Iterator[dict[str, str]]:
    """A small file for a moment in each folder: path -> content. A node that reads the content sees the folder."""
    content = secrets.token_hex(16)
    marks = [folder / f".seen-{secrets.token_hex(4)}" for folder in folders]
    try:
        for mark in marks:
            try:
                write_atomic(mark, content)
            except OSError as error:
                failed(error)
        yield {str(mark): content for mark in marks}
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)
