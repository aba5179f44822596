"""`corral up --replicas N`: several servers of one model, one address, one key."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace

import click

from corral.base.errors import UsageError
from corral.client.endpoint import Endpoint
from corral.deploy.lifecycle.decision import DeployRequest
from corral.deploy.targets.base import Queue, load_target
from corral.lab.report.screen import PhaseScreen, print_json
from corral.node.agent.probe import REQUESTS
from corral.serve.fleet.creation import FleetOrder, prepare_fleet
from corral.serve.fleet.processes import end_fleet, ensure_keeper
from corral.serve.fleet.start import start_member
from corral.serve.fleet.status import FleetStatus, fleet_status, wait_fleet


def checked(request: DeployRequest, order: FleetOrder) -> DeployRequest:
    """The request of each member; refuses what is meant for single deployments."""
    target = load_target(request.target, request.target_options)
    queue = isinstance(target, Queue)
    if order.keep and not queue:
        raise UsageError("--keep is for SLURM jobs, which have a time limit.", "Leave it out.")
    if order.keeper_in_jobs:
        if not isinstance(target, Queue):
            raise UsageError("--keeper job is for SLURM, whose jobs can run it.", "Leave it out.")
        request = replace(request, target_options=target.with_keeper(request.target_options))
    return replace(request, port=None, bind=None, expose=request.expose and queue)


def bring_up_fleet(
    request: DeployRequest,
    order: FleetOrder,
    screen: PhaseScreen,
    wait: bool,
    ask: Callable[..., str],
    as_json: bool,
) -> None:
    """Make the fleet, start its first member here, and let its keeper do the rest."""
    with screen:
        folder = prepare_fleet(checked(request, order), order, screen)
        try:
            start_member(folder, f"{folder.name}-1", screen)
        except BaseException:
            end_fleet(folder, "its first member could not be started")
            raise
        ensure_keeper(folder, until_served=order.keeper_in_jobs)
        if wait:
            try:
                found = wait_fleet(folder, screen)
            except KeyboardInterrupt:
                name = shlex.quote(folder.name)
                screen.note(
                    f"it keeps starting in the background. Wait: corral wait {name}    Stop: corral down {name}"
                )
                raise
            except BaseException:
                end_fleet(folder, "it never became ready")
                raise
        else:
            found = fleet_status(folder)
    if as_json:
        print_json(found)
    elif wait:
        assert found.endpoint is not None
        click.echo("\n" + _summary(found, ask(found.endpoint)))
    else:
        click.echo(f"{found.name} is starting; `corral wait {shlex.quote(found.name)}` waits until it is ready.")


_FIRST: dict[str, tuple[str, dict[str, object]]] = {
    **REQUESTS, "generate": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]})
}  # fmt: skip


def next_lines(name: str) -> list[str]:
    """The two commands with which most people go on."""
    return [
        f"  corral chat {shlex.quote(name)}    talk with it in this terminal",
        "  corral console    everything on one page in the browser",
    ]


def curl_lines(endpoint: Endpoint, task: str = "generate") -> list[str]:
    """How a shell asks a server its first question."""
    key = f'    -H "Authorization: Bearer $(cat {shlex.quote(endpoint.key_file or "")})"'
    if task == "transcribe":
        url = f"  curl {endpoint.base_url}/audio/transcriptions \\"
        return ["curl:", url, f"{key} \\", f"    -F model={shlex.quote(endpoint.model)} -F file=@speech.wav"]
    path, fields = _FIRST[task]
    body = json.dumps({"model": endpoint.model, **fields})
    url = f"  curl {endpoint.root}{path} \\"
    return ["curl:", url, f'{key} -H "Content-Type: application/json" \\', f"    -d {shlex.quote(body)}"]


def _summary(found: FleetStatus, answer: str) -> str:
    """Where the fleet is, how to call it, how to change and end it."""
    assert found.endpoint is not None
    name, endpoint = shlex.quote(found.name), found.endpoint
    lines = [
        f"{found.name} is ready: {found.ready} members behind one address",
        "",
        f"  endpoint  {endpoint.base_url}",
        f"  model     {endpoint.model}",
        f"  key       {endpoint.key_file}",
        f"  members   {', '.join(one.name for one in found.members)}",
    ]
    if answer:
        lines += ["", f"  answered  {' '.join(answer.split())}"]
    lines += [
        "",
        *next_lines(found.name),
        "",
        *curl_lines(endpoint),
        "",
        f"It goes on running. Size: corral scale {name} N    Look: corral status {name}    Stop: corral down {name}",
    ]
    return "\n".join(lines)
