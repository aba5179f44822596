"""Who serves the model of a batch: endpoints that are there, or a model that is started for it and stopped.

Rows go to the engine inside its own process, without HTTP: with `--offline`, or where a batch starts the model.

The server is the deployment that any batch would use, with its agent, restarts and log; only the way of the rows is
another one (`corral.client.row_socket`), so that ledger, retries, pace and results are those of every batch. It works
where the engine runs on the machine of the runner: a deployment here, a model that the batch starts here, or the one
beside a runner in a job of a scheduler.

Whether HTTP was the limit of a batch: how busy the engine's API server processes were while it ran.

Measured, not guessed: the processor time of the processes that listen at the deployment's row sockets, which are on
this machine. Nothing is said of engines elsewhere, nor of a batch too short to tell.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.base.errors import CorralError, NotFoundError, UsageError
from corral.base.processes import processor_s
from corral.base.record import to_json
from corral.client.endpoint import Absence, Endpoint, ModelServer
from corral.client.row_socket import RowSocketEndpoint, has_row_socket, row_processes
from corral.deploy.deployment.folder import DeploymentFolder
from corral.serve.resolve import DeploymentServer, FleetServer, find_servers, served_by
from corral.use.batch.core.run import Listener, RunSummary, Share, run_share
from corral.use.batch.core.runner import Counts, Runner, RunnerSettings, Work
from corral.use.batch.input.lengths import Counter, engine_counter, server_counter
from corral.use.batch.spec import BatchOrder, load_record

if TYPE_CHECKING:
    from corral.deploy.lifecycle.bringup import DeployDecision, DeployRequest


class InProcessServer:
    """A server of a long job that takes rows through its sockets; where it has none and may, over HTTP."""

    def __init__(self, inner: ModelServer, over_http: bool = False) -> None:
        self.name, self._inner, self._over_http = inner.name, inner, over_http
        self.seats = inner.seats
        self._had_sockets = False

    def find(self) -> Endpoint | None:
        endpoint = self._inner.find()
        folder = _sockets_of(endpoint) if endpoint else None
        if endpoint is None or folder is None:
            return endpoint if self._over_http else None
        self._had_sockets = True
        return RowSocketEndpoint(endpoint.base_url, endpoint.model, endpoint.key_file, folder)

    def absence(self) -> Absence:
        """Why there is none; a ready server that never had a socket here will not get one by waiting."""
        if self._inner.find() is None or self.find() is not None or self._had_sockets:
            return self._inner.absence()
        error = UsageError(
            f"{self.name} takes no rows in process: its engine does not run on this machine, or an older Corral "
            "started it.",
            "Leave out --offline, and rows go over HTTP; or start the model here: --start MODEL.",
        )
        return Absence(error.message.rstrip("."), error.remedy, error)


def _sockets_of(endpoint: Endpoint) -> str | None:
    """The folder of the sockets of a deployment: the key of what Corral serves lies in its deployment's folder."""
    if endpoint.key_file is None:
        return None
    folder = str(DeploymentFolder(Path(endpoint.key_file).parent).rank(0).path)
    return folder if has_row_socket(folder) else None


RAY_DATA = "ray-data"


@dataclass(frozen=True)
class ModelToStart:
    """A model that the batch starts for itself and stops at the end."""

    model: str
    context: int | None = None
    fixed: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)  # other fields of a request: target, runtime, …
    engine: str = "http"  # or RAY_DATA: then Ray starts it (see `raydata`) …
    replicas: int = 1  # … so many times

    def to_json(self) -> dict[str, Any]:
        plain = {"more": {}, "engine": "http", "replicas": 1}  # left out, as before they existed
        body: dict[str, Any] = to_json(self)
        return {name: value for name, value in body.items() if plain.get(name) != value}

    def request(self, name: str, **more: Any) -> DeployRequest:
        """What `corral up` would be asked."""
        from corral.deploy.lifecycle.bringup import DeployRequest
        from corral.plan.settings import parse_assignments

        said = dict(self.more)
        context = {"context": self.context} if self.context else {}
        said["goal"] = {**said.get("goal", {}), **context, "goal": "throughput"}
        said["patience"] = {"restarts": 3, **said.get("patience", {})}
        said["fixed"] = {**said.get("fixed", {}), **parse_assignments(self.fixed)}
        said["extra_args"] = (*said.get("extra_args", ()), *self.engine_args)
        return DeployRequest.of({**said, "model": self.model, "name": name, **more})


@dataclass(frozen=True)
class BatchServers:
    """Which endpoints to use."""

    deployments: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    key_file: str | None = None
    offline: ModelToStart | None = None
    in_process: bool = False  # rows go to the engine without HTTP

    def way_to(self, server: ModelServer) -> ModelServer:
        """The server as this batch uses it."""
        return InProcessServer(server) if self.in_process else server


def where_record(where: BatchServers) -> dict[str, Any]:
    """Where it runs, as kept with the job for `corral batch resume`."""
    return {
        "deployments": where.deployments,
        "urls": where.urls,
        "key_file": str(Path(where.key_file).absolute()) if where.key_file else None,
        "offline": where.offline.to_json() if where.offline else None,
        "in_process": where.in_process,
    }


@dataclass(frozen=True)
class Served:
    """What `prepare` needs to know of the model, and who does the rows of a share."""

    facts: dict[str, Any]
    run: Callable[[Share, Work, RunnerSettings, Listener, bool], RunSummary]
    names: tuple[str, ...] = ()  # of deployments

    @classmethod
    def by(
        cls, find: Callable[[], Sequence[ModelServer]], facts: dict[str, Any], names: tuple[str, ...] = ()
    ) -> Served:
        """Served by HTTP servers."""
        return cls(facts, partial(run_share, find), names)


@contextlib.contextmanager
def served_for(where: BatchServers, order: BatchOrder, reporter: Any) -> Iterator[Served]:
    """The model that a batch is asked of, as long as the batch needs it."""
    if where.in_process and (where.urls or (where.offline and where.offline.engine == RAY_DATA)):
        other = "--url" if where.urls else "--engine ray-data"
        raise UsageError(
            f"--offline needs an engine that Corral started on this machine, and {other} names another.",
            "Leave one of them out.",
        )
    if where.offline is None:
        yield _online(where, order)
        return
    if where.deployments or where.urls:
        raise UsageError("--start starts a model; --deployment and --url use running ones.", "Give one of them.")
    if where.offline.engine == RAY_DATA:
        yield _on_ray(where.offline)
        return
    with _started(where, where.offline, order, reporter) as served:
        yield served


def _on_ray(offline: ModelToStart) -> Served:
    from corral.use.batch.raydata.engine import RayEngine, engine_settings
    from corral.use.batch.raydata.run import run_on_engine

    settings = engine_settings(offline.context, offline.fixed)
    engine = partial(RayEngine, offline.model, offline.replicas, settings)
    return Served({"model": offline.model}, partial(run_on_engine, engine, offline.model))


def _online(where: BatchServers, order: BatchOrder) -> Served:
    known = _known_model(order)
    try:
        servers = find_servers(where.deployments, where.urls, where.key_file, known)
    except CorralError as error:
        if known is None:
            if isinstance(error, NotFoundError) and not where.deployments:
                error.remedy += " Or let the batch start a model itself: --start MODEL."
            raise
        failure = error  # the job may be done already, and then needs nobody

        def unavailable() -> Sequence[ModelServer]:
            raise failure

        return Served.by(unavailable, {"model": known})
    deployments = [server for server in servers if isinstance(server, DeploymentServer | FleetServer)]
    answering = [(server, found) for server in servers if (found := served_by(server))]
    models = {found.names[0] for _, found in answering} or {server.model for server in deployments}
    if len(models) > 1:
        raise UsageError(
            f"the endpoints serve different models: {', '.join(sorted(models))}.",
            "Name endpoints that serve the same model.",
        )
    facts: dict[str, Any] = {"model": next(iter(models), known or "")}
    if answering:
        server, found = answering[0]
        facts |= {"models": found.names, "context": found.context, "counter": server_counter(server)}
    used = [where.way_to(server) for server in servers]
    return Served.by(lambda: used, facts, tuple(server.name for server in deployments))


def _known_model(order: BatchOrder) -> str | None:
    try:
        return load_record(order.output)[1].model
    except CorralError:
        return None


def offline_name(output: str) -> str:
    """The deployment's name: the same for the same output, so that a second start finds what the first left."""
    path = Path(output).absolute()
    return f"batch-{path.stem[:40]}-{blake2b(str(path).encode(), digest_size=3).hexdigest()}"


@contextlib.contextmanager
def _started(where: BatchServers, offline: ModelToStart, order: BatchOrder, reporter: Any) -> Iterator[Served]:
    """Decide now, start when the input has been checked, stop at the end, whatever the end is."""
    from corral.deploy.deployment.folder import DeploymentFolder
    from corral.deploy.deployment.state import ENDED
    from corral.deploy.lifecycle import bringup, deployments
    from corral.deploy.lifecycle.watching import wait_ready
    from corral.serve.fleet.start import bring_up

    name = offline_name(order.output)
    request = offline.request(name)
    _, decision = bringup.sized(request, reporter.note)
    folder = DeploymentFolder.of(name)
    begun: list[bool] = []

    def servers() -> Sequence[ModelServer]:
        begun.append(True)
        running = folder.record.is_file() and deployments.status(folder).state not in ENDED
        if running:
            wait_ready(folder, reporter)
        else:
            bring_up(request, reporter)
        return [InProcessServer(DeploymentServer(name), over_http=not where.in_process)]

    facts = facts_of(decision)
    try:
        yield Served.by(servers, facts, (name,))
    finally:
        if folder.record.is_file() and (begun or deployments.status(folder).state not in ENDED):
            reporter.phase("stopping the model")
            deployments.stop(folder)


def facts_of(decision: DeployDecision) -> dict[str, Any]:
    """What `prepare` needs to know of a model that is not there yet."""
    return {
        "model": decision.served_name,
        "models": (decision.served_name,),
        "context": decision.plan.max_model_len,
        "counter": _tokenizer_here(decision),
    }


def _tokenizer_here(decision: DeployDecision) -> Counter | None:
    """The model's tokenizer, where model and engine are on this disk already."""
    from corral.engines import environments as engines
    from corral.plan.models import store as model_store

    model = model_store.already_here(decision.source)
    engine = engines.find(decision.flavour)
    return engine_counter(engine.python, model) if model and engine else None


BUSY = 0.8  # of one core, on average over the processes
LEAST_S = 5.0


def advice(busy: float, processes: int) -> str:
    """What to do about API servers that busy; empty where they are not the limit."""
    if busy < BUSY:
        return ""
    who = "API server was" if processes == 1 else f"{processes} API servers were"
    return f"the engine's {who} busy {busy:.0%} of the time: --offline hands rows over without HTTP"


class FrontEndWatch:
    """Passes on what happens, and looks at the API servers of deployments at the beginning and at the end."""

    def __init__(self, inner: Listener, names: Sequence[str]) -> None:
        self._inner, self._folders = inner, [str(DeploymentFolder.of(name).rank(0).path) for name in names]
        self._began: dict[int, float] = {}
        self._began_s = 0.0

    def note(self, kind: str, text: str) -> None:
        self._inner.note(kind, text)

    def tick(self, counts: Counts, runner: Runner) -> None:
        if not self._began_s:
            self._begin([lane.client.endpoint for lane in runner.lanes if lane.up and lane.client])
        self._inner.tick(counts, runner)

    def _begin(self, used: Sequence[Endpoint]) -> None:
        """Once a server is there; where rows go in process, there is nothing to watch."""
        if used:
            in_process = any(isinstance(one, RowSocketEndpoint) for one in used)
            self._began, self._began_s = {} if in_process else self._read(), time.monotonic()

    def advice(self) -> str:
        """What the time since the beginning says."""
        took_s = time.monotonic() - self._began_s
        now = self._read() if self._began and took_s >= LEAST_S else {}
        both = [now[pid] - before for pid, before in self._began.items() if pid in now]
        return advice(sum(both) / took_s / len(both), len(both)) if both else ""

    def _read(self) -> dict[int, float]:
        found = {}
        for pid in (pid for folder in self._folders for pid in row_processes(folder)):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found[pid] = processor_s(pid)
        return found
