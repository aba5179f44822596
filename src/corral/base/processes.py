"""Processes as Corral records them: which one is meant, whether it still runs, its processor time, and who holds a
port.

An `Identity` names one process for good, also after its number was reused or the machine was restarted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from corral.base.errors import ConflictError
from corral.node.files import read_text
from corral.node.processes import boot_id, identity, start_ticks, stat_fields
from corral.node.sockets import TIME_WAIT, holders, listening, tcp_sockets

# this Corral; with -P nothing is imported from the current folder, where another user's modules may lie
OWN_COMMAND = (sys.executable, "-P", "-m", "corral")


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Within the block, SIGTERM raises KeyboardInterrupt as Ctrl-C does; nothing changes outside the main thread."""
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
    namespace: str = ""  # of its process number; empty: not known

    def is_here(self) -> bool:
        """Whether this machine is the one the process ran on, and its processes can be seen from here."""
        seen = self.namespace in ("", process_namespace()) or self.boot_id != boot_id()
        return self.host == socket.gethostname() and seen

    def is_among_ours(self) -> bool:
        """Whether its number certainly means the same process here: same boot of the machine, same namespace."""
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
        """Whether no visible process is this one, and no hidden process of another user can be."""
        found = start_ticks(self.pid)
        return found != self.start_ticks if found else not _is_hidden(self.pid)


def identify(pid: int) -> Identity:
    return Identity(**identity(pid))


def own_identity() -> Identity:
    return replace(identify(os.getpid()), namespace=process_namespace())


def process_namespace() -> str:
    """The namespace of the numbers in /proc; empty when that is not this process's own namespace."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):  # noqa: PTH115 - text, not a path
            return " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time"))  # noqa: PTH115
    return ""


def processor_s(pid: int) -> float:
    """The processor time that a process used so far, with all its threads; OSError where there is no such process."""
    fields = stat_fields(str(pid))
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
    """Who listens on a TCP port of this machine, for a message; empty when nobody does."""
    inodes = {one.inode for one in listening(port)}
    if not inodes:
        return ""
    for pid in holders(inodes).values():
        return f"process {pid} ({read_text(f'/proc/{pid}/comm')})"
    return "a process of another user"


def port_refused(port: int, host: str, error: OSError, remedy: str) -> ConflictError:
    """The error for a port that could not be bound, which names its holder."""
    owner = port_owner(port) or "another process"
    return ConflictError(f"port {port} of {host} cannot be used: {error.strerror or error} ({owner}).", remedy)


def only_lingering(port: int) -> bool:
    """Whether the port is used by nothing but closed connections in TIME_WAIT."""
    states = {one.state for one in tcp_sockets(port)}
    return bool(states) and states == {TIME_WAIT}
