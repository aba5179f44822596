"""The servers behind a gateway: the members of fleets and chains, and single deployments.

A thread finds out how they are, because that reads files and asks schedulers; the gateway's loop is told. A server
that cannot be asked keeps the address that it had, and a source whose files cannot be read at this moment (it is
being replaced) keeps its servers and its key.
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
from corral.deploy.launch.adapters import adapters
from corral.deploy.launch.render import LaunchSpec
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.tunnel import ensure_tunnel, needs_tunnel, tunnel_holder
from corral.serve.fleet.chain import DeploymentReading, read_chain, read_deployment
from corral.serve.fleet.record import FleetFolder, FleetMember, find_fleet, read_fleet
from corral.serve.gateway.keys import digest_of, read_keys
from corral.serve.gateway.member import MemberReading
from corral.serve.gateway.usage import KeyGrant

INTERVAL_S = 1.0
Stamp = tuple[int, int]  # of a deployment's record: another deployment of the same name has another


@dataclass(frozen=True)
class Source:
    """A fleet or a deployment that a gateway serves."""

    name: str
    fleet: FleetFolder | None = None  # None: a deployment

    def deployments(self) -> list[tuple[DeploymentFolder, bool]]:
        """The deployments that serve it now, oldest first, and whether each is leaving."""
        fleet = read_fleet(self.fleet) if self.fleet else read_chain(DeploymentFolder.of(self.name))
        members = fleet.members if fleet else [FleetMember(self.name)]
        return [(DeploymentFolder.of(one.name), one.leaving) for one in members]

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
    """The fleet or deployment of that name."""
    fleet = find_fleet(name)
    if fleet is None:
        open_folder(name)  # refuses an unknown name, with the nearest
    return Source(name, fleet)


@dataclass(frozen=True)
class GatewaySnapshot:
    """All that a gateway needs to know from outside."""

    readings: tuple[MemberReading, ...]
    grants: tuple[KeyGrant, ...]


@dataclass(frozen=True)
class _SourceReading:
    """What the files of a source say."""

    model: str
    grant: KeyGrant
    deployments: tuple[tuple[DeploymentFolder, bool], ...]


class Watcher(threading.Thread):
    """Reads all sources every second or so, and tells the gateway."""

    def __init__(self, sources: Sequence[Source], tell: Callable[[GatewaySnapshot], None]) -> None:
        super().__init__(name="corral-gateway-watcher", daemon=True)
        self._sources, self._tell = sources, tell
        self._stop = threading.Event()
        self._known_sources: dict[str, _SourceReading] = {}
        self._known: dict[str, DeploymentReading] = {}
        self._addresses: dict[str, tuple[str, str]] = {}  # URL and key, when the deployment could last be asked
        self._seats: dict[tuple[str, Stamp], int | None] = {}
        self._adapters: dict[tuple[str, Stamp], tuple[str, ...]] = {}
        self._tunnelled: dict[tuple[str, Stamp], bool] = {}  # whether a deployment is reached through a tunnel

    def run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(CorralError, OSError):
                self._tell(self.read())
            self._stop.wait(INTERVAL_S)

    def stop(self) -> None:
        self._stop.set()

    def read(self) -> GatewaySnapshot:
        """Everything, now."""
        readings: list[MemberReading] = []
        grants: list[KeyGrant] = []
        known: dict[str, DeploymentReading] = {}
        for source in self._sources:
            files = self._source(source)
            if files is None:
                continue
            grants.append(files.grant)
            for folder, leaving in files.deployments:
                known[folder.name] = one = read_deployment(folder, self._known.get(folder.name))
                readings.append(self._reading(one, source.name, files.model, leaving))
        self._known = known
        return GatewaySnapshot(tuple(readings), (*grants, *_client_grants()))

    def _source(self, source: Source) -> _SourceReading | None:
        with contextlib.suppress(CorralError, OSError):
            model = source.model()
            grant = _own_grant(source, model)
            self._known_sources[source.name] = _SourceReading(model, grant, tuple(source.deployments()))
        return self._known_sources.get(source.name)

    def _reading(self, one: DeploymentReading, source: str, model: str, leaving: bool) -> MemberReading:
        name, status = one.folder.name, one.status
        if status is not None:
            endpoint = status.endpoint
            self._addresses[name] = (endpoint.root, _key(endpoint)) if endpoint else ("", "")
        if one.state is State.READY:
            with contextlib.suppress(CorralError, OSError):
                self._open_tunnel(one.folder, one.stamp)
        url, key = self._addresses.get(name, ("", ""))
        text = status.text if status else one.text
        seats, given = self._seats_of(one), self._adapters_of(one)
        return MemberReading(name, one.state, url, text, model, key, seats, source, leaving, given)

    def _open_tunnel(self, folder: DeploymentFolder, stamp: Stamp) -> None:
        """Open a tunnel where one is needed and none is held: it may never have been opened, or its holder died."""
        key = (folder.name, stamp)
        if key not in self._tunnelled:
            self._tunnelled[key] = needs_tunnel(folder)
        if self._tunnelled[key] and tunnel_holder(folder) is None:
            ensure_tunnel(folder)

    def _seats_of(self, one: DeploymentReading) -> int | None:
        key = (one.folder.name, one.stamp)
        if key not in self._seats:
            plan = deployments.plan_of(one.folder)
            if plan is None:
                return None  # it may still come
            self._seats[key] = plan.seats
        return self._seats[key]

    def _adapters_of(self, one: DeploymentReading) -> tuple[str, ...]:
        key = (one.folder.name, one.stamp)
        if key not in self._adapters:
            with contextlib.suppress(CorralError, OSError):  # it may still come
                self._adapters[key] = adapters(load_json(LaunchSpec, one.folder.launch))
        return self._adapters.get(key, ())


def _key(endpoint: Endpoint) -> str:
    with contextlib.suppress(CorralError):
        return endpoint.key() or ""
    return ""


def _own_grant(source: Source, model: str) -> KeyGrant:
    """The key of a fleet or deployment is good for what that one serves."""
    key = Endpoint("http://localhost", "", source.key_file()).key() or ""
    return KeyGrant(source.name, digest_of(key.encode()), frozenset((model, source.name)), source=source.name)


def _client_grants() -> list[KeyGrant]:
    """The keys that were made for clients."""
    with contextlib.suppress(CorralError, OSError, ValueError):
        return [
            KeyGrant(one.name, bytes.fromhex(one.digest), frozenset(one.models) or None, one.rpm, one.tpm)
            for one in read_keys()
        ]
    return []
