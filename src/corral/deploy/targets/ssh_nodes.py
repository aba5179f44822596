"""The nodes of an ssh target: its options, what the nodes are as one, and where files lie on them.

The nodes may share a file system with each other and with this machine, or nothing at all. `prepare` finds out, and
what every node sees already is not copied.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from corral.base.errors import ConflictError, CorralError, EngineError, UsageError
from corral.base.files import make_private_dir
from corral.base.home import home_dir
from corral.base.ssh import Ssh, check_host, each
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.launch.links import Node
from corral.deploy.targets.base import MISSING, NodeFiles, Preflight, Progress
from corral.deploy.targets.keys import a_path, key
from corral.deploy.targets.keys import hosts as good_hosts
from corral.deploy.transfer.in_place import lacking
from corral.deploy.transfer.pull import PullOrder, pull_onto_nodes
from corral.deploy.transfer.spread import ensure_folder
from corral.engines.adapters import adapter_names
from corral.plan.hardware.fabric import Fabric, choose_fabric
from corral.plan.hardware.inventory import Inventory, common_cpu, parse_cpuinfo, parse_gpus, recognise
from corral.plan.hardware.survey import Asked, NodeFacts, all_or_error, marked_folders, survey
from corral.plan.places import DEFAULT_HOME, Storage, find_on_nodes

if TYPE_CHECKING:
    from corral.engines.runtimes.base import NodeCheck
    from corral.plan.models.store import ModelSource


@dataclass(frozen=True)
class SshOptions:
    """The options of an ssh target."""

    hosts: tuple[str, ...]  # as ssh knows them, head first
    interface: str | None = None  # found, unless named
    hca: str | None = None
    home: str | None = None  # Corral's home on the nodes
    models: str | None = None  # a folder of models there
    hf_home: str | None = None  # a Hugging Face home there
    gpus: str | None = None  # hardware of one node by name, so that a dry run need not ask: 8xH100
    fabric: str | None = None  # kind of network between the nodes, for the plan: ib-ndr, ethernet-100, …
    env: dict[str, str] = field(default_factory=dict)  # network variables that the user fixes
    identity: str | None = None  # ssh -i
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


class SshNodes(Preflight, NodeFiles):
    """The nodes as one: their hardware, their network, and their files."""

    def __init__(self, chosen: SshOptions) -> None:
        self.chosen, self.ssh = chosen, Ssh(identity=chosen.identity, config=chosen.config)
        self._facts: dict[str, NodeFacts] = {}
        self._sees_home = self._sees_hub = False  # whether the nodes see this machine's home, and its hub's cache

    @property
    def named(self) -> bool:
        """Whether the hardware is named and no node was asked: a dry run asks none."""
        return not self._facts and self.chosen.gpus is not None

    def prepare(self) -> list[str]:
        make_private_dir(home_dir())
        hub = self._hub_here()
        with marked_folders([home_dir(), *([hub] if hub else [])]) as marks:
            self._facts = all_or_error(survey(self.ssh, self.chosen.hosts, Asked(nonces=tuple(marks))))
        seen = [all(facts.nonces.get(mark) == marks[mark] for facts in self._facts.values()) for mark in marks]
        self._sees_home, self._sees_hub = seen[0], hub is not None and seen[1]
        refuse_skew(list(self._facts.values()))
        return [self._fabric().because] if len(self.chosen.hosts) > 1 else []

    def _hub_here(self) -> Path | None:
        """The profile's Hugging Face home, where this machine sees it."""
        hub = Path(self.chosen.hf_home).expanduser() if self.chosen.hf_home else None
        return hub if hub and hub.is_dir() else None

    def facts(self) -> dict[str, NodeFacts]:
        """What the nodes are; they are asked once."""
        if not self._facts:
            self.prepare()
        return self._facts

    def _fabric(self) -> Fabric:
        facts = [self._facts[host] for host in self.chosen.hosts]
        return choose_fabric(facts, self.chosen.interface, self.chosen.hca, self.chosen.env)

    def nodes(self) -> tuple[Node, ...]:
        if self.named and len(self.chosen.hosts) > 1:
            return tuple(self._unasked(rank, host) for rank, host in enumerate(self.chosen.hosts))
        if self.named:
            return (Node(self.chosen.hosts[0]),)
        self.facts()
        if len(self.chosen.hosts) == 1:
            return (Node(self.chosen.hosts[0]),)
        fabric = self._fabric()
        return tuple(Node(host, fabric.addresses[host], fabric.env(host)) for host in self.chosen.hosts)

    def _unasked(self, rank: int, host: str) -> Node:
        """A node with what the user names; tokens stand for what a start finds there, as in a batch job."""
        interface, hca = self.chosen.interface or f"@INTERFACE{rank}@", self.chosen.hca or f"=@HCA{rank}@"
        env = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface, "NCCL_IB_HCA": hca}
        return Node(host, literal_address(host) or f"@ADDRESS{rank}@", {**env, **self.chosen.env})

    def inventory(self) -> Inventory:
        count, link = len(self.chosen.hosts), self.chosen.fabric or "ib-ndr"
        if self.chosen.gpus:
            return parse_gpus(self.chosen.gpus, count, link)
        return inventory_of([self.facts()[host] for host in self.chosen.hosts], link)

    def missing(self, paths: Sequence[str]) -> dict[str, str]:
        if self.named or not paths:
            return {}
        command = ["sh", "-c", MISSING, "corral-paths", *paths]
        found: dict[str, str] = {}
        for host, done in each(self.chosen.hosts, lambda host: self.ssh.run(host, command)).items():
            if isinstance(done, CorralError):
                raise done
            found |= {path: host for path in done.stdout.splitlines() if path in paths and path not in found}
        return found

    def verify(self, checks: Sequence[NodeCheck]) -> None:
        for check in checks:
            answers = each(self.chosen.hosts, lambda host, check=check: self._run(host, check))  # type: ignore[misc]
            reports: dict[str, str] = {}
            for host, answer in answers.items():
                if isinstance(answer, EngineError) and check.details.get("pulled_at_start"):
                    continue  # not there yet is not wrong
                if isinstance(answer, CorralError):
                    raise answer
                reports[host] = answer
            if check.reports and len(set(reports.values())) > 1:
                rows = ", ".join(f"{host} has {text}" for host, text in reports.items())
                raise ConflictError(f"{check.reports} differs between the nodes: {rows}.", check.remedy)

    def _run(self, host: str, check: NodeCheck) -> str:
        done = self.ssh.run(host, check.argv, timeout_s=check.timeout_s)
        lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
        last = lines[-1] if lines else ""
        if done.code:
            raise EngineError(f"{check.what} does not work on {host}: {last or 'it said nothing'}", check.remedy)
        return last

    # files

    def home(self) -> str:
        if self.chosen.home and not self.chosen.home.startswith("~"):
            return self.chosen.home
        if self.named:
            return self.chosen.home or DEFAULT_HOME
        self.facts()
        if self._shares_home():
            return str(home_dir())
        return self._there(self.chosen.home or DEFAULT_HOME)

    def _shares_home(self) -> bool:
        """Whether this machine and all nodes have one home."""
        return self._sees_home and not self.chosen.home

    def node_folder(self, folder: DeploymentFolder, launch_id: str) -> DeploymentFolder:
        return DeploymentFolder(Path(self.home()) / "nodes" / f"{folder.path.name}-{launch_id[:8]}")

    def may_have(self, folder: str) -> bool:
        """Their disks are not seen from here."""
        return True

    def place(self, path: Path, progress: Progress) -> str:
        facts = self.facts()
        if self._shares_home() and path.is_relative_to(home_dir()):
            return str(path)
        if (path / "config.json").is_file() or adapter_names(path):
            reasons = lacking(self.ssh, self.chosen.hosts, path)
            if not reasons:
                return str(path)  # what every node sees where this machine does
            host, why = next(iter(reasons.items()))
            progress(f"{path}: {host} {why}; it is brought to the nodes", 0, 0)
        addresses = {node.name: node.address or facts[node.name].hostname for node in self.nodes()}
        return ensure_folder(self.ssh, self.chosen.hosts, path, self._destination(path), addresses, progress)

    def _destination(self, path: Path) -> str:
        own = path.relative_to(home_dir()) if path.is_relative_to(home_dir()) else PurePath("models") / path.name
        if adapter_names(path):  # what is in that folder is served: it is that of no other one
            own = PurePath("adapters") / hashlib.sha256(str(path).encode()).hexdigest()[:12]
        return str(PurePath(self.home()) / own)

    def placed(self, path: Path) -> str:
        if not self._facts:  # a folder that a profile says is on the nodes is there
            folders = (self.chosen.home, self.chosen.models, self.chosen.hf_home)
            there = any(path.is_relative_to(Path(folder).expanduser()) for folder in folders if folder)
            return str(path) if there else self._destination(path)
        seen = self._shares_home() and path.is_relative_to(home_dir())
        return str(path) if seen or not lacking(self.ssh, self.chosen.hosts, path) else self._destination(path)

    def find_model(self, source: ModelSource, least_bytes: int) -> str | None:
        if self.named:
            return None
        storage = Storage(self.home(), self.chosen.models or "", self.chosen.hf_home or "")
        found = find_on_nodes(self.ssh, self.chosen.hosts, source, storage, least_bytes)
        return found.folder if found else None

    def pull_command(self, reference: str, folder: str) -> list[str]:
        own = [f"CORRAL_SSH={shlex.join(self.ssh.argv)}"] if self.chosen.identity or self.chosen.config else []
        command = super().pull_command(reference, folder)
        return [*(["env", *own] if own else []), *command, "--hosts", ",".join(self.chosen.hosts)]

    def on_each(self, argv: Sequence[str]) -> list[list[str]]:
        return [[*self.ssh.argv, host, shlex.join(argv)] for host in self.chosen.hosts]

    def fetch_model(self, source: ModelSource, progress: Progress) -> str | None:
        self.facts()
        if self._sees_hub or self._shares_home():  # the nodes see what this machine fetches
            return None
        addresses = {node.name: node.address for node in self.nodes() if node.address}
        folder = f"{self.home()}/models/{source.name}"
        return pull_onto_nodes(
            PullOrder(source.repo, self.chosen.hosts, folder, addresses=addresses), progress, self.ssh
        )

    def _there(self, path: str) -> str:
        """A path on the nodes with their home in it."""
        return path.replace("~", self.facts()[self.chosen.hosts[0]].home, 1) if path.startswith("~") else path


def bare(host: str) -> str:
    """The host's name without a user."""
    return host.rpartition("@")[2]


def literal_address(host: str) -> str:
    """The host itself where it is an address; empty where it is a name, which may lead to another network."""
    try:
        return str(ip_address(bare(host)))
    except ValueError:
        return ""


def refuse_skew(facts: Sequence[NodeFacts]) -> None:
    """Ranks of one replica need GPUs of one kind and number."""
    kinds = {node.host: tuple(gpu.name for gpu in node.gpus) for node in facts}
    labels = {host: f"{len(kind)} × {kind[0]}" if kind else "no GPU" for host, kind in kinds.items()}
    first = facts[0].host
    for host, kind in kinds.items():
        if kind != kinds[first]:
            raise ConflictError(
                f"the nodes differ: {first} has {labels[first]}, {host} has {labels[host]}.",
                "Name only nodes with the same GPUs.",
            )


def inventory_of(facts: Sequence[NodeFacts], link: str) -> Inventory:
    """The least of what the nodes have: every rank gets the same."""
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
