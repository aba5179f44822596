"""`corral status NAME`: one deployment in full."""

from __future__ import annotations

import click

from corral.cli.screen import duration, print_json, since
from corral.deployment import Status, status
from corral.folder import open_folder
from corral.state import ENDED, State

__all__ = ["command"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="The whole status as JSON.")
def command(name: str, as_json: bool) -> None:
    """Show one deployment: state, reason, endpoint, what the engine reported. Exit code 8 when it has failed."""
    folder = open_folder(name)
    found = status(folder)
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(_lines(found)))
    if found.state is State.FAILED:
        raise SystemExit(8)


def _lines(found: Status) -> list[str]:
    rows = [("name", found.name), ("state", f"{found.state} for {since(found.since_s)}")]
    if found.state in (State.STARTING, State.LOADING):
        amount = f" {found.done}/{found.total}" if found.total else ""
        rows.append(("phase", f"{found.phase}{amount}"))
    if found.reason:
        rows.append(("reason", found.reason.value.replace("_", " ")))
    if found.text:
        rows.append(("because", found.text))
    if found.remedy and found.state in ENDED:
        rows.append(("do", found.remedy))
    rows += [("model", found.model), ("engine", found.engine or "-"), ("target", found.target)]
    if found.endpoint:
        rows += [("endpoint", found.endpoint.base_url), ("key", found.endpoint.key_file or "none")]
    if found.timings.ready_s is not None:
        rows.append(("ready after", duration(found.timings.ready_s)))
    if found.restarts:
        rows.append(("restarts", str(found.restarts)))
    rows += [(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
             for name, value in found.observed.items()]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]
