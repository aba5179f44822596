"""`corral events NAME`: the journal of a deployment."""

from __future__ import annotations

import json
import time

import click

from corral.cli.options import deployment_argument
from corral.deploy.deployment.events import Event, read_events
from corral.deploy.lifecycle.deployments import status
from corral.serve.fleet.chain import choose_folder
from corral.serve.fleet.status import chosen_fleet


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@deployment_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def command(name: str | None, as_json: bool) -> None:
    """Print what happened, and when; of a fleet, what was decided and why."""
    if fleet := chosen_fleet(name):
        events = read_events(fleet.events)
    else:
        folder = choose_folder(name)
        status(folder)  # brings here what was written elsewhere
        events = [event for rank in folder.ranks() for event in read_events(rank.events)]
    for event in sorted(events, key=lambda event: event.time_s):
        if as_json:
            head = {"t": event.time_s, "kind": event.kind, "rank": event.rank, "elapsed_s": event.elapsed_s}
            click.echo(json.dumps({**head, **event.details}, ensure_ascii=False))
        else:
            click.echo(_line(event))


def _line(event: Event) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time_s))
    details = dict(event.details)
    head = str(details.pop("state", None) or details.pop("phase", None) or "")
    words = " ".join(f"{name}={value}" for name, value in details.items() if value is not None)
    return f"{moment}  {event.elapsed_s:8.1f} s  rank {event.rank}  {event.kind:<9} {head} {words}".rstrip()
