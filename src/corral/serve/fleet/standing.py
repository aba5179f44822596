"""How a fleet stands: its members, what gateways have on them, and where it is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from corral.base.errors import CorralError
from corral.base.lock import holder_of
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.fleet import (
    Fleet,
    FleetFolder,
    FleetMember,
    GatewayLoad,
    Judgement,
    MemberLoad,
    held_gateways,
    read_fleet,
    read_loads,
)
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle import deployments

ORDER = (State.READY, State.DRAINING, State.LOADING, State.STARTING, State.STAGING, State.QUEUED)
WORST = (Judgement.GONE, Judgement.HUNG, Judgement.SLOW, Judgement.OK)


@dataclass(frozen=True)
class MemberStatus:
    """One member: its deployment as it stands, and its load."""

    name: str
    leaving: bool
    status: deployments.Status | None  # None: it was not made yet, or cannot be asked
    load: MemberLoad | None  # None: no gateway has it
    text: str = ""

    @property
    def state(self) -> State | None:
        return self.status.state if self.status else None


@dataclass(frozen=True)
class FleetStatus:
    """A fleet as it stands now."""

    name: str
    state: State
    text: str
    model: str
    least: int
    most: int
    wanted: int
    ready: int
    running: int  # requests
    waiting: int
    created_s: float
    endpoint: Endpoint | None
    gateways: tuple[str, ...]
    kept: bool  # whether a keeper runs
    members: tuple[MemberStatus, ...]


def fleet_status(folder: FleetFolder) -> FleetStatus:
    """A fleet with all its members."""
    fleet, loads = read_fleet(folder), list(read_loads(folder).values())
    addresses = [one.url for one in held_gateways(folder).values()]
    members = tuple(member_status(one, load_of(loads, one.name)) for one in fleet.members)
    ready = sum(one.state is State.READY and not one.leaving for one in members)
    state, text = _state(fleet, members, bool(addresses), ready)
    serves = bool(addresses) and not fleet.closed
    return FleetStatus(
        name=fleet.name,
        state=state,
        text=text,
        model=fleet.model,
        least=fleet.least,
        most=fleet.most,
        wanted=fleet.wanted,
        ready=ready,
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        created_s=fleet.created_s,
        endpoint=Endpoint(f"{addresses[0]}/v1", fleet.model, str(folder.key)) if serves else None,
        gateways=tuple(addresses),
        kept=holder_of(folder.keeper) is not None,
        members=members,
    )


def member_status(member: FleetMember, load: MemberLoad | None = None) -> MemberStatus:
    """A member's deployment, as far as it can be asked; one that ended under its name before is not its own."""
    status, text = None, "not started yet"
    folder = DeploymentFolder.of(member.name)
    try:
        found = deployments.status(folder) if folder.record.is_file() else None
        if found is not None and not (found.state in ENDED and found.created_s < member.added_s):
            status, text = found, ""
    except (CorralError, OSError) as error:
        text = str(error)
    return MemberStatus(member.name, member.leaving, status, load, text)


def _state(fleet: Fleet, members: tuple[MemberStatus, ...], reached: bool, ready: int) -> tuple[State, str]:
    """One state for all of it: ready as soon as one member serves through a gateway."""
    count = f"{ready} of {fleet.wanted} ready"
    if fleet.closed:
        return State.STOPPED, fleet.closed
    if ready and reached:
        return State.READY, count
    if ready:
        return State.STARTING, f"{count}; its gateway is not running yet"
    states = [one.state for one in members if one.state and one.state not in ENDED]
    best = next((state for state in ORDER if state in states), State.STARTING)
    return State.STARTING if best is State.READY else best, count


def load_of(loads: list[GatewayLoad] | Mapping[str, GatewayLoad], name: str) -> MemberLoad | None:
    """What all gateways together have on a member; the worst of what they hold of it."""
    known = [load.members[name] for load in (loads.values() if isinstance(loads, Mapping) else loads)
             if name in load.members]  # fmt: skip
    if not known:
        return None
    return MemberLoad(
        running=sum(one.running for one in known),
        outstanding_tokens=sum(one.outstanding_tokens for one in known),
        tokens_per_s=sum(one.tokens_per_s for one in known),
        last_progress_s=max(one.last_progress_s for one in known),
        judged=min((one.judged for one in known), key=WORST.index),
    )
