"""The servers of a batch: running ones, or a model that is started for it and stopped at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.base.errors import CorralError, NotFoundError, UsageError
from corral.client.endpoint import ModelServer
from corral.deploy.deployment.folder import DeploymentFolder
from corral.serve.resolve import DeploymentServer, FleetServer, find_servers, served_by
from corral.use.batch.core.run import Assignment, Listener, RunSummary, run_assignment
from corral.use.batch.core.runner import RunnerSettings, Work
from corral.use.batch.in_process import InProcessServer, as_used
from corral.use.batch.input.check import TokenCounter, engine_counter, server_counter
from corral.use.batch.spec import RAY_DATA, BatchServers, BatchSpec, ModelToStart, load_record

if TYPE_CHECKING:
    from corral.deploy.lifecycle.decision import DeployDecision


@dataclass(frozen=True)
class Served:
    """A served model: the facts that `prepare` needs, and the function that does the rows of an assignment."""

    facts: dict[str, Any]
    run: Callable[[Assignment, Work, RunnerSettings, Listener, bool], RunSummary]
    names: tuple[str, ...] = ()  # of deployments
    find: Callable[[], Sequence[ModelServer]] | None = None  # finds or starts the HTTP servers

    @classmethod
    def by(
        cls, find: Callable[[], Sequence[ModelServer]], facts: dict[str, Any], names: tuple[str, ...] = ()
    ) -> Served:
        """Served by HTTP servers."""
        return cls(facts, partial(run_assignment, find), names, find)


@contextlib.contextmanager
def served_for(servers: BatchServers, spec: BatchSpec, reporter: Any, known: str | None = None) -> Iterator[Served]:
    """The model of a batch, for as long as the batch needs it; `known` is the model of its earlier results."""
    if servers.in_process and (servers.urls or (servers.start_model and servers.start_model.engine == RAY_DATA)):
        other = "--url" if servers.urls else "--engine ray-data"
        raise UsageError(
            f"--in-process needs an engine that Corral started on this machine, and {other} names another.",
            "Leave one of them out.",
        )
    if servers.start_model is None:
        yield _online(servers, known or _known_model(spec))
        return
    if servers.deployments or servers.urls:
        raise UsageError("--start starts a model; --deployment and --url use running ones.", "Give one of them.")
    if servers.start_model.engine == RAY_DATA:
        yield _on_ray(servers.start_model)
        return
    with _started(servers, servers.start_model, spec, reporter) as served:
        yield served


def _on_ray(model: ModelToStart) -> Served:
    from corral.use.batch.ray_engine import RayEngine, engine_settings
    from corral.use.batch.ray_run import run_on_engine

    settings = engine_settings(model.context, model.fixed)
    engine = partial(RayEngine, model.model, model.replicas, settings)
    return Served({"model": model.model}, partial(run_on_engine, engine, model.model))


def _online(servers: BatchServers, known: str | None) -> Served:
    try:
        found = find_servers(servers.deployments, servers.urls, servers.key_file, known)
    except CorralError as error:
        if known is None:
            if isinstance(error, NotFoundError) and not servers.deployments:
                error.remedy += " Or let the batch start a model itself: --start MODEL."
            raise
        failure = error  # the batch may be done already, and then needs no server

        def unavailable() -> Sequence[ModelServer]:
            raise failure

        return Served.by(unavailable, {"model": known})
    deployments = [server for server in found if isinstance(server, DeploymentServer | FleetServer)]
    answering = [(server, model) for server in found if (model := served_by(server))]
    models = {model.names[0] for _, model in answering} or {server.model for server in deployments}
    if len(models) > 1:
        raise UsageError(
            f"the endpoints serve different models: {', '.join(sorted(models))}.",
            "Name endpoints that serve the same model.",
        )
    facts: dict[str, Any] = {"model": next(iter(models), known or "")}
    if answering:
        server, model = answering[0]
        facts |= {"models": model.names, "context": model.context, "counter": server_counter(server)}
    used = [as_used(servers, server) for server in found]
    return Served.by(lambda: used, facts, tuple(server.name for server in deployments))


def _known_model(spec: BatchSpec) -> str | None:
    try:
        return load_record(spec.output)[1].model
    except CorralError:
        return None


def started_name(output: str) -> str:
    """The name of the deployment that a batch starts; a resume of the same output finds it."""
    path = Path(output).absolute()
    return f"batch-{path.stem[:40]}-{blake2b(str(path).encode(), digest_size=3).hexdigest()}"


@contextlib.contextmanager
def _started(servers: BatchServers, model: ModelToStart, spec: BatchSpec, reporter: Any) -> Iterator[Served]:
    """Plan the model now, start it when the input has been checked, and stop it at the end, whatever happens."""
    from corral.deploy.deployment.state import ENDED
    from corral.deploy.lifecycle import deployments
    from corral.deploy.lifecycle.decision import sized
    from corral.deploy.lifecycle.watching import wait_ready
    from corral.serve.fleet.start import bring_up

    name = started_name(spec.output)
    request = model.request(name)
    _, decision = sized(request, reporter.note)
    folder = DeploymentFolder.of(name)
    begun: list[bool] = []

    def start() -> Sequence[ModelServer]:
        begun.append(True)
        running = folder.record.is_file() and deployments.status(folder).state not in ENDED
        if running:
            wait_ready(folder, reporter)
        else:
            bring_up(request, reporter)
        return [InProcessServer(DeploymentServer(name), over_http=not servers.in_process)]

    try:
        yield Served.by(start, facts_of(decision), (name,))
    finally:
        if folder.record.is_file() and (begun or deployments.status(folder).state not in ENDED):
            reporter.phase("stopping the model")
            deployments.stop(folder)


def facts_of(decision: DeployDecision) -> dict[str, Any]:
    """The facts that `prepare` needs of a model that is not started yet."""
    return {
        "model": decision.served_name,
        "models": (decision.served_name,),
        "context": decision.plan.max_model_len,
        "counter": _tokenizer_here(decision),
    }


def _tokenizer_here(decision: DeployDecision) -> TokenCounter | None:
    """The model's tokenizer, if model and engine are on this disk already."""
    from corral.engines import environments as engines
    from corral.plan.models import store as model_store

    model = model_store.already_here(decision.source)
    engine = engines.find(decision.flavour)
    return engine_counter(engine.python, model) if model and engine else None
