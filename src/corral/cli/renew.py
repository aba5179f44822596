"""`corral renew NAME`: submit successors of a deployment that has a time limit."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import click

from corral.base.processes import identify
from corral.cli.options import deployment_argument
from corral.deploy.lifecycle.renewal import renew
from corral.deploy.lifecycle.successors import chain_lock, choose_folder, read_chain, write_chain
from corral.lab.report.screen import event_line


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@deployment_argument
@click.option("--max-jobs", type=click.IntRange(min=1), help="Jobs in all, from now on.")
@click.option("--while", "parent", type=click.IntRange(min=1), metavar="PID", help="End when this process has ended.")
@click.option("--once", is_flag=True, help="Only what is due now.")
@click.option("--json", "as_json", is_flag=True, help="What it does, and at last why it ends, as JSON lines.")
def command(name: str | None, max_jobs: int | None, parent: int | None, once: bool, as_json: bool) -> None:
    """Look after NAME, started with `corral up … --renew`: submit a successor before each time limit.

    The jobs do this by themselves. By hand it is for clusters whose nodes may not submit jobs, from a login node; it
    does no harm twice.
    """
    folder = choose_folder(name)
    if max_jobs is not None:
        with chain_lock(folder):
            write_chain(folder, replace(read_chain(folder), max_jobs=max_jobs))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a submission under way is undone, not left unknown
    wanted = identify(parent) if parent else None

    def say(text: str) -> None:
        click.echo(event_line(folder.name, "renewal", text) if as_json else f"{time.strftime('%H:%M:%S')} {text}")

    why = renew(folder, say, once, lambda: wanted is None or not wanted.is_gone())
    if as_json:
        click.echo(event_line(folder.name, "end", why))
    else:
        click.echo(f"{folder.name}: {why}", err=True)
