"""`corral pull`: a model's files where they are needed."""

from __future__ import annotations

import importlib
import shutil
import sys
import threading
import time
from typing import Any

import click

from corral.base.errors import CorralError, DataError, UnreachableError, UsageError
from corral.base.ssh import Ssh
from corral.cli.options import with_token
from corral.deploy.deployment.start_times import duration
from corral.deploy.transfer.courier_group import Outcome, Progress
from corral.deploy.transfer.pull import Pull, PullOrder, pull
from corral.lab.report.screen import print_json, print_table

_KINDS = {kind.exit_code: kind for kind in (UnreachableError, DataError)}
STATES = {
    "arrived": "arrived",
    "already": "was there",
    "converted": "converted here",
    "shared": "sees it",
    "failed": "failed",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option("--hosts", metavar="A,B,C", help="Nodes, as ssh knows them (default: this machine).")
@click.option("--on", "profile", metavar="PROFILE", help="The nodes of a profile.")
@click.option("--to", metavar="FOLDER", default="", help="Folder for the model's files.")
@click.option("--shared", is_flag=True, help="The folder is one storage for all nodes: refuse if it is not.")
@click.option("--local-disk", is_flag=True, help="The folder is on each node's own disk: refuse if it is not.")
@click.option("--from", "source", metavar="HOST|hub", default="", help="Where to take it from (default: nearest).")
@click.option("--check", is_flag=True, help="Read and hash every file again, also those that look unchanged.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end.")
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
    nodes, ssh = _nodes(hosts, profile)
    order = PullOrder(
        model=model,
        hosts=nodes,
        to=to,
        storage="shared" if shared else "local-disk" if local_disk else "auto",
        source=source,
        check_again=check,
    )
    with NodeScreen(quiet=as_json) as screen:
        result = with_token(lambda: pull(order, screen.report, ssh))
    if as_json:
        print_json(result)
        click.get_current_context().exit(result.failed[0].exit_code if result.failed else 0)
    _print(result)
    if result.failed:
        names = ", ".join(arrival.host for arrival in result.failed)
        first = result.failed[0]
        raise _KINDS.get(first.exit_code, CorralError)(
            f"{result.model} did not reach {names}: {first.text}",
            first.remedy or "Run the same command again: what has arrived is kept.",
        )


def _nodes(names: str | None, profile: str | None) -> tuple[tuple[str, ...], Ssh]:
    """The hosts, and the ssh that reaches them: as a profile says, where one is named."""
    if names and profile:
        raise UsageError("--hosts and --on both name nodes.", "Leave out one of them.")
    found: Any = names or ""
    ssh = Ssh()
    if profile:
        said = importlib.import_module("corral.deploy.profile").load_profile(profile).target_options
        found, ssh = said.get("hosts", ""), Ssh(identity=said.get("identity"), config=said.get("config"))
        if not found:
            raise UsageError(f"the profile {profile!r} names no hosts.", "Give them with --hosts a,b,c.")
    words = found.split(",") if isinstance(found, str) else [str(word) for word in found]
    return tuple(word.strip() for word in words if word.strip()), ssh


def _print(result: Pull) -> None:
    why = f" ({result.why})" if result.why else ""
    click.echo(f"{result.model}: {_gb(result.total_bytes)} in {result.folder}, {duration(result.seconds)}")
    click.echo(f"from {result.source}{why}\n")
    print_table(
        ["host", "state", "received", "speed", "storage reads", "load, predicted"],
        [_row(arrival) for arrival in result.hosts],
    )
    for arrival in result.hosts:
        if arrival.damaged:
            click.echo(f"\n{arrival.host}: fetched again because damaged: {', '.join(arrival.damaged)}")


def _row(arrival: Outcome) -> list[str]:
    return [
        arrival.host,
        STATES[arrival.state],
        _gb(arrival.moved_bytes) if arrival.moved_bytes else "–",
        f"{arrival.mb_per_s:.0f} MB/s" if arrival.mb_per_s else "–",
        f"{arrival.read_mb_per_s:.0f} MB/s" if arrival.read_mb_per_s else "–",
        duration(arrival.load_s) if arrival.load_s is not None else "–",
    ]


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


class NodeScreen:
    """One line per node: live on a terminal, told now and then elsewhere. On stderr."""

    def __init__(self, quiet: bool = False) -> None:
        self._live = sys.stderr.isatty() and not quiet
        self._quiet = quiet
        self._began_s = time.monotonic()
        self._nodes: dict[str, Progress] = {}
        self._first: dict[str, tuple[float, int]] = {}
        self._told: dict[str, tuple[str, float]] = {}
        self._drawn = 0
        self._lock = threading.Lock()

    def __enter__(self) -> NodeScreen:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._paint()

    def report(self, step: Progress) -> None:
        """Take note of how far a node is."""
        if self._quiet:
            return
        with self._lock:
            known = self._nodes.get(step.host)
            if known is None or known.what != step.what:
                self._first[step.host] = (time.monotonic(), step.done_bytes)
            self._nodes[step.host] = step
        if self._live:
            self._paint()
        else:
            self._tell(step)

    def _tell(self, step: Progress) -> None:
        what, told_s = self._told.get(step.host, ("", 0.0))
        if what == step.what and time.monotonic() - told_s < 5:
            return
        self._told[step.host] = (step.what, time.monotonic())
        click.echo(f"[{time.monotonic() - self._began_s:7.1f} s] {self._line(step)}", err=True)

    def _line(self, step: Progress) -> str:
        if not step.total_bytes:
            return f"{step.host}: {step.what}"
        began_s, first = self._first[step.host]
        took_s = time.monotonic() - began_s
        speed = f"  {(step.done_bytes - first) / 1e6 / took_s:.0f} MB/s" if took_s > 1 else ""
        share = 100 * step.done_bytes / step.total_bytes
        return f"{step.host}: {step.what} {_gb(step.done_bytes)} of {_gb(step.total_bytes)} ({share:.0f}%){speed}"

    def _paint(self) -> None:
        size = shutil.get_terminal_size()
        with self._lock:
            lines = [self._line(step)[: size.columns - 1] for step in self._nodes.values()]
            if len(lines) > size.lines - 2:  # the slowest are what one waits for
                ranked = sorted(self._nodes.values(), key=lambda step: step.done_bytes)[: size.lines - 3]
                left = len(lines) - len(ranked)
                lines = [self._line(step)[: size.columns - 1] for step in ranked] + [f"… and {left} more"]
            back = f"\033[{self._drawn}A" if self._drawn else ""
            sys.stderr.write(back + "".join(f"\r\033[2K{line}\n" for line in lines))
            sys.stderr.flush()
            self._drawn = len(lines)
