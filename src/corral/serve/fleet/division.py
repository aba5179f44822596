"""Which part of the machines the next member of a fleet gets. Pure.

Where there are at least as many nodes as members, each member has whole nodes; else several share one: a number of
GPUs each, or a number of cores each with their part of the memory. GPUs are never shared between members. Cores are,
where a fleet grows beyond the number it was divided for: the least used ones are taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from corral.base.errors import ConflictError
from corral.base.wording import counted
from corral.deploy.deployment.fleet import FleetNode
from corral.plan.hardware.inventory import NodeSlice


def place_all(nodes: Sequence[FleetNode], count: int, most: int) -> tuple[NodeSlice, ...]:
    """The shares of the first members."""
    found: list[NodeSlice] = []
    for _ in range(count):
        found.append(place(nodes, found, most))
    return tuple(found)


def place(nodes: Sequence[FleetNode], taken: Sequence[NodeSlice], most: int) -> NodeSlice:
    """The share of one more member, where others hold `taken` and there may be `most` in all."""
    if not nodes:  # whoever gives the nodes divides them
        return NodeSlice()
    whole, parts = max(1, len(nodes) // most), -(-most // len(nodes))
    used = Counter(name for share in taken for name in share.nodes)
    order = sorted(nodes, key=lambda node: used[node.name])
    if nodes[0].gpus:
        return _some_gpus(order, taken, whole, parts)
    chosen = order[:whole]
    names, cores = tuple(node.name for node in chosen), chosen[0].cores
    if parts == 1 and not any(used[name] for name in names):
        return NodeSlice(names)
    return NodeSlice(names, cores=_quietest(chosen[0], taken, max(1, len(cores) // parts)),
                 memory_bytes=chosen[0].memory_bytes // parts)  # fmt: skip


def _some_gpus(order: Sequence[FleetNode], taken: Sequence[NodeSlice], whole: int, parts: int) -> NodeSlice:
    size = order[0].gpus // parts
    free = {node.name: _free_gpus(node, taken) for node in order}
    able = [node for node in order if size and len(free[node.name]) >= size]
    if len(able) < whole:
        total = sum(node.gpus for node in order)
        held = total - sum(map(len, free.values()))
        raise ConflictError(
            f"there is no room for another member: {counted(len(taken), 'member holds', 'members hold')} {held} of"
            f" {total} GPUs, and one more needs {max(1, size) * whole}.",
            "Ask for fewer members, or end the fleet and start it again with room to grow: --replicas A..B.",
        )
    chosen = able[:whole]
    if parts == 1:
        return NodeSlice(tuple(node.name for node in chosen))
    return NodeSlice((chosen[0].name,), gpus=tuple(free[chosen[0].name][:size]))


def _free_gpus(node: FleetNode, taken: Sequence[NodeSlice]) -> list[int]:
    here = [share for share in taken if node.name in share.nodes]
    if any(not share.gpus for share in here):  # one has the whole node
        return []
    held = {number for share in here for number in share.gpus}
    return [number for number in range(node.gpus) if number not in held]


def _quietest(node: FleetNode, taken: Sequence[NodeSlice], size: int) -> tuple[int, ...]:
    """The cores that the fewest members have; neighbours where several are alike."""
    use = Counter(core for share in taken if node.name in share.nodes for core in share.cores or node.cores)
    return tuple(sorted(sorted(node.cores, key=lambda core: (use[core], core))[:size]))
