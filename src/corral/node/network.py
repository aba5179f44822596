"""This node's network: interfaces with their addresses, RDMA adapters, and which adapters NCCL may use.

Adapters are named only where all nodes have active ones of the same kind: NCCL fails at its first collective between
a node that uses InfiniBand and one that does not. For the choice, which serves Corral and what runs in a SLURM job, a
node is

    {"name": …, "rdma": [the survey's ports], "networks": {interface: [network, …]}, "default": interface}

Standard library only, nothing of corral: the source is sent to the node. (Part of `survey`, which older Pythons
read.)
"""

import glob
import os
import re
import socket
import struct
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from .files import read_number, read_text

Json = Dict[str, Any]
Address = Tuple[int, str, int]  # family, address, prefix length
COMPUTE_GBPS = 100.0  # an Ethernet adapter that carries the default route is a management port below this
CONTAINER_BRIDGES = re.compile(r"^(docker|br-[0-9a-f]{12}|cni|podman|lxcbr|lxdbr|incusbr|flannel|cilium|kube)")


def addresses() -> Dict[str, List[Address]]:
    """Interface -> its addresses, from the kernel by netlink: `ip` is not on every machine."""
    found: Dict[str, List[Address]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(3)
        link.send(struct.pack("=IHHIIBBBBi", 24, 22, 0x301, 1, 0, 0, 0, 0, 0, 0))  # RTM_GETADDR, a dump
        while True:
            data = link.recv(1 << 17)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (2, 3) or length < 16:  # an error, or the end
                    return found
                _note_address(data[16:length], found)
                data = data[(length + 3) & ~3 :]


def _note_address(body: bytes, found: Dict[str, List[Address]]) -> None:
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
        found.setdefault(socket.if_indextoname(index), []).append((family, socket.inet_ntop(family, raw), prefix))


def interface_of(address: str) -> str:
    """The interface of this machine that has an address; empty where there is none."""
    try:
        rows = addresses()
    except (OSError, AttributeError):  # no netlink: not Linux
        return ""
    return next((name for name, own in rows.items() if address in [one for _, one, _ in own]), "")


def link_is_down(address: str) -> bool:
    """Whether the interface with this address has no carrier now; False where that cannot be known."""
    name = interface_of(address)
    return bool(name) and read_text("/sys/class/net/%s/operstate" % name) in ("down", "lowerlayerdown", "notpresent")


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
    kind = read_number(folder + "/type")
    uevent = read_text(folder + "/uevent")
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
    by_name, rows = addresses(), []
    for name in sorted(os.listdir("/sys/class/net")):
        folder = "/sys/class/net/" + name
        if not os.path.isdir(folder):  # bonding_masters is a file
            continue
        driver = driver_of(name)
        flags = int(read_text(folder + "/flags") or "0", 16)
        own = by_name.get(name, [])
        rows.append(
            {
                "name": name,
                "kind": kind_of(name, folder, driver),
                "driver": driver,
                "up": bool(flags & 1),
                "carrier": {"1": True, "0": False}.get(read_text(folder + "/carrier")),
                "ipv4": ["%s/%d" % (address, bits) for family, address, bits in own if family == socket.AF_INET],
                "ipv6": ["%s/%d" % (address, bits) for family, address, bits in own if family == socket.AF_INET6],
                "mtu": read_number(folder + "/mtu"),
                "speed_mbps": read_number(folder + "/speed"),
            }
        )
    return {"interfaces": rows, "default_interface": default_interface()}


def rdma_ports() -> List[Json]:
    """This node's RDMA ports."""
    rows = []
    for folder in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        device, port = folder.split("/")[4], folder.split("/")[6]
        rate = re.match(r"[\d.]+", read_text(folder + "/rate"))
        beside = sorted(glob.glob("/sys/class/infiniband/%s/device/net/*" % device))
        rows.append(
            {
                "device": device,
                "port": int(port),
                "state": read_text(folder + "/state").rpartition(":")[2].strip().lower(),
                "link_layer": read_text(folder + "/link_layer").lower(),
                "rate_gbps": float(rate.group()) if rate else 0.0,
                "netdev": read_text(folder + "/gid_attrs/ndevs/0") or (os.path.basename(beside[0]) if beside else ""),
            }
        )
    return rows


def default_interface() -> str:
    """The interface of this node's default route."""
    best: Optional[Tuple[int, str]] = None
    for line in read_text("/proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000" and int(fields[3], 16) & 1:
            best = min(best or (1 << 40, ""), (int(fields[6]), fields[0]))
    return best[1] if best else ""


def choose_adapters(nodes: List[Json]) -> Tuple[List[List[str]], bool, str]:
    """Each node's ports as `device:port` (none: NCCL's own choice), whether RDMA must be left alone, and why."""
    infiniband, ethernet = ([_active(node, layer) for node in nodes] for layer in ("infiniband", "ethernet"))
    everywhere: Set[str] = set.intersection(
        *({n for own in node["networks"].values() for n in own} for node in nodes)
    )
    compute = [_for_compute(node, ports, everywhere) for node, ports in zip(nodes, ethernet)]  # noqa: B905 - 3.8
    for active in (infiniband, compute):
        if all(active):
            return [_fastest(ports) for ports in active], False, ""
    for what, active in (("active InfiniBand ports", infiniband), ("RDMA ports on the nodes' network", compute)):
        if any(active):
            lacking = some_of([node["name"] for node, ports in zip(nodes, active) if not ports])  # noqa: B905
            return [], True, "%s has no %s and other nodes do: NCCL uses sockets on all" % (lacking, what)
    if any(ethernet):
        return [], True, "the RDMA ports are those of the management network: NCCL uses sockets"
    return [], False, ""


def _active(node: Json, layer: str) -> List[Json]:
    return [port for port in node["rdma"] if port["state"] == "active" and port["link_layer"] == layer]


def _for_compute(node: Json, ports: List[Json], everywhere: Set[str]) -> List[Json]:
    """Ports whose network the other nodes are in too, without the management port."""
    kept = []
    for port in ports:
        own = set(node["networks"].get(port["netdev"], ()))
        managing = port["netdev"] == node["default"] and port["rate_gbps"] < COMPUTE_GBPS
        if not managing and (not own or own & everywhere):
            kept.append(port)
    return kept


def _fastest(ports: List[Json]) -> List[str]:
    """The ports of the highest rate: slower ones are for storage or management."""
    most = max(port["rate_gbps"] for port in ports)
    chosen = [port for port in ports if port["rate_gbps"] >= 0.9 * most]
    order = sorted(chosen, key=lambda port: (len(port["device"]), port["device"], port["port"]))
    return ["%s:%d" % (port["device"], port["port"]) for port in order]


def some_of(names: Sequence[str], most: int = 6) -> str:
    """The first of many names, and how many more there are."""
    return ", ".join(names[:most]) + (" and %d more" % (len(names) - most) if len(names) > most else "")


def rdma(_: Json) -> Json:
    return {"rdma": rdma_ports()}
