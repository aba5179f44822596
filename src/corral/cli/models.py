"""`corral models`: the models Corral knows by name, which are on disk, and which fit this machine."""

from __future__ import annotations

from typing import Any

import click

from corral.base.errors import ConflictError
from corral.cli.help_pages import WholeGroup
from corral.cli.options import json_option
from corral.lab.report.screen import print_json, print_table
from corral.plan.hardware.inventory import Inventory
from corral.plan.models.store import ShelvedModel, known_name, on_disk, remove


@click.group(cls=WholeGroup, invoke_without_command=True)
@click.option("--gpus", metavar="SPEC", help="Ask whether they fit these GPUs instead (8xH100, 1xA100-40GB, …).")
@json_option("The list as JSON.")
@click.pass_context
def command(context: click.Context, gpus: str | None, as_json: bool) -> None:
    """List models: the catalogue, what is on disk and where, and what fits this machine.

    Any other model of the Hugging Face hub works by its id, and any folder by its path.
    """
    if context.invoked_subcommand is not None:
        return
    rows = _rows(_inventory(gpus), on_disk())
    if as_json:
        print_json(rows)
        return
    cells = [[r["name"], _gigabytes(r["bytes"]), r["fits"], "gated" if r["gated"] else "", r["path"]] for r in rows]
    print_table(["NAME", "WEIGHTS", f"FITS {gpus or 'HERE'}", "ACCESS", "ON DISK"], cells, left=1, tail=3)


@command.command("remove")
@click.argument("name")
@json_option()
def remove_model(name: str, as_json: bool) -> None:
    """Delete a model's files from this machine's disk; refused while a deployment serves it."""
    from corral.deploy.deployment.state import ENDED
    from corral.deploy.lifecycle.deployments import statuses

    for status in statuses():
        if known_name(status.model) == known_name(name) and status.state not in ENDED:
            raise ConflictError(f"{status.name!r} serves {name}.", f"Stop it first: corral down {status.name}")
    removed = remove(name)
    if as_json:
        print_json(removed)
    else:
        for model in removed:
            click.echo(f"removed {model.name} ({_gigabytes(model.stored_bytes)}) from {model.path}")


def _inventory(gpus: str | None) -> Inventory:
    from corral.plan.hardware.inventory import parse_gpus, probe

    return parse_gpus(gpus) if gpus else probe()


def _rows(inventory: Inventory, stored: list[ShelvedModel]) -> list[dict[str, Any]]:
    from corral.plan.models.catalogue import CATALOGUE
    from corral.plan.models.facts import facts_from_entry

    on_disk = {model.name: model for model in stored}
    rows = []
    for entry in CATALOGUE.values():
        if entry.name.startswith("llama-3.1-405b-first-upload"):
            continue  # for checking old figures, not for serving
        facts, here = facts_from_entry(entry), on_disk.pop(entry.name, None)
        rows.append(
            {
                "name": entry.name,
                "repository": entry.repo,
                "bytes": facts.weights_bytes,
                "fits": _fits(facts, inventory),
                "gated": entry.gated,
                "path": here.path if here else "",
            }
        )
    others = [
        {"name": m.name, "repository": "", "bytes": m.stored_bytes, "fits": "", "gated": False, "path": m.path}
        for m in on_disk.values()
    ]
    return rows + others


def _fits(facts: Any, inventory: Inventory) -> str:
    """How it would run as it is stored: `yes`, `context 24,576` when not at full length, or `no`."""
    from corral.plan.choose import make_plan
    from corral.plan.contract import Goal

    as_stored = {"weights": facts.weights} if inventory.gpu else {}
    plan = make_plan(facts, inventory, Goal(), as_stored)
    if not plan.fits:
        return "no"
    return "yes" if plan.max_model_len >= facts.max_context else f"context {plan.max_model_len:,}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 100e9 else f"{size / 1e9:,.0f} GB"
