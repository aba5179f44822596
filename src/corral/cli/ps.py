"""`corral ps`: deployments and their states."""

from __future__ import annotations

import click

from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle.deployments import Status, statuses
from corral.lab.report.fleet import fleet_row, load_words
from corral.lab.report.screen import print_json, print_table, since
from corral.serve.fleet.record import all_fleets
from corral.serve.fleet.status import FleetStatus, MemberStatus, fleet_status


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--all", "-a", "show_all", is_flag=True, help="Also those that have ended.")
@click.option("--json", "as_json", is_flag=True, help="All deployments as JSON.")
def command(show_all: bool, as_json: bool) -> None:
    """List deployments and fleets with their members; without --all, those that run or failed."""
    found, fleets = statuses(), [fleet_status(folder) for folder in all_fleets()]
    if as_json:
        print_json([*found, *fleets])
        return
    shown = [status for status in found if show_all or status.state not in ENDED or status.state is State.FAILED]
    behind = [fleet for fleet in fleets if show_all or fleet.state not in ENDED]
    rows = [row for fleet in behind for row in _fleet_rows(fleet)]
    members = {one.name for fleet in behind for one in fleet.members}
    shown = [status for status in shown if status.name not in members]
    if not shown and not rows:
        click.echo("No deployments. `corral up` starts one.", err=True)
        return
    headings = ["NAME", "STATE", "SINCE", "MODEL", "ENDPOINT", "LOAD" if rows and not shown else "ENGINE"]
    print_table(headings, [*rows, *(_row(status) for status in shown)])


def _fleet_rows(fleet: FleetStatus) -> list[list[str]]:
    """The fleet, and its members below it with what gateways have on them."""
    return [fleet_row(fleet), *map(_member_row, fleet.members)]


def _member_row(one: MemberStatus) -> list[str]:
    if one.status is None:
        return [f"  {one.name}", one.text, "-", "-", "-", "-"]
    row = _row(one.status)
    state = f"{row[1]}, leaving" if one.leaving else row[1]
    return [f"  {row[0]}", state, *row[2:5], load_words(one) or row[5]]


def _row(status: Status) -> list[str]:
    state = status.state.value
    if status.state in (State.STAGING, State.LOADING, State.STARTING):
        state = f"{status.phase} {100 * (status.done or 0) // status.total}%" if status.total else status.phase
    elif status.reason and status.state in ENDED:
        state = f"{state}: {status.reason.value.replace('_', ' ')}"
    url = status.endpoint.base_url if status.endpoint else "-"
    return [status.name, state, since(status.since_s), status.model, url, status.engine or "-"]
