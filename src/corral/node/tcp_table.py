"""The kernel's list of this machine's TCP sockets, and whose process is at the other end of a connection within it.

A port of this machine may be taken by anybody who has an account here. So before a key goes through a connection that
does not leave the machine, one looks which user's socket is at its other end. A connection that nobody has accepted
yet belongs to whoever listens. Without the kernel's list (not Linux) nothing is known, and nobody is found.

Standard library only, nothing of corral: the source is sent to the node.
"""

from __future__ import annotations

import socket
import struct
from typing import List, NamedTuple, Sequence, Set, Tuple

LISTEN, TIME_WAIT = "0A", "06"  # as the kernel writes them
_MAPPED = "0000000000000000FFFF0000"  # what stands before an IPv4 address in the list of IPv6


class TcpSocket(NamedTuple):
    """One line of the list; addresses are the kernel's hexadecimal."""

    address: str
    port: int
    far: str  # address:port
    state: str
    uid: int
    inode: str


def tcp_sockets(port: int) -> List[TcpSocket]:
    """Every socket with this local port."""
    found = []
    wanted = ":%04X " % port
    for table in ("tcp", "tcp6"):
        try:
            with open("/proc/net/" + table, encoding="ascii", errors="replace") as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            if wanted not in line:  # most of them, and splitting costs
                continue
            fields = line.split()
            address, _, number = fields[1].rpartition(":")
            if int(number, 16) == port:
                found.append(TcpSocket(address, port, fields[2], fields[3], int(fields[7]), fields[9]))
    return found


def written(host: str) -> Set[str]:
    """A numeric address in the ways the kernel writes it; empty for anything else."""
    try:
        own = "%08X" % struct.unpack("=I", socket.inet_aton(host))[0]
        return {own, _MAPPED + own}
    except OSError:
        pass
    try:
        words = struct.unpack("=4I", socket.inet_pton(socket.AF_INET6, host.partition("%")[0]))
    except (OSError, UnicodeError):
        return set()
    own = "".join("%08X" % word for word in words)
    return {own, own[len(_MAPPED) :]} if own.startswith(_MAPPED) else {own}


def stays_here(connection: socket.socket) -> bool:
    """Whether both ends of a TCP connection are on this machine."""
    ours, theirs = connection.getsockname(), connection.getpeername()
    return isinstance(theirs, tuple) and (ours[0] == theirs[0] or theirs[0].startswith(("127.", "::ffff:127.")))


def users_at_other_end(connection: socket.socket) -> Set[int]:
    """The users whose sockets are at the other end of a connection that stays on this machine."""
    if not stays_here(connection):
        return set()
    theirs = connection.getpeername()[:2]
    return owners_of(connection.getsockname()[:2], theirs, tcp_sockets(theirs[1]))


def owners_of(ours: Tuple[str, int], theirs: Tuple[str, int], found: Sequence[TcpSocket]) -> Set[int]:
    """Who accepted this connection or, while nobody has, who listens there (`found`: all with their port)."""
    near = {"%s:%04X" % (one, ours[1]) for one in written(ours[0])}
    far = written(theirs[0])
    taken = {one.uid for one in found if one.address in far and one.far in near and one.inode != "0"}
    if taken:
        return taken
    listening = [one for one in found if one.state == LISTEN]
    exact = {one.uid for one in listening if one.address in far}
    return exact or {one.uid for one in listening if not one.address.strip("0")}
