"""The nodes of an ssh target taken together: what they are as one, and where they must not differ.

What makes an ssh target: its options, and its table in a profile.

How the nodes of an ssh deployment stand: all are asked at once, and no longer waited for than the answer needs.

What a deployment's state is, its head's journal says; where the head cannot be heard, the last words of another rank
do. So a node that does not answer is never a verdict here: it is only not waited for where its answer would change
nothing. That a node is lost is decided by the agents alone, who talk several times a second (`node/agent/gang.py`);
a machine that is merely busy loses nothing by an ssh connection that took too long.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, Queue

from corral.base.errors import ConflictError, CorralError, UnreachableError, UsageError
from corral.base.files import write_atomic
from corral.base.shell import CommandHandle
from corral.base.ssh import ANNOUNCE_AFTER_S, FAN_OUT, WAITING, check_host
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder, RankFolder
from corral.deploy.deployment.state import ENDED, Reason
from corral.deploy.targets.keys import a_path, key
from corral.deploy.targets.keys import hosts as good_hosts
from corral.deploy.targets.remote_files import NodeReport, last_word, mirror
from corral.node.network import some_of
from corral.plan.hardware.inventory import Inventory, common_cpu, parse_cpuinfo, recognise
from corral.plan.hardware.survey import NodeFacts


def bare(host: str) -> str:
    """The host's own name: without a user."""
    return host.rpartition("@")[2]


def address_of(host: str) -> str:
    """What the host's name stands for on this machine; the name itself where that is not known."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(bare(host), None, type=socket.SOCK_STREAM)[0][4][0])
    return bare(host)


def refuse_skew(facts: Sequence[NodeFacts]) -> None:
    """Ranks of one replica must be equal: GPUs of one kind and number, one driver."""
    kinds = {
        node.host: (tuple(gpu.name for gpu in node.gpus), node.gpus[0].driver if node.gpus else "") for node in facts
    }
    first = facts[0].host
    for host, kind in kinds.items():
        if kind[0] != kinds[first][0]:
            says = {h: f"{len(k[0])} × {k[0][0]}" if k[0] else "no GPU" for h, k in kinds.items()}
            raise ConflictError(
                f"the nodes differ: {first} has {says[first]}, {host} has {says[host]}.",
                "Name only nodes with the same GPUs.",
            )


def inventory_of(facts: Sequence[NodeFacts], link: str) -> Inventory:
    """The smallest of what the nodes have: every rank gets the same."""
    least = min(facts, key=lambda node: node.memory_available_bytes)
    base = Inventory(
        None, 1, len(facts), 0, min(node.cores for node in facts), least.memory_bytes, least.memory_available_bytes,
        link, "probed", cpu=common_cpu([parse_cpuinfo(node.cpuinfo, node.machine) for node in facts]),
    )  # fmt: skip
    gpus = facts[0].gpus
    if not gpus:
        return base
    kind, memory = gpus[0].name, min(gpu.memory_bytes for node in facts for gpu in node.gpus)
    kind, memory = recognise(kind, memory)
    return replace(base, gpu=kind, gpus_per_node=len(gpus), memory_bytes_per_gpu=memory, driver=gpus[0].driver)


@dataclass(frozen=True)
class SshOptions:
    """What makes an ssh target."""

    hosts: tuple[str, ...]  # as ssh knows them, head first
    interface: str | None = None  # found, unless named
    hca: str | None = None
    home: str | None = None  # Corral's home on the nodes
    models: str | None = None  # a folder of models there
    hf_home: str | None = None  # a Hugging Face home there
    gpus: str | None = None  # hardware of one node by name, so that a dry run need not ask: 8xH100
    fabric: str | None = None  # kind of network between the nodes, for the plan: ib-ndr, ethernet-100, …
    env: dict[str, str] = field(default_factory=dict)  # network variables that the user fixes
    identity: str | None = None  # ssh -i; kept with the deployment, as all of these
    config: str | None = None  # ssh -F

    def __post_init__(self) -> None:
        for what, path in (("the key file", self.identity), ("the ssh configuration", self.config)):
            if path and not Path(path).is_file():
                raise UsageError(f"{what} {path!r} is not there.", "Correct [ssh] in the profile.")
        if not self.hosts:
            raise UsageError("no host was given.", "Name them: --hosts node00,node01.")
        for host in self.hosts:
            check_host(host)
        doubled = sorted({host for host in self.hosts if self.hosts.count(host) > 1})
        if doubled:
            raise UsageError(f"the host {doubled[0]!r} is named twice.", "Name each node once.")


@dataclass(frozen=True)
class SshKeys:
    """[ssh]: nodes reached by ssh."""

    hosts: tuple[str, ...] = key("the nodes, head first, as ssh knows them", (), good_hosts, ["node00", "node01"])
    hosts_file: str | None = key(
        "a file with one host per line instead; relative to the profile", None, None, "hosts.txt"
    )
    identity: str | None = key("`ssh -i`: the key file", None, a_path, "~/.ssh/cluster_key")
    config: str | None = key("`ssh -F`: a configuration of its own", None, a_path, "~/.ssh/config.d/cluster")


REPORT_S = 4.0  # a node that takes longer to say how it stands counts as unreachable for the moment
AWAY_S = 15.0  # within which a rank that did not answer in that time is not waited for: it says what it says in time
AGAIN_S = 1.0  # after which the others are asked once more, while the head is silent: they may learn that it is lost
Answers = dict[str, NodeReport | CorralError]
Ask = Callable[
    [str, RankFolder, float, CommandHandle], NodeReport
]  # a host, its rank, for how long, and what ends it


def gather(folder: DeploymentFolder, hosts: Sequence[str], ask: Ask) -> Answers:
    """What the hosts say, head first, mirrored into the folder; ends once nobody is left who is worth waiting for."""
    inquiry = _Inquiry(folder, hosts, ask)
    try:
        inquiry.follow()
    finally:
        inquiry.close()
    return inquiry.answers


def is_away(rank: RankFolder) -> bool:
    """Whether the node of this rank did not answer a moment ago, also where another command asked."""
    with contextlib.suppress(OSError):
        return 0.0 <= time.time() - _note(rank).stat().st_mtime < AWAY_S
    return False


def _note(rank: RankFolder) -> Path:
    return rank.path / "away"


class _Inquiry:
    """One round of questions; a thread for every host, and the answers read in one place."""

    def __init__(self, folder: DeploymentFolder, hosts: Sequence[str], ask: Ask) -> None:
        self.answers: Answers = {}
        self._hosts = hosts
        self._ranks = {host: folder.rank(number) for number, host in enumerate(hosts)}
        self._away = {host for host in hosts[1:] if is_away(self._ranks[host])}
        self._ask = ask
        self._came: Queue[tuple[str, NodeReport | Exception]] = Queue()
        self._over = threading.Event()
        self._handles = {host: CommandHandle() for host in hosts}
        self._seats = threading.Semaphore(FAN_OUT)
        for host in hosts:
            threading.Thread(target=self._talk, args=(host,), daemon=True).start()

    def _talk(self, host: str) -> None:
        """Ask a host; one that is not the head again and again, until the round is over."""
        while not self._over.is_set():
            with self._seats:
                self._came.put((host, self._once(host)))
            if host == self._hosts[0] or self._over.wait(AGAIN_S):
                return

    def _once(self, host: str) -> NodeReport | Exception:
        try:
            return self._ask(host, self._ranks[host], REPORT_S, self._handles[host])
        except Exception as error:
            return error

    def follow(self) -> None:
        quiet_until: float | None = time.monotonic() + ANNOUNCE_AFTER_S  # None: it has been said
        while late := self._needed():
            left_s = None if quiet_until is None else max(0.0, quiet_until - time.monotonic())
            try:
                self._take(*self._came.get(timeout=left_s))
            except Empty:
                WAITING.get()(f"waiting for {some_of(late, 5)}")
                quiet_until = None

    def close(self) -> None:
        """What is still being asked is given up; whatever it would have said comes with the next round."""
        self._over.set()
        for handle in self._handles.values():
            handle.kill()

    def _take(self, host: str, answer: NodeReport | Exception) -> None:
        rank = self._ranks[host]
        if isinstance(answer, NodeReport):
            mirror(rank, answer)
            with contextlib.suppress(OSError):
                _note(rank).unlink(missing_ok=True)
        elif isinstance(answer, UnreachableError) and not is_away(rank):
            with contextlib.suppress(OSError):  # a full disk here: the next one waits again
                write_atomic(_note(rank), answer.message)
        elif not isinstance(answer, CorralError):
            raise answer
        self.answers[host] = answer

    def _needed(self) -> list[str]:
        """Whose answers the deployment's state still depends on."""
        head, *others = self._hosts
        if isinstance(self.answers.get(head), NodeReport):
            cause = _cause(self._ranks[head])
            if cause is not None:
                others = [self._hosts[cause]] if 0 < cause < len(self._hosts) else []
            return [host for host in others if host not in self.answers and host not in self._away]
        if any(_has_lost_its_head(self._ranks[host]) for host in others if host in self.answers):
            return []
        return [host for host in self._hosts if host not in self.answers and host not in self._away]


def _has_lost_its_head(rank: RankFolder) -> bool:
    """Whether a rank has ended for a lost node; one that ended for another reason was told so by the head itself."""
    ended = last_word(rank)
    return ended is not None and ended[0] is Reason.NODE_LOST


def _cause(head: RankFolder) -> int | None:
    """Once it is over: the rank whose own log says why, or the head's; None while it goes on.

    A node that fell silent has nothing to say, and is not waited for. One whose agent is gone may live: by being
    asked, it learns that nobody needs the secrets there any more.
    """
    states = [event for event in read_events(head.events) if event.kind == "state"]
    if not states or states[-1].get("state") not in ENDED:
        return None
    failed = states[-1].get("failed_rank")
    lost = states[-1].get("reason") == Reason.NODE_LOST and not states[-1].get("closed")
    return failed if isinstance(failed, int) and not lost else 0
