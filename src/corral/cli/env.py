"""`corral env NAME`: address and key as the shell wants them."""

from __future__ import annotations

import shlex

import click

from corral.base.errors import ConflictError
from corral.cli.options import deployment_argument, json_option
from corral.deploy.lifecycle.deployments import status
from corral.lab.report.screen import print_json
from corral.serve.fleet.chain import choose_folder, newest_ready
from corral.serve.fleet.status import chosen_fleet
from corral.serve.gateway.process import held_proxy
from corral.serve.resolve import fleet_endpoint


@click.command()
@deployment_argument
@json_option("The two variables as one JSON document.")
def command(name: str | None, as_json: bool) -> None:
    """Print OPENAI_BASE_URL and OPENAI_API_KEY for the shell: eval "$(corral env NAME)".

    The key is printed. Everything that reads the two variables then finds the server: the openai SDK, curl, Corral.
    """
    if fleet := chosen_fleet(name):
        endpoint = fleet_endpoint(fleet)
        _print({"OPENAI_BASE_URL": f"{endpoint.root}/v1", "OPENAI_API_KEY": endpoint.key() or "none"}, as_json)
        return
    folder = choose_folder(name)
    ready = newest_ready(folder)
    current = ready.status if ready and ready.status else status(folder)
    proxy = held_proxy(folder)
    if current.endpoint is None:
        raise ConflictError(
            f"{current.name!r} has no address now: it is {current.state}.",
            f"Wait for it: corral wait {shlex.quote(current.name)}",
            state=current.state.value,
        )
    root = proxy.url if proxy else current.endpoint.root  # the proxy's address stays
    _print({"OPENAI_BASE_URL": f"{root}/v1", "OPENAI_API_KEY": current.endpoint.key() or "none"}, as_json)


def _print(variables: dict[str, str], as_json: bool) -> None:
    if as_json:
        print_json(variables)
        return
    for variable, value in variables.items():
        click.echo(f"export {variable}={shlex.quote(value)}")
