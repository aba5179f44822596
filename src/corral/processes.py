"""Telling one process from another, also after its number was given to somebody else or the machine restarted."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from corral.node.identity import boot_id, identity, start_ticks
from corral.node.tcp_table import LISTEN, TIME_WAIT, tcp_sockets

__all__ = ["Identity", "boot_id", "identify", "only_lingering", "own_identity", "port_owner"]


@dataclass(frozen=True)
class Identity:
    """One process on one boot of one machine."""

    pid: int
    host: str
    boot_id: str
    start_ticks: int

    def is_here(self) -> bool:
        """Whether this machine is the one the process ran on."""
        return self.host == socket.gethostname()

    def machine_restarted(self) -> bool:
        return self.is_here() and self.boot_id != boot_id()

    def is_gone(self) -> bool:
        """Whether the process is known to have ended; a process of another machine is never known to."""
        if not self.is_here():
            return False
        return self.machine_restarted() or start_ticks(self.pid) != self.start_ticks


def identify(pid: int) -> Identity:
    return Identity(**identity(pid))


def own_identity() -> Identity:
    return identify(os.getpid())


def port_owner(port: int) -> str:
    """Who listens on a TCP port of this machine, in words; empty when nobody can be named."""
    inodes = {one.inode for one in tcp_sockets(port) if one.state == LISTEN}
    if not inodes:
        return ""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            links = [os.readlink(link) for link in (entry / "fd").iterdir()]  # noqa: PTH115 - text, not a path
        except OSError:
            continue
        if any(f"socket:[{inode}]" in links for inode in inodes):
            name = (entry / "comm").read_text().strip()
            return f"process {entry.name} ({name})"
    return "a process of another user"


def only_lingering(port: int) -> bool:
    """Whether all that the kernel knows of a port are closed connections waiting to be forgotten."""
    states = {one.state for one in tcp_sockets(port)}
    return bool(states) and states == {TIME_WAIT}
