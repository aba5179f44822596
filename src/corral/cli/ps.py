"""`corral ps`: deployments and their states."""

from __future__ import annotations

import click

from corral.base.shell import answering_soon
from corral.cli.options import json_option
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle.deployments import statuses
from corral.lab.report.screen import print_json, print_table
from corral.lab.report.status import deployment_row, fleet_rows
from corral.serve.fleet.status import NOT_STARTED, fleet_statuses


@click.command()
@click.option("--all", "-a", "show_all", is_flag=True, help="Also those that have ended.")
@json_option("All deployments as JSON.")
def command(show_all: bool, as_json: bool) -> None:
    """List deployments and fleets with their members; without --all, those that run or failed."""
    with answering_soon():
        deployments = statuses()
    fleets = fleet_statuses({one.name: one for one in deployments})
    if as_json:
        print_json([*deployments, *fleets])
        return
    fleets = [fleet for fleet in fleets if show_all or fleet.state not in ENDED]
    for warning in filter(None, (fleet.warning for fleet in fleets)):
        click.echo(warning)
    rows = [row for fleet in fleets for row in fleet_rows(fleet)]
    members = {one.name for fleet in fleets for one in fleet.members}
    shown = [one for one in deployments if show_all or one.state not in ENDED or one.state is State.FAILED]
    shown = [one for one in shown if one.name not in members]
    if not shown and not rows:
        click.echo("No deployments. `corral up` starts one.", err=True)
        return
    headings = ["NAME", "STATE", "SINCE", "MODEL", "ENDPOINT", "LOAD" if rows and not shown else "ENGINE"]
    print_table(headings, [*rows, *map(deployment_row, shown)], spared=("ENGINE", "MODEL"))
    members_of = [one for fleet in fleets for one in fleet.members]
    told = [(one.name, one.text) for one in fleets if one.state is State.UNKNOWN]
    told += [(one.name, one.text) for one in shown if one.state is State.UNKNOWN]
    told += [(one.name, one.text) for one in members_of if one.status is None and one.text != NOT_STARTED]
    listed = [*shown, *(one.status for one in members_of if one.status)]
    told += [(one.name, one.text) for one in listed if one.state is State.QUEUED]  # why it waits
    for name, text in told:
        click.echo(f"corral: {name}: {text}", err=True)
