"""`corral adapter`: the LoRA adapters of a deployment or fleet that runs."""

from __future__ import annotations

from typing import Any

import click

from corral.base.wording import counted
from corral.cli.help_pages import WholeGroup
from corral.cli.options import json_option
from corral.lab.report.screen import explain, print_json, print_table
from corral.serve.fleet.adapters import AdapterHost, adapter_host

_DEPLOYMENT = click.option("--deployment", "-d", metavar="NAME", help="Deployment or fleet (default: the only one).")


@click.group(cls=WholeGroup)
def command() -> None:
    """LoRA adapters of a deployment or fleet that was started with `corral up --adapters DIR`.

    Clients name an adapter as their model. It is loaded on first use, and makes room when others are needed.
    """


@command.command("add")
@click.argument("name")
@click.argument("source", metavar="PATH|REPOSITORY")
@_DEPLOYMENT
@json_option("The adapter as JSON.")
def add(name: str, source: str, deployment: str | None, as_json: bool) -> None:
    """Serve the adapter in PATH, or of a repository of the hub, as NAME; no server is started again.

    It is refused where it does not fit the model: rank, modules, shapes, base model. Only safetensors are read.
    """
    host = adapter_host(deployment)
    adapter = host.add(name, source, lambda text, *_: explain("  ", text))
    _tell(host, name, as_json, {"name": name, "rank": adapter.rank, "modules": adapter.modules})


@command.command("list")
@_DEPLOYMENT
@json_option("All of them as JSON.")
def list_adapters(deployment: str | None, as_json: bool) -> None:
    """The adapters, and how many servers list each."""
    host = adapter_host(deployment)
    listing = host.listing()
    rows = [(one, sum(one.name in names for names in listing)) for one in host.adapters()]
    if as_json:
        shown = ("name", "rank", "modules", "size_bytes", "base")
        print_json([{**{name: getattr(one, name) for name in shown}, "servers": having} for one, having in rows])
        return
    cells = [
        [
            one.name,
            str(one.rank),
            f"{one.size_bytes / 1e6:,.1f} MB",
            f"{n} of {len(host.servers)}",
            " ".join(one.modules),
        ]
        for one, n in rows
    ]
    print_table(["NAME", "RANK", "SIZE", "SERVERS", "MODULES"], cells, left=1, tail=1)


@command.command("remove")
@click.argument("name")
@_DEPLOYMENT
@json_option("What was removed as JSON.")
def remove(name: str, deployment: str | None, as_json: bool) -> None:
    """Delete NAME from the folder of adapters; requests that run are finished."""
    host = adapter_host(deployment)
    host.remove(name)
    _tell(host, name, as_json, {"name": name})


def _tell(host: AdapterHost, name: str, as_json: bool, document: dict[str, Any]) -> None:
    having = sum(name in names for names in host.listing())
    if as_json:
        print_json({**document, "deployment": host.name, "servers": having})
    else:
        click.echo(f"{name}: listed by {having} of {counted(len(host.servers), 'server')}")
