"""Telling one process from another, also after its number was given to somebody else or the machine restarted;
what a process took of the processor, and who holds a port.

Being told to end: SIGTERM, from a scheduler or `timeout`, as Ctrl-C is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.errors import ConflictError
from corral.node.identity import boot_id, identity, start_ticks
from corral.node.tcp_table import LISTEN, TIME_WAIT, tcp_sockets


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt in here; in other threads than the main one, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class Identity:
    """One process on one boot of one machine."""

    pid: int
    host: str
    boot_id: str
    start_ticks: int
    namespace: str = ""  # in which its number counts; empty: not known

    def is_here(self) -> bool:
        """Whether this machine is the one the process ran on, and its processes can be seen from here."""
        seen = self.namespace in ("", process_namespace()) or self.boot_id != boot_id()
        return self.host == socket.gethostname() and seen

    def is_among_ours(self) -> bool:
        """Whether its number means the same process here, beyond doubt: not on a machine of the same name, nor in
        another container of this one."""
        known = bool(self.boot_id and self.namespace and self.start_ticks)
        return known and (self.boot_id, self.namespace) == (boot_id(), process_namespace())

    def machine_restarted(self) -> bool:
        return self.is_here() and self.boot_id != boot_id()

    def is_gone(self) -> bool:
        """Whether the process is known to have ended; a process of another machine is never known to."""
        if not self.is_here():
            return False
        return self.machine_restarted() or self.has_ended()

    def has_ended(self) -> bool:
        """Whether no process among ours is this one; one of another user that is hidden may still be."""
        found = start_ticks(self.pid)
        return found != self.start_ticks if found else not _is_hidden(self.pid)


def identify(pid: int) -> Identity:
    return Identity(**identity(pid))


def own_identity() -> Identity:
    return replace(identify(os.getpid()), namespace=process_namespace())


def process_namespace() -> str:
    """In which the numbers of /proc count; empty when they are not those of this process' own namespace."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):  # noqa: PTH115 - text, not a path
            return " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time"))  # noqa: PTH115
    return ""


def processor_s(pid: int) -> float:
    """The processor time that a process took so far, with all its threads; OSError where there is no such process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_hidden(pid: int) -> bool:
    """Whether there is a process of another user that /proc does not show (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        pass
    return False


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


def port_refused(port: int, host: str, error: OSError, remedy: str) -> ConflictError:
    """The error of a port that could not be bound, with who holds it."""
    owner = port_owner(port) or "another process"
    return ConflictError(f"port {port} of {host} cannot be used: {error.strerror or error} ({owner}).", remedy)


def only_lingering(port: int) -> bool:
    """Whether all that the kernel knows of a port are closed connections waiting to be forgotten."""
    states = {one.state for one in tcp_sockets(port)}
    return bool(states) and states == {TIME_WAIT}
