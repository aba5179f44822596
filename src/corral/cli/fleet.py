"""`corral fleet`: what runs behind a fleet, and what it would do."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from corral.base.processes import identify
from corral.base.record import to_json
from corral.base.wording import duration
from corral.cli.help_pages import WholeGroup
from corral.cli.options import Duration
from corral.client.trace import read_trace
from corral.lab.report.screen import event_line, print_json
from corral.serve.fleet.creation import parse_size
from corral.serve.fleet.keeper import is_leaving, is_served, keep
from corral.serve.fleet.record import FleetFolder, open_fleet

if TYPE_CHECKING:
    from corral.lab.simulate.fleet_trace import Replay


@click.group(cls=WholeGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Run or simulate what manages a fleet. To start one: `corral up --replicas`; to resize it: `corral scale`."""


@command.command("keep")
@click.argument("name")
@click.option(
    "--json", "as_json", is_flag=True, help="Print each step, and at the end why it stopped, as JSON lines."
)
@click.option("--stand-by", "stands_by", is_flag=True, help="Wait while another keeper works, and take its place.")
@click.option("--in-job", is_flag=True, hidden=True)  # NAME is a member, in whose job this runs
@click.option("--while", "parent", type=click.IntRange(min=1), hidden=True)
@click.option("--until-served", is_flag=True, hidden=True)  # until one of those in jobs can take over
def keep_command(
    name: str, as_json: bool, stands_by: bool, in_job: bool, parent: int | None, until_served: bool
) -> None:
    """Run the keeper of the fleet NAME: it starts, replaces and stops members, and starts the gateway.

    `corral up --replicas` starts it in the background. Run it by hand after a restart of this machine, or on another
    machine that shares CORRAL_HOME; `corral service install` does that for you.
    """
    folder = open_fleet(name.rpartition("-")[0] if in_job else name)
    job = identify(parent) if parent else None

    def wanted() -> bool:
        if job is not None and job.is_gone():
            return False
        return not (in_job and is_leaving(folder, name)) and not (until_served and is_served(folder))

    run_keeper(folder, "fleet", as_json, wanted, stands_by=stands_by or in_job)


def run_keeper(
    folder: FleetFolder,
    kind: str,
    as_json: bool,
    wanted: Callable[[], bool] = lambda: True,
    once: bool = False,
    stands_by: bool = False,
) -> None:
    """Run a keeper until a signal ends it; what it does is printed, as events of that kind with `as_json`."""
    ending = False

    def end(*_: object) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGTERM, end)  # a submission under way is finished, not left unknown
    signal.signal(signal.SIGINT, end)

    def say(text: str) -> None:
        click.echo(event_line(folder.name, kind, text) if as_json else f"{time.strftime('%H:%M:%S')} {text}")

    why = keep(folder, say, lambda: not ending and wanted(), once, stands_by)
    if as_json:
        click.echo(event_line(folder.name, "end", why))
    else:
        click.echo(f"{folder.name}: {why}", err=True)


@command.command("simulate")
@click.argument("trace")
@click.option(
    "--replicas", metavar="A..B", default="1..8", show_default=True, help="Servers that the fleet may have."
)
@click.option("--capacity", type=click.FloatRange(min=0.1), required=True, metavar="TOKENS/S",
              help="What one member generates at full load (see `corral bench`, `corral plan`).")  # fmt: skip
@click.option("--load-time", "load_s", type=Duration(1), required=True, metavar="TIME",
              help="Time from the start of a member until it is ready.")  # fmt: skip
@click.option("--queue-wait", "queue_s", type=Duration(), default=0.0, show_default=True,
              metavar="TIME", help="Time that a job waits in the queue.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print all decisions and figures as JSON.")
def simulate_command(
    trace: str, replicas: str, capacity: float, load_s: float, queue_s: float, as_json: bool
) -> None:
    """Replay TRACE through the code that scales fleets: what it decides, how long requests wait, what it costs.

    TRACE has one request per line: {"time_s": 0.5, "prompt_tokens": 100, "output_tokens": 200}; or "tokens" in place
    of both lengths; or, in milliseconds, {"timestamp": 500, "input_length": 100, "output_length": 200}.
    """
    from corral.lab.simulate.fleet_trace import ReplaySetting, simulate

    size = parse_size(replicas)
    outcome = simulate(
        list(read_trace(trace, sums=True)), ReplaySetting(size.least, size.most, capacity, load_s, queue_s)
    )
    if as_json:
        print_json({**to_json(outcome), "ratio": round(outcome.ratio, 4)})
    else:
        click.echo("\n".join(_lines(outcome)))


def _lines(outcome: Replay) -> list[str]:
    lines = [f"{change.time_s:10.0f} s  {change.wanted:3} members  {change.why}" for change in outcome.changes]
    return [
        *lines,
        f"requests     {outcome.requests:,} with {outcome.tokens:,} tokens in {duration(outcome.span_s)}",
        f"waits        mean {outcome.mean_wait_s:.1f} s, P99 {outcome.p99_wait_s:.1f} s,"
        f" longest {outcome.longest_wait_s:.1f} s",
        f"job time     {duration(outcome.member_s)}, {outcome.ratio:.2f} times the {duration(outcome.clairvoyant_s)}"
        " of a schedule that knows the whole trace",
        f"changes      {len(outcome.changes)}",
    ]
