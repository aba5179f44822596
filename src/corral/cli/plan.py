"""`corral plan`: will it fit, how to split it, how fast will it be, and why."""

from __future__ import annotations

import click

from corral.hardware import parse_gpus, probe
from corral.model import read_facts
from corral.plan import Goal, make_plan
from corral.plan.fixed import parse_assignments
from corral.record import dump_json

__all__ = ["command"]


@click.command()
@click.argument("model")
@click.option("--gpus")
@click.option("--nodes", type=int)
@click.option("--context", type=int)
@click.option("--concurrency", type=int)
@click.option("--goal", default="balanced")
@click.option("--set", "assignments", multiple=True)
@click.option("--json", "as_json", is_flag=True)
def command(
    model: str,
    gpus: str | None,
    nodes: int | None,
    context: int | None,
    concurrency: int | None,
    goal: str,
    assignments: tuple[str, ...],
    as_json: bool,
) -> int:
    """Plan how to run MODEL."""
    inventory = parse_gpus(gpus, nodes) if gpus else probe()
    plan = make_plan(read_facts(model), inventory, Goal(context, concurrency, goal), parse_assignments(assignments))
    click.echo(dump_json(plan))
    return 0 if plan.fits else 5
