"""`corral tunnel NAME`: the endpoint of a deployment elsewhere, on this machine."""

from __future__ import annotations

import os
import shlex

import click

from corral.base.errors import UsageError
from corral.base.record import load_json
from corral.cli.options import deployment_argument, json_option
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle.deployments import status
from corral.deploy.lifecycle.distant import find_distant, hold_distant
from corral.deploy.lifecycle.tunnel import close_tunnel, ensure_tunnel, hold_tunnel, needs_tunnel, tunnel_holder
from corral.lab.report.screen import print_json
from corral.serve.fleet.chain import choose_folder


@click.command()
@deployment_argument
@click.option("--background", "-b", is_flag=True, help="Open it in the background and return.")
@click.option("--close", is_flag=True, help="Close the one that is open.")
@click.option("--through", metavar="HOST", help="The deployment belongs to Corral on HOST, a login node for example.")
@click.option("--corral", "program", default="corral", show_default=True, help="With --through: the command there.")
@click.option("--port", type=click.IntRange(1, 65535), help="With --through: the port here (default: a free one).")
@json_option("The address, and which process holds it open, as JSON.")
def command(
    name: str | None,
    background: bool,
    close: bool,
    through: str | None,
    program: str,
    port: int | None,
    as_json: bool,
) -> None:
    """Bring the endpoint of NAME to this machine and keep it here; opens the connection again when it breaks.

    `corral up` opens one in the background by itself; this is for later sessions and other terminals.
    """
    if through is not None:
        if name is None:
            raise UsageError(
                "--through needs the name of a deployment there.", f"`ssh {through} corral ps` lists them."
            )
        _through(name, through, program, port, as_json)
        return
    folder = choose_folder(name)
    if close:
        close_tunnel(folder)
        if as_json:
            _print_facts(folder, None)
        return
    url = _url(folder)
    if not needs_tunnel(folder):
        _print(as_json, folder, None, f"{folder.name} needs no tunnel: {url or status(folder).state}", err=True)
    elif holder := tunnel_holder(folder):
        _print(as_json, folder, holder.pid, f"{url} (held open by process {holder.pid})")
    elif background:
        ensure_tunnel(folder)
        opened = tunnel_holder(folder)
        _print(as_json, folder, opened.pid if opened else None, url)
    else:
        _print(as_json, folder, os.getpid(), f"{url}  (Ctrl-C closes it)", err=True)
        hold_tunnel(folder, lambda text: click.echo(f"corral: {text}", err=True))


def _url(folder: DeploymentFolder) -> str:
    return load_json(Endpoint, folder.endpoint).base_url if folder.endpoint.is_file() else ""


def _print(as_json: bool, folder: DeploymentFolder, holder: int | None, text: str, err: bool = False) -> None:
    _print_facts(folder, holder) if as_json else click.echo(text, err=err)


def _print_facts(folder: DeploymentFolder, holder: int | None) -> None:
    facts = {"name": folder.name, "url": _url(folder) or None, "needed": needs_tunnel(folder), "held_by": holder}
    print_json(facts)


def _through(name: str, through: str, program: str, port: int | None, as_json: bool) -> None:
    remote = find_distant(name, through, shlex.split(program), port)
    if as_json:
        facts = {"name": name, "url": remote.base_url, "through": through, "key_file": str(remote.key_file)}
        print_json({**facts, "held_by": os.getpid()})
    else:
        click.echo(f"export OPENAI_BASE_URL={remote.base_url}")
        click.echo(f'export OPENAI_API_KEY="$(cat {shlex.quote(str(remote.key_file))})"')
    click.echo(f"{name} through {through}  (Ctrl-C closes it)", err=True)
    hold_distant(remote, lambda text: click.echo(f"corral: {text}", err=True))
