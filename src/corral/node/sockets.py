"""TCP sockets and ports of this machine: who listens, who is at the other end of a local connection, which ports are
free.

Anybody with an account on this machine can bind one of its ports. So before a key is sent over a connection that does
not leave the machine, the sender checks which user's socket is at the other end. A connection that has not been
accepted yet belongs to whoever listens. Where the kernel has no list of sockets (not Linux), nobody is found.

A port can be reserved for a deployment long before its engine, which may load for minutes, listens on it. A
reservation is a Unix socket with an abstract name (Linux): it covers all users and homes of the machine, the kernel
grants it to one process only, and it ends with that process. It keeps away other deployments, not other programs.

Standard library only, nothing of corral: the source is sent to the node. (Part of `survey`, which older Pythons
read.)
"""

import contextlib
import errno
import os
import random
import socket
import struct
from typing import Collection, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

LISTEN, TIME_WAIT = "0A", "06"  # as the kernel writes them
_MAPPED = "0000000000000000FFFF0000"  # precedes an IPv4 address in the list of IPv6 sockets
SERVED, NEAR = "port", "near"  # a server's own port, and the near end of a tunnel to one
RANGE = (15000, 32000)  # below the range from which the kernel takes ports for outgoing connections


class TcpSocket(NamedTuple):
    """One line of the kernel's list; addresses are in the kernel's hexadecimal form."""

    address: str
    port: int
    far: str  # address:port
    state: str
    uid: int
    inode: str


def tcp_sockets(port: int) -> List[TcpSocket]:
    """Every socket with this local port."""
    sockets = []
    wanted = ":%04X " % port
    for table in ("tcp", "tcp6"):
        try:
            with open("/proc/net/" + table, encoding="ascii", errors="replace") as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            if wanted not in line:  # most lines: splitting them all would cost time
                continue
            fields = line.split()
            address, _, number = fields[1].rpartition(":")
            if int(number, 16) == port:
                sockets.append(TcpSocket(address, port, fields[2], fields[3], int(fields[7]), fields[9]))
    return sockets


def listening(port: int) -> List[TcpSocket]:
    """The sockets that listen on this port, whatever address they are bound to."""
    return [one for one in tcp_sockets(port) if one.state == LISTEN]


def listeners(host: str, port: int) -> Set[str]:
    """Inodes of the sockets that answer on this address and port: bound to it, or to every address."""
    own = kernel_forms(host) if ":" not in host else set()  # IPv6: any listener on the port counts
    return {one.inode for one in listening(port) if not own or one.address in own or not one.address.strip("0")}


def listener_users(port: int, inodes: Optional[Set[str]] = None) -> Set[int]:
    """Users whose sockets listen on a port; with `inodes`, of these sockets only."""
    return {one.uid for one in listening(port) if inodes is None or one.inode in inodes}


def sockets_of(pids: Set[int]) -> Set[str]:
    """Inodes of all sockets that these processes hold, as far as this user may see them."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc/%d/fd" % pid):
                with contextlib.suppress(OSError):
                    link = os.readlink("/proc/%d/fd/%s" % (pid, name))
                    if link.startswith("socket:["):
                        inodes.add(link[8:-1])
    return inodes


def holders(inodes: Set[str]) -> Dict[str, int]:
    """Inode -> process that holds this socket, for processes that this user may inspect."""
    found: Dict[str, int] = {}
    for name in os.listdir("/proc") if inodes else ():
        if name.isdigit():
            for inode in sockets_of({int(name)}) & inodes:
                found.setdefault(inode, int(name))
    return found


def kernel_forms(host: str) -> Set[str]:
    """A numeric address in the ways the kernel writes it; empty for anything else."""
    try:
        form = "%08X" % struct.unpack("=I", socket.inet_aton(host))[0]
        return {form, _MAPPED + form}
    except OSError:
        pass
    try:
        numbers = struct.unpack("=4I", socket.inet_pton(socket.AF_INET6, host.partition("%")[0]))
    except (OSError, UnicodeError):
        return set()
    form = "".join("%08X" % number for number in numbers)
    return {form, form[len(_MAPPED) :]} if form.startswith(_MAPPED) else {form}


def is_local(connection: socket.socket) -> bool:
    """Whether both ends of a TCP connection are on this machine."""
    ours, theirs = connection.getsockname(), connection.getpeername()
    return isinstance(theirs, tuple) and (ours[0] == theirs[0] or theirs[0].startswith(("127.", "::ffff:127.")))


def peer_users(connection: socket.socket) -> Set[int]:
    """The users whose sockets are at the other end of a local connection; empty for one that leaves the machine."""
    if not is_local(connection):
        return set()
    theirs = connection.getpeername()[:2]
    return peer_owners(connection.getsockname()[:2], theirs, tcp_sockets(theirs[1]))


def peer_owners(ours: Tuple[str, int], theirs: Tuple[str, int], sockets: Sequence[TcpSocket]) -> Set[int]:
    """Who accepted this connection or, while nobody has, who listens there (`sockets`: all with their port)."""
    near = {"%s:%04X" % (one, ours[1]) for one in kernel_forms(ours[0])}
    far = kernel_forms(theirs[0])
    accepted = {one.uid for one in sockets if one.address in far and one.far in near and one.inode != "0"}
    if accepted:
        return accepted
    waiting = [one for one in sockets if one.state == LISTEN]
    exact = {one.uid for one in waiting if one.address in far}
    return exact or {one.uid for one in waiting if not one.address.strip("0")}


def free_port(host: str = "", first: int = 0, avoid: Collection[int] = ()) -> int:
    """One free port, `first` where it is free."""
    for port in free_ports(1, avoid, host, first):
        return port
    raise OSError("this machine has no free port")


def free_ports(count: int, avoid: Collection[int] = (), host: str = "", first: int = 0) -> List[int]:
    """Distinct free ports, `first` before all others where it is free; fewer than `count` when there are no more.

    All are bound at once during the search and are chosen at random, so that searches at the same time find different
    ones. Without SO_REUSEADDR: a port that is bound without listening, or in its last wait, counts as taken.
    """
    bound: List[socket.socket] = []
    ports: List[int] = []
    excluded = set(avoid) | reserved_ports()
    candidates = [first] * bool(first) + random.sample(range(*RANGE), 2000) + [0] * 20  # 0: the kernel's choice
    try:
        for port in candidates:
            if len(ports) == count:
                break
            if port and port in excluded:
                continue
            probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            bound.append(probe)
            try:
                probe.bind((host, port))
                ports.append(probe.getsockname()[1])
            except OSError:
                continue
    finally:
        for probe in bound:
            probe.close()
    return ports


def reserve(port: int, kind: str = SERVED) -> Optional[socket.socket]:
    """A reservation, which lasts until it is closed; None when another process has it."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind("\0corral-%s-%d" % (kind, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reservation.close()
            return None
    except ValueError:  # a system without abstract names: there are no reservations there
        pass
    return reservation


def reserved_ports(kind: str = SERVED) -> Set[int]:
    """The ports that deployments on this machine have reserved, whichever user they belong to."""
    start = "@corral-%s-" % kind
    try:
        with open("/proc/net/unix") as file:
            names = [line.split()[-1] for line in file if start in line]
    except OSError:
        return set()
    return {int(name[len(start) :]) for name in names if name.startswith(start) and name[len(start) :].isdigit()}
