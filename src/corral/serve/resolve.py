"""Which server is meant: a deployment's name, an address, the environment, or the only deployment there is.

The order is flag, environment, default: a name or `--url` given; else `OPENAI_BASE_URL` (with `OPENAI_API_KEY`);
else the only deployment of this home. A deployment and its successors are one: the newest that is ready serves. A
fleet is one, too: it is reached by its gateway, with the fleet's key. The served model's name is asked of the server,
so nobody types a path.

`resolve` gives an endpoint that can be used now. `find_servers` gives what a long job uses: servers that may be away
for a while and come back elsewhere; `absence_of` says why one is away: what it is doing and for how long, or how it
ended, in its own diagnosis. A key given in memory or by an environment variable stays in memory.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.base.errors import ConflictError, CorralError, LaunchError, NotFoundError, UnreachableError, UsageError
from corral.base.record import load_json, nearest
from corral.base.wording import duration
from corral.client.client import Client
from corral.client.endpoint import Absence, Endpoint, FixedServer, HeldKeyEndpoint, ModelServer
from corral.client.errors import MalformedReplyError, error_from_status
from corral.deploy.deployment.folder import DeploymentFolder, open_folder
from corral.deploy.deployment.state import ENDED, Reason, State
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.deployments import Status
from corral.deploy.lifecycle.tunnel import ensure_tunnel
from corral.serve.fleet.chain import DeploymentReading, living_chains, newest_ready, read_chain, read_members
from corral.serve.fleet.record import FleetFolder, find_fleet, held_gateways, read_fleet, read_fleets
from corral.serve.fleet.status import not_here

URL_VARIABLE, KEY_VARIABLE = "OPENAI_BASE_URL", "OPENAI_API_KEY"
_ASKED_AGAIN = 2


def resolve(
    name: str | None = None,
    *,
    url: str | None = None,
    key_file: str | None = None,
    key: str | None = None,
    model: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Endpoint:
    """The endpoint that was meant, with the model's name that its server knows."""
    if name is not None and url is not None:
        raise UsageError("both a deployment and --url were given.", "Give one of them.")
    if key_file is not None and key is not None:
        raise UsageError("both a key and a key file were given.", "Give one of them.")
    urls, key = _addresses([name] if name else [], [url] if url else [], key_file, key, environ)
    if urls:
        bare = _endpoint(urls[0], model or "", key_file, key)
        return _endpoint(urls[0], _choose(bare, model), key_file, key)
    endpoint = ready_endpoint(name or _only_deployment(ready=True))
    return Endpoint(endpoint.base_url, _choose(endpoint, model), endpoint.key_file) if model else endpoint


def server_at(url: str | None, key_file: str | None) -> Endpoint:
    """An address, or the environment's, with whichever of its models comes first."""
    urls, key = _addresses([], [url] if url else [], key_file, None, None)
    return _endpoint(urls[0], _choose(_endpoint(urls[0], "", key_file, key), None, any_model=True), key_file, key)


def resolve_server(
    name: str | None, url: str | None, key_file: str | None, model: str | None
) -> tuple[ModelServer, Endpoint]:
    """The same for a long job: a server that can be used now and is found again wherever it moves."""
    endpoint = resolve(name, url=url, key_file=key_file, model=model)
    if _addresses([name] if name else [], [url] if url else [], key_file, None, None)[0]:
        return FixedServer(endpoint), endpoint
    return server_called(name or _only_deployment(ready=True), model), endpoint


def find_servers(
    names: Sequence[str],
    urls: Sequence[str],
    key_file: str | None,
    known: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[ModelServer]:
    """The servers that were meant; a deployment that is not ready yet will be.

    An address that does not answer is refused, unless its model is `known` from before: then it is waited for.
    """
    urls, key = _addresses(names, urls, key_file, None, environ)
    servers: list[ModelServer] = [server_called(name) for name in names]
    for url in urls:
        model = _first_model(_endpoint(url, "", key_file, key), known)
        servers.append(FixedServer(_endpoint(url, model, key_file, key)))
    return servers or [server_called(_only_deployment(ready=False))]


def _addresses(
    names: Sequence[str],
    urls: Sequence[str],
    key_file: str | None,
    key: str | None,
    environ: Mapping[str, str] | None,
) -> tuple[Sequence[str], str | None]:
    """The addresses given, or the environment's when nothing was; and the key, unless it is in a file."""
    environ = os.environ if environ is None else environ
    if not names and not urls and (found := environ.get(URL_VARIABLE)):
        return [found], key if key or key_file else environ.get(KEY_VARIABLE) or None
    if not urls and (key_file is not None or key is not None):
        raise UsageError("a key was given without an address.", "Add --url, or leave both out.")
    return urls, key


def _endpoint(url: str, model: str, key_file: str | None, key: str | None) -> Endpoint:
    return HeldKeyEndpoint(url, model, key) if key_file is None else Endpoint(url, model, key_file)


# Deployments and fleets


def server_called(name: str, model: str | None = None) -> ModelServer:
    """The fleet or the deployment of that name."""
    fleet = find_fleet(name)
    return FleetServer(fleet) if fleet else DeploymentServer(name, model)


class FleetServer:
    """A fleet, behind whichever of its gateways runs."""

    def __init__(self, folder: FleetFolder) -> None:
        self.name, self._folder = folder.name, folder

    @property
    def model(self) -> str:
        return read_fleet(self._folder).model

    def find(self) -> Endpoint | None:
        try:
            return fleet_endpoint(self._folder)
        except (NotFoundError, ConflictError, LaunchError):
            return None

    def absence(self) -> Absence:
        try:
            fleet_endpoint(self._folder)
        except CorralError as error:
            closed = isinstance(error, NotFoundError)
            return Absence(error.message.rstrip("."), error.remedy, error if closed else None, stopped=closed)
        return Absence(f"the gateway of {self.name} does not answer", "`corral status` says whether it runs.")

    def seats(self) -> int | None:
        """What all members together run at once, where their plans tell."""
        plans = [deployments.plan_of(DeploymentFolder.of(name)) for name in read_fleet(self._folder).serving()]
        known = [plan.seats for plan in plans if plan and plan.seats]
        return sum(known) if known and len(known) == len(plans) else None


def fleet_endpoint(folder: FleetFolder) -> Endpoint:
    """Where a fleet is reached, once a gateway runs and a member is ready."""
    fleet, name = read_fleet(folder), shlex.quote(folder.name)
    if fleet.closed:
        raise NotFoundError(
            f"the fleet {folder.name!r} has ended: {fleet.closed}.", "Start it again with `corral up`."
        )
    gateways = held_gateways(folder)
    if not gateways:
        raise ConflictError(f"no gateway of the fleet {folder.name!r} runs.", f"`corral status {name}` says why.")
    if not any(_is_ready(member) for member in fleet.serving()):
        raise ConflictError(f"no member of the fleet {folder.name!r} is ready.", f"`corral wait {name}` waits.")
    gateway = next(iter(gateways.values()))
    if not gateway.is_reachable:
        raise ConflictError(
            f"the gateway of the fleet {folder.name!r} cannot be reached from this machine.",
            not_here(folder.name, gateway),
        )
    return Endpoint(f"{gateway.url}/v1", fleet.model, str(folder.key))


def _is_ready(name: str) -> bool:
    folder = DeploymentFolder.of(name)
    return folder.record.is_file() and newest_ready(folder) is not None


class DeploymentServer:
    """A deployment by name, wherever it and its successors are."""

    def __init__(self, name: str, model: str | None = None) -> None:
        self.name, self._model = name, model  # the model that is wanted of it, where it serves several
        open_folder(name)  # refuses unknown names, naming the known ones

    @property
    def model(self) -> str:
        """The name it serves, also while it is away."""
        return load_json(deployments.Record, open_folder(self.name).record).served_name

    def find(self) -> Endpoint | None:
        """The endpoint while one of the chain is ready."""
        try:
            found = ready_endpoint(self.name)
            return Endpoint(found.base_url, self._model, found.key_file) if self._model else found
        except (NotFoundError, ConflictError, LaunchError):
            return None

    def absence(self) -> Absence:
        """What it is doing, or how it ended."""
        try:
            return absence_of(open_folder(self.name))
        except NotFoundError as error:
            return Absence(error.message.rstrip("."), error.remedy, error, stopped=True)

    def seats(self) -> int | None:
        try:
            plan = deployments.plan_of(open_folder(self.name))
        except CorralError:
            return None
        return plan.seats if plan else None


def ready_endpoint(name: str) -> Endpoint:
    """Where a fleet, or a deployment or the newest of its successors, answers, if one is ready; opens its tunnel."""
    if fleet := find_fleet(name):
        return fleet_endpoint(fleet)
    folder = open_folder(name)
    serving = newest_ready(folder)
    if serving and serving.status and serving.status.endpoint:
        ensure_tunnel(serving.folder)
        return deployments.endpoint_of(serving.folder, State.READY) or serving.status.endpoint  # it may have moved
    found = deployments.status(folder)
    if found.state in ENDED:
        raise ending_of(found)
    text = f"{describe(found, time.time())}; it does not answer yet."
    raise ConflictError(text, f"`corral wait {shlex.quote(name)}` waits until it does.")


def _only_deployment(ready: bool) -> str:
    """The only one that is ready, or, unless it must be, the only one that will be."""
    fleets, unreadable = read_fleets()
    members = {member.name for fleet in fleets for member in fleet.members}
    chains = {name: chain for name, chain in living_chains().items() if name not in members}
    there = [name for name, chain in chains.items() if any(one.state is State.READY for one in chain)]
    coming = [name for name, chain in chains.items() if any(one.state is not State.UNKNOWN for one in chain)]
    there += [fleet.name for fleet in fleets if any(map(_is_ready, fleet.serving()))]
    coming += [fleet.name for fleet in fleets]
    found = there or ([] if ready else coming)
    if len(found) == 1:
        return found[0]
    if there:
        raise UsageError(
            f"{len(there)} deployments are ready: {', '.join(there)}.",
            "Say which, by its name: `corral chat NAME`, --deployment NAME, or in Python Corral(NAME).",
        )
    states = [f"{one.folder.name} ({one.state})" for chain in chains.values() for one in chain]
    states += [f"{fleet.name} (a fleet)" for fleet in fleets]
    if states := [*states, *(f"{name} (a fleet: {why})" for name, why in unreadable.items())]:
        raise NotFoundError(f"no deployment is ready yet: {', '.join(states)}.", "Wait for it: `corral wait NAME`.")
    raise NotFoundError(
        "no deployment is ready.",
        f"Start one with `corral up`, or give --url (or set {URL_VARIABLE}).",
        deployments=[],
    )


# Why a server does not answer


def describe(status: Status, now_s: float) -> str:
    """What a deployment is doing, for somebody who waits for it."""
    if status.state is State.READY:
        return f"{status.name} is ready, but its server does not answer"
    if status.state in (State.STARTING, State.LOADING):
        amount = f" {status.done}/{status.total}" if status.total else ""
        elapsed_s = max(0.0, now_s - (status.phase_since_s or status.since_s))
        usual = f" ({status.expected.text})" if status.expected else ""
        return f"{status.name} is {status.phase or status.state}{amount}, for {duration(elapsed_s)} now{usual}"
    return f"{status.name} is {status.state}" + (f": {status.text}" if status.text else "")


def ending_of(status: Status) -> CorralError:
    """The error that tells how a deployment ended; one that failed has its own diagnosis and remedy."""
    why = f": {status.text}" if status.text else ""
    again = f"Start it again with `corral up`; `corral logs {shlex.quote(status.name)}` shows its last words."
    reason = status.reason.value if status.reason else ""
    details = {"name": status.name, "state": status.state.value, "reason": reason}
    if status.state is State.FAILED:
        return LaunchError(f"{status.name!r} has failed{why}.", status.remedy or again, **details)
    return NotFoundError(f"{status.name!r} is stopped{why}.", status.remedy or again, **details)


def absence_of(folder: DeploymentFolder) -> Absence:
    """Why neither a deployment nor any of its successors answers."""
    members = read_members(folder)
    coming = [one for one in members if one.state not in ENDED]
    if coming:
        return _coming(coming[-1])
    chain, last = read_chain(folder), members[-1].status
    if chain is not None and not chain.closed:
        return Absence(f"{members[-1].folder.name} has ended, and its successor is not submitted yet")
    assert last is not None  # one that could not be asked is of unknown state, which is no end
    error = ending_of(last)
    return Absence(error.message.rstrip("."), error.remedy, error, last.reason is Reason.REQUESTED)


def _coming(one: DeploymentReading) -> Absence:
    if one.status is None:
        return Absence(f"{one.folder.name} cannot be read: {one.text}")
    return Absence(describe(one.status, time.time()), one.status.remedy)


# What a server serves


@dataclass(frozen=True)
class ServedModels:
    """The models of a server, adapters included, and the context length where it tells."""

    names: tuple[str, ...]
    base: tuple[str, ...]  # those that are no adapters
    context: int | None


def served_by(server: ModelServer) -> ServedModels | None:
    """What a server serves now; None while it is away."""
    try:
        endpoint = server.find()
        return _models_at(endpoint) if endpoint else None
    except UnreachableError:
        return None


def _models_at(endpoint: Endpoint) -> ServedModels:
    client = Client(endpoint, connect_s=5)
    try:
        page = client.page_sync("/v1/models", timeout_s=30)
    finally:
        client.close_sync()
    if page.status != 200:
        raise error_from_status(page.status, page.body, None, endpoint.root)
    try:
        cards: list[dict[str, Any]] = page.json()["data"]
        names = tuple(str(card["id"]) for card in cards)
        base = tuple(str(card["id"]) for card in cards if not card.get("parent"))
        context = next((int(card["max_model_len"]) for card in cards if card.get("max_model_len")), None)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MalformedReplyError(
            f"{endpoint.root}/v1/models is not a list of models.", "Is it an OpenAI-compatible server?"
        ) from None
    if not names:
        raise NotFoundError(f"{endpoint.root} serves no model.", "Is it still starting?")
    return ServedModels(names, base, context)


def _first_model(endpoint: Endpoint, known: str | None) -> str:
    """The model of rows that name none. A server that does not answer may be restarting, and is asked again."""
    for _ in range(0 if known else _ASKED_AGAIN):
        with contextlib.suppress(UnreachableError):
            return _models_at(endpoint).names[0]
        time.sleep(0.5)
    try:
        return _models_at(endpoint).names[0]
    except UnreachableError:
        if known:
            return known
        raise


def _choose(endpoint: Endpoint, wanted: str | None, any_model: bool = False) -> str:
    """The model that is wanted, or the only one that is no adapter."""
    served = _models_at(endpoint)
    if wanted is not None:
        if wanted in served.names:
            return wanted
        known = nearest(wanted, served.names) or served.names
        raise NotFoundError(f"{endpoint.root} does not serve {wanted!r}.", f"It serves: {', '.join(known)}.")
    if len(served.base) == 1 or (any_model and served.base):
        return served.base[0]
    names = ", ".join(served.names)
    raise UsageError(f"{endpoint.root} serves {len(served.names)} models: {names}.", "Say which: --model NAME.")
