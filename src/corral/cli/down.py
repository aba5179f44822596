"""`corral down NAME`: stop deployments and fleets."""

from __future__ import annotations

import click

from corral.base.errors import CorralError, DataError, UsageError
from corral.base.files import remove_tree
from corral.base.shell import answering_soon
from corral.cli.options import json_option
from corral.deploy.deployment.folder import DeploymentFolder, all_folders
from corral.deploy.deployment.state import ENDED
from corral.deploy.lifecycle import deployments
from corral.lab.report.screen import print_json, say_waiting
from corral.serve.fleet.chain import choose_folder, close_chain
from corral.serve.fleet.processes import end_fleet, runs_elsewhere
from corral.serve.fleet.record import FleetFolder, all_fleets, read_fleet
from corral.serve.fleet.status import chosen_fleet


@click.command()
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("--all", "every", is_flag=True, help="All deployments of this home.")
@click.option("--purge", is_flag=True, help="Also delete the deployment's folder: logs, events, key.")
@json_option("The final statuses as JSON.")
def command(names: tuple[str, ...], every: bool, purge: bool, as_json: bool) -> None:
    """Stop deployments and fleets: each engine is asked, given time, then ended; no process of it is left afterwards.

    Without a name it stops the only deployment that runs. The successors of a deployment end with it.
    """
    say_waiting()
    if names and every:
        raise UsageError("both names and --all were given.", "`corral down NAME`, or `corral down --all`.")
    failures: list[CorralError] = []
    fleets = _every_fleet(failures) if every else _fleets(names)
    fleet_names = {folder.name for folder in fleets}
    rest = [name for name in names if name not in fleet_names] if names else [] if fleets else [None]
    stopped: list[deployments.Status] = []
    for fleet in fleets:
        _end(fleet, purge, as_json, stopped, failures)
    ended = {one.name for one in stopped}
    folders = [one for one in all_folders() if one.name not in ended] if every else [choose_folder(n) for n in rest]
    for folder in _with_successors(folders):
        try:
            stopped.append(_stop(folder, purge, quiet=as_json))
        except CorralError as error:
            failures.append(error)
    if as_json:
        print_json(stopped)
    if failures:
        raise failures[0]


def _every_fleet(failures: list[CorralError]) -> list[FleetFolder]:
    """All fleets that have not ended; why one cannot be read is added to `failures`."""
    fleets = []
    for folder in all_fleets():
        try:
            if not read_fleet(folder).closed:
                fleets.append(folder)
        except (CorralError, OSError) as error:
            failures.append(error if isinstance(error, CorralError) else DataError(f"{error}.", "Try again."))
    return fleets


def _fleets(names: tuple[str, ...]) -> list[FleetFolder]:
    chosen = [chosen_fleet(name) for name in names] if names else [chosen_fleet(None)]
    return [folder for folder in chosen if folder is not None]


def _end(
    fleet: FleetFolder, purge: bool, quiet: bool, stopped: list[deployments.Status], failures: list[CorralError]
) -> None:
    """Stop a fleet with all its members; the results are added to `stopped` and `failures`."""
    for name, result in end_fleet(fleet, "ended by `corral down`"):
        if isinstance(result, CorralError):
            failures.append(result)
            continue
        stopped.append(result)
        if not quiet:
            click.echo(f"{name}: stopped")
        if purge and DeploymentFolder.of(name).path.exists():
            DeploymentFolder.of(name).delete()
    for left in runs_elsewhere(fleet):
        click.echo(f"corral: {left} still runs; it ends when it reads that the fleet has ended", err=True)
    if not quiet:
        click.echo(f"{fleet.name}: ended")
    if purge:
        remove_tree(fleet.path)


def _with_successors(folders: list[DeploymentFolder]) -> list[DeploymentFolder]:
    """The deployments with their successors, the latest first; no more successors will be submitted."""
    chosen: dict[str, DeploymentFolder] = {}
    for folder in folders:
        for one in [*close_chain(folder, "ended by `corral down`"), folder]:
            chosen.setdefault(one.name, one)
    return list(chosen.values())


def _stop(folder: DeploymentFolder, purge: bool, quiet: bool) -> deployments.Status:
    try:
        with answering_soon():
            before = deployments.status(folder).state
    except (CorralError, OSError):  # its files cannot be read; the text then says what was done
        before = None
    after = deployments.stop(folder)
    if not quiet:
        text = "was not running" if before in ENDED else "stopped" if before else f"stopped. {after.text}"
        found = [] if before in ENDED else [one.get("text") for one in deployments.adoptions(folder)]
        click.echo("; ".join([f"{folder.name}: {text}", *found]))
    if purge and folder.path.exists():
        folder.delete()
    return after
