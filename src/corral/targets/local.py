"""This machine: agents started as background processes that outlive the terminal."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from importlib import resources
from typing import TYPE_CHECKING

from corral.errors import ConflictError, LaunchError
from corral.files import make_private_dir, write_atomic
from corral.folder import DeploymentFolder, RankFolder
from corral.launch import LaunchSpec, agent_spec
from corral.processes import Identity, port_owner
from corral.record import dump_json, load_json
from corral.shell import run
from corral.targets.base import ChosenPort, Life

if TYPE_CHECKING:
    from corral.hardware import Inventory

__all__ = ["LocalTarget"]

DEFAULT_PORT = 8000


class LocalTarget:
    """Starts ranks on this machine."""

    name = "local"

    def nodes(self) -> tuple[str, ...]:
        return (socket.gethostname(),)

    def inventory(self) -> Inventory:
        from corral.hardware import probe

        return probe()

    def choose_port(self, host: str, wanted: int | None) -> ChosenPort:
        if wanted is not None:
            if not _is_free(host, wanted):
                owner = port_owner(wanted) or "another process"
                raise ConflictError(
                    f"port {wanted} is held by {owner}.", "Leave --port out and a free one is chosen.", port=wanted
                )
            return ChosenPort(wanted)
        if _is_free(host, DEFAULT_PORT):
            return ChosenPort(DEFAULT_PORT)
        owner = port_owner(DEFAULT_PORT) or "another process"
        with socket.socket() as probe:
            probe.bind((_bindable(host), 0))
            number = probe.getsockname()[1]
        return ChosenPort(number, f"port {DEFAULT_PORT} is held by {owner}; using {number}")

    def start(self, spec: LaunchSpec, folder: DeploymentFolder) -> None:
        make_private_dir(folder.node_files)
        for file in spec.files:
            text = (resources.files("corral") / file.resource).read_text(encoding="utf-8")
            write_atomic(folder.node_files / file.name, text)
        for rank in spec.ranks:
            files = folder.rank(rank.rank)
            make_private_dir(files.path)
            write_atomic(files.spec, dump_json(agent_spec(spec, rank, folder)))
            _start_agent(folder, files)

    def life(self, folder: DeploymentFolder) -> Life:
        ranks = folder.ranks()
        agents = [_agent_of(rank) for rank in ranks]
        known = [agent for agent in agents if agent is not None]
        if not known or len(known) < len(ranks):
            return Life(False)
        if not all(agent.is_here() for agent in known):
            return Life(None, where=known[0].host)
        alive = not any(agent.is_gone() for agent in known)
        return Life(alive, any(agent.machine_restarted() for agent in known), known[0].host)

    def stop(self, folder: DeploymentFolder, launch_id: str, grace_s: float) -> bool:
        for rank in folder.ranks():
            rank.stop.touch(mode=0o600)
        deadline = time.monotonic() + grace_s + 20
        while time.monotonic() < deadline and self.life(folder).alive is not False:
            time.sleep(0.05)
        if self.life(folder).alive is None:
            return False
        return _sweep(folder, launch_id)


def _bindable(host: str) -> str:
    return host or "0.0.0.0"  # noqa: S104 - asked for by the user


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_bindable(host), port))
        except OverflowError:
            raise ConflictError(f"{port} is no port number.", "Use 1 to 65535.") from None
        except OSError as error:
            if error.errno in (98, 48, 13):  # in use (Linux, macOS), not permitted
                return False
            raise ConflictError(
                f"{host} is no address of this machine.", "Use 127.0.0.1, 0.0.0.0, or one that `ip address` shows."
            ) from None
    return True


def _start_agent(folder: DeploymentFolder, rank: RankFolder) -> None:
    log = os.open(rank.agent_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        subprocess.Popen(
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
    deadline = time.monotonic() + 20
    while not rank.agent.exists():
        if time.monotonic() > deadline:
            said = rank.agent_log.read_text(errors="replace").strip()[-500:]
            raise LaunchError(
                f"the node agent did not start: {said or 'it said nothing'}", "Report this with the log."
            )
        time.sleep(0.005)


def _plain_python() -> str:
    """An interpreter for the agent that does not depend on Corral's own environment staying in place."""
    base = getattr(sys, "_base_executable", "") or sys.executable
    return base if os.access(base, os.X_OK) else sys.executable


def _agent_of(rank: RankFolder) -> Identity | None:
    with contextlib.suppress(OSError):
        return load_json(Identity, rank.agent)
    return None


def _sweep(folder: DeploymentFolder, launch_id: str) -> bool:
    """End what an agent that was killed together with its keeper may have left behind."""
    agent = folder.node_files / "agent.py"
    if not agent.is_file():
        return True
    return run([_plain_python(), "-I", str(agent), "sweep", launch_id], timeout_s=60).code == 0
