"""Ports that nobody holds, when one looks.

Standard library only, nothing of corral: the source is sent to the node. (As `survey`, it is read by older Pythons.)
"""

import random
import socket
from typing import List, Sequence

RANGE = (15000, 32000)  # below the range from which the kernel takes ports for outgoing connections


def free_port(host: str = "", first: int = 0) -> int:
    """One port, `first` where it is free."""
    for port in free_ports(1, host=host, first=first):
        return port
    raise OSError("this machine has no free port")


def free_ports(count: int, avoid: Sequence[int] = (), host: str = "", first: int = 0) -> List[int]:
    """Distinct ports, `first` before all others where it is free; fewer than asked for when there are no more.

    All are held at once while they are sought, and chosen at random, so that other seekers meet others. Without
    SO_REUSEADDR: what another has bound, even without listening, or left to its last wait, is taken.
    """
    held: List[socket.socket] = []
    found: List[int] = []
    candidates = [first] * bool(first) + random.sample(range(*RANGE), 2000) + [0] * 20  # 0: the kernel's choice
    try:
        for port in candidates:
            if len(found) == count:
                break
            if port and port in avoid:
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
