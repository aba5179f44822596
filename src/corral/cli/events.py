"""`corral events NAME`: the journal of a deployment."""

from __future__ import annotations

import json

import click

from corral.cli.options import deployment_argument, json_option
from corral.deploy.deployment.events import read_events
from corral.deploy.lifecycle.deployments import adoptions, status
from corral.lab.report.status import event_text
from corral.serve.fleet.chain import choose_folder
from corral.serve.fleet.status import chosen_fleet


@click.command()
@deployment_argument
@json_option("One JSON object per line.")
def command(name: str | None, as_json: bool) -> None:
    """Print what happened, and when; of a fleet, what was decided and why."""
    if fleet := chosen_fleet(name):
        events = read_events(fleet.events)
    else:
        folder = choose_folder(name)
        status(folder)  # copies what was written on other nodes
        events = [event for rank in folder.ranks() for event in read_events(rank.events)] + adoptions(folder)
    for event in sorted(events, key=lambda event: event.time_s):
        if as_json:
            head = {"t": event.time_s, "kind": event.kind, "rank": event.rank, "elapsed_s": event.elapsed_s}
            click.echo(json.dumps({**head, **event.details}, ensure_ascii=False))
        else:
            click.echo(event_text(event))
