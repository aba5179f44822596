"""The nodes of an ssh target taken together: what they are as one, and where they must not differ."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import replace

from corral.base.errors import ConflictError
from corral.plan.hardware.cpu import common_cpu, parse_cpuinfo
from corral.plan.hardware.inventory import Inventory, recognise
from corral.plan.hardware.survey import NodeFacts


def bare(host: str) -> str:
    """The host's own name: without a user."""
    return host.rpartition("@")[2]


def address_of(host: str) -> str:
    """What the host's name stands for on this machine; the name itself where that is not known."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(bare(host), None, type=socket.SOCK_STREAM)[0][4][0])
    return bare(host)


def refuse_skew(facts: Sequence[NodeFacts]) -> None:
    """Ranks of one replica must be equal: GPUs of one kind and number, one driver."""
    kinds = {
        node.host: (tuple(gpu.name for gpu in node.gpus), node.gpus[0].driver if node.gpus else "") for node in facts
    }
    first = facts[0].host
    for host, kind in kinds.items():
        if kind[0] != kinds[first][0]:
            says = {h: f"{len(k[0])} × {k[0][0]}" if k[0] else "no GPU" for h, k in kinds.items()}
            raise ConflictError(
                f"the nodes differ: {first} has {says[first]}, {host} has {says[host]}.",
                "Name only nodes with the same GPUs.",
            )


def inventory_of(facts: Sequence[NodeFacts], link: str) -> Inventory:
    """The smallest of what the nodes have: every rank gets the same."""
    least = min(facts, key=lambda node: node.memory_available_bytes)
    base = Inventory(
        None, 1, len(facts), 0, min(node.cores for node in facts), least.memory_bytes, least.memory_available_bytes,
        link, "probed", cpu=common_cpu([parse_cpuinfo(node.cpuinfo, node.machine) for node in facts]),
    )  # fmt: skip
    gpus = facts[0].gpus
    if not gpus:
        return base
    kind, memory = gpus[0].name, min(gpu.memory_bytes for node in facts for gpu in node.gpus)
    kind, memory = recognise(kind, memory)
    return replace(base, gpu=kind, gpus_per_node=len(gpus), memory_bytes_per_gpu=memory, driver=gpus[0].driver)
