"""Nodes reached over ssh: agents placed and started there, that outlive the session and hold together by themselves.

What the agents write stays on their nodes and is mirrored into the deployment's folder here whenever somebody looks,
so that every command that reads a deployment works unchanged. The nodes may share a file system with each other and
with this machine, or nothing at all. The first host is the head.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from corral.base.bundle import bundle
from corral.base.errors import (
    ConflictError,
    CorralError,
    DataError,
    EngineError,
    LaunchError,
    UnreachableError,
    UsageError,
)
from corral.base.files import make_private_dir, write_atomic
from corral.base.home import home_dir
from corral.base.record import from_json, load_json, to_json
from corral.base.shell import CommandHandle
from corral.base.ssh import Forward, Ssh, each, read_hosts
from corral.base.untrusted import parse_json
from corral.deploy.deployment.folder import DeploymentFolder, RankFolder
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.launch.links import Node, Ports
from corral.deploy.launch.render import LaunchSpec, agent_spec, server_url
from corral.deploy.targets.base import AgentsStatus, ChosenPorts, Declared, Progress
from corral.deploy.targets.keys import Flag, Shared, Size, only_said
from corral.deploy.targets.near_port import near_port
from corral.deploy.targets.remote_files import (
    NodeReport,
    Started,
    last_state,
    last_word,
    mirrored_sizes,
    pack,
    read_removed,
    read_report,
    read_started,
    read_stopped,
)
from corral.deploy.targets.ssh_nodes import (
    Answers,
    SshKeys,
    SshOptions,
    address_of,
    bare,
    gather,
    inventory_of,
    is_away,
    refuse_skew,
)
from corral.deploy.transfer.in_place import find_on_nodes, lacking
from corral.deploy.transfer.spread import ensure_folder
from corral.plan.hardware.fabric import Fabric, choose_fabric
from corral.plan.hardware.inventory import Inventory, parse_gpus
from corral.plan.hardware.survey import Asked, NodeFacts, all_or_error, survey

if TYPE_CHECKING:
    from corral.engines.runtimes.base import NodeCheck

__all__ = ["SshOptions", "SshTarget"]

DEFAULT_PORT = 8000
DEFAULT_HOME = "~/.local/share/corral"
REACH_S, STOP_TRIES = 4.0, 2  # a node that answers nothing in so long is given up by `down`, after so many tries
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class SshTarget(Declared):
    """Starts one agent per host."""

    name = "ssh"
    TITLE = "ssh"
    TABLE = SshKeys
    FLAGS = (
        Flag("--hosts", "hosts", "Run over ssh on these hosts, head first; @FILE: one host per line.", "A,B,…",
             read=read_hosts),
        Flag("--interface", "interface", "Network interface between the nodes (default: found).", "NAME"),
    )  # fmt: skip
    VARIABLES: ClassVar[Mapping[str, str]] = {"CORRAL_HOSTS": "hosts"}
    DERIVED: ClassVar[Mapping[str, str]] = {"hosts": "hosts_file"}
    REQUIRED = ("hosts",)

    @classmethod
    def completed(cls, table: SshKeys, folder: Path, overruled: frozenset[str]) -> SshKeys:
        """With the hosts that a hosts file names, one per line, further words on a line (slots=8) left aside."""
        if table.hosts_file is None or "hosts" in overruled:
            return table
        if table.hosts:
            raise UsageError("[ssh] has both hosts and hosts_file.", "Keep one of them.", key="hosts_file")
        try:
            found = read_hosts(f"@{folder / Path(table.hosts_file).expanduser()}")
        except CorralError as error:
            said = f"the hosts file cannot be used: {error.message}"
            raise UsageError(said, "One host per line.", key="hosts_file") from None
        return replace(table, hosts=tuple(dict.fromkeys(found)))

    @classmethod
    def from_profile(cls, table: SshKeys, shared: Shared) -> dict[str, object]:
        named = parse_gpus(shared.hardware.gpus) if shared.hardware.gpus else None
        return only_said({
            "hosts": list(table.hosts),
            "identity": _expanded(table.identity),
            "config": _expanded(table.config),
            "gpus": f"{named.gpus_per_node}x{named.gpu}" if named else None,  # of one node
            "fabric": shared.hardware.link,
            "interface": shared.network.interface,
            "hca": shared.network.hca,
            "env": dict(shared.network.env),
            "home": shared.storage.home,
            "models": shared.storage.models,
            "hf_home": shared.storage.hf_home,
        })  # fmt: skip

    @classmethod
    def count_nodes(cls, table: SshKeys) -> int | None:
        return len(table.hosts) or None

    @classmethod
    def size(cls, options: Mapping[str, Any]) -> Size:
        gpus = options.get("gpus")
        return Size(len(options.get("hosts", ())) or 1, parse_gpus(str(gpus)).gpus_per_node if gpus else 0)

    @classmethod
    def divisible(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(options.get("hosts", ()))

    @classmethod
    def only_on(cls, options: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
        return {**options, "hosts": list(nodes)}

    def __init__(self, chosen: SshOptions) -> None:
        self.chosen, self.ssh = chosen, Ssh(identity=chosen.identity, config=chosen.config)
        self._facts: dict[str, NodeFacts] = {}
        self._reports: Answers = {}
        self._shared = self._shared_hub = False  # whether the nodes see this machine's home, and its hub's cache

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> SshTarget:
        return cls(from_json(SshOptions, dict(options), "the ssh target"))

    def options(self) -> dict[str, object]:
        home = self.home() if self._facts else self.chosen.home
        found: dict[str, object] = to_json(replace(self.chosen, home=home))
        return found

    # ------------------------------------------------------------------------------------------ looking at the nodes
    def prepare(self) -> list[str]:
        """Ask every node what it is; refuse what cannot work. Things worth knowing, as sentences."""
        make_private_dir(home_dir())
        hub = self._hub_here()
        marks = [folder / f".seen-{secrets.token_hex(4)}" for folder in (home_dir(), *([hub] if hub else []))]
        content = secrets.token_hex(16)
        try:
            for mark in marks:
                with contextlib.suppress(OSError):  # a Hugging Face home of somebody else's may be read-only
                    write_atomic(mark, content)
            found = survey(self.ssh, self.chosen.hosts, Asked(nonces=tuple(str(mark) for mark in marks)))
        finally:
            for mark in marks:
                mark.unlink(missing_ok=True)
        self._facts = all_or_error(found)
        seen = [all(facts.nonces.get(str(mark)) == content for facts in self._facts.values()) for mark in marks]
        self._shared, self._shared_hub = seen[0], hub is not None and seen[1]
        refuse_skew(list(self._facts.values()))
        return [self._fabric().because] if len(self.chosen.hosts) > 1 else []

    def _hub_here(self) -> Path | None:
        """The profile's Hugging Face home, where this machine sees it."""
        hub = Path(self.chosen.hf_home).expanduser() if self.chosen.hf_home else None
        return hub if hub and hub.is_dir() else None

    def _looked(self) -> dict[str, NodeFacts]:
        if not self._facts:
            self.prepare()
        return self._facts

    def _fabric(self) -> Fabric:
        facts = [self._facts[host] for host in self.chosen.hosts]
        return choose_fabric(facts, self.chosen.interface, self.chosen.hca, self.chosen.env)

    def nodes(self) -> tuple[Node, ...]:
        if not self._facts and self.chosen.gpus:  # a dry run on named hardware asks nobody
            interface = self.chosen.interface
            network = {
                "NCCL_SOCKET_IFNAME": interface,
                "GLOO_SOCKET_IFNAME": interface,
                "NCCL_IB_HCA": self.chosen.hca,
            }
            env = {name: value for name, value in network.items() if value}
            return tuple(Node(host, address_of(host), {**env, **self.chosen.env}) for host in self.chosen.hosts)
        self._looked()
        if len(self.chosen.hosts) == 1:
            return (Node(self.chosen.hosts[0]),)
        fabric = self._fabric()
        return tuple(Node(host, fabric.addresses[host], fabric.env(host)) for host in self.chosen.hosts)

    def inventory(self) -> Inventory:
        count, link = len(self.chosen.hosts), self.chosen.fabric or "ib-ndr"
        if self.chosen.gpus:
            return parse_gpus(self.chosen.gpus, count, link)
        return inventory_of([self._looked()[host] for host in self.chosen.hosts], link)

    def home(self) -> str:
        if self.chosen.home and not self.chosen.home.startswith("~"):
            return self.chosen.home
        if not self._facts and self.chosen.gpus:
            return self.chosen.home or DEFAULT_HOME
        self._looked()
        if self._shared and not self.chosen.home:
            return str(home_dir())
        return self._there(self.chosen.home or DEFAULT_HOME)

    def node_folder(self, folder: DeploymentFolder, launch_id: str) -> DeploymentFolder:
        return DeploymentFolder(Path(self.home()) / "nodes" / f"{folder.path.name}-{launch_id[:8]}")

    def default_bind(self, expose: bool = False) -> str:
        if not expose:
            return "127.0.0.1"
        return self.nodes()[0].address or bare(self.chosen.hosts[0])

    def choose_ports(self, bind: str, wanted: int | None, avoid: Collection[int] = ()) -> ChosenPorts:
        if not self._facts and self.chosen.gpus:
            return ChosenPorts(Ports(wanted or DEFAULT_PORT, 29501, 29502))
        head = self.chosen.hosts[0]
        asked = Asked(ports=(wanted or DEFAULT_PORT,), free_ports=3 + len(avoid))
        facts = all_or_error(survey(self.ssh, [head], asked))[head]
        if len(facts.free_ports) < asked.free_ports:
            why = facts.errors.get("ports", "it named none")
            raise ConflictError(f"{head} has no free ports: {why}.", "Look at the node: `corral doctor`.", host=head)
        free = [port for port in facts.free_ports if port not in avoid]
        serve, note = wanted or DEFAULT_PORT, ""
        if wanted is None and serve in avoid:
            serve = free[0]
        elif facts.taken_ports:
            taken = facts.taken_ports[0]
            owner = (taken.command or "a process") + (f" of {taken.user}" if taken.user else "")
            if wanted is not None:
                raise ConflictError(
                    f"port {wanted} on {head} is held by {owner}.",
                    "Leave the port out (--port of `corral up`, port in a profile) and a free one is chosen.",
                )
            serve, note = free[0], f"port {DEFAULT_PORT} on {head} is held by {owner}; using another"
        return ChosenPorts(Ports(serve, free[1], free[2]), note)

    def base_url(self, bind: str, ports: Ports) -> str:
        if bind not in LOOPBACK:
            return server_url(self.nodes()[0].address if bind in ("0.0.0.0", "::") else bind, ports.serve)  # noqa: S104
        return server_url("127.0.0.1", near_port(ports.serve))  # brought here by a tunnel

    def place(self, path: Path, progress: Progress) -> str:
        facts = self._looked()
        if self._shared and not self.chosen.home and path.is_relative_to(home_dir()):
            return str(path)  # one home for this machine and all nodes
        if (path / "config.json").is_file():
            away = lacking(self.ssh, self.chosen.hosts, path)
            if not away:
                return str(path)  # a model that every node sees where this machine does
            host, why = next(iter(away.items()))
            progress(f"{path}: {host} {why}; it is brought to the nodes", 0, 0)
        destination = self._destination(path)
        addresses = {node.name: node.address or facts[node.name].hostname for node in self.nodes()}
        return ensure_folder(self.ssh, self.chosen.hosts, path, destination, addresses, progress)

    def _destination(self, path: Path) -> str:
        own = path.relative_to(home_dir()) if path.is_relative_to(home_dir()) else PurePath("models") / path.name
        return str(PurePath(self.home()) / own)

    def placed(self, path: Path) -> str:
        if not self._facts:  # what a profile says lies on the nodes, lies there
            said = (self.chosen.home, self.chosen.models, self.chosen.hf_home)
            there = any(path.is_relative_to(Path(one).expanduser()) for one in said if one)
            return str(path) if there else self._destination(path)
        seen = self._shared and not self.chosen.home and path.is_relative_to(home_dir())
        return str(path) if seen or not lacking(self.ssh, self.chosen.hosts, path) else self._destination(path)

    def reach(self, node: str) -> tuple[str, ...]:
        return (*self.ssh.argv, node)

    def shell(self) -> Ssh:
        return self.ssh

    def fetching_hosts(self) -> tuple[str, ...]:
        self._looked()
        shared = self._shared_hub or (self._shared and not self.chosen.home)  # what is fetched here, the nodes see
        return () if shared else self.chosen.hosts

    def find_model(self, name: str, repo: str, at_least_bytes: int) -> str | None:
        if not self._facts and self.chosen.gpus:
            return None  # a dry run on named hardware asks nobody
        folders = [f"{self.home()}/models/{name}"]
        if self.chosen.models:
            models = self._there(self.chosen.models).rstrip("/")
            folders += [f"{models}/{repo}", f"{models}/{repo.rpartition('/')[2]}", f"{models}/{name}"]
        hub = self._there(self.chosen.hf_home) if self.chosen.hf_home else ""
        return find_on_nodes(self.ssh, self.chosen.hosts, dict.fromkeys(folders), hub, repo, at_least_bytes)

    def _there(self, path: str) -> str:
        """A path on the nodes with their home in it."""
        return path.replace("~", self._looked()[self.chosen.hosts[0]].home, 1) if path.startswith("~") else path

    def verify(self, checks: Sequence[NodeCheck]) -> None:
        for check in checks:
            found = each(self.chosen.hosts, lambda host, check=check: self._ask(host, check))  # type: ignore[misc]
            said: dict[str, str] = {}
            for host, answer in found.items():
                if isinstance(answer, EngineError) and check.details.get("pulled_at_start"):
                    continue  # not there yet is not wrong
                if isinstance(answer, CorralError):
                    raise answer
                said[host] = answer
            if check.reports and len(set(said.values())) > 1:
                rows = ", ".join(f"{host} has {text}" for host, text in said.items())
                raise ConflictError(f"{check.reports} differs between the nodes: {rows}.", check.remedy)

    def _ask(self, host: str, check: NodeCheck) -> str:
        done = self.ssh.run(host, check.argv, timeout_s=check.timeout_s)
        words = (done.stdout.strip() or done.stderr.strip()).splitlines()
        last = words[-1] if words else ""
        if done.code:
            raise EngineError(f"{check.what} does not work on {host}: {last or 'it said nothing'}", check.remedy)
        return last

    def start(self, spec: LaunchSpec, folder: DeploymentFolder) -> None:
        there = self.node_folder(folder, spec.launch_id)
        for rank in spec.ranks:
            make_private_dir(folder.rank(rank.rank).path)
        order = {rank.node: rank for rank in spec.ranks}

        def begin(host: str) -> Started:
            rank = order[host]
            told = {**agent_spec(spec, rank, there), "secrets": [str(there.key), str(there.token)]}
            archive = pack(spec, folder, {f"rank{rank.rank}/spec.json": told})
            said = self._do(host, "start", {"folder": str(there.path), "rank": rank.rank}, archive, 90)
            return read_started(said, host)

        folder.started.touch(mode=0o600)
        try:
            results = each(self.chosen.hosts, begin)
        except BaseException:  # interrupted: an agent without a folder could never be stopped again
            self._undo(folder, spec.launch_id)
            raise
        failed = {host: _why(found) for host, found in results.items() if _why(found)}
        if failed:
            host, why = next(iter(failed.items()))
            left = self._undo(folder, spec.launch_id)
            remedy = left or "Nothing was left running; run it again."
            raise LaunchError(f"the agent on {host} could not be started: {why}", remedy, host=host)
        self.refresh(folder)

    def _undo(self, folder: DeploymentFolder, launch_id: str) -> str:
        """Stop whatever a start may have begun, also on hosts that only did not answer; what is left, in words."""
        try:
            if self.stop(folder, launch_id, 5):
                folder.started.unlink(missing_ok=True)
                return ""
        except CorralError as error:
            return error.in_full
        return f"Something is left there: `corral down {shlex.quote(folder.name)}`."

    def refresh(self, folder: DeploymentFolder) -> None:
        launch = _launch_id(folder)
        ranks = [folder.rank(number) for number in range(len(self.chosen.hosts))]
        if launch is None or all(last_state(rank) in ENDED for rank in ranks):
            return  # nothing more can come
        there = self.node_folder(folder, launch)

        def ask(host: str, rank: RankFolder, timeout_s: float, handle: CommandHandle) -> NodeReport:
            sizes = mirrored_sizes(rank)
            order = {"folder": str(there.path), "rank": rank.number, "files": sizes}
            return read_report(self._do(host, "report", order, b"", timeout_s, handle), host, sizes)

        self._reports = gather(folder, self.chosen.hosts, ask)

    def agents(self, folder: DeploymentFolder) -> AgentsStatus:
        head, *others = self.chosen.hosts
        found = self._reports.get(head)
        if not isinstance(found, NodeReport):  # not heard, or not waited for: others may say that it is lost
            for number, host in enumerate(others, 1):
                if said := last_word(folder.rank(number)):
                    return AgentsStatus(False, where=host, state=State.FAILED, reason=said[0], text=said[1])
        if isinstance(found, CorralError):
            text = f"{found.message.rstrip('.')}; its agents go on without this machine"
            return AgentsStatus(None, where=head, state=State.UNKNOWN, text=text, remedy=found.remedy)
        if found is None or found.missing:
            return AgentsStatus(False, where=head)
        restarted = found.agent is not None and found.agent.boot_id != found.boot_id
        return AgentsStatus(found.alive, restarted, head)

    def stop(self, folder: DeploymentFolder, launch_id: str, grace_s: float) -> bool:
        there = self.node_folder(folder, launch_id)
        waiting = list(self.chosen.hosts)
        left: dict[str, tuple[int | str, ...]] = {}
        away = {host for number, host in enumerate(waiting) if is_away(folder.rank(number))}  # asked just before
        unreachable: dict[str, CorralError] = {}
        for attempt in range(STOP_TRIES):
            if attempt:
                time.sleep(1.0)
            results = each(waiting, lambda host: self._stop_on(host, there, launch_id, grace_s))
            left |= {host: found for host, found in results.items() if not isinstance(found, CorralError)}
            unreachable = {host: found for host, found in results.items() if isinstance(found, CorralError)}
            waiting = list(unreachable)
            if away.issuperset(waiting):  # all others have answered; these did not before either
                break
        if self.chosen.hosts[0] not in waiting:
            self.refresh(folder)
        if not waiting and not any(left.values()):  # the folders say how to find what is left, so they go last
            self._remove(there)
        if waiting:
            names, why = ", ".join(waiting), next(iter(unreachable.values()))
            raise UnreachableError(
                f"{names} could not be reached, so what runs there may go on: {why.message}",
                "All else was stopped; agents that have lost their head end by themselves within seconds. "
                "Run the same `corral down` again when the node is back.",
                hosts=waiting,
            )
        return not any(left.values())

    def _remove(self, there: DeploymentFolder) -> None:
        """The folders on the nodes go; one that stays holds the deployment's key, and is named."""
        order = {"folder": str(there.path)}
        found = each(self.chosen.hosts, lambda host: read_removed(self._do(host, "remove", order, b"", 60), host))
        stays = [host for host, gone in found.items() if isinstance(gone, CorralError) or not gone.removed]
        if stays:
            raise LaunchError(
                f"{there.path} could not be deleted on {', '.join(stays)}; it holds the deployment's key.",
                f"Nothing of it runs any more. Delete it there: ssh {stays[0]} rm -r {shlex.quote(str(there.path))}",
                hosts=stays,
            )

    def _stop_on(self, host: str, there: DeploymentFolder, launch_id: str, grace_s: float) -> tuple[int | str, ...]:
        self.ssh.run(host, ["true"], timeout_s=REACH_S)  # one that is cut off is known soon, and by its name
        rank = self.chosen.hosts.index(host)
        order = {"folder": str(there.path), "rank": rank, "launch_id": launch_id, "grace_s": grace_s + 25}
        found = read_stopped(self._do(host, "stop", order, b"", grace_s + 120), host)
        return (*found.left, *found.containers)

    def forward(self, folder: DeploymentFolder) -> Forward | None:
        launch = load_json(LaunchSpec, folder.launch)
        serve = launch.ranks[0].serve if launch.ranks else None
        local = launch.base_url.rpartition(":")[2].partition("/")[0]
        if serve is None or not local.isascii() or not local.isdigit():
            raise DataError(f"{folder.launch} does not say where the server is.", "Restore the file or delete it.")
        if serve.host not in LOOPBACK:
            return None
        far = "[::1]" if serve.host == "::1" else "127.0.0.1"
        return Forward(int(local), f"{far}:{serve.port}", self.chosen.hosts[0], self.ssh)

    def _do(
        self,
        host: str,
        action: str,
        order: Mapping[str, Any],
        data: bytes,
        timeout_s: float,
        handle: CommandHandle | None = None,
    ) -> str:
        """What the host says to a command of `node/remote.py`; nobody has looked at it yet."""
        done = self.ssh.python(host, bundle("node/remote.py"), [action, json.dumps(order)], data, timeout_s, handle)
        return done.or_raise(f"on {host}", f"Does `ssh {host} python3 --version` say 3.8 or later?").stdout


def _expanded(path: str | None) -> str | None:
    return str(Path(path).expanduser()) if path else None


def _why(found: Started | CorralError) -> str:
    return found.message if isinstance(found, CorralError) else found.error


def _launch_id(folder: DeploymentFolder) -> str | None:
    with contextlib.suppress(OSError, DataError, KeyError, TypeError):
        found = parse_json(folder.launch.read_bytes(), str(folder.launch))["launch_id"]
        return found if isinstance(found, str) else None
    return None
