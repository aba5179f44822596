"""`corral wait NAME`: until it is ready, or until it is known that it never will be."""

from __future__ import annotations

import click

from corral.cli.screen import PhaseScreen, print_json
from corral.cli.use_options import deployment_argument
from corral.lifecycle.bringup import wait_ready
from corral.lifecycle.successors import choose_folder

__all__ = ["command"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@deployment_argument
@click.option("--json", "as_json", is_flag=True, help="The final status as JSON.")
def command(name: str | None, as_json: bool) -> None:
    """Wait until NAME is ready (exit 0) or has ended (exit 8, with the reason)."""
    folder = choose_folder(name)
    with PhaseScreen(quiet=as_json) as screen:
        found = wait_ready(folder, screen)
    if as_json:
        print_json(found)
    elif found.endpoint:
        click.echo(found.endpoint.base_url)
