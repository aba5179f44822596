"""`corral scale NAME N`: another number of members."""

from __future__ import annotations

import click

from corral.lab.report.screen import PhaseScreen, print_json
from corral.serve.fleet.creation import parse_size, resize
from corral.serve.fleet.processes import ensure_keeper
from corral.serve.fleet.record import open_fleet
from corral.serve.fleet.status import fleet_status, wait_fleet


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name")
@click.argument("replicas")
@click.option("--wait", is_flag=True, help="Wait until that many are ready.")
@click.option("--json", "as_json", is_flag=True, help="Print the fleet's status as JSON.")
def command(name: str, replicas: str, wait: bool, as_json: bool) -> None:
    """Change how many members the fleet NAME has: REPLICAS is 6, or 2..8 to follow the load.

    New members are started at once. Members that are no longer wanted get no new requests, finish those they have,
    and are then stopped.
    """
    folder = open_fleet(name)
    before, after = resize(folder, parse_size(replicas))
    ensure_keeper(folder)
    if wait:
        with PhaseScreen(quiet=as_json) as screen:
            wait_fleet(folder, screen)
    if as_json:
        print_json(fleet_status(folder))
    else:
        limits = f" ({after.least} to {after.most}, depending on the load)" if after.least != after.most else ""
        click.echo(f"{name}: {before.wanted} → {after.wanted} members{limits}")
