"""`corral bench`: measure a served model, say how far it is from the limit, refuse to report nonsense.

`corral bench compare`, `report` and `list`: saved runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import click

from corral.base.errors import UsageError
from corral.base.files import existing_file, write_atomic
from corral.base.processes import terminated_as_interrupted
from corral.cli.bench_options import (
    load_options,
    make_spec,
    numbers,
    read_plan_file,
    refuse_ignored,
    server_options,
    work_options,
)
from corral.cli.help_pages import WholeGroup
from corral.cli.options import Duration
from corral.client.client import run as run_loop
from corral.lab.bench import store
from corral.lab.bench.measure import Bench, Finished
from corral.lab.bench.series import measure_series, quick_specs, reseeded, search_limit, sweep_specs
from corral.lab.bench.spec import parse_slos
from corral.lab.report import tables
from corral.lab.report.screen import explain, print_json, print_table, since, tell
from corral.serve.resolve import resolve


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="The differences as JSON.")
def compare(a: str, b: str, as_json: bool) -> None:
    """Two runs (or repeats) side by side: what changed, and whether it is more than noise."""
    from corral.lab.bench.compare import compared
    from corral.lab.report.text import comparison_lines

    one, other = store.find(a), store.find(b)
    found = compared(one, other)
    if as_json:
        told = {"figures": found.rows, "differs": found.differs, "repeats": found.repeats}
        print_json({"a": str(one), "b": str(other), **told})
    else:
        invalid = [folder.name for folder, bad in zip((one, other), found.invalid, strict=True) if bad]
        names = (one.name, other.name)
        lines = comparison_lines(names, found.figures, found.differs, found.repeats, tables.room())
        click.echo("\n".join([*(f"✗ {name} is INVALID" for name in invalid), *lines]))


@click.command()
@click.argument("reference", metavar="RUN", default="last")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write one HTML file.")
@click.option("--json", "as_json", is_flag=True, help="Everything that is known of the run.")
def report(reference: str, output: Path | None, as_json: bool) -> None:
    """A saved run again: in the terminal, as JSON, or as one HTML file."""
    folder = store.find(reference)
    is_series = (folder / "series.json").is_file()
    if as_json:
        print_json(_known_of_series(folder) if is_series else store.load_run(folder))
    elif output is not None:
        write_atomic(output, _series_html(folder) if is_series else _run_html(folder), 0o644)
        click.echo(str(output))
    else:
        click.echo("\n".join(_series_text(folder) if is_series else _run_text(folder)))


def _known_of_series(folder: Path) -> dict[str, Any]:
    series = store.load_series(folder)
    return {"series": series, "runs": [store.load_run(folder / name) for name in series.runs]}


def _series_html(folder: Path) -> str:
    from corral.lab.report.page import series_page

    return series_page(**_known_of_series(folder), name=folder.name)


def _series_text(folder: Path) -> list[str]:
    from corral.lab.report.text import series_lines

    return series_lines(**_known_of_series(folder), folder=folder, columns=tables.room())


def _run_html(folder: Path) -> str:
    from corral.lab.report.page import run_page

    return run_page(store.load_run(folder), store.load_rows(folder), store.load_samples(folder), folder.name)


def _run_text(folder: Path) -> list[str]:
    from corral.lab.report.text import run_lines

    return run_lines(store.load_run(folder), store.load_rows(folder), folder, tables.room())


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON document.")
def list_runs(as_json: bool) -> None:
    """Saved runs, oldest first; of a series, the fastest run's tokens per second."""
    from corral.lab.bench.compare import all_runs

    found = all_runs()
    if as_json:
        print_json(found)
    elif not found:
        tell("No runs. `corral bench` makes one.", err=True)
    else:
        rows = [
            (one.name, one.load, one.verdict, f"{one.output_throughput:,.0f}", since(one.created_s)) for one in found
        ]
        print_table(("RUN", "LOAD", "VERDICT", "OUT TOK/S", "AGO"), rows, left=3)


INVALID = 1  # exit code of a run that was measured, saved, and is not to be used


class _Line:
    """One line of progress on stderr: rewritten on a terminal, once every few seconds elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._told = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told < (0.2 if self._live else 10.0) and done:
            return
        self._told = now
        text = f"{label}: {done}/{total}" if done else f"{label} …"
        if self._live:
            columns = shutil.get_terminal_size().columns
            click.echo(f"\r\033[2K{text[: columns - 1]}", err=True, nl=False)
        elif done:
            click.echo(text, err=True)

    def clear(self) -> None:
        if self._live:
            click.echo("\r\033[2K", err=True, nl=False)


def _bench(given: dict[str, Any], line: _Line) -> Bench:
    if given["dataset_path"] is not None:
        existing_file(given["dataset_path"])  # before a server is asked for anything
    endpoint = resolve(given["name"], url=given["url"], key_file=given["key_file"], model=given["model"])
    return Bench(
        endpoint,
        plan=read_plan_file(given["plan_file"]),
        price=given["price"],
        gpus=given["gpus"],
        detailed=given["save_detailed"],
        on_progress=line,
    )


def _go(work: Coroutine[Any, Any, Any], line: _Line) -> Any:
    try:
        return run_loop(_until_terminated(work))
    finally:
        line.clear()


async def _until_terminated(work: Coroutine[Any, Any, Any]) -> Any:
    """SIGTERM ends the work as Ctrl-C does, so that what was measured is kept: schedulers and `timeout` send it."""
    loop, task, told = asyncio.get_running_loop(), asyncio.current_task(), []

    def end() -> None:
        told.append(signal.SIGTERM)
        if task is not None:
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        return await work
    except asyncio.CancelledError:
        if told:
            raise KeyboardInterrupt from None
        raise
    finally:
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
            look = f"what was measured until now is in {folder}; `corral bench report {folder.name}` shows it."
            explain("corral: ", look if saved else "nothing was measured yet.")
            raise
        finally:
            if not any(folder.iterdir()):
                folder.rmdir()


@click.group(cls=WholeGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@server_options
@work_options
@click.pass_context
def command(context: click.Context, /, **given: Any) -> int:
    """Measure a served model. Without a subcommand: a quick profile of the running deployment, in half a minute."""
    if context.invoked_subcommand is not None:
        _refuse_options_before(context)
        return 0
    specs = quick_specs(make_spec(given))
    return _series(given, "quick", specs)


def _refuse_options_before(context: click.Context) -> None:
    """`corral bench --deployment x run` would measure something else than x: options belong after the subcommand."""
    for name in context.params:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = next(p.opts[0] for p in context.command.params if p.name == name)
            word = context.invoked_subcommand
            raise UsageError(f"{flag} must come after `{word}`.", f"Write: corral bench {word} {flag} …")


def _series(given: dict[str, Any], kind: str, specs: list[Any]) -> int:
    line = _Line()
    bench = _bench(given, line)
    with _new_folder(kind, given["run_name"]) as folder:

        async def work() -> list[Finished]:
            async with bench:
                return await measure_series(bench, kind, specs, folder)

        done = _go(work(), line)
    return _show_series(folder, [finished.run for finished in done], given["as_json"])


def _show_series(folder: Path, runs: list[store.Run], as_json: bool) -> int:
    series = store.load_series(folder)
    if as_json:
        body = [
            {"load": run.spec.load.label, **_figures(folder / name)}
            for name, run in zip(series.runs, runs, strict=True)
        ]
        print_json({"kind": series.kind, "folder": str(folder), "findings": series.findings, "runs": body})
    else:
        from corral.lab.report.text import series_lines

        click.echo("\n".join(series_lines(series, runs, folder, tables.room())))
    return INVALID if all(run.verdict == "invalid" for run in runs) else 0


def _figures(folder: Path) -> dict[str, Any]:
    import json

    body: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return body


@command.command()
@server_options
@work_options
@load_options
@click.option("--repeat", default=1, show_default=True, help="Measure this many times, for confidence intervals.")
def run(repeat: int, **given: Any) -> int:
    """Measure one load: closed loop (--concurrency) or open loop (--request-rate)."""
    spec = make_spec(given, replay=True)
    refuse_ignored(spec.load)
    if repeat > 1:
        return _series(given, "repeat", [reseeded(spec, n) for n in range(repeat)])
    line = _Line()
    bench = _bench(given, line)
    with _new_folder(spec.load.label, given["run_name"]) as folder:

        async def work() -> Finished:
            async with bench:
                return await bench.run(spec, folder)

        finished = _go(work(), line)
    if given["as_json"]:
        print_json({**_figures(folder), "folder": str(folder)})
    else:
        from corral.lab.report.text import run_lines

        click.echo("\n".join(run_lines(finished.run, finished.rows, folder, tables.room())))
    return INVALID if finished.run.verdict == "invalid" else 0


@command.command()
@server_options
@work_options
@click.option("--concurrency", "concurrencies", default="", metavar="N,N,…", help="Closed loop, one run for each.")
@click.option("--request-rate", "rates", default="", metavar="R,R,…", help="Open loop, one run for each.")
@click.option("--num-prompts", type=int, help="Requests of each run (default: 8 for each at once, at least 64).")
@click.option("--seconds", type=Duration(), metavar="TIME", help="Send nothing after this long, in each run.")
def sweep(concurrencies: str, rates: str, num_prompts: int | None, **given: Any) -> int:
    """The latency/throughput curve: one run for each load."""
    if bool(concurrencies) == bool(rates):
        raise UsageError("a sweep varies one kind of load.", "Give --concurrency 1,4,16,64 or --request-rate 1,2,4.")
    from dataclasses import replace

    base = make_spec({**given, "concurrency": None, "num_prompts": num_prompts or 100})
    if given["warmup"] is None:
        base = replace(base, warmup=1)
    places = [int(n) for n in numbers(concurrencies, "--concurrency")] if concurrencies else []
    specs = sweep_specs(base, places, numbers(rates, "--request-rate") if rates else [])
    if num_prompts is None:
        specs = [
            replace(s, workload=replace(s.workload, num_prompts=max(64, 8 * (s.load.concurrency or 16))))
            for s in specs
        ]
    return _series(given, "sweep", specs)


@command.command()
@server_options
@work_options
@click.option("--slo", required=True, metavar="SLOS", help="For example ttft_p99=1s,tpot_p99=50ms.")
@click.option(
    "--over", type=click.Choice(["rate", "concurrency"]), default="rate", show_default=True, help="What is varied."
)
@click.option("--arrival", default="poisson", show_default=True, type=click.Choice(["poisson", "constant", "gamma"]),
              help="When requests are sent.")  # fmt: skip
@click.option("--burstiness", default=1.0, help="gamma: below 1 burstier, above 1 more even.")
@click.option("--probe-seconds", default=15.0, show_default=True, help="How long one probe sends, at least.")
@click.option("--tolerance", default=0.03, show_default=True, help="End when the bracket is this narrow.")
@click.option("--max-probes", default=12, show_default=True, help="End after this many.")
@click.option("--saturate", default=64, show_default=True, help="Requests at once that saturate the server.")
def search(
    slo: str, over: str, probe_seconds: float, tolerance: float, max_probes: int, saturate: int, **given: Any
) -> int:
    """The highest load that still meets its service levels."""
    slos = parse_slos(slo)
    if not 0.001 <= tolerance <= 0.5 or not 2 <= max_probes <= 100 or saturate < 1 or probe_seconds <= 0:
        raise UsageError(
            "the search cannot use these numbers.", "Give a tolerance from 0.001 to 0.5, and 2 to 100 probes."
        )
    spec = make_spec(given)
    refuse_ignored(spec.load, over)
    line = _Line()
    bench = _bench(given, line)

    def tell(probe: Any, _: Finished) -> None:
        line.clear()
        click.echo(f"{probe.load:9.4g}  {'meets it' if probe.passed else 'fails: ' + probe.why}", err=True)

    with _new_folder("search", given["run_name"]) as folder:

        async def work() -> Any:
            async with bench:
                return await search_limit(
                    bench, spec, slos, folder, over=over, seconds=probe_seconds, tolerance=tolerance, most=max_probes,
                    saturate=saturate, on_probe=tell,
                )  # fmt: skip

        found, done = _go(work(), line)
    _show_series(folder, [finished.run for finished in done], given["as_json"])
    return 0 if found.best is not None else INVALID


for view in (compare, report, list_runs):
    command.add_command(view)
