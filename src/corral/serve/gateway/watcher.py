"""The servers behind a gateway: the members of fleets and chains, single deployments, and servers at a URL.

A thread finds out how they are, because that reads files and asks schedulers; the gateway's loop is told. Each
reading has three outcomes: good, gone for certain (the folder does not exist), and unknown. On unknown (a file system
that does not answer, a file of a later format) the last good reading stays: a server keeps its address and its key, a
source its servers and its key, and clients keep theirs. What is unknown is told with it, so that the gateway refuses
no key for good that it cannot check.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from corral.base.errors import CorralError
from corral.base.files import is_gone
from corral.base.record import load_json
from corral.base.wording import duration
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
from corral.serve.gateway.url_member import UrlMember
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

    def is_gone(self) -> bool:
        """Whether its folder certainly does not exist any more."""
        return is_gone(self.fleet.path if self.fleet else DeploymentFolder.of(self.name).path)

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


CLIENT_KEYS = "the keys of clients"


@dataclass(frozen=True)
class GatewaySnapshot:
    """All that a gateway needs to know from outside."""

    readings: tuple[MemberReading, ...]
    grants: tuple[KeyGrant, ...]
    unknown: tuple[str, ...] = ()  # what cannot be read now, why, and how old its last good reading is


@dataclass(frozen=True)
class _SourceReading:
    """What the files of a source say; of the clients' keys only `grants`."""

    grants: tuple[KeyGrant, ...] = ()
    model: str = ""
    deployments: tuple[tuple[DeploymentFolder, bool], ...] = ()
    read_s: float = 0.0  # monotonic
    failure: str = ""  # why it could not be read again since then


class Watcher(threading.Thread):
    """Reads all sources every second or so, and tells the gateway."""

    def __init__(
        self,
        sources: Sequence[Source],
        tell: Callable[[GatewaySnapshot], None],
        say: Callable[[str], None] = lambda _: None,
        urls: Sequence[UrlMember] = (),
    ) -> None:
        super().__init__(name="corral-gateway-watcher", daemon=True)
        self._sources, self._tell, self._say, self._urls = sources, tell, say, urls
        self._stop = threading.Event()
        self._known_sources: dict[str, _SourceReading] = {}  # by what is read: a fleet, a deployment, clients' keys
        self._failing: set[str] = set()
        self._known: dict[str, DeploymentReading] = {}
        self._addresses: dict[str, tuple[str, str]] = {}  # URL and key, when the deployment could last be asked
        self._seats: dict[tuple[str, Stamp], int | None] = {}
        self._launches: dict[tuple[str, Stamp], LaunchSpec] = {}
        self._tunnelled: dict[tuple[str, Stamp], bool] = {}  # whether a deployment is reached through a tunnel

    def run(self) -> None:
        """What files say is told first, once: requests wait for members whose scheduler is slow to answer."""
        with contextlib.suppress(CorralError, OSError):
            self._tell(self._read(ask=False))
        while not self._stop.is_set():
            with contextlib.suppress(CorralError, OSError):
                self._tell(self.read())
            self._stop.wait(INTERVAL_S)

    def stop(self) -> None:
        self._stop.set()

    def read(self) -> GatewaySnapshot:
        """Everything, now."""
        return self._read(ask=True)

    def _read(self, ask: bool) -> GatewaySnapshot:
        """All sources; without `ask` their members are of unknown state, unless they were asked before."""
        readings: list[MemberReading] = []
        files = {source.name: self._source(source) for source in self._sources}
        files[CLIENT_KEYS] = self._files(CLIENT_KEYS, lambda: _SourceReading(_client_grants()))
        known: dict[str, DeploymentReading] = {}
        for name, source in files.items():
            for folder, leaving in source.deployments:
                before = self._known.get(folder.name)
                one = read_deployment(folder, before) if ask else before or DeploymentReading(folder, None)
                known[folder.name] = one
                readings.append(self._reading(one, name, source.model, leaving))
        self._known = known
        readings += map(self._url_reading, self._urls)
        grants = [grant for source in files.values() for grant in source.grants]
        unknown = [_unknown_text(name, source) for name, source in files.items() if source.failure]
        return GatewaySnapshot(tuple(readings), tuple(grants), tuple(unknown))

    def _source(self, source: Source) -> _SourceReading:
        def read() -> _SourceReading:
            model = source.model()
            return _SourceReading((_own_grant(source, model),), model, tuple(source.deployments()))

        return self._files(source.name, read, source.is_gone)

    def _files(
        self, name: str, read: Callable[[], _SourceReading], is_gone: Callable[[], bool] = lambda: False
    ) -> _SourceReading:
        """What is read now; the last good reading where that fails, and nothing of what is gone for certain."""
        try:
            found = replace(read(), read_s=time.monotonic())
        except (CorralError, OSError, ValueError) as error:
            if is_gone():
                found = _SourceReading(read_s=time.monotonic())
            else:
                found = replace(self._known_sources.get(name, _SourceReading()), failure=str(error))
        if bool(found.failure) is not (name in self._failing):
            self._failing ^= {name}
            self._say(_unknown_text(name, found) if found.failure else f"{name}: read again")
        self._known_sources[name] = found
        return found

    def _reading(self, one: DeploymentReading, source: str, model: str, leaving: bool) -> MemberReading:
        name, status, state = one.folder.name, one.status, one.state
        if status is not None:
            try:
                endpoint = status.endpoint
                self._addresses[name] = (endpoint.root, endpoint.key() or "") if endpoint else ("", "")
            except CorralError:  # its key cannot be read now; without it the server would refuse every request
                if name not in self._addresses:
                    state = State.UNKNOWN
        if state is State.READY:
            with contextlib.suppress(CorralError, OSError):
                self._open_tunnel(one.folder, one.stamp)
        url, key = self._addresses.get(name, ("", ""))
        text = status.text if status else one.text
        seats, given = self._seats_of(one), self._adapters_of(one)
        return MemberReading(name, state, url, text, model, key, seats, source, leaving, given)

    def _url_reading(self, one: UrlMember) -> MemberReading:
        """A server at a URL: ready until it is found not to answer, and unknown as long as its key was not read."""
        state, text = State.READY, ""
        try:
            self._addresses[one.name] = one.name, one.endpoint.key() or ""
        except CorralError as error:
            text = error.message
            state = State.READY if one.name in self._addresses else State.UNKNOWN
        url, key = self._addresses.get(one.name, ("", ""))
        return MemberReading(one.name, state, url, text, one.models[0], key, source=one.name, named=one.models)

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
        if key not in self._launches:
            with contextlib.suppress(CorralError, OSError):  # it may still come
                self._launches[key] = load_json(LaunchSpec, one.folder.launch)
        return adapters(self._launches[key]) if key in self._launches else ()


def _unknown_text(name: str, source: _SourceReading) -> str:
    age = f"read {duration(time.monotonic() - source.read_s)} ago" if source.read_s else "not read yet"
    return f"{name}: {age}; now: {source.failure}"


def _own_grant(source: Source, model: str) -> KeyGrant:
    """The key of a fleet or deployment is good for what that one serves."""
    key = Endpoint("http://localhost", "", source.key_file()).key() or ""
    return KeyGrant(source.name, digest_of(key.encode()), frozenset((model, source.name)), source=source.name)


def _client_grants() -> tuple[KeyGrant, ...]:
    """The keys that were made for clients."""
    return tuple(
        KeyGrant(one.name, bytes.fromhex(one.digest), frozenset(one.models) or None, one.rpm, one.tpm)
        for one in read_keys()
    )
