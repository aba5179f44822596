"""`corral bench compare`, `report` and `list`: saved runs again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from corral.base.files import write_atomic
from corral.cli.screen import print_json, print_table, since, tell
from corral.lab.bench import store
from corral.lab.report import tables


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="The differences as JSON.")
def compare(a: str, b: str, as_json: bool) -> None:
    """Two runs (or repeats) side by side: what changed, and whether it is more than noise."""
    from corral.lab.bench.listing import compared
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
    from corral.lab.bench.listing import all_runs

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
