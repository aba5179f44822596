"""Making a fleet: how many members, which part of the machines each gets, the record; and starting a member."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.errors import ConflictError, UsageError
from corral.base.files import write_atomic
from corral.base.record import dump_json, load_json
from corral.base.wording import counted
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.fleet import (
    Fleet,
    FleetFolder,
    FleetMember,
    FleetNode,
    change_fleet,
    create_fleet,
    read_fleet,
    refuse_fleet_name,
)
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED
from corral.deploy.launch.render import LaunchSpec
from corral.deploy.lifecycle import bringup, deployments, rendering
from corral.deploy.lifecycle.decision import DeployRequest, sized
from corral.deploy.lifecycle.watching import Reporter
from corral.deploy.targets.base import load_target, target_class
from corral.plan.hardware.inventory import Inventory, NodeSlice
from corral.serve.fleet.division import place, place_all

MOST_MEMBERS = 1000


@dataclass(frozen=True)
class FleetSize:
    """How many members a fleet has: at least, and at most."""

    least: int
    most: int

    @property
    def words(self) -> str:
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


def preview(request: DeployRequest, size: FleetSize, note: Callable[[str], None]) -> list[LaunchSpec]:
    """What the first members would run; nothing is started or written."""
    shares = place_all(_nodes(request), size.least, size.most)
    name = sized(_narrowed(replace(request, share=shares[0])), note)[1].name
    requests = [replace(request, share=share, name=f"{name}-{n}") for n, share in enumerate(shares, 1)]
    taken: dict[tuple[str, ...], set[int]] = {}
    return [
        rendering.dry_run(_narrowed(one), note, taken=taken.setdefault(one.share.nodes[:1], set()))
        for one in requests
    ]


def make_fleet(request: DeployRequest, asked: FleetOrder, report: Reporter) -> FleetFolder:
    """Decide, take the name, write everything down; nothing is started yet."""
    nodes = _nodes(request)
    shares = place_all(nodes, asked.size.least, asked.size.most)
    _, decision = sized(_narrowed(replace(request, share=shares[0])), report.note)
    now_s = time.time()
    fleet = Fleet(
        name=decision.name,
        model=decision.served_name,
        least=asked.size.least,
        most=asked.size.most,
        wanted=asked.size.least,
        created_s=now_s,
        members=tuple(
            FleetMember(f"{decision.name}-{n}", share=one, added_s=now_s) for n, one in enumerate(shares, 1)
        ),
        route=asked.route,
        host=asked.host,
        port=asked.port,
        nodes=nodes,
        keep=asked.keep,
    )
    _free_the_name(fleet)
    folder = create_fleet(fleet)
    model = request.model or decision.source.name
    given = Path(model).expanduser()
    kept = replace(request, model=str(given.resolve()) if given.exists() else model, name=fleet.name,
                   served_name=fleet.model, port=None)  # fmt: skip
    write_atomic(folder.request, dump_json(kept))
    append_event(folder.events, "made", text=f"{fleet.name}: {asked.size.words}")
    return folder


def _free_the_name(fleet: Fleet) -> None:
    """Refuse names that live; what ended under the fleet's own name is set aside."""
    refuse_fleet_name(fleet.name)
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
    found = target.inventory()
    return tuple(FleetNode(name, found.gpus_per_node if found.gpu else 0, _cores(found, len(names) == 1),
                           found.host_available_bytes) for name in names)  # fmt: skip


def _cores(found: Inventory, here: bool) -> tuple[int, ...]:
    """The cores by number; of this machine only those that this process may use."""
    allowed = sorted(os.sched_getaffinity(0)) if here and hasattr(os, "sched_getaffinity") else []
    numbers = allowed if len(allowed) >= found.cpu_cores else range(found.cpu_cores)
    return tuple(numbers)[: found.cpu_cores]


def _narrowed(request: DeployRequest) -> DeployRequest:
    """The request with only the nodes of its share."""
    options = target_class(request.target).only_on(request.target_options, request.share.nodes)
    return replace(request, target_options=options) if request.share.nodes else request


def start_member(folder: FleetFolder, name: str, report: Reporter | None = None) -> deployments.Status:
    """Start one member, in the share that it has; returns as soon as it is on its way."""
    member = read_fleet(folder).member(name)
    share = member.share if member else NodeSlice()
    request = _narrowed(replace(load_json(DeployRequest, folder.request), name=name, share=share))
    return bringup.bring_up(request, report or _Silent(), wait=False)


class _Silent:
    """Nobody watches."""

    def phase(self, name: str, expected: object = None) -> None: ...

    def detail(self, text: str, done: int = 0, total: int = 0, news: bool = False) -> None: ...

    def note(self, text: str) -> None: ...


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
    append_event(folder.events, "asked", text=f"asked for {size.words}")
    return before, after
