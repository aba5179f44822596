"""A node's RDMA adapters, and which of them NCCL may use; the choice serves Corral and what runs in a SLURM job.

Adapters are named only where all nodes have active ones of the same kind: a node that speaks InfiniBand to one that
does not makes NCCL fail at its first collective. A node is given as

    {"name": …, "rdma": [the survey's ports], "networks": {interface: [network, …]}, "default": interface}

Standard library only, Python 3.8 or later.
"""

import glob
import os
import re
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from .files import read_text

Json = Dict[str, Any]
COMPUTE_GBPS = 100.0  # an Ethernet adapter that carries the default route is a management port below this


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
        words = line.split()
        if len(words) > 7 and words[1] == "00000000" and words[7] == "00000000" and int(words[3], 16) & 1:
            best = min(best or (1 << 40, ""), (int(words[6]), words[0]))
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


def some_of(words: Sequence[str], most: int = 6) -> str:
    """The first of many words, and how many more there are."""
    return ", ".join(words[:most]) + (" and %d more" % (len(words) - most) if len(words) > most else "")
