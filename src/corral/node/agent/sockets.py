"""Sockets: who listens on a port of this node, and which processes hold what listens."""

from __future__ import annotations

import contextlib
import os
from typing import Optional, Set

from ..tcp_table import LISTEN, tcp_sockets, written


def listeners(host: str, port: int) -> Set[str]:
    """Inodes of the sockets that answer on this address and port: bound to it, or to every address."""
    own = written(host) if ":" not in host else set()  # IPv6: any listener on the port counts
    found = [one for one in tcp_sockets(port) if one.state == LISTEN]
    return {one.inode for one in found if not own or one.address in own or not one.address.strip("0")}


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


def listener_users(port: int, inodes: Optional[Set[str]] = None) -> Set[int]:
    """Users whose sockets listen on a port; with `inodes`, of these sockets only."""
    found = [one for one in tcp_sockets(port) if one.state == LISTEN]
    return {one.uid for one in found if inodes is None or one.inode in inodes}
