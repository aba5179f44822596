"""Sockets: who listens on a port of this node, and which processes hold what listens."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Set


def listeners(host: str, port: int) -> Set[str]:
    """Inodes of the sockets that answer on this address and port: bound to it, or to every address."""
    try:
        own = socket.inet_aton(host)[::-1].hex().upper()  # as the kernel writes it
    except OSError:
        own = ""  # IPv6: any listener on the port counts
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/net/" + table) as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].rpartition(":")
                if (
                    fields[3] == "0A"
                    and int(number, 16) == port
                    and (not own or address in (own, "0" * len(address)))
                ):
                    found.add(fields[9])
    return found


def sockets_of(pids: Set[int]) -> Set[str]:
    """Inodes of all sockets that these processes hold."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc/%d/fd" % pid):
                with contextlib.suppress(OSError):
                    link = os.readlink("/proc/%d/fd/%s" % (pid, name))
                    if link.startswith("socket:["):
                        found.add(link[8:-1])
    return found


def listener_users(port: int) -> Set[int]:
    """Users whose sockets listen on a port."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/net/" + table) as file:
            for fields in (line.split() for line in file.readlines()[1:]):
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(int(fields[7]))
    return found
