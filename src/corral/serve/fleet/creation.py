"""Creating a fleet: how many members, which part of the machines each gets, the record; and another size later.

Where there are at least as many nodes as members, each member has whole nodes; otherwise several share a node: a
number of GPUs each, or a number of cores each with their part of the memory. GPUs are never shared between members.
Cores are, where a fleet grows beyond the number it was divided for: the least used ones are taken.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from corral.base.errors import ConflictError, UsageError
from corral.base.record import save_record
from corral.base.wording import counted
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED
from corral.deploy.launch.render import LaunchSpec
from corral.deploy.lifecycle import deployments, rendering
from corral.deploy.lifecycle.decision import DeployRequest, sized
from corral.deploy.lifecycle.watching import Reporter
from corral.deploy.targets.base import load_target
from corral.deploy.targets.keys import target_class
from corral.plan.contract import Plan
from corral.plan.hardware.inventory import Inventory, NodeSlice
from corral.serve.fleet.chain import refuse_held_name
from corral.serve.fleet.record import (
    Fleet,
    FleetFolder,
    FleetMember,
    FleetNode,
    change_fleet,
    create_fleet,
    read_fleet,
)
from corral.serve.fleet.start import narrowed, replaceable

MOST_MEMBERS = 1000


@dataclass(frozen=True)
class FleetSize:
    """How many members a fleet has: at least, and at most."""

    least: int
    most: int

    @property
    def text(self) -> str:
        if self.least == self.most:
            return counted(self.least, "member")
        return f"{self.least} to {counted(self.most, 'member')}"


def parse_size(text: str) -> FleetSize:
    """Read `4`, or `2..8`."""
    low, dots, high = text.partition("..")
    try:
        size = FleetSize(int(low), int(high if dots else low))
    except ValueError:
        raise UsageError(
            f"{text!r} is not a number of replicas.", "Give a number, such as 4, or a range, such as 2..8."
        ) from None
    if not 1 <= size.least <= size.most <= MOST_MEMBERS:
        raise UsageError(
            f"a fleet cannot have {text} replicas.",
            f"Give 1 to {MOST_MEMBERS}; a range begins with the smaller number.",
        )
    return size


@dataclass(frozen=True)
class FleetOrder:
    """What was asked of a fleet besides what its members are."""

    size: FleetSize
    route: str = "prefix"
    host: str = "127.0.0.1"
    port: int | None = None
    keep: bool = False
    keeper_in_jobs: bool = False


def preview(request: DeployRequest, size: FleetSize, note: Callable[[str], None]) -> list[tuple[Plan, LaunchSpec]]:
    """What the first members would run; nothing is started or written."""
    shares = place_all(_nodes(request), size.least, size.most)
    name = sized(narrowed(replace(request, share=shares[0])), note)[1].name
    requests = [replace(request, share=share, name=f"{name}-{n}") for n, share in enumerate(shares, 1)]
    taken: dict[tuple[str, ...], set[int]] = {}
    return [
        rendering.dry_run(narrowed(one), note, taken=taken.setdefault(one.share.nodes[:1], set())) for one in requests
    ]


def prepare_fleet(request: DeployRequest, order: FleetOrder, report: Reporter) -> FleetFolder:
    """Decide, claim the name and write the record; nothing is started yet."""
    nodes = _nodes(request)
    shares = place_all(nodes, order.size.least, order.size.most)
    _, decision = sized(narrowed(replace(request, share=shares[0])), report.note)
    now_s = time.time()
    fleet = Fleet(
        name=decision.name,
        model=decision.served_name,
        least=order.size.least,
        most=order.size.most,
        wanted=order.size.least,
        created_s=now_s,
        members=tuple(
            FleetMember(f"{decision.name}-{n}", share=one, added_s=now_s) for n, one in enumerate(shares, 1)
        ),
        route=order.route,
        allowed_origins=request.api.allowed_origins,
        host=order.host,
        port=order.port,
        nodes=nodes,
        keep=order.keep,
    )
    _free_the_name(fleet)
    folder = create_fleet(fleet, request.api.key())
    if request.api.key_file:  # members made later have the key, too, wherever the file is by then
        request = replace(request, api=replace(request.api, key_file=str(folder.key)))
    save_record(folder.request, replaceable(request, decision))
    append_event(folder.events, "made", text=f"{fleet.name}: {order.size.text}")
    return folder


def _free_the_name(fleet: Fleet) -> None:
    """Refuse names that are in use; an ended deployment of the fleet's own name is set aside."""
    refuse_held_name(fleet.name)
    for name in (fleet.name, *(one.name for one in fleet.members)):
        folder = DeploymentFolder.of(name)
        if not folder.record.is_file():
            continue
        state = deployments.status(folder).state
        if state not in ENDED:
            raise ConflictError(
                f"there is already a deployment called {name!r}, and it is {state}.",
                f"End it (`corral down {shlex.quote(name)}`), or choose another --name for the fleet.",
            )
        if name == fleet.name:
            folder.set_aside()


def _nodes(request: DeployRequest) -> tuple[FleetNode, ...]:
    """The machines that members share; empty where a scheduler gives each member its own."""
    names = target_class(request.target).divisible(request.target_options)
    if not names:
        return ()
    target = load_target(request.target, request.target_options)
    target.prepare()
    inventory = target.inventory()
    return tuple(FleetNode(name, inventory.gpus_per_node if inventory.gpu else 0, _cores(inventory, len(names) == 1),
                           inventory.host_available_bytes) for name in names)  # fmt: skip


def _cores(inventory: Inventory, here: bool) -> tuple[int, ...]:
    """The cores by number; of this machine only those that this process may use."""
    allowed = sorted(os.sched_getaffinity(0)) if here and hasattr(os, "sched_getaffinity") else []
    numbers = allowed if len(allowed) >= inventory.cpu_cores else range(inventory.cpu_cores)
    return tuple(numbers)[: inventory.cpu_cores]


def resize(folder: FleetFolder, size: FleetSize) -> tuple[Fleet, Fleet]:
    """Ask for another number of members: exactly one, or a range; the record before and after."""
    before = read_fleet(folder)
    if before.closed:
        raise ConflictError(
            f"the fleet {folder.name!r} has ended: {before.closed}.",
            "Start it again with `corral up MODEL --replicas N`.",
        )
    taken = [one.share for one in before.members]
    for _ in range(size.least - len(taken)):
        taken.append(place(before.nodes, taken, max(size.most, before.most)))  # refuses what has no room

    def changed(one: Fleet) -> Fleet:
        return replace(
            one, least=size.least, most=size.most, wanted=max(size.least, min(size.most, one.wanted)), closed=""
        )

    after = change_fleet(folder, changed)
    append_event(folder.events, "asked", text=f"asked for {size.text}")
    return before, after


# Which part of the machines a member gets


def place_all(nodes: Sequence[FleetNode], count: int, most: int) -> tuple[NodeSlice, ...]:
    """The shares of the first members."""
    slices: list[NodeSlice] = []
    for _ in range(count):
        slices.append(place(nodes, slices, most))
    return tuple(slices)


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
