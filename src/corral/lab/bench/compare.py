"""Two runs side by side: differences with 95% confidence intervals, marked where they are noise.

With repeats (two or more runs on each side) the interval is Welch's, over runs: it covers what changes from run to
run. With single runs it covers only the chance inside a run: order statistics for percentiles, the standard error for
means, one-second blocks for throughput; requests of a run are not independent, so it is too narrow.

Also here: the list of saved runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.errors import UsageError
from corral.base.wording import counted
from corral.lab.bench.fingerprint import differences
from corral.lab.bench.gate import needed
from corral.lab.bench.metrics import RequestRow, Summary, latencies_s, percentile
from corral.lab.bench.spec import METRICS
from corral.lab.bench.store import Run, is_series, load_rows, load_run, load_runs, load_series, runs_dir

# two-sided 95% quantiles of Student's t, by degrees of freedom
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run, or repeats of it."""

    summaries: tuple[Summary, ...]
    rows: tuple[tuple[RequestRow, ...], ...]


@dataclass(frozen=True)
class MetricDifference:
    """One figure on both sides; `low` and `high` bound the change in percent of `a`."""

    name: str
    unit: str
    a: float
    b: float
    low: float
    high: float
    higher_is_better: bool
    other_lengths: bool = False  # it rests on the lengths of the answers, and those differ

    @property
    def change(self) -> float:
        return (self.b / self.a - 1) * 100 if self.a else 0.0

    @property
    def noise(self) -> bool:
        """Whether the difference may be chance."""
        return self.low <= 0 <= self.high

    @property
    def verdict(self) -> str:
        if self.noise:
            return "noise"
        if self.other_lengths:
            return "other lengths"
        return "better" if (self.change > 0) == self.higher_is_better else "worse"


def compare(a: Side, b: Side) -> list[MetricDifference]:
    """The figures that matter, throughput first."""
    results = []
    for name, unit, of in (
        ("request_throughput", "req/s", lambda s: s.request_throughput),
        ("output_throughput", "tok/s", lambda s: s.output_throughput),
    ):
        results.append(_difference(name, unit, a, b, of, _throughput_error(of), True))
    for metric in METRICS:
        least = min(summary.of(metric).count for side in (a, b) for summary in side.summaries)
        for name, p in (("median", 50.0), ("p90", 90.0), ("p99", 99.0)):
            if least >= needed(p):  # otherwise the percentile rests on single requests
                results.append(
                    _difference(f"{name}_{metric}_ms", "ms", a, b, _cut(metric, p), _rank_error(metric, p), False)
                )
    apart = not 1 / _SAME_LENGTH <= answer_tokens(a) / (answer_tokens(b) or 1.0) <= _SAME_LENGTH
    return [
        replace(d, other_lengths=apart and (d.name == "request_throughput" or d.name.endswith("e2el_ms")))
        for d in results
        if d.a and d.b
    ]


_SAME_LENGTH = 1.05  # mean lengths of answers up to so far apart: what a whole request takes can be compared


def answer_tokens(side: Side) -> float:
    """Mean tokens of an answer."""
    good = sum(s.completed for s in side.summaries)
    return sum(s.output_tokens for s in side.summaries) / good if good else 0.0


def _cut(metric: str, p: float) -> Callable[[Summary], float]:
    def of(summary: Summary) -> float:
        results = summary.of(metric)
        return results.median if p == 50.0 else dict(results.percentiles).get(p, 0.0)

    return of


def _difference(
    name: str,
    unit: str,
    a: Side,
    b: Side,
    of: Callable[[Summary], float],
    inside: Callable[[Summary, Sequence[RequestRow]], float],
    higher: bool,
) -> MetricDifference:
    one, other = [of(s) for s in a.summaries], [of(s) for s in b.summaries]
    mean_a, mean_b = sum(one) / len(one), sum(other) / len(other)
    if len(one) > 1 and len(other) > 1:
        half = _welch(one, other)
    else:
        errors = [inside(s, r) for side in (a, b) for s, r in zip(side.summaries[:1], side.rows[:1], strict=True)]
        half = 1.96 * math.hypot(*errors)
    scale = 100 / mean_a if mean_a else 0.0
    return MetricDifference(
        name, unit, mean_a, mean_b, (mean_b - mean_a - half) * scale, (mean_b - mean_a + half) * scale, higher
    )


def _welch(one: Sequence[float], other: Sequence[float]) -> float:
    """Half the width of the interval of a difference of means."""
    parts = []
    for values in (one, other):
        mean = sum(values) / len(values)
        parts.append((sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values), len(values)))
    total = sum(part for part, _ in parts)
    if not total:
        return 0.0
    freedom = total**2 / sum(part**2 / (n - 1) for part, n in parts if part)
    return t_quantile(freedom) * math.sqrt(total)


def t_quantile(freedom: float) -> float:
    """The two-sided 95% quantile of Student's t."""
    return _T[min(max(int(freedom), 1), len(_T)) - 1] if freedom <= len(_T) else 1.96


def _rank_error(metric: str, p: float) -> Callable[[Summary, Sequence[RequestRow]], float]:
    """Standard error in ms of a percentile, from the order statistics one standard error of the rank away."""

    def error(_: Summary, rows: Sequence[RequestRow]) -> float:
        ordered = sorted(latencies_s(rows)[metric])
        if len(ordered) < 2:
            return 0.0
        share = p / 100
        reach = 100 * math.sqrt(share * (1 - share) / len(ordered))
        low, high = percentile(ordered, max(0.0, p - reach)), percentile(ordered, min(100.0, p + reach))
        return (high - low) / 2 * 1000

    return error


def _throughput_error(of: Callable[[Summary], float]) -> Callable[[Summary, Sequence[RequestRow]], float]:
    """Standard error of a rate from ten equal stretches of the run."""

    def error(summary: Summary, rows: Sequence[RequestRow]) -> float:
        times = [t for row in rows if row.ok for t in row.chunk_ns]
        if len(times) < 20 or not summary.duration_s:
            return 0.0
        width = summary.duration_s * 1e9 / 10
        counts = [0] * 10
        for t in times:
            counts[min(9, max(0, int(t / width)))] += 1
        inner = counts[1:-1]  # filling and draining are not noise
        mean = sum(inner) / len(inner)
        if not mean:
            return 0.0
        variance = sum((c - mean) ** 2 for c in inner) / (len(inner) - 1)
        return of(summary) * math.sqrt(variance / len(inner)) / mean

    return error


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
    if not is_series(folder):
        return None
    many, runs = load_series(folder), load_runs(folder)
    worst = next((word for word in ("invalid", "caution", "valid") if word in {run.verdict for run in runs}), "")
    fastest = max((run.summary.output_throughput for run in runs), default=0.0)
    return ListedRun(folder.name, f"{many.kind}, {counted(len(runs), 'run')}", worst, fastest, many.created_s)


@dataclass(frozen=True)
class Comparison:
    """Two runs, or repeats of them: what changed, whether that is noise, and what else differed."""

    figures: tuple[MetricDifference, ...]
    differs: tuple[tuple[str, str, str], ...]  # name, the one's value, the other's
    repeats: bool  # both sides have repeats
    invalid: tuple[bool, bool]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The figures as plain data."""
        return [{**vars(one), "change": one.change, "verdict": one.verdict} for one in self.figures]


def compared(one: Path, other: Path) -> Comparison:
    (a, first), (b, second) = _side(one), _side(other)
    figures = tuple(compare(a, b))
    lengths = [f"{answer_tokens(side):.1f} tokens" for side in (a, b)]
    apart = [("answers", lengths[0], lengths[1])] if any(one.other_lengths for one in figures) else []
    return Comparison(
        figures,
        (*apart, *differences(first.fingerprint, second.fingerprint), *_spec_differences(first, second)),
        all(len(side.summaries) > 1 for side in (a, b)),
        (first.verdict == "invalid", second.verdict == "invalid"),
    )


def _side(folder: Path) -> tuple[Side, Run]:
    """A run, or repeats of one, with the first of them."""
    parts = [folder]
    if is_series(folder):
        series = load_series(folder)
        if series.kind != "repeat":
            raise UsageError(
                f"{folder.name} is a {series.kind}, not one load.",
                f"Compare its points: {folder.name}/{series.runs[0]}.",
            )
        parts = [folder / name for name in series.runs]
    runs = load_runs(folder)
    rows = tuple(tuple(load_rows(part)) for part in parts)
    return Side(tuple(r.summary for r in runs), rows), runs[0]


def _spec_differences(a: Run, b: Run) -> list[tuple[str, str, str]]:
    """Differences of workload and load: name, the one's value, the other's."""
    results = []
    for part in ("workload", "load"):
        one, other = vars(getattr(a.spec, part)), vars(getattr(b.spec, part))
        results += [(f"{part}.{k}", str(one[k]), str(other[k])) for k in one if one[k] != other[k] and k != "seed"]
    return results
