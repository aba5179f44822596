"""`corral wait NAME`: until it is ready, or until it is known that it never will be."""

from __future__ import annotations

import shlex

import click

from corral.base.errors import LaunchError
from corral.cli.options import deployment_argument, json_option
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle.deployments import Status, status
from corral.deploy.lifecycle.watching import wait_ready
from corral.lab.report.screen import PhaseScreen, print_json
from corral.serve.fleet.chain import choose_folder
from corral.serve.fleet.status import FleetStatus, chosen_fleet, wait_fleet


@click.command()
@deployment_argument
@json_option("The final status as JSON.")
def command(name: str | None, as_json: bool) -> None:
    """Wait until NAME is ready (exit 0) or has ended (exit 8, with the reason).

    A fleet is ready when as many members as it has at least are, and its gateway runs.
    """
    fleet = chosen_fleet(name)
    folder = None if fleet else choose_folder(name)
    before = status(folder) if folder else None
    if before and before.state is State.STOPPED:
        raise LaunchError(
            f"{before.name!r} is stopped: {before.text or 'it will not become ready'}.",
            f"`corral up` starts it again; `corral events {shlex.quote(before.name)}` tells what happened.",
            name=before.name, state=before.state.value, reason=before.reason.value if before.reason else "",
        )  # fmt: skip
    ready = before is not None and before.state is State.READY  # then there is nothing to show
    result: FleetStatus | Status
    with PhaseScreen(quiet=as_json or ready) as screen:
        result = wait_fleet(fleet, screen) if fleet else wait_ready(folder or choose_folder(name), screen)
    if as_json:
        print_json(result)
    elif result.endpoint:
        click.echo(result.endpoint.base_url)
