"""Nodes reached over ssh: agents placed and started there, that outlive the session and stop together by themselves.

What the agents write stays on their nodes and is mirrored into the deployment's folder here by every command that
reads it (`ssh_reports`), so that these commands work unchanged. The first host is the head.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from corral.base.bundle import bundle
from corral.base.errors import ConflictError, CorralError, DataError, LaunchError, UnreachableError, UsageError
from corral.base.files import make_private_dir
from corral.base.record import load_json, to_json
from corral.base.shell import CommandHandle
from corral.base.ssh import Forward, each, read_hosts_file, split_hosts, typed_hosts
from corral.base.untrusted import parse_json
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.events import last_state
from corral.deploy.deployment.folder import DeploymentFolder, RankFolder, all_folders
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.launch.links import Ports
from corral.deploy.launch.paste import as_shell
from corral.deploy.launch.render import LaunchSpec, agent_spec, server_url
from corral.deploy.targets.base import AgentsStatus, ChosenPorts, Target, launch_id_of
from corral.deploy.targets.keys import Flag, Shared, Size, only_set
from corral.deploy.targets.ssh_nodes import SshKeys, SshNodes, SshOptions, bare
from corral.deploy.targets.ssh_reports import (
    Answers,
    NodeReport,
    Started,
    failure_of,
    gather,
    is_away,
    mirrored_sizes,
    pack,
    read_removed,
    read_report,
    read_started,
    read_stopped,
)
from corral.node.sockets import NEAR, free_port, reserve
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.hardware.survey import Asked, all_or_error, survey

__all__ = ["SshOptions", "SshTarget"]

DEFAULT_PORT = 8000
REACH_S, STOP_TRIES = 4.0, 2  # `down` gives up a node that does not answer within so long, after so many tries
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class SshTarget(SshNodes, Target):
    """Starts one agent per host."""

    name = "ssh"
    TITLE = "ssh"
    TABLE = SshKeys
    OPTIONS = SshOptions
    FLAGS = (
        Flag("--hosts", "hosts", "Run over ssh on these hosts, head first; @FILE: one host per line.", "A,B,…",
             read=split_hosts, typed=typed_hosts),
        Flag("--interface", "interface", "Network interface between the nodes (default: found).", "NAME"),
    )  # fmt: skip
    VARIABLES: ClassVar[Mapping[str, str]] = {"CORRAL_HOSTS": "hosts"}
    DERIVED: ClassVar[Mapping[str, str]] = {"hosts": "hosts_file"}
    REQUIRED = ("hosts",)

    @classmethod
    def completed(cls, table: SshKeys, folder: Path, overruled: frozenset[str]) -> SshKeys:
        """With the hosts of the hosts file, one per line; further words of a line (slots=8) are ignored."""
        if table.hosts_file is None or "hosts" in overruled:
            return table
        if table.hosts:
            raise UsageError("[ssh] has both hosts and hosts_file.", "Keep one of them.", key="hosts_file")
        try:
            hosts = read_hosts_file(str(folder / Path(table.hosts_file).expanduser()))
        except CorralError as error:
            text = f"the hosts file cannot be used: {error.message}"
            raise UsageError(text, "One host per line.", key="hosts_file") from None
        return replace(table, hosts=tuple(dict.fromkeys(hosts)))

    @classmethod
    def from_profile(cls, table: SshKeys, shared: Shared) -> dict[str, object]:
        named = parse_gpus(shared.hardware.gpus) if shared.hardware.gpus else None
        return only_set({
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
        super().__init__(chosen)
        self._reports: Answers = {}

    def options(self) -> dict[str, object]:
        home = self.home() if self._facts else self.chosen.home
        options: dict[str, object] = to_json(replace(self.chosen, home=home))
        return options

    def default_bind(self, expose: bool = False) -> str:
        if not expose:
            return "127.0.0.1"
        return self.nodes()[0].address or bare(self.chosen.hosts[0])

    def choose_ports(self, bind: str, wanted: int | None, avoid: Collection[int] = ()) -> ChosenPorts:
        if self.named:
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

    def paste(self, spec: LaunchSpec, folder: DeploymentFolder, first: Sequence[str]) -> str:
        return as_shell(spec, {rank.node: (*self.ssh.argv, rank.node) for rank in spec.ranks}, first)

    def start(self, spec: LaunchSpec, folder: DeploymentFolder) -> None:
        there = self.node_folder(folder, spec.launch_id)
        for rank in spec.ranks:
            make_private_dir(folder.rank(rank.rank).path)
        ranks = {rank.node: rank for rank in spec.ranks}

        def begin(host: str) -> Started:
            rank = ranks[host]
            orders = {**agent_spec(spec, rank, there), "secrets": [str(there.key), str(there.token)]}
            archive = pack(spec, folder, {f"rank{rank.rank}/spec.json": orders})
            return read_started(
                self._do(host, "start", {"folder": str(there.path), "rank": rank.rank}, archive, 90), host
            )

        folder.started.touch(mode=0o600)
        try:
            results = each(self.chosen.hosts, begin)
        except BaseException:  # interrupted: an agent without a folder could never be stopped again
            self._undo(folder, spec.launch_id)
            raise
        errors = {host: one.message if isinstance(one, CorralError) else one.error for host, one in results.items()}
        failed = {host: error for host, error in errors.items() if error}
        if failed:
            host, why = next(iter(failed.items()))
            left = self._undo(folder, spec.launch_id)
            remedy = left or "Nothing was left running; run it again."
            raise LaunchError(f"the agent on {host} could not be started: {why}", remedy, host=host)
        self.refresh(folder)

    def _undo(self, folder: DeploymentFolder, launch_id: str) -> str:
        """Stop whatever a start may have begun, also on hosts that did not answer; says what is left."""
        try:
            if self.stop(folder, launch_id, 5):
                folder.started.unlink(missing_ok=True)
                return ""
        except CorralError as error:
            return error.in_full
        return f"Something is left there: `corral down {shlex.quote(folder.name)}`."

    def refresh(self, folder: DeploymentFolder) -> None:
        launch = launch_id_of(folder)
        ends = [last_state(folder.rank(number).events) for number in range(len(self.chosen.hosts))]
        if not launch or all(last is not None and last.get("state") in ENDED for last in ends):
            return  # nothing more can come
        there = self.node_folder(folder, launch)

        def ask(host: str, rank: RankFolder, timeout_s: float, leash: CommandHandle) -> NodeReport:
            sizes = mirrored_sizes(rank)
            order = {"folder": str(there.path), "rank": rank.number, "files": sizes}
            return read_report(self._do(host, "report", order, b"", timeout_s, leash), host, sizes)

        self._reports = gather(folder, self.chosen.hosts, ask)

    def agents(self, folder: DeploymentFolder) -> AgentsStatus:
        head, *others = self.chosen.hosts
        report = self._reports.get(head)
        if not isinstance(
            report, NodeReport
        ):  # it did not answer, or was not waited for: others may say that it is lost
            for number, host in enumerate(others, 1):
                if failure := failure_of(folder.rank(number)):
                    return AgentsStatus(False, where=host, state=State.FAILED, reason=failure[0], text=failure[1])
        if isinstance(report, CorralError):
            text = f"{report.message.rstrip('.')}; its agents go on without this machine"
            return AgentsStatus(None, where=head, state=State.UNKNOWN, text=text, remedy=report.remedy)
        if report is None or report.missing:
            return AgentsStatus(False, where=head)
        restarted = report.agent is not None and report.agent.boot_id != report.boot_id
        return AgentsStatus(report.alive, restarted, head)

    def stop(self, folder: DeploymentFolder, launch_id: str, grace_s: float) -> bool:
        there = self.node_folder(folder, launch_id)
        waiting = list(self.chosen.hosts)
        left: dict[str, tuple[int | str, ...]] = {}
        away = {host for number, host in enumerate(waiting) if is_away(folder.rank(number))}
        unreachable: dict[str, CorralError] = {}
        for attempt in range(STOP_TRIES):
            if attempt:
                time.sleep(1.0)
            results = each(waiting, lambda host: self._stop_on(host, there, launch_id, grace_s, host in away))
            left |= {host: result for host, result in results.items() if not isinstance(result, CorralError)}
            unreachable = {host: result for host, result in results.items() if isinstance(result, CorralError)}
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
        """Delete the folders on the nodes; one that cannot be deleted holds the deployment's key, and is named."""
        order = {"folder": str(there.path)}
        results = each(self.chosen.hosts, lambda host: read_removed(self._do(host, "remove", order, b"", 60), host))
        failed = [host for host, result in results.items() if isinstance(result, CorralError) or not result.removed]
        if failed:
            raise LaunchError(
                f"{there.path} could not be deleted on {', '.join(failed)}; it holds the deployment's key.",
                f"Nothing of it runs any more. Delete it there: ssh {failed[0]} rm -r {shlex.quote(str(there.path))}",
                hosts=failed,
            )

    def _stop_on(
        self, host: str, there: DeploymentFolder, launch_id: str, grace_s: float, away: bool
    ) -> tuple[int | str, ...]:
        reach_s = REACH_S / 2 if away else REACH_S  # it was waited for a moment ago
        self.ssh.run(host, ["true"], timeout_s=reach_s)  # an unreachable host fails soon, by its name
        rank = self.chosen.hosts.index(host)
        order = {"folder": str(there.path), "rank": rank, "launch_id": launch_id, "grace_s": grace_s + 25}
        stopped = read_stopped(self._do(host, "stop", order, b"", grace_s + 120), host)
        return (*stopped.left, *stopped.containers)

    def forward(self, folder: DeploymentFolder) -> Forward | None:
        launch = load_json(LaunchSpec, folder.launch)
        serve = launch.ranks[0].serve if launch.ranks else None
        url = load_json(Endpoint, folder.endpoint).base_url if folder.endpoint.is_file() else launch.base_url
        local = url.rpartition(":")[2].partition("/")[0]  # the endpoint's: a tunnel may have had to move
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
        leash: CommandHandle | None = None,
    ) -> str:
        """The host's answer to a command of `node/remote.py`, not yet decoded."""
        done = self.ssh.python(host, bundle("node/remote.py"), [action, json.dumps(order)], data, timeout_s, leash)
        return done.or_raise(f"on {host}", f"Does `ssh {host} python3 --version` say 3.8 or later?").stdout


def _expanded(path: str | None) -> str | None:
    return str(Path(path).expanduser()) if path else None


def near_port(first: int) -> int:
    """A port of this machine for a tunnel that opens when the server is ready, an hour from now maybe.

    This process reserves it until it ends; beyond that, the endpoint in the deployment's folder promises it.
    """
    promised: set[int | None] = set()
    for folder in all_folders():
        try:
            promised.add(_promised_port(folder))
        except OSError:
            first = 0  # it may have promised that one; a port chosen at random it hardly has
    for _ in range(100):
        port = free_port("127.0.0.1", first=0 if first in promised else first)
        held = None if port in promised else reserve(port, NEAR)
        if held:
            atexit.register(held.close)  # this process opens the tunnel, and holds the port until it ends
            return port
        first = 0
    raise ConflictError("this machine has no free port for a tunnel.", "End deployments that are not needed.")


def _promised_port(folder: DeploymentFolder) -> int | None:
    """The port at which a deployment that has not ended is, or will be, reached from here; None where it has none."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, CorralError):
        url = parse_json(folder.endpoint.read_bytes(), str(folder.endpoint))["base_url"]
        last = last_state(folder.rank(0).events)
        return None if last and last.get("state") in ENDED else urlsplit(url).port
    return None
