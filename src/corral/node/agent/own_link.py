"""Whether this node's own cable is the one that is cut: who loses all others has probably lost itself.

Standard library only, Python 3.8 or later, nothing of corral: the source is sent to the node.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

from ..files import read_text

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str:
    """The interface of this machine that has an IPv4 address; empty where none is found."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            found = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def link_is_down(address: str) -> bool:
    """Whether the interface with this address has no carrier now; False where that cannot be known."""
    name = interface_of(address)
    return bool(name) and read_text("/sys/class/net/%s/operstate" % name) in ("down", "lowerlayerdown", "notpresent")
