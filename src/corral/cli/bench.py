"""`corral bench`: measure a served model, say how far it is from the limit, refuse to report nonsense.

`corral bench compare`, `report` and `list`: saved runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import click

from corral.base.errors import UsageError
from corral.base.files import existing_file, write_atomic
from corral.base.processes import terminated_as_interrupted
from corral.base.wording import duration
from corral.cli.bench_options import (
    arrival_options,
    load_options,
    make_spec,
    measured_options,
    numbers,
    read_plan_file,
    refuse_ignored,
    slo_option,
    work_options,
)
from corral.cli.help_pages import WholeGroup
from corral.cli.options import Duration, json_option
from corral.client.client import run as run_loop
from corral.lab.bench import store
from corral.lab.bench.measure import Bench, Finished
from corral.lab.bench.series import measure_series, quick_specs, reseeded, search_limit, sweep_specs
from corral.lab.bench.spec import parse_slos
from corral.lab.report import tables
from corral.lab.report.screen import CountLine, explain, print_json, print_table, since, tell
from corral.serve.resolve import resolve


@click.command()
@click.argument("a")
@click.argument("b")
@json_option("The differences as JSON.")
def compare(a: str, b: str, as_json: bool) -> None:
    """Two runs (or repeats) side by side: what changed, and whether it is more than noise."""
    from corral.lab.bench.compare import compared
    from corral.lab.report.bench import comparison_lines

    one, other = store.find(a), store.find(b)
    result = compared(one, other)
    if as_json:
        figures = {"figures": result.rows, "differs": result.differs, "repeats": result.repeats}
        print_json({"a": str(one), "b": str(other), **figures})
    else:
        invalid = [folder.name for folder, bad in zip((one, other), result.invalid, strict=True) if bad]
        names = (one.name, other.name)
        lines = comparison_lines(names, result.figures, result.differs, result.repeats, tables.room())
        click.echo("\n".join([*(f"✗ {name} is INVALID" for name in invalid), *lines]))


@click.command()
@click.argument("reference", metavar="RUN", default="last")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write one HTML file.")
@json_option("Everything that is known of the run, as JSON.")
def report(reference: str, output: Path | None, as_json: bool) -> None:
    """A saved run again: in the terminal, as JSON, or as one HTML file."""
    folder = store.find(reference)
    if as_json:
        runs = store.load_runs(folder)
        print_json({"series": store.load_series(folder), "runs": runs} if store.is_series(folder) else runs[0])
    elif output is not None:
        from corral.lab.report.bench_page import saved_page

        write_atomic(output, saved_page(folder), 0o644)
        click.echo(str(output))
    else:
        from corral.lab.report.bench import saved_lines

        click.echo("\n".join(saved_lines(folder, tables.room())))


@click.command("list")
@json_option()
def list_runs(as_json: bool) -> None:
    """Saved runs, oldest first; of a series, the fastest run's tokens per second."""
    from corral.lab.bench.compare import all_runs

    runs = all_runs()
    if as_json:
        print_json(runs)
    elif not runs:
        tell("No runs. `corral bench` makes one.", err=True)
    else:
        rows = [
            (one.name, one.load, one.verdict, f"{one.output_throughput:,.0f}", since(one.created_s)) for one in runs
        ]
        print_table(("RUN", "LOAD", "VERDICT", "OUT TOK/S", "AGO"), rows, left=3)


INVALID = 1  # exit code of a run that was measured, saved, and is not to be used


def _bench(options: dict[str, Any], line: CountLine) -> Bench:
    if options["file"] is not None:
        existing_file(options["file"])  # before a server is asked for anything
    endpoint = resolve(options["name"], url=options["url"], key_file=options["key_file"], model=options["model"])
    return Bench(
        endpoint,
        plan=read_plan_file(options["plan_file"]),
        price=options["price"],
        gpus=options["gpus"],
        detailed=options["save_detailed"],
        on_progress=line,
        task=options["task"],
    )


def _run(work: Coroutine[Any, Any, Any], line: CountLine) -> Any:
    try:
        return run_loop(_until_terminated(work, line))
    finally:
        line.clear()


async def _tick(line: CountLine) -> None:
    while True:
        await asyncio.sleep(1)
        line.tick()


async def _until_terminated(work: Coroutine[Any, Any, Any], line: CountLine) -> Any:
    """SIGTERM ends the work as Ctrl-C does, so that what was measured is kept: schedulers and `timeout` send it."""
    loop, task, signals = asyncio.get_running_loop(), asyncio.current_task(), []

    def end() -> None:
        signals.append(signal.SIGTERM)
        if task is not None:
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    ticking = asyncio.create_task(_tick(line))
    try:
        return await work
    except asyncio.CancelledError:
        if signals:
            raise KeyboardInterrupt from None
        raise
    finally:
        ticking.cancel()
        loop.remove_signal_handler(signal.SIGTERM)


@contextlib.contextmanager
def _new_folder(label: str, name: str) -> Iterator[Path]:
    """Where runs are saved; one that never began leaves nothing behind."""
    with terminated_as_interrupted():
        folder = store.new_folder(label, name=name)
        try:
            yield folder
        except KeyboardInterrupt:
            saved = any(folder.iterdir())
            where = f"what was measured until now is in {folder}; `corral bench report {folder.name}` shows it."
            explain("corral: ", where if saved else "nothing was measured yet.")
            raise
        finally:
            if not any(folder.iterdir()):
                folder.rmdir()


@click.group(cls=WholeGroup, invoke_without_command=True)
@measured_options
@work_options
@slo_option
@click.pass_context
def command(context: click.Context, /, **options: Any) -> int:
    """Measure a served model. Without a subcommand: a quick profile of the running deployment (half a minute on a
    quiet machine)."""
    if context.invoked_subcommand is not None:
        _refuse_options_before(context)
        return 0
    specs = quick_specs(make_spec(options))
    return _series(options, "quick", specs)


def _refuse_options_before(context: click.Context) -> None:
    """`corral bench --deployment x run` would measure something else than x: options belong after the subcommand."""
    for name in context.params:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = next(p.opts[0] for p in context.command.params if p.name == name)
            verb = context.invoked_subcommand
            raise UsageError(f"{flag} must come after `{verb}`.", f"Write: corral bench {verb} {flag} …")


def _series(options: dict[str, Any], kind: str, specs: list[Any]) -> int:
    line = CountLine()
    bench = _bench(options, line)
    with _new_folder(kind, options["run_name"]) as folder:

        async def work() -> list[Finished]:
            async with bench:
                return await measure_series(bench, kind, specs, folder)

        done = _run(work(), line)
    return _show_series(folder, [finished.run for finished in done], options["as_json"])


def _show_series(folder: Path, runs: list[store.Run], as_json: bool) -> int:
    series = store.load_series(folder)
    if as_json:
        body = [
            {"load": run.spec.load.label, **_figures(folder / name)}
            for name, run in zip(series.runs, runs, strict=True)
        ]
        print_json({"kind": series.kind, "folder": str(folder), "findings": series.findings, "runs": body})
    else:
        from corral.lab.report.bench import series_lines

        click.echo("\n".join(series_lines(series, runs, folder, tables.room())))
    return INVALID if all(run.verdict == "invalid" for run in runs) else 0


def _figures(folder: Path) -> dict[str, Any]:
    import json

    body: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return body


@command.command()
@measured_options
@work_options
@slo_option
@load_options
@click.option("--repeat", default=1, show_default=True, help="Measure this many times, for confidence intervals.")
def run(repeat: int, **options: Any) -> int:
    """Measure one load: closed loop (--concurrency) or open loop (--request-rate)."""
    spec = make_spec(options, replay=True)
    refuse_ignored(spec.load)
    if repeat > 1:
        return _series(options, "repeat", [reseeded(spec, n) for n in range(repeat)])
    line = CountLine()
    bench = _bench(options, line)
    with _new_folder(spec.load.label, options["run_name"]) as folder:

        async def work() -> Finished:
            async with bench:
                return await bench.run(spec, folder)

        finished = _run(work(), line)
    if options["as_json"]:
        print_json({**_figures(folder), "folder": str(folder)})
    else:
        from corral.lab.report.bench import run_lines

        click.echo("\n".join(run_lines(finished.run, finished.rows, folder, tables.room())))
    return INVALID if finished.run.verdict == "invalid" else 0


@command.command()
@measured_options
@work_options
@slo_option
@click.option(
    "--concurrency",
    "concurrencies",
    default="",
    metavar="N,N,…",
    help="Closed loop: requests at once, one run for each.",
)
@click.option(
    "--request-rate", "rates", default="", metavar="R,R,…", help="Open loop: requests per second, one run for each."
)
@click.option("--num-prompts", type=int, help="Requests of each run (default: 8 for each at once, at least 64).")
@click.option("--seconds", type=Duration(), metavar="TIME", help="Send nothing after this long, in each run.")
def sweep(concurrencies: str, rates: str, num_prompts: int | None, **options: Any) -> int:
    """The latency/throughput curve: one run for each load."""
    if bool(concurrencies) == bool(rates):
        raise UsageError("a sweep varies one kind of load.", "Give --concurrency 1,4,16,64 or --request-rate 1,2,4.")
    from dataclasses import replace

    base = make_spec({**options, "concurrency": None, "num_prompts": num_prompts or 100})
    if options["warmup"] is None:
        base = replace(base, warmup=1)
    at_once = [int(n) for n in numbers(concurrencies, "--concurrency")] if concurrencies else []
    specs = sweep_specs(base, at_once, numbers(rates, "--request-rate") if rates else [])
    if num_prompts is None:
        specs = [
            replace(s, workload=replace(s.workload, num_prompts=max(64, 8 * (s.load.concurrency or 16))))
            for s in specs
        ]
    return _series(options, "sweep", specs)


@command.command("search")
@measured_options
@work_options
@click.option("--slo", required=True, metavar="SLOS", help="Service levels to meet: ttft_p99=1s,tpot_p99=50ms.")
@click.option(
    "--over", type=click.Choice(["rate", "concurrency"]), default="rate", show_default=True, help="What is varied."
)
@arrival_options(["poisson", "constant", "gamma"])
@click.option("--probe-seconds", default=15.0, show_default=True, help="How long one probe sends, at least.")
@click.option("--tolerance", default=0.03, show_default=True, help="End when the bracket is this narrow.")
@click.option("--max-probes", default=12, show_default=True, help="End after this many.")
@click.option("--saturate", default=64, show_default=True, help="Requests at once that saturate the server.")
def search_command(
    slo: str, over: str, probe_seconds: float, tolerance: float, max_probes: int, saturate: int, **options: Any
) -> int:
    """The highest load that still meets its service levels."""
    slos = parse_slos(slo)
    if not 0.001 <= tolerance <= 0.5 or not 2 <= max_probes <= 100 or saturate < 1 or probe_seconds <= 0:
        raise UsageError(
            "the search cannot use these numbers.", "Give a tolerance from 0.001 to 0.5, and 2 to 100 probes."
        )
    spec = make_spec({**options, "slo": slo})
    refuse_ignored(spec.load, over)
    line = CountLine()
    bench = _bench(options, line)

    def show(probe: Any, _: Finished) -> None:
        line.clear()
        click.echo(f"{probe.load:9.4g}  {'meets it' if probe.passed else 'fails: ' + probe.why}", err=True)

    def show_ceiling(rate: float, requests: int) -> None:
        line.clear()
        tell(
            f"The server finishes about {rate:.2g} requests per second. A probe near that sends {requests:,} of them,"
            f" which takes about {duration(requests / rate)}.",
            err=True,
        )

    with _new_folder("search", options["run_name"]) as folder:

        async def work() -> Any:
            async with bench:
                return await search_limit(
                    bench, spec, slos, folder, over=over, seconds=probe_seconds, tolerance=tolerance, most=max_probes,
                    saturate=saturate, on_probe=show, on_ceiling=show_ceiling,
                )  # fmt: skip

        search, done = _run(work(), line)
    _show_series(folder, [finished.run for finished in done], options["as_json"])
    return 0 if search.best is not None else INVALID


for view in (compare, report, list_runs):
    command.add_command(view)
