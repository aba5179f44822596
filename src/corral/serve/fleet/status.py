"""The status of a fleet: its members, the load on them, where it is reached; and waiting until it serves."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from corral.base.errors import CorralError, LaunchError
from corral.base.files import changed_s, is_gone
from corral.base.lock import holder_of, lock_holder, silence_s
from corral.base.wording import duration
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.diagnosis import last_lines
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.watching import Reporter, learn_from
from corral.serve.fleet.chain import living_chains
from corral.serve.fleet.record import (
    SILENT_S,
    Fleet,
    FleetFolder,
    FleetMember,
    GatewayAddress,
    GatewayLoad,
    Judgement,
    MemberLoad,
    all_fleets,
    find_fleet,
    held_gateways,
    living_fleets,
    read_fleet,
    read_loads,
)
from corral.serve.fleet.steps import BAD_LUCK

NOT_STARTED = "not started yet"
ORDER = (State.READY, State.DRAINING, State.LOADING, State.STARTING, State.STAGING, State.QUEUED)
WORST = (Judgement.GONE, Judgement.HUNG, Judgement.SLOW, Judgement.OK)


@dataclass(frozen=True)
class MemberStatus:
    """One member: the status of its deployment, and its load."""

    name: str
    leaving: bool
    status: deployments.Status | None  # None: it was not started yet; of unknown state where it cannot be read
    load: MemberLoad | None  # None: no gateway has it
    text: str = ""

    @property
    def state(self) -> State | None:
        return self.status.state if self.status else None

    @property
    def stuck(self) -> bool:
        """Whether requests to it would not be answered, although its engine runs."""
        return self.load is not None and self.load.judged in (Judgement.HUNG, Judgement.GONE)


@dataclass(frozen=True)
class FleetStatus:
    """The status of a fleet now."""

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
    kept: bool | None  # whether a keeper runs; None: that cannot be read now
    keeper: str  # which, or since when there is none
    members: tuple[MemberStatus, ...]
    at_urls: tuple[MemberStatus, ...] = ()  # servers that its gateways have beside its members
    outdated: tuple[int, ...] = ()  # processes of gateways here that cannot hand their port over to a later version's

    @property
    def warning(self) -> str:
        """What to say first where the keeper is dead; empty where all is well or nothing is known."""
        if self.state is State.STOPPED:
            return ""
        if self.kept is not False:
            return _outdated(self.name, self.outdated[0]) if self.outdated else ""
        last = self.keeper.removeprefix("none").removeprefix("; ")
        return (
            f"no keeper runs for {self.name}{f' ({last})' if last else ''}: members that end are not replaced."
            f" `corral fleet keep {shlex.quote(self.name)}` starts one;"
            " `corral service install` does so after each boot."
        )


def _outdated(name: str, pid: int) -> str:
    return (
        f"the gateway of {name} (process {pid}) is of an earlier version of Corral and does not know the members that"
        f" this version starts. `kill {pid}` ends it; the keeper then starts one of this version at the same port,"
        " which refuses connections for a few seconds."
    )


def fleet_status(folder: FleetFolder, known: Mapping[str, deployments.Status] | None = None) -> FleetStatus:
    """A fleet with all its members, as they are `known` by name, or asked at once."""
    fleet, loads = read_fleet(folder), list(read_loads(folder).values())
    held = held_gateways(folder)
    gateways = list(held.values())
    known = read_statuses(fleet.members) if known is None else known
    members = tuple(member_of(one, known.get(one.name), load_of(loads, one.name)) for one in fleet.members)
    if any(one.status is None for one in members):
        members = _with_refusals(folder, members)
    ready = sum(one.state is State.READY and not one.leaving and not one.stuck for one in members)
    state, text = _state(fleet, members, gateways, ready)
    serves = bool(gateways) and gateways[0].is_reachable and not fleet.closed
    kept, keeper = keeper_status(folder)
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
        endpoint=Endpoint(f"{gateways[0].url}/v1", fleet.model, str(folder.key)) if serves else None,
        gateways=tuple(one.url if one.is_reachable else f"{one.url} on {one.machine}" for one in gateways),
        kept=kept,
        keeper=keeper,
        members=members,
        at_urls=_at_urls(loads),
        outdated=tuple(
            one.holder.pid
            for id, one in held.items()
            if one.holder and not (one.machine or one.written_by or folder.gateway_socket(id).exists())
        ),
    )


def fleet_statuses(known: Mapping[str, deployments.Status]) -> list[FleetStatus]:
    """Every fleet of this home, its members as they are `known`; one that cannot be read is of unknown state."""
    statuses = []
    for folder in all_fleets():
        try:
            statuses.append(fleet_status(folder, known))
        except FileNotFoundError:  # deleted meanwhile
            continue
        except (CorralError, OSError) as error:
            text = error.in_full if isinstance(error, CorralError) else str(error)
            of_what, counts = (folder.name, State.UNKNOWN, text, "-"), (0, 0, 0, 0, 0, 0)
            made_s = changed_s(folder.key)
            statuses.append(FleetStatus(*of_what, *counts, made_s, None, (), None, "unknown", ()))
    return statuses


def _with_refusals(folder: FleetFolder, members: tuple[MemberStatus, ...]) -> tuple[MemberStatus, ...]:
    """The members; of those that could not be started, why, as the keeper was told."""
    why = {
        str(event.get("member")): str(event.get("text")).removeprefix(f"{event.get('member')}: ")
        for event in read_events(folder.events)
        if event.kind == "failed"
    }
    return tuple(
        replace(one, text=f"{one.text}: {why[one.name]}") if one.status is None and one.name in why else one
        for one in members
    )


def keeper_status(folder: FleetFolder) -> tuple[bool | None, str]:
    """Whether a fleet has a keeper, and which, or which it had; None where that cannot be read now."""
    try:
        last = lock_holder(folder.keeper)
        if last is None:
            return False, "none"
        who = f"process {last.pid} on {last.host}"
        if holder_of(folder.keeper, SILENT_S):
            return True, who
        return False, f"none; the last one, {who}, has been gone for {duration(silence_s(folder.keeper))}"
    except OSError as error:
        return None, f"unknown: {error}"


def not_here(name: str, gateway: GatewayAddress) -> str:
    """Where to go when the only gateway listens on the loopback address of another machine."""
    return (
        f"Its gateway listens on {gateway.machine} only. Use it there, start another one here"
        f" (`corral gateway {shlex.quote(name)}`), or open a tunnel"
        f" (`ssh -N -L {gateway.port}:127.0.0.1:{gateway.port} {gateway.machine}`)."
    )


def read_statuses(members: Sequence[FleetMember]) -> dict[str, deployments.Status]:
    """The statuses of the deployments that there are, asked at once, by name."""
    folders = [folder for one in members if not is_gone((folder := DeploymentFolder.of(one.name)).record)]
    statuses = deployments.statuses(folders)
    return {folder.name: status for folder, status in zip(folders, statuses, strict=True)}


def member_of(member: FleetMember, known: deployments.Status | None, load: MemberLoad | None = None) -> MemberStatus:
    """A member with the status of the deployment of its name, unless that ended before it was the fleet's."""
    if known is None or (known.state in ENDED and known.created_s < member.added_s):
        return MemberStatus(member.name, member.leaving, None, load, NOT_STARTED)
    return MemberStatus(member.name, member.leaving, known, load, known.text if known.state is State.UNKNOWN else "")


def _state(
    fleet: Fleet, members: tuple[MemberStatus, ...], gateways: Sequence[GatewayAddress], ready: int
) -> tuple[State, str]:
    """One state for all of it: ready as soon as one member serves through a gateway."""
    judged = [one.load.judged.value for one in members if one.load and one.stuck and one.state is State.READY]
    count = ", ".join(
        [f"{ready} of {fleet.wanted} ready", *(f"{judged.count(one)} {one}" for one in sorted({*judged}))]
    )
    if fleet.closed:
        return State.STOPPED, fleet.closed
    if ready and gateways:
        return State.READY, count if gateways[0].is_reachable else f"{count}. {not_here(fleet.name, gateways[0])}"
    if ready:
        return State.STARTING, f"{count}; its gateway is not running yet"
    states = [one.state for one in members if one.state and one.state not in ENDED]
    best = next((state for state in ORDER if state in states), State.STARTING)
    return State.STARTING if best is State.READY else best, count


def load_of(loads: list[GatewayLoad] | Mapping[str, GatewayLoad], name: str) -> MemberLoad | None:
    """What all gateways together have on a member; the worst of what they hold of it."""
    return _worst([load.members[name] for load in (loads.values() if isinstance(loads, Mapping) else loads)
                   if name in load.members])  # fmt: skip


def _worst(known: Sequence[MemberLoad]) -> MemberLoad | None:
    if not known:
        return None
    return MemberLoad(
        running=sum(one.running for one in known),
        outstanding_tokens=sum(one.outstanding_tokens for one in known),
        tokens_per_s=sum(one.tokens_per_s for one in known),
        last_progress_s=max(one.last_progress_s for one in known),
        judged=min((one.judged for one in known), key=WORST.index),
    )


def _at_urls(loads: Sequence[GatewayLoad]) -> tuple[MemberStatus, ...]:
    urls = sorted({url for load in loads for url in load.at_urls})
    known = [_worst([load.at_urls[url] for load in loads if url in load.at_urls]) for url in urls]
    return tuple(MemberStatus(url, False, None, load) for url, load in zip(urls, known, strict=True))


def judgement_of(loads: Mapping[str, GatewayLoad], name: str) -> Judgement:
    """What gateways hold of a member, the worst of it; OK where nothing is known.

    A gateway to which every member seems out of order does not count beside others, and does not call one out of
    reach: the cause may be its own network.
    """
    seeing = [load for load in loads.values() if any(one.judged is Judgement.OK for one in load.members.values())]
    judged = [load.members[name].judged for load in seeing or loads.values() if name in load.members]
    if not seeing:
        judged = [one for one in judged if one is not Judgement.GONE]
    return min(judged, key=WORST.index, default=Judgement.OK)


INTERVAL_S = 0.5
GATEWAY_PATIENCE_S = 60.0  # from the first ready member on


def chosen_fleet(name: str | None) -> FleetFolder | None:
    """The fleet of that name; without a name the only one, where nothing else runs. None: a deployment is meant."""
    if name is not None:
        return find_fleet(name)
    fleets = living_fleets()
    members = {member.name for fleet in fleets for member in fleet.members}
    if len(fleets) != 1 or set(living_chains()) - members:
        return None
    return FleetFolder.of(fleets[0].name)


def wait_fleet(folder: FleetFolder, report: Reporter, clock: Callable[[], float] = time.monotonic) -> FleetStatus:
    """Follow a fleet until it serves with as many members as it has at least."""
    told: dict[str, str] = {}
    alone_s: float | None = None  # since when members are ready and no gateway is
    report.phase("starting members")
    while True:
        fleet = fleet_status(folder)
        if fleet.state is State.STOPPED:
            raise LaunchError(
                f"the fleet {fleet.name!r} has ended: {fleet.text}.", "Start it again with `corral up`."
            )
        if fleet.endpoint and fleet.ready >= max(1, fleet.least):
            for one in fleet.members:
                if one.state is State.READY:
                    learn_from(DeploymentFolder.of(one.name))
            report.phase("ready")
            return fleet
        _refuse_hopeless(fleet)
        alone_s = None if fleet.endpoint or not fleet.ready else clock() if alone_s is None else alone_s
        if alone_s is not None and clock() - alone_s > GATEWAY_PATIENCE_S:
            raise _no_gateway(folder)
        report.detail(f"{fleet.ready} of {fleet.least} ready", fleet.ready, fleet.least)
        for one in fleet.members:
            _tell(one, told, report)
        time.sleep(INTERVAL_S)


def _tell(one: MemberStatus, told: dict[str, str], report: Reporter) -> None:
    text = f"{one.name}: {one.state or one.text}"
    if told.get(one.name) != text:
        told[one.name] = text
        report.detail(text, news=True)


def _refuse_hopeless(fleet: FleetStatus) -> None:
    """A member that never was ready, and ended for a reason that will be the same next time."""
    for one in fleet.members:
        status = one.status
        if status is None or status.state not in ENDED or status.timings.ready_s is not None:
            continue
        if status.state is State.FAILED and status.reason not in BAD_LUCK:
            why = status.text or (status.reason.value if status.reason else "the reason is unknown")
            raise LaunchError(
                f"{one.name!r}, a member of the fleet {fleet.name!r}, failed: {why}.",
                status.remedy,
                name=one.name,
                state=status.state.value,
                reason=status.reason.value if status.reason else "",
                log=str(DeploymentFolder.of(one.name).rank(0).log),
            )


def _no_gateway(folder: FleetFolder) -> LaunchError:
    lines = last_lines(folder.gateway_log, 3) if folder.gateway_log.is_file() else []
    text = " ".join(lines) or "it logged nothing"
    return LaunchError(
        f"the members of {folder.name!r} are ready, but its gateway does not start: {text}",
        f"Read {folder.gateway_log}, or end the fleet with `corral down {shlex.quote(folder.name)}`.",
        log=str(folder.gateway_log),
    )
