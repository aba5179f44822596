"""`corral ps`: deployments and their states."""

from __future__ import annotations

import click

from corral.cli.screen import print_json, print_table, since
from corral.deployment.state import ENDED, State
from corral.lifecycle.deployments import Status, statuses

__all__ = ["command"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--all", "-a", "show_all", is_flag=True, help="Also those that have ended.")
@click.option("--json", "as_json", is_flag=True, help="All deployments as JSON.")
def command(show_all: bool, as_json: bool) -> None:
    """List deployments; without --all, those that run or failed."""
    found = statuses()
    if as_json:
        print_json(found)
        return
    shown = [status for status in found if show_all or status.state not in ENDED or status.state is State.FAILED]
    if not shown:
        click.echo("No deployments. `corral up` starts one.", err=True)
        return
    print_table(["NAME", "STATE", "SINCE", "MODEL", "ENDPOINT", "ENGINE"], [_row(status) for status in shown])


def _row(status: Status) -> list[str]:
    state = status.state.value
    if status.state in (State.LOADING, State.STARTING) and status.total:
        state = f"{status.phase} {status.done}/{status.total}"
    elif status.state in (State.LOADING, State.STARTING):
        state = status.phase
    elif status.reason and status.state in ENDED:
        state = f"{state}: {status.reason.value.replace('_', ' ')}"
    url = status.endpoint.base_url if status.endpoint else "-"
    return [status.name, state, since(status.since_s), status.model, url, status.engine or "-"]
