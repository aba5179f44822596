"""`corral.up` and `corral.connect`: from a name to a model that can be used in Python."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

from corral.base.errors import ConflictError, NotFoundError
from corral.base.processes import own_identity
from corral.base.record import load_json
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.folder import all_folders, open_folder
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.decision import DeployRequest
from corral.deploy.lifecycle.watching import Lines
from corral.plan.contract import Goal
from corral.serve.fleet.start import bring_up
from corral.serve.resolve import ready_endpoint, resolve
from corral.use.llm.llm import LLM


def up(
    model: str | None = None,
    *,
    name: str | None = None,
    context: int | None = None,
    concurrency: int | None = None,
    goal: str = "balanced",
    fixed: Mapping[str, object] | None = None,
    engine_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    reuse: bool = False,
    quiet: bool = False,
) -> LLM:
    """Serve a model (a catalogue name, a Hugging Face id, a folder; without one, what fits) and connect to it.

    Leaving the `with` of what it returns, or its `close()`, stops the server. With `reuse`, a deployment of that name
    that is ready already is used instead, and is left running.
    """
    request = DeployRequest(
        model=model,
        name=name,
        port=port,
        goal=Goal(context=context, concurrency=concurrency, goal=goal),
        fixed=dict(fixed or {}),
        extra_args=tuple(engine_args),
        extra_env=dict(env or {}),
    )
    return _serve(request, reuse, quiet)


def _serve(request: DeployRequest, reuse: bool, quiet: bool) -> LLM:
    began_s = time.time()
    try:
        status = bring_up(request, Lines(quiet))
    except ConflictError as error:
        if reuse and error.details.get("state") == "ready":
            endpoint = ready_endpoint(str(error.details["name"]))
            return LLM(endpoint, on_down=lambda: _down(endpoint))
        raise
    except KeyboardInterrupt:
        _stop_own(began_s)  # unlike `corral up` in a shell, an interrupted program leaves nothing running
        raise
    assert status.endpoint is not None
    folder = open_folder(status.name)
    stop = partial(_stop, folder.name)
    return LLM(status.endpoint, on_exit=stop, on_down=stop)


def _stop(name: str) -> None:
    deployments.stop(open_folder(name))


def _down(endpoint: Endpoint) -> None:
    """Stop the deployment that serves this endpoint."""
    for folder in all_folders():
        served = deployments.status(folder).endpoint
        if served is not None and served.root == endpoint.root:
            deployments.stop(folder)
            return
    raise NotFoundError(
        f"no deployment of yours answers at {endpoint.base_url}.", "End that server where it was started."
    )


def _stop_own(since_s: float) -> None:
    """Stop the deployments that this process began to start since then."""
    for folder in all_folders():
        record = load_json(deployments.Record, folder.record)
        if record.created_by == own_identity() and record.created_s >= since_s:
            deployments.stop(folder)


def connect(
    name: str | None = None,
    *,
    url: str | None = None,
    key: str | None = None,
    key_file: str | None = None,
    model: str | None = None,
    stall_s: float = 600.0,
    timeout_s: float | None = None,
) -> LLM:
    """Use a running server: a deployment by name, any address, what `OPENAI_BASE_URL` says, or the only ready one."""
    endpoint = resolve(name, url=url, key=key, key_file=key_file, model=model)
    return LLM(endpoint, stall_s=stall_s, timeout_s=timeout_s, on_down=lambda: _down(endpoint))
