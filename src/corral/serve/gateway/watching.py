"""Who stands behind a gateway: the members of fleets, and single deployments with their successors.

Looked up in a thread, because it reads files and asks schedulers; told to the gateway's loop.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from corral.base.errors import CorralError
from corral.base.record import load_json
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.folder import DeploymentFolder, open_folder
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.tunnel import ensure_tunnel
from corral.serve.fleet.chain import ChainMember, all_standings
from corral.serve.fleet.record import FleetFolder, find_fleet, read_fleet
from corral.serve.gateway.client_keys import digest_of, read_keys
from corral.serve.gateway.serving import ServerReading
from corral.serve.gateway.users import KeyGrant

LOOK_S = 1.0


@dataclass(frozen=True)
class Source:
    """A name that was given to the gateway."""

    name: str
    fleet: FleetFolder | None = None  # None: a deployment

    def deployments(self) -> list[tuple[DeploymentFolder, bool]]:
        """The deployments that serve it now, and whether each is leaving."""
        if self.fleet is None:
            return [(DeploymentFolder.of(self.name), False)]
        return [(DeploymentFolder.of(one.name), one.leaving) for one in read_fleet(self.fleet).members]

    def key_file(self) -> str:
        return str(self.fleet.key if self.fleet else DeploymentFolder.of(self.name).key)

    def route(self) -> str:
        """The policy that a fleet asks for."""
        return read_fleet(self.fleet).route if self.fleet is not None else "prefix"

    def model(self) -> str:
        """The name that its servers serve."""
        if self.fleet is not None:
            return read_fleet(self.fleet).model
        return load_json(deployments.Record, DeploymentFolder.of(self.name).record).served_name


def open_source(name: str) -> Source:
    """A fleet or a deployment of that name."""
    fleet = find_fleet(name)
    if fleet is None:
        open_folder(name)  # refuses an unknown name, with the nearest
    return Source(name, fleet)


@dataclass(frozen=True)
class GatewaySnapshot:
    """All that a gateway needs to know from outside."""

    readings: tuple[ServerReading, ...]
    grants: tuple[KeyGrant, ...]


class GatewayWatcher(threading.Thread):
    """Looks every second or so, and tells."""

    def __init__(self, sources: Sequence[Source], tell: Callable[[GatewaySnapshot], None]) -> None:
        super().__init__(name="corral-gateway-watcher", daemon=True)
        self._sources, self._tell = sources, tell
        self._stop = threading.Event()
        self._known: dict[str, ChainMember] = {}
        self._last: dict[str, tuple[str, str]] = {}  # address and key that a deployment had when it could be asked
        self._seats: dict[tuple[str, tuple[int, int]], int | None] = {}
        self._tunnelled: dict[str, tuple[int, int]] = {}  # which deployment of a name has its tunnel

    def run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(CorralError, OSError):  # a folder being replaced: the next look sees the new one
                self._tell(self.look())
            self._stop.wait(LOOK_S)

    def stop(self) -> None:
        self._stop.set()

    def look(self) -> GatewaySnapshot:
        """Everything, now; a source whose files cannot be read at this moment keeps nobody else from being seen."""
        readings: list[ServerReading] = []
        grants: list[KeyGrant] = []
        known: dict[str, ChainMember] = {}
        for source in self._sources:
            with contextlib.suppress(CorralError, OSError):
                model = source.model()
                grants.append(_own_grant(source, model))
                for folder, leaving in source.deployments():
                    for one in all_standings(folder, self._known):
                        known[one.folder.name] = one
                        readings.append(self._reading(one, source.name, model, leaving))
        self._known = known
        return GatewaySnapshot(tuple(readings), (*grants, *_further()))

    def _reading(self, one: ChainMember, source: str, model: str, leaving: bool) -> ServerReading:
        name, status = one.folder.name, one.status
        if status is not None:
            endpoint = status.endpoint
            self._last[name] = (endpoint.root, _key(endpoint)) if endpoint else ("", "")
        if one.state is State.READY and self._tunnelled.get(name) != one.stamp:
            with contextlib.suppress(CorralError):
                ensure_tunnel(one.folder)
                self._tunnelled[name] = one.stamp
        url, key = self._last.get(name, ("", ""))
        text = status.text if status else one.text
        return ServerReading(name, one.state, url, text, model, key, self._seats_of(one), source, leaving)

    def _seats_of(self, one: ChainMember) -> int | None:
        key = (one.folder.name, one.stamp)
        if key not in self._seats:
            plan = deployments.plan_of(one.folder)
            if plan is None:
                return None  # it may still come
            self._seats[key] = plan.seats
        return self._seats[key]


def _key(endpoint: Endpoint) -> str:
    with contextlib.suppress(CorralError):
        return endpoint.key() or ""
    return ""


def _own_grant(source: Source, model: str) -> KeyGrant:
    """The key of a fleet or deployment is good for its model."""
    key = Endpoint("http://localhost", "", source.key_file()).key() or ""
    return KeyGrant(source.name, digest_of(key.encode()), frozenset((model, source.name)))


def _further() -> list[KeyGrant]:
    """The keys that were made for clients."""
    with contextlib.suppress(CorralError, OSError, ValueError):
        return [
            KeyGrant(one.name, bytes.fromhex(one.digest), frozenset(one.models) or None, one.rpm, one.tpm)
            for one in read_keys()
        ]
    return []
