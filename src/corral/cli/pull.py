"""`corral pull`: a model's files where they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from corral.base.errors import CorralError, DataError, UnreachableError, UsageError
from corral.base.ssh import Ssh, typed_hosts
from corral.cli.options import json_option, with_token
from corral.deploy.profile.merging import merged, storage_of, use_hub_of
from corral.deploy.profile.profile import load_profile
from corral.deploy.transfer.pull import PullOrder, pull
from corral.lab.report import tables
from corral.lab.report.pull import NodeLines, pull_lines
from corral.lab.report.screen import print_json
from corral.plan.places import Storage

_KINDS = {kind.exit_code: kind for kind in (UnreachableError, DataError)}


@click.command()
@click.argument("model")
@click.option("--hosts", metavar="A,B,…",
              help="Nodes, as ssh knows them; @FILE: one per line (default: this machine).")  # fmt: skip
@click.option("--on", "profile", metavar="PROFILE", help="The nodes of a profile, and where its models lie.")
@click.option("--to", metavar="FOLDER", default="", help="Folder for the model's files.")
@click.option("--shared", is_flag=True, help="The folder is one storage for all nodes: refuse if it is not.")
@click.option("--local-disk", is_flag=True, help="The folder is on each node's own disk: refuse if it is not.")
@click.option("--from", "source", metavar="HOST|hub", default="", help="Where to take it from (default: nearest).")
@click.option("--check", is_flag=True, help="Read and hash every file again, also those that look unchanged.")
@json_option("Print one JSON document at the end.")
def command(
    model: str,
    hosts: str | None,
    profile: str | None,
    to: str,
    shared: bool,
    local_disk: bool,
    source: str,
    check: bool,
    as_json: bool,
) -> None:
    """Bring MODEL (a catalogue name, a Hugging Face id, or a folder) to this machine or onto nodes.

    Nodes take it from each other while it arrives, so many take about as long as one. Run it again to continue.
    """
    if shared and local_disk:
        raise UsageError("--shared and --local-disk cannot be combined.", "Leave out one of them.")
    nodes, ssh, storage = _where(hosts, profile)
    order = PullOrder(
        model=model,
        hosts=nodes,
        to=to,
        storage="shared" if shared else "local-disk" if local_disk else "auto",
        source=source,
        check_again=check,
        lies=storage,
    )
    with NodeLines(quiet=as_json) as screen:
        result = with_token(lambda: pull(order, screen.report, ssh))
    if as_json:
        print_json(result)
        click.get_current_context().exit(result.failed[0].exit_code if result.failed else 0)
    click.echo("\n".join(pull_lines(result, tables.room())))
    if result.failed:
        names = ", ".join(arrival.host for arrival in result.failed)
        first = result.failed[0]
        raise _KINDS.get(first.exit_code, CorralError)(
            f"{result.model} did not reach {names}: {first.text}",
            first.remedy or "Run the same command again: what has arrived is kept.",
        )


def _where(names: str | None, name: str | None) -> tuple[tuple[str, ...], Ssh, Storage]:
    """The hosts, the ssh that reaches them, and where models lie there: as a profile says, where one is named."""
    if names and name:
        raise UsageError("--hosts and --on both name nodes.", "Leave out one of them.")
    if not name:
        return typed_hosts(names or ""), Ssh(), Storage()
    profile = load_profile(name)
    use_hub_of(profile)
    options: Mapping[str, Any] = merged(profile, {})["target_options"]
    ssh = Ssh(identity=options.get("identity"), config=options.get("config"))
    return tuple(options.get("hosts", ())), ssh, Storage(**storage_of(profile))
