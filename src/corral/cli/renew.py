"""`corral renew NAME`: submit successors of a deployment that has a time limit."""

from __future__ import annotations

from dataclasses import replace

import click

from corral.base.processes import identify
from corral.cli.fleet import run_keeper
from corral.cli.options import deployment_argument
from corral.serve.fleet.chain import choose_folder, open_chain
from corral.serve.fleet.record import change_fleet


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@deployment_argument
@click.option("--max-jobs", type=click.IntRange(min=1), help="Jobs in all, from now on.")
@click.option("--while", "parent", type=click.IntRange(min=1), metavar="PID", help="End when this process has ended.")
@click.option("--once", is_flag=True, help="Do once what is due now, and end.")
@click.option("--json", "as_json", is_flag=True, help="What it does, and at last why it ends, as JSON lines.")
def command(name: str | None, max_jobs: int | None, parent: int | None, once: bool, as_json: bool) -> None:
    """Keep NAME, started with `corral up … --renew`: submit a successor before each time limit.

    The jobs do this by themselves. By hand it is for clusters whose nodes may not submit jobs, from a login node. Run
    it as often as you like: one of them submits, and the others wait to take its place.
    """
    chain = open_chain(choose_folder(name))
    if max_jobs is not None:
        change_fleet(chain, lambda one: replace(one, max_jobs=max_jobs))
    job = identify(parent) if parent else None
    run_keeper(chain, "renewal", as_json, lambda: job is None or not job.is_gone(), once)
