"""Telling one process from another, also after its number was given to somebody else or the machine restarted."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from corral.node.identity import boot_id, identity, start_ticks

__all__ = ["Identity", "boot_id", "identify", "only_lingering", "own_identity", "port_owner"]

LISTEN, TIME_WAIT = "0A", "06"  # as the kernel writes them


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
    inodes = _listening_inodes(port)
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
    states = {state for state, _ in _sockets(port)}
    return bool(states) and states == {TIME_WAIT}


def _listening_inodes(port: int) -> set[str]:
    return {inode for state, inode in _sockets(port) if state == LISTEN}


def _sockets(port: int) -> list[tuple[str, str]]:
    """(state, inode) of every TCP socket with this local port."""
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if int(fields[1].rpartition(":")[2], 16) == port:
                found.append((fields[3], fields[9]))
    return found
