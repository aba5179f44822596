"""Waiting for a fleet: until as many members serve as it has at least, or it is known that they never will."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

from corral.base.errors import LaunchError
from corral.deploy.deployment.diagnosis import last_lines
from corral.deploy.deployment.fleet import FleetFolder, find_fleet, living_fleets
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle.renewal import BAD_LUCK
from corral.deploy.lifecycle.successors import living_chains
from corral.deploy.lifecycle.watching import Reporter, learn_from
from corral.serve.fleet.standing import FleetStatus, MemberStatus, fleet_status

LOOK_S = 0.5
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
        found = fleet_status(folder)
        if found.state is State.STOPPED:
            raise LaunchError(
                f"the fleet {found.name!r} has ended: {found.text}.", "Start it again with `corral up`."
            )
        if found.endpoint and found.ready >= max(1, found.least):
            for one in found.members:
                if one.state is State.READY:
                    learn_from(DeploymentFolder.of(one.name))
            report.phase("ready")
            return found
        _refuse_hopeless(found)
        alone_s = None if found.endpoint or not found.ready else clock() if alone_s is None else alone_s
        if alone_s is not None and clock() - alone_s > GATEWAY_PATIENCE_S:
            raise _no_gateway(folder)
        report.detail(f"{found.ready} of {found.least} ready", found.ready, found.least)
        for one in found.members:
            _tell(one, told, report)
        time.sleep(LOOK_S)


def _tell(one: MemberStatus, told: dict[str, str], report: Reporter) -> None:
    text = f"{one.name}: {one.state or one.text}"
    if told.get(one.name) != text:
        told[one.name] = text
        report.detail(text, news=True)


def _refuse_hopeless(found: FleetStatus) -> None:
    """A member that never was ready, and ended for a reason that will be the same next time."""
    for one in found.members:
        status = one.status
        if status is None or status.state not in ENDED or status.timings.ready_s is not None:
            continue
        if status.state is State.FAILED and status.reason not in BAD_LUCK:
            why = status.text or (status.reason.value if status.reason else "the reason is unknown")
            raise LaunchError(
                f"{one.name!r}, a member of the fleet {found.name!r}, failed: {why}.",
                status.remedy,
                name=one.name,
                state=status.state.value,
                reason=status.reason.value if status.reason else "",
                log=str(DeploymentFolder.of(one.name).rank(0).log),
            )


def _no_gateway(folder: FleetFolder) -> LaunchError:
    said = last_lines(folder.gateway_log, 3) if folder.gateway_log.is_file() else []
    words = " ".join(said) or "it logged nothing"
    return LaunchError(
        f"the members of {folder.name!r} are ready, but its gateway does not start: {words}",
        f"Read {folder.gateway_log}, or end the fleet with `corral down {shlex.quote(folder.name)}`.",
        log=str(folder.gateway_log),
    )
