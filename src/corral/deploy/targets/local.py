"""This machine: agents started as background processes that outlive the terminal."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from corral.base.errors import ConflictError, DataError, LaunchError
from corral.base.files import write_atomic
from corral.base.processes import Identity, only_lingering, port_owner
from corral.base.record import dump_json, load_json
from corral.base.shell import run
from corral.deploy.deployment.folder import DeploymentFolder, RankFolder
from corral.deploy.launch.links import Node, Ports
from corral.deploy.launch.render import LaunchSpec, agent_spec
from corral.deploy.targets.base import AgentsStatus, ChosenPorts, Target, write_node_files
from corral.node.processes import marked
from corral.node.sockets import free_port, reserved_ports

if TYPE_CHECKING:
    from corral.plan.hardware.inventory import Inventory


DEFAULT_PORT = 8000
_STARTED: list[subprocess.Popen[bytes]] = []  # agents that this process started and must reap


class LocalTarget(Target):
    """Starts ranks on this machine."""

    name = "local"
    HERE = True

    @classmethod
    def divisible(cls, options: Mapping[str, Any]) -> tuple[str, ...]:  # noqa: ARG003
        return (socket.gethostname(),)

    def nodes(self) -> tuple[Node, ...]:
        return (Node(socket.gethostname()),)

    def inventory(self) -> Inventory:
        from corral.plan.hardware.inventory import probe

        return probe()

    def choose_ports(self, bind: str, wanted: int | None, avoid: Collection[int] = ()) -> ChosenPorts:
        if wanted is not None:
            if not _is_free(bind, wanted):
                owner = _owner(wanted)
                raise ConflictError(
                    f"port {wanted} is held by {owner}.",
                    "Leave the port out (--port of `corral up`, port in a profile) and a free one is chosen.",
                    port=wanted,
                )
            return ChosenPorts(Ports(wanted))
        if DEFAULT_PORT in avoid:
            return ChosenPorts(Ports(free_port(bind, avoid=avoid)))
        if _is_free(bind, DEFAULT_PORT):
            return ChosenPorts(Ports(DEFAULT_PORT))
        owner = _owner(DEFAULT_PORT)
        number = free_port(bind, avoid=avoid)
        return ChosenPorts(Ports(number), f"port {DEFAULT_PORT} is held by {owner}; using {number}")

    def start(self, spec: LaunchSpec, folder: DeploymentFolder) -> None:
        write_node_files(spec, folder)
        for rank in spec.ranks:
            files = folder.rank(rank.rank)
            write_atomic(files.spec, dump_json(agent_spec(spec, rank, folder)))
            _start_agent(folder, files)

    def agents(self, folder: DeploymentFolder) -> AgentsStatus:
        _STARTED[:] = [process for process in _STARTED if process.poll() is None]
        ranks = folder.ranks() or [folder.rank(0)]
        agents = [_agent_of(rank) for rank in ranks]
        known = [agent for agent in agents if agent is not None]
        if not known or len(known) < len(ranks):
            return AgentsStatus(False)
        if not all(agent.is_here() for agent in known):
            return AgentsStatus(None, where=known[0].host)
        alive = not any(agent.is_gone() for agent in known)
        return AgentsStatus(alive, any(agent.machine_restarted() for agent in known), known[0].host)

    def stop(self, folder: DeploymentFolder, launch_id: str, grace_s: float) -> bool:
        for rank in folder.ranks():
            rank.stop.touch(mode=0o600)
        deadline = time.monotonic() + grace_s + 20
        while time.monotonic() < deadline and self._may_run(folder, launch_id):
            time.sleep(0.05)
        with contextlib.suppress(DataError):  # the agent's file cannot be read: the launch id finds its processes
            if folder.ranks() and self.agents(folder).alive is not False:
                return False
        return _sweep(folder, launch_id)

    def _may_run(self, folder: DeploymentFolder, launch_id: str) -> bool:
        try:
            return self.agents(folder).alive is not False
        except DataError:
            return bool(marked(launch_id, [str(rank.engine) for rank in folder.ranks()]))


def _bindable(host: str) -> str:
    return host or "0.0.0.0"  # noqa: S104 - asked for by the user


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_free(host: str, port: int) -> bool:
    """Whether the port can be bound; closed connections that linger on it do not count.

    Without SO_REUSEADDR, because vLLM binds with it long before it listens: two servers would both find it free.
    """
    free = _can_bind(host, port, reuse=False) or (only_lingering(port) and _can_bind(host, port, reuse=True))
    return free and port not in reserved_ports()


def _owner(port: int) -> str:
    starting = "another deployment that is starting" if port in reserved_ports() else "another process"
    return port_owner(port) or starting


def _can_bind(host: str, port: int, reuse: bool) -> bool:
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        try:
            probe.bind((_bindable(host), port))
        except OverflowError:
            raise ConflictError(f"{port} is not a port number.", "Use 1 to 65535.") from None
        except OSError as error:
            if error.errno in (98, 48, 13):  # in use (Linux, macOS), not permitted
                return False
            raise ConflictError(
                f"{host} is not an address of this machine.",
                "Use 127.0.0.1, 0.0.0.0, or one that `ip address` shows.",
            ) from None
    return True


def _start_agent(folder: DeploymentFolder, rank: RankFolder) -> None:
    log = os.open(rank.agent_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        process = subprocess.Popen(
            [_plain_python(), "-I", str(folder.node_files / "agent.py"), "run", str(rank.spec)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
            cwd=rank.path,
        )
    finally:
        os.close(log)
    try:
        _STARTED.append(process)
        _wait_for_agent(process, rank)
    except BaseException:  # interrupted: nothing could stop an agent without a folder
        process.terminate()
        process.wait(30)
        raise


def _wait_for_agent(process: subprocess.Popen[bytes], rank: RankFolder) -> None:
    deadline = time.monotonic() + 60
    while not rank.agent.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            output = rank.agent_log.read_text(errors="replace").strip()[-500:]
            raise LaunchError(
                f"the node agent did not start: {output or 'it said nothing'}", "Report this with the log."
            )
        time.sleep(0.005)


def _plain_python() -> str:
    """An interpreter for the agent that does not depend on Corral's own environment staying in place."""
    base = getattr(sys, "_base_executable", "") or sys.executable
    return base if os.access(base, os.X_OK) else sys.executable


def _agent_of(rank: RankFolder) -> Identity | None:
    with contextlib.suppress(FileNotFoundError):
        return load_json(Identity, rank.agent)
    return None


def _sweep(folder: DeploymentFolder, launch_id: str) -> bool:
    """End what an agent that was killed together with its supervisor may have left behind."""
    agent = folder.node_files / "agent.py"
    if not agent.is_file():
        return True
    engines = [str(rank.engine) for rank in folder.ranks()]
    return run([_plain_python(), "-I", str(agent), "sweep", launch_id, *engines], timeout_s=120).code == 0
