"""Saved runs as a list, and two of them as the sides of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.errors import UsageError
from corral.base.wording import counted
from corral.lab.bench.compare import MetricDifference, Side, compare
from corral.lab.bench.fingerprint import differences
from corral.lab.bench.store import Run, load_rows, load_run, load_series, runs_dir


@dataclass(frozen=True)
class ListedRun:
    """One line of `corral bench list`; of a series, its fastest run and its worst verdict."""

    name: str
    load: str
    verdict: str
    output_throughput: float
    created_s: float


def all_runs() -> list[ListedRun]:
    """Runs and series, oldest first."""
    folders = sorted(runs_dir().glob("*"), key=lambda path: path.stat().st_mtime)
    return [one for folder in folders if (one := _listed(folder))]


def _listed(folder: Path) -> ListedRun | None:
    if (folder / "run.json").is_file():
        one = load_run(folder)
        return ListedRun(folder.name, one.spec.load.label, one.verdict, one.summary.output_throughput, one.created_s)
    if not (folder / "series.json").is_file():
        return None
    many = load_series(folder)
    runs = [load_run(folder / name) for name in many.runs]
    worst = next((word for word in ("invalid", "caution", "valid") if word in {run.verdict for run in runs}), "")
    fastest = max((run.summary.output_throughput for run in runs), default=0.0)
    return ListedRun(folder.name, f"{many.kind}, {counted(len(runs), 'run')}", worst, fastest, many.created_s)


@dataclass(frozen=True)
class Comparison:
    """Two runs, or repeats of them: what changed, whether that is more than noise, and what else differed."""

    figures: tuple[MetricDifference, ...]
    differs: tuple[tuple[str, str, str], ...]  # name, the one's value, the other's
    repeats: bool  # both were repeated
    invalid: tuple[bool, bool]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The figures as plain data."""
        return [{**vars(one), "change": one.change, "verdict": one.verdict} for one in self.figures]


def compared(one: Path, other: Path) -> Comparison:
    (a, first), (b, second) = _side(one), _side(other)
    return Comparison(
        tuple(compare(a, b)),
        (*differences(first.fingerprint, second.fingerprint), *_asked_differently(first, second)),
        all(len(side.summaries) > 1 for side in (a, b)),
        (first.verdict == "invalid", second.verdict == "invalid"),
    )


def _side(folder: Path) -> tuple[Side, Run]:
    """A run, or repeats of one, with the first of them."""
    if (folder / "series.json").is_file():
        series = load_series(folder)
        if series.kind != "repeat":
            raise UsageError(
                f"{folder.name} is a {series.kind}, not one load.",
                f"Compare its points: {folder.name}/{series.runs[0]}.",
            )
        parts = [folder / name for name in series.runs]
    else:
        parts = [folder]
    runs = [load_run(part) for part in parts]
    rows = tuple(tuple(load_rows(part)) for part in parts)
    return Side(tuple(r.summary for r in runs), rows), runs[0]


def _asked_differently(a: Run, b: Run) -> list[tuple[str, str, str]]:
    """What was asked of the two servers that differs: name, the one's value, the other's."""
    found = []
    for part in ("workload", "load"):
        one, other = vars(getattr(a.spec, part)), vars(getattr(b.spec, part))
        found += [(f"{part}.{k}", str(one[k]), str(other[k])) for k in one if one[k] != other[k] and k != "seed"]
    return found
