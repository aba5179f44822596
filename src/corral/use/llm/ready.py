"""Every server that can be looked at now: each fleet before its members, as its gateway sees it; then the others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from corral.base.errors import CorralError
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.fleet import FleetFolder, living_fleets
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle.deployments import Status, statuses
from corral.deploy.lifecycle.resolve import fleet_endpoint


@dataclass(frozen=True)
class ReadyServer:
    """A server under the name that people know it by."""

    name: str
    endpoint: Endpoint
    fleet: str = ""  # that it is a member of
    members: int = 0  # that are ready behind it, where it is a fleet's gateway


def ready_servers(known: Sequence[Status] | None = None) -> list[ReadyServer]:
    """Those that are ready; `known` are the deployments' states, where somebody has just asked."""
    ready = [status for status in (statuses() if known is None else known) if status.state is State.READY]
    left = {status.name: status.endpoint for status in ready if status.endpoint is not None}
    found = []
    for fleet in living_fleets():
        members = [
            ReadyServer(member.name, left.pop(member.name), fleet.name)
            for member in fleet.members
            if member.name in left
        ]
        with contextlib.suppress(CorralError, OSError):  # no gateway of it runs now
            found.append(ReadyServer(fleet.name, fleet_endpoint(FleetFolder.of(fleet.name)), members=len(members)))
        found += members
    return found + [ReadyServer(name, endpoint) for name, endpoint in left.items()]
