"""Ports that nobody holds, when one looks, and ports that Corral's own have reserved.

A reservation is a socket without a file (Linux's abstract names): it counts where the port itself would count, for
all users and homes of the machine; the kernel gives it to one only, and it ends with the process that holds it. So a
port is taken among Corral's own long before an engine that loads for minutes listens there. No stranger is kept away.

Standard library only, nothing of corral: the source is sent to the node. (As `survey`, it is read by older Pythons.)
"""

import errno
import random
import socket
from typing import Collection, List, Optional, Set

SERVED, NEAR = "port", "near"  # a server's own port, and the near end of a tunnel to one
RANGE = (15000, 32000)  # below the range from which the kernel takes ports for outgoing connections


def free_port(host: str = "", first: int = 0, avoid: Collection[int] = ()) -> int:
    """One port, `first` where it is free."""
    for port in free_ports(1, avoid, host, first):
        return port
    raise OSError("this machine has no free port")


def free_ports(count: int, avoid: Collection[int] = (), host: str = "", first: int = 0) -> List[int]:
    """Distinct ports, `first` before all others where it is free; fewer than asked for when there are no more.

    All are held at once while they are sought, and chosen at random, so that other seekers meet others. Without
    SO_REUSEADDR: what another has bound, even without listening, or left to its last wait, is taken.
    """
    held: List[socket.socket] = []
    found: List[int] = []
    shunned = set(avoid) | reserved_ports()
    candidates = [first] * bool(first) + random.sample(range(*RANGE), 2000) + [0] * 20  # 0: the kernel's choice
    try:
        for port in candidates:
            if len(found) == count:
                break
            if port and port in shunned:
                continue
            seeker = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            held.append(seeker)
            try:
                seeker.bind((host, port))
                found.append(seeker.getsockname()[1])
            except OSError:
                continue
    finally:
        for seeker in held:
            seeker.close()
    return found


def reserve(port: int, kind: str = SERVED) -> Optional[socket.socket]:
    """The reservation, which lasts as long as it is not closed; None when another has it."""
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind("\0corral-%s-%d" % (kind, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            held.close()
            return None
    except ValueError:  # a system without such names: nobody has one there
        pass
    return held


def reserved_ports(kind: str = SERVED) -> Set[int]:
    """What Corral's own have reserved here, whoever they belong to."""
    start = "@corral-%s-" % kind
    try:
        with open("/proc/net/unix") as file:
            names = [line.split()[-1] for line in file if start in line]
    except OSError:
        return set()
    return {int(name[len(start) :]) for name in names if name.startswith(start) and name[len(start) :].isdigit()}
