"""Who serves the model of a batch: endpoints that are there, or a model that is started for it and stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.base.errors import CorralError, NotFoundError, UsageError
from corral.base.record import to_json
from corral.client.endpoint import ModelServer
from corral.deploy.lifecycle.resolve import DeploymentServer, FleetServer, find_servers, served_by
from corral.use.batch.core.run import Listener, RunSummary, Share, run_share
from corral.use.batch.core.runner import RunnerSettings, Work
from corral.use.batch.in_process import InProcessServer
from corral.use.batch.input.lengths import Counter, engine_counter, server_counter
from corral.use.batch.job import BatchOrder, load_record

if TYPE_CHECKING:
    from corral.deploy.lifecycle.bringup import LaunchDecision, Wish


RAY_DATA = "ray-data"


@dataclass(frozen=True)
class Offline:
    """A model that the batch starts for itself and stops at the end."""

    model: str
    context: int | None = None
    fixed: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)  # other fields of a wish: target, runtime, …
    engine: str = "http"  # or RAY_DATA: then Ray starts it (see `raydata`) …
    replicas: int = 1  # … so many times

    def to_json(self) -> dict[str, Any]:
        plain = {"more": {}, "engine": "http", "replicas": 1}  # left out, as before they existed
        body: dict[str, Any] = to_json(self)
        return {name: value for name, value in body.items() if plain.get(name) != value}

    def wish(self, name: str, **more: Any) -> Wish:
        """What `corral up` would be asked."""
        from corral.deploy.lifecycle.bringup import Wish
        from corral.plan.fixed import parse_assignments

        said = dict(self.more)
        context = {"context": self.context} if self.context else {}
        said["goal"] = {**said.get("goal", {}), **context, "goal": "throughput"}
        said["patience"] = {"restarts": 3, **said.get("patience", {})}
        said["fixed"] = {**said.get("fixed", {}), **parse_assignments(self.fixed)}
        said["extra_args"] = (*said.get("extra_args", ()), *self.engine_args)
        return Wish.of({**said, "model": self.model, "name": name, **more})


@dataclass(frozen=True)
class Where:
    """Which endpoints to use."""

    deployments: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    key_file: str | None = None
    offline: Offline | None = None
    in_process: bool = False  # rows go to the engine without HTTP

    def way_to(self, server: ModelServer) -> ModelServer:
        """The server as this batch uses it."""
        return InProcessServer(server) if self.in_process else server


def where_record(where: Where) -> dict[str, Any]:
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
def served_for(where: Where, order: BatchOrder, reporter: Any) -> Iterator[Served]:
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


def _on_ray(offline: Offline) -> Served:
    from corral.use.batch.raydata.engine import RayEngine, engine_settings
    from corral.use.batch.raydata.run import run_on_engine

    settings = engine_settings(offline.context, offline.fixed)
    engine = partial(RayEngine, offline.model, offline.replicas, settings)
    return Served({"model": offline.model}, partial(run_on_engine, engine, offline.model))


def _online(where: Where, order: BatchOrder) -> Served:
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
def _started(where: Where, offline: Offline, order: BatchOrder, reporter: Any) -> Iterator[Served]:
    """Decide now, start when the input has been checked, stop at the end, whatever the end is."""
    from corral.deploy.deployment.folder import DeploymentFolder
    from corral.deploy.deployment.state import ENDED
    from corral.deploy.lifecycle import bringup, deployments
    from corral.deploy.lifecycle.watching import wait_ready

    name = offline_name(order.output)
    wish = offline.wish(name)
    _, decision = bringup.sized(wish, reporter.note)
    folder = DeploymentFolder.of(name)
    begun: list[bool] = []

    def servers() -> Sequence[ModelServer]:
        begun.append(True)
        running = folder.record.is_file() and deployments.status(folder).state not in ENDED
        if running:
            wait_ready(folder, reporter)
        else:
            bringup.bring_up(wish, reporter)
        return [InProcessServer(DeploymentServer(name), over_http=not where.in_process)]

    facts = facts_of(decision)
    try:
        yield Served.by(servers, facts, (name,))
    finally:
        if folder.record.is_file() and (begun or deployments.status(folder).state not in ENDED):
            reporter.phase("stopping the model")
            deployments.stop(folder)


def facts_of(decision: LaunchDecision) -> dict[str, Any]:
    """What `prepare` needs to know of a model that is not there yet."""
    return {
        "model": decision.served_name,
        "models": (decision.served_name,),
        "context": decision.plan.max_model_len,
        "counter": _tokenizer_here(decision),
    }


def _tokenizer_here(decision: LaunchDecision) -> Counter | None:
    """The model's tokenizer, where model and engine are on this disk already."""
    from corral.engines import environments as engines
    from corral.plan.models import store as model_store

    model = model_store.already_here(decision.source)
    engine = engines.find(decision.flavour)
    return engine_counter(engine.python, model) if model and engine else None
