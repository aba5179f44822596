"""From a request to a running deployment: decide, stage, launch, wait. What `corral up` and Python share.

`decision` refuses what can be refused; only then is a name taken, an engine installed and a model fetched
(`staging`), and the launch rendered (`rendering`) and started.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.errors import CorralError, LaunchError
from corral.base.processes import own_identity
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import Phase, kind_of, planned_start
from corral.deploy.deployment.state import Reason, State
from corral.deploy.launch.links import choose_link
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.decision import DeployDecision, DeployRequest, runtime_of, sized
from corral.deploy.lifecycle.rendering import Staged, render_launch
from corral.deploy.lifecycle.staging import Staging, bring_model, measured
from corral.deploy.lifecycle.status import give_up
from corral.deploy.lifecycle.watching import Reporter, wait_ready
from corral.deploy.targets.base import Target
from corral.engines import PINNED_VERSION
from corral.engines import environments as engines
from corral.engines.runtimes.base import Runtime
from corral.engines.runtimes.ray import ray_checks
from corral.plan.models import store as model_store

PORT_ATTEMPTS = 3  # a port that was free when chosen can be taken before the engine binds it


@dataclass(frozen=True)
class ClaimHooks:
    """What a caller adds when a name is claimed."""

    refuse: Callable[[str], None] = lambda _: None  # raises where something else holds the name
    prepare: Callable[[DeploymentFolder, DeployDecision], None] = lambda *_: None  # writes into the new folder


def bring_up(
    request: DeployRequest, report: Reporter, wait: bool = True, hooks: ClaimHooks | None = None
) -> deployments.Status:
    """Decide, stage and launch; returns the ready deployment (or, without waiting, the starting one)."""
    hooks = hooks or ClaimHooks()
    for _ in range(PORT_ATTEMPTS - 1):
        try:
            return _bring_up_once(request, report, wait, hooks)
        except LaunchError as error:
            if error.details.get("reason") != "port_taken" or request.port is not None:
                raise
            report.note(f"{error.message} Starting again on another port.")
    return _bring_up_once(request, report, wait, hooks)


def _new_record(decision: DeployDecision, target: Target) -> deployments.Record:
    return deployments.Record(
        name=decision.name,
        launch_id=secrets.token_hex(8),
        model=decision.source.name,
        served_name=decision.served_name,
        target=target.name,
        target_options=target.options(),
        created_s=time.time(),
        created_by=own_identity(),
        words=decision.request.words,
        task=decision.task,
    )


def _bring_up_once(request: DeployRequest, report: Reporter, wait: bool, hooks: ClaimHooks) -> deployments.Status:
    target, decision = sized(request, report.note)
    record = _new_record(decision, target)
    if decision.inventory.gpu:
        _tell(decision, report)
    hooks.refuse(decision.name)
    key = request.api.key()
    folder = deployments.claim(record, lambda who: report.note(f"waiting for {who}, which uses the same name"), key)
    with _released_on_failure(folder, record.launch_id):
        hooks.prepare(folder, decision)
        _stage_and_launch(decision, target, record, folder, report)
    return _wait_ready(folder, report) if wait else deployments.status(folder)


def _stage_and_launch(
    decision: DeployDecision,
    target: Target,
    record: deployments.Record,
    folder: DeploymentFolder,
    report: Reporter,
) -> None:
    """Install the engine, fetch the model, and start the agents."""
    staging = Staging(report, folder, planned_start(decision.plan))
    runtime = _staged_runtime(decision, target, staging)
    decision = measured(decision, staging)
    if not decision.inventory.gpu:  # told only now: the measurement may have changed the plan
        _tell(decision, report)
    kind = kind_of("model", decision.source.name, target.name, target.options())
    staging.phase(Phase.FETCHING, kind, needed=model_store.already_here(decision.source) is None)
    path = bring_model(decision, target, staging)
    adapters = decision.request.adapters
    placed = target.place(Path(adapters), staging.detail) if adapters else ""
    staged = Staged(decision, target, folder, runtime, path, record.launch_id, placed)
    spec = render_launch(staged, report.note)
    record = replace(record, kind=staged.start_kind())
    staging.phase(Phase.STARTING, record.kind)
    deployments.launch(spec, decision.plan, target, record, folder)


def _tell(decision: DeployDecision, report: Reporter) -> None:
    for text in decision.notes():
        report.note(text)


def _staged_runtime(decision: DeployDecision, target: Target, staging: Staging) -> Runtime:
    """The runtime, installed, on the nodes, and checked there."""
    request = decision.request
    kind = kind_of("engine", decision.flavour, PINNED_VERSION, request.runtime)
    staging.phase(Phase.INSTALLING, kind, needed=engines.find(decision.flavour) is None)
    runtime = runtime_of(request, target, decision.flavour).stage(staging.detail)
    if runtime.carried:
        runtime = runtime.moved({path: target.place(Path(path), staging.detail) for path in runtime.carried})
    link, _ = choose_link(request.link, target.nodes(), runtime.flags())
    target.verify((*runtime.check(), *(ray_checks(runtime) if link == "ray" else ())))
    return runtime


def _wait_ready(folder: DeploymentFolder, report: Reporter) -> deployments.Status:
    try:
        return wait_ready(folder, report)
    except KeyboardInterrupt:
        report.note(_interrupted(folder))
        raise
    except LaunchError as error:
        if error.details.get("reason") == Reason.CANNOT_START:  # otherwise its job would wait in the queue for ever
            deployments.stop(folder)
        raise


def _interrupted(folder: DeploymentFolder) -> str:
    """What goes on after an interrupted wait, and how to wait again."""
    name = shlex.quote(folder.name)
    with contextlib.suppress(CorralError, OSError):
        now = deployments.status(folder)
        if now.state is State.QUEUED:
            return f"{now.text}. Wait for it again: corral up --attach {name}. Stop it: corral down {name}"
    return f"it keeps starting in the background. Wait for it: corral up --attach {name}. Stop it: corral down {name}"


@contextlib.contextmanager
def _released_on_failure(folder: DeploymentFolder, launch_id: str) -> Iterator[None]:
    """Free the name again where a failure comes before anything was started; what cannot be read may have been."""
    try:
        yield
    except BaseException:
        give_up(launch_id)
        with contextlib.suppress(OSError):
            if not any(mark.exists() for mark in (folder.rank(0).agent, folder.job, folder.started)):
                shutil.rmtree(folder.path, ignore_errors=True)
        raise
