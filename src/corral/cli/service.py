"""`corral service`: keepers that come back after a boot of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

import click

from corral.base.errors import CorralError, UsageError
from corral.cli.help_pages import WholeGroup
from corral.cli.options import json_option
from corral.lab.report.screen import event_line, print_json
from corral.serve.fleet.service import (
    STARTERS,
    AlreadyRunsError,
    Step,
    choose_starter,
    kept_folders,
    running_service,
    serve_home,
)
from corral.serve.fleet.status import keeper_status

HELP = {"help_option_names": ["-h", "--help"]}
YES = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


@click.group(cls=WholeGroup, context_settings=HELP)
def command() -> None:
    """Let the keepers of fleets and chains come back by themselves: after a boot, and after they were killed.

    On each login node: `corral service install`. It works without root.
    """


@command.command("install", context_settings=HELP)
@click.option(
    "--with",
    "name",
    type=click.Choice(list(STARTERS)),
    help="What starts it: a unit of your systemd, cron, or SLURM's cron.  [default: the first that works here]",
)
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE",
    help="An option of the job of --with scrontab, such as partition=cpu. Repeatable.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")
@YES
@json_option("What is done, as JSON.")
def install_command(name: str | None, options: tuple[str, ...], dry_run: bool, yes: bool, as_json: bool) -> None:
    """Install the service for this home; shows what it will do and asks."""
    chosen = choose_starter(name)
    steps = STARTERS[chosen].install(options)
    if _carry_out(steps, dry_run, yes, as_json, {"with": chosen}):
        click.echo(f"installed with {chosen}; `corral service status` shows what it keeps", err=True)


@command.command("remove", context_settings=HELP)
@click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")
@YES
@json_option("What is done, as JSON.")
def remove_command(dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove the service, and end its process here; keepers, gateways and members go on."""
    names = _installed()
    steps = [step for name in names for step in STARTERS[name].remove()]
    if not steps:
        click.echo("It is not installed.", err=True)
    if _carry_out(steps, dry_run, yes, as_json, {"with": names}):
        if (process := running_service()) and process.is_among_ours():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        click.echo("removed", err=True)


@command.command("status", context_settings=HELP)
@json_option("The same as JSON.")
def status_command(as_json: bool) -> None:
    """Show whether it is installed and runs on this machine, and what it keeps."""
    names, process = _installed(), running_service()
    kept = {folder.name: keeper_status(folder) for folder, _ in kept_folders()}
    if as_json:
        keepers = [{"name": name, "kept": is_kept, "keeper": who} for name, (is_kept, who) in kept.items()]
        print_json({"installed": names, "process": process, "keepers": keepers})
        return
    click.echo(f"installed  {', '.join(names) or 'no: `corral service install`'}")
    click.echo(f"running    {f'process {process.pid}' if process else 'no'}")
    for name, (_, who) in kept.items():
        click.echo(f"keeper     {name}: {who}")


@command.command("run", context_settings=HELP)
@click.option("--json", "as_json", is_flag=True, help="Print what it does as JSON lines.")
def run_command(as_json: bool) -> None:
    """Be the service of this machine, until a signal; what `install` lets start. Ends at once where one runs."""
    ending = False

    def end(*_: object) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)

    def say(text: str) -> None:
        click.echo(event_line("service", "service", text) if as_json else f"{time.strftime('%F %T')} {text}")

    with contextlib.suppress(AlreadyRunsError):
        say(serve_home(say, lambda: not ending))


def _installed() -> list[str]:
    """What it is installed with; what cannot be asked now is left out, with a line about it."""
    names = []
    for name, one in STARTERS.items():
        if one.refusal():
            continue
        try:
            if one.is_installed():
                names.append(name)
        except CorralError as error:
            click.echo(f"corral: {error}", err=True)
    return names


def _carry_out(steps: Sequence[Step], dry_run: bool, yes: bool, as_json: bool, more: dict[str, object]) -> bool:
    """Show the steps, ask, and do them; whether they were done."""
    if as_json:
        print_json({**more, "steps": steps, "done": bool(steps) and yes and not dry_run})
    else:
        click.echo("\n".join(line for step in steps for line in step.lines()))
    if dry_run or not steps:
        return False
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise UsageError(
                "this needs a confirmation, and there is no terminal.",
                "Add --yes, or --dry-run to see only what would be done.",
            )
        click.confirm("Do that?", abort=True, err=True)
    for step in steps:
        step.do()
    return True
