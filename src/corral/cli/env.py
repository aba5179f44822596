"""`corral env NAME`: address and key as the shell wants them."""

from __future__ import annotations

import shlex

import click

from corral.base.errors import ConflictError
from corral.base.record import load_json
from corral.cli.client_lines import CLIENTS, EndpointFacts, client_called, file_text, typed_line, variables_for
from corral.cli.options import deployment_argument, json_option
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.launch.render import LaunchSpec
from corral.deploy.lifecycle.deployments import status
from corral.lab.report.screen import print_json
from corral.serve.fleet.chain import choose_folder, newest_ready
from corral.serve.fleet.record import read_fleet
from corral.serve.fleet.status import chosen_fleet
from corral.serve.gateway.process import held_proxy
from corral.serve.resolve import fleet_endpoint


@click.command()
@deployment_argument
@click.option(
    "--for",
    "client",
    default="openai",
    metavar="CLIENT",
    help=f"The variables and the line to type for a client: {', '.join(CLIENTS)}.",
)
@json_option("The variables as one JSON document.")
def command(name: str | None, client: str, as_json: bool) -> None:
    """Print OPENAI_BASE_URL and OPENAI_API_KEY for the shell: eval "$(corral env NAME)".

    The key is printed. Everything that reads the two variables then finds the server: the openai SDK, curl, Corral.
    With --for, the variables of that client are printed, and as comments its file and the line to type.
    """
    row = client_called(client)
    endpoint, folder = _endpoint(name)
    facts = EndpointFacts(endpoint.root, endpoint.model, endpoint.key_file, _tokenizer(folder))
    variables = variables_for(row, facts, endpoint.key() or "")
    if as_json:
        print_json(variables)
        return
    for variable, value in variables.items():
        click.echo(f"export {variable}={shlex.quote(value)}")
    for text in (file_text(row, facts), typed_line(row, facts)):
        for line in text.splitlines():
            click.echo(f"# {line}")


def _endpoint(name: str | None) -> tuple[Endpoint, DeploymentFolder]:
    """Where it is used, and a deployment whose files tell the rest."""
    if fleet := chosen_fleet(name):
        return fleet_endpoint(fleet), DeploymentFolder.of(next(iter(read_fleet(fleet).serving())))
    folder = choose_folder(name)
    ready = newest_ready(folder)
    current = ready.status if ready and ready.status else status(folder)
    if current.endpoint is None:
        raise ConflictError(
            f"{current.name!r} has no address now: it is {current.state}.",
            f"Wait for it: corral wait {shlex.quote(current.name)}",
            state=current.state.value,
        )
    proxy = held_proxy(folder)  # its address stays
    found = current.endpoint
    return Endpoint(proxy.url, found.model, found.key_file) if proxy else found, folder


def _tokenizer(folder: DeploymentFolder) -> str:
    """Where the model's own tokenizer is."""
    return load_json(LaunchSpec, folder.launch).model_path
