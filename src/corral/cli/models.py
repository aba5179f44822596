"""`corral models`: the models Corral knows by name, which are on disk, and which fit this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from corral.base.errors import ConflictError
from corral.cli.help_pages import WholeGroup
from corral.cli.options import json_option
from corral.lab.report.screen import print_json, print_table
from corral.plan.hardware.inventory import Inventory
from corral.plan.models.store import known_name, on_disk, remove

if TYPE_CHECKING:  # the planner is loaded by the command alone
    from corral.plan.model_list import ListedModel


@click.group(cls=WholeGroup, invoke_without_command=True)
@click.option("--gpus", metavar="NxKIND", help="Hardware, for example 8xH100 (default: this machine's own).")
@click.option("--search", metavar="WORDS", default="", help="Only models whose name or task has all of the words.")
@click.option("--all", "everything", is_flag=True, help="Those that do not fit, and every stored format, too.")
@json_option("All of them as JSON.")
@click.pass_context
def command(context: click.Context, gpus: str | None, search: str, everything: bool, as_json: bool) -> None:
    """List models by size: what fits this machine, what is on disk and where.

    Of a model that is stored in several formats the first that fits is shown. Any other model of the Hugging Face hub
    works by its id, and any folder by its path.
    """
    if context.invoked_subcommand is not None:
        return
    from corral.plan.model_list import found_by, known_models, with_disk

    rows = found_by(search, with_disk(known_models(_inventory(gpus)), on_disk()))
    if as_json:
        print_json(rows)
        return
    shown = rows if everything or search else _shown(rows)
    cells = [[r.name, _billions(r), _gigabytes(r.bytes), r.fits, ", ".join(_remarks(r)), r.path] for r in shown]
    headings = ["NAME", "PARAMETERS", "WEIGHTS", f"FITS {gpus or 'HERE'}", "REMARKS", "ON DISK"]
    print_table(headings, cells, left=1, tail=3)
    if len(shown) < len(rows):
        click.echo(f"\n{len(rows) - len(shown)} more do not fit or are other formats: --all, --search")


def _shown(rows: list[ListedModel]) -> list[ListedModel]:
    """What fits, once for each model, and what is on disk."""
    families: set[str] = set()
    shown = []
    for row in rows:
        fits = row.fits not in ("", "no") and row.family not in families
        if fits or row.path:
            shown.append(row)
            families.add(row.family)
    return shown


def _billions(row: ListedModel) -> str:
    if not row.parameters:
        return ""
    whole, active = row.parameters / 1e9, row.active_parameters / 1e9
    return f"{whole:.3g} B" + (f", {active:.2g} active" if active < 0.7 * whole else "")


def _remarks(row: ListedModel) -> list[str]:
    task = row.task if row.task not in ("", "generate") else ""
    part = "partly downloaded" if row.path and not row.whole else ""
    return [word for word in (task, "gated" if row.gated else "", part) if word]


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


@command.command("update")
@click.argument("source", metavar="FILE|URL")
@json_option()
def update(source: str, as_json: bool) -> None:
    """Read newer recipes of models (parsers, flags, variables) from FILE or an https URL; docs/recipes.md.

    Where they say nothing of a model, those that came with Corral hold.
    """
    from corral.engines.recipes import update_from, updated_file

    table, ignored = update_from(source)
    if as_json:
        print_json({"recipes": len(table.recipes), "source": table.source, "date": table.date,
                    "read_from": table.read_from, "path": str(updated_file()), "ignored": ignored})  # fmt: skip
        return
    click.echo(f"{table.read_from} was read into {updated_file()}: {len(table.recipes)} rows ({table.label}).")
    if ignored:
        click.echo(f"Ignored, as this version of Corral does not know them: {', '.join(ignored)}")


def _inventory(gpus: str | None) -> Inventory:
    from corral.plan.hardware.inventory import parse_gpus, probe

    return parse_gpus(gpus) if gpus else probe()


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 100e9 else f"{size / 1e9:,.0f} GB"
