"""`corral bench compare`, `report` and `list`: saved runs again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from corral.bench import store
from corral.cli.screen import print_json, print_table, since, tell
from corral.errors import UsageError
from corral.files import write_atomic
from corral.report import tables
from corral.wording import counted

__all__ = ["compare", "list_runs", "report"]


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="The differences as JSON.")
def compare(a: str, b: str, as_json: bool) -> None:
    """Two runs (or repeats) side by side: what changed, and whether it is more than noise."""
    from corral.bench.compare import compare as differences_of
    from corral.bench.fingerprint import differences
    from corral.report.text import comparison_lines

    one, other = store.find(a), store.find(b)
    sides, firsts = [], []
    for folder in (one, other):
        side, first = _side(folder)
        sides.append(side)
        firsts.append(first)
    found = differences_of(sides[0], sides[1])
    changed = differences(firsts[0].fingerprint, firsts[1].fingerprint)
    changed += _asked_differently(firsts[0], firsts[1])
    repeats = all(len(side.summaries) > 1 for side in sides)
    if as_json:
        rows = [{**vars(d), "change": d.change, "verdict": d.verdict} for d in found]
        print_json({"a": str(one), "b": str(other), "figures": rows, "differs": changed, "repeats": repeats})
    else:
        invalid = [f.name for f, run in zip((one, other), firsts, strict=True) if run.verdict == "invalid"]
        lines = comparison_lines((one.name, other.name), found, changed, repeats, tables.room())
        click.echo("\n".join([*(f"✗ {name} is INVALID" for name in invalid), *lines]))


def _side(folder: Path) -> tuple[Any, store.Run]:
    from corral.bench.compare import Side

    if (folder / "series.json").is_file():
        series = store.load_series(folder)
        if series.kind != "repeat":
            raise UsageError(
                f"{folder.name} is a {series.kind}, not one load.",
                f"Compare its points: {folder.name}/{series.runs[0]}.",
            )
        parts = [folder / name for name in series.runs]
    else:
        parts = [folder]
    runs = [store.load_run(part) for part in parts]
    rows = tuple(tuple(store.load_rows(part)) for part in parts)
    return Side(tuple(r.summary for r in runs), rows), runs[0]


def _asked_differently(a: store.Run, b: store.Run) -> list[tuple[str, str, str]]:
    found = []
    for part in ("workload", "load"):
        one, other = vars(getattr(a.spec, part)), vars(getattr(b.spec, part))
        found += [(f"{part}.{k}", str(one[k]), str(other[k])) for k in one if one[k] != other[k] and k != "seed"]
    return found


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
    from corral.report.page import series_page

    return series_page(**_known_of_series(folder), name=folder.name)


def _series_text(folder: Path) -> list[str]:
    from corral.report.text import series_lines

    return series_lines(**_known_of_series(folder), folder=folder, columns=tables.room())


def _run_html(folder: Path) -> str:
    from corral.report.page import run_page

    return run_page(store.load_run(folder), store.load_rows(folder), store.load_samples(folder), folder.name)


def _run_text(folder: Path) -> list[str]:
    from corral.report.text import run_lines

    return run_lines(store.load_run(folder), store.load_rows(folder), folder, tables.room())


@dataclass(frozen=True)
class _Listed:
    """One line of `corral bench list`; of a series, its fastest run and its worst verdict."""

    name: str
    load: str
    verdict: str
    output_throughput: float
    created_s: float


def _listed(folder: Path) -> _Listed | None:
    if (folder / "run.json").is_file():
        one = store.load_run(folder)
        return _Listed(folder.name, one.spec.load.label, one.verdict, one.summary.output_throughput, one.created_s)
    if not (folder / "series.json").is_file():
        return None
    many = store.load_series(folder)
    runs = [store.load_run(folder / name) for name in many.runs]
    worst = next((word for word in ("invalid", "caution", "valid") if word in {run.verdict for run in runs}), "")
    fastest = max((run.summary.output_throughput for run in runs), default=0.0)
    return _Listed(folder.name, f"{many.kind}, {counted(len(runs), 'run')}", worst, fastest, many.created_s)


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON document.")
def list_runs(as_json: bool) -> None:
    """Saved runs, oldest first; of a series, the fastest run's tokens per second."""
    folders = sorted(store.runs_dir().glob("*"), key=lambda path: path.stat().st_mtime)
    found = [one for folder in folders if (one := _listed(folder))]
    if as_json:
        print_json(found)
    elif not found:
        tell("No runs. `corral bench` makes one.", err=True)
    else:
        rows = [
            (one.name, one.load, one.verdict, f"{one.output_throughput:,.0f}", since(one.created_s)) for one in found
        ]
        print_table(("RUN", "LOAD", "VERDICT", "OUT TOK/S", "AGO"), rows, left=3)
