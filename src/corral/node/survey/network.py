"""Interfaces with their addresses, and RDMA adapters."""

import os
import re
import socket
import struct
from typing import Any, Dict, List, Tuple

from ..adapters import default_interface, rdma_ports
from ..files import read_text as read
from .machine import number

Json = Dict[str, Any]
CONTAINER_BRIDGES = re.compile(r"^(docker|br-[0-9a-f]{12}|cni|podman|lxcbr|lxdbr|incusbr|flannel|cilium|kube)")


def addresses() -> Dict[str, List[Tuple[int, str, int]]]:
    """Interface -> (family, address, prefix length), asked of the kernel: `ip` is not on every machine."""
    found: Dict[str, List[Tuple[int, str, int]]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(3)
        link.send(struct.pack("=IHHIIBBBBi", 24, 22, 0x301, 1, 0, 0, 0, 0, 0, 0))  # RTM_GETADDR, a dump
        while True:
            data = link.recv(1 << 17)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (2, 3) or length < 16:  # an error, or the end
                    return found
                note_address(data[16:length], found)
                data = data[(length + 3) & ~3 :]


def note_address(body: bytes, found: Dict[str, List[Tuple[int, str, int]]]) -> None:
    family, prefix, _, _, index = struct.unpack_from("=BBBBi", body)
    parts, rest = {}, body[8:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if length < 4:
            break
        parts[kind] = rest[4:length]
        rest = rest[(length + 3) & ~3 :]
    raw = parts.get(2) or parts.get(1)  # IFA_LOCAL, or IFA_ADDRESS where there is no peer
    if raw and family in (socket.AF_INET, socket.AF_INET6):
        where = found.setdefault(socket.if_indextoname(index), [])
        where.append((family, socket.inet_ntop(family, raw), prefix))


def driver_of(name: str) -> str:
    """The driver's name, by ethtool's call: the only way to know a veth or a tun that was renamed."""
    import array
    import fcntl

    answer = array.array("B", struct.pack("=I", 3) + b"\0" * 192)  # ETHTOOL_GDRVINFO
    request = struct.pack("16sP", name.encode()[:15], answer.buffer_info()[0]) + b"\0" * 16
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket.fileno(), 0x8946, request)
    except OSError:
        return ""
    return answer.tobytes()[4:36].split(b"\0")[0].decode("ascii", "replace")


def kind_of(name: str, folder: str, driver: str) -> str:
    kind = number(read(folder + "/type"))
    uevent = read(folder + "/uevent")
    if kind == 772:
        return "loopback"
    if CONTAINER_BRIDGES.match(name):
        return "docker"
    if kind == 32:
        return "infiniband"
    if os.path.isdir(folder + "/bonding") or "DEVTYPE=team" in uevent or driver == "team":
        return "bond"
    if os.path.isdir(folder + "/bridge"):
        return "bridge"
    if driver == "veth":
        return "veth"
    if driver in ("tun", "wireguard") or kind in (65534, 512, 768, 776, 778) or "DEVTYPE=wireguard" in uevent:
        return "tun"
    if driver in ("dummy", "macvtap", "vxlan", "geneve", "ifb") or name.startswith(("dummy", "vxlan", "cali")):
        return "virtual"
    return "ethernet" if kind == 1 else "virtual"


def interfaces(_: Json) -> Json:
    where, rows = addresses(), []
    for name in sorted(os.listdir("/sys/class/net")):
        folder = "/sys/class/net/" + name
        if not os.path.isdir(folder):  # bonding_masters is a file
            continue
        driver = driver_of(name)
        flags = int(read(folder + "/flags") or "0", 16)
        own = where.get(name, [])
        rows.append(
            {
                "name": name,
                "kind": kind_of(name, folder, driver),
                "driver": driver,
                "up": bool(flags & 1),
                "carrier": {"1": True, "0": False}.get(read(folder + "/carrier")),
                "ipv4": ["%s/%d" % (address, bits) for family, address, bits in own if family == socket.AF_INET],
                "ipv6": ["%s/%d" % (address, bits) for family, address, bits in own if family == socket.AF_INET6],
                "mtu": number(read(folder + "/mtu")),
                "speed_mbps": number(read(folder + "/speed")),
            }
        )
    return {"interfaces": rows, "default_interface": default_interface()}


def rdma(_: Json) -> Json:
    return {"rdma": rdma_ports()}
