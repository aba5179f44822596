"""Runs of `corral bench` for a terminal: figures, small plots of block characters, and a run over time.

`columns` is the width of the terminal; None is a pipe or a file, where every row and every fact is one line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.lab.bench import store
from corral.lab.bench.compare import MetricDifference
from corral.lab.bench.gate import needed
from corral.lab.bench.limit import TokenCost
from corral.lab.bench.metrics import RequestRow, Spread, latencies_s, statistic
from corral.lab.bench.store import Run, Series
from corral.lab.report.tables import fact_lines, flowing, table_lines, tied, wrapped
from corral.plan.speed import rounded


@dataclass(frozen=True)
class Timeline:
    step_s: float
    tokens_per_s: tuple[float, ...]
    concurrency: tuple[float, ...]  # mean of each step


def timeline(rows: Sequence[RequestRow], duration_s: float, steps: int = 60) -> Timeline:
    """Output chunks per second and mean requests under way, in at most `steps` steps of at least 0.1 s."""
    good = [row for row in rows if row.ok and row.chunk_ns]
    if not good or duration_s <= 0:
        return Timeline(1.0, (), ())
    count = max(1, min(steps, int(duration_s / 0.1)))
    width = duration_s * 1e9 / count
    tokens, busy = [0.0] * count, [0.0] * count
    for row in good:
        scale = (row.output_tokens if row.writes else row.input_tokens) / len(
            row.chunk_ns
        )  # several tokens may share a chunk
        for t in row.chunk_ns:
            tokens[min(count - 1, max(0, int(t / width)))] += scale
        first, last = max(0.0, row.asked_ns / width), min(float(count), row.chunk_ns[-1] / width)
        for step in range(int(first), min(count, int(last) + 1)):
            busy[step] += max(0.0, min(last, step + 1) - max(first, step))
    return Timeline(width / 1e9, tuple(n / (width / 1e9) for n in tokens), tuple(busy))


_BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A row of blocks from 0 to the highest value; more values than places are averaged."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
    top = max(values) or 1.0
    return "".join(_BLOCKS[max(0, min(8, math.ceil(v / top * 8)))] for v in values)


def histogram(values: Sequence[float], width: int = 24) -> str:
    """How values are distributed between their least and their P99, as a row of blocks."""
    ordered = sorted(values)
    if not ordered:
        return ""
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    if high <= low:
        return _BLOCKS[8]
    counts = [0] * width
    for value in ordered:
        if value <= high:
            counts[min(width - 1, int((value - low) / (high - low) * width))] += 1
    top = max(counts)
    return "".join(_BLOCKS[max(1 if count else 0, round(count / top * 8))] for count in counts)


def bar(value: float, top: float, width: int = 20) -> str:
    """A horizontal bar, good to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, value / top if top else 0.0)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2el": "whole answer",
}
_SEVERITY = {"invalid": "✗", "caution": "!"}
_MARKS = {"valid": "✓ valid", "caution": "! read with caution", "invalid": "✗ INVALID"}


def figure(value: float) -> str:
    """Three or more digits, no more than are known."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def headline(run: Run) -> str:
    server, work = run.fingerprint.server, run.spec.workload
    where = server.get("deployment") or server.get("address", "")
    engine = f" · {server['engine']}" if "engine" in server else ""
    sizes = f"{work.input_len} → {work.output_len}" if work.writes else f"{work.input_len}"
    task = "" if work.writes else f"{work.task}, "
    lengths = f"{task}{work.dataset} {sizes if work.synthetic else work.file}"
    return f"{server.get('model', '')} on {where}{engine} · {lengths} tokens · {run.spec.load.label}"


def _headline_lines(text: str, columns: int | None) -> list[str]:
    return flowing(text.split(" · "), columns)


def verdict_line(run: Run) -> str:
    s = run.summary
    failed = f", {s.failed} failed" if s.failed else ""
    return f"{_MARKS[run.verdict]}: {s.completed} answers in {s.duration_s:.1f} s{failed}"


def _problem_lines(run: Run, columns: int | None) -> list[str]:
    return [
        line
        for problem in run.problems
        for line in wrapped(problem.text, columns, f"  {_SEVERITY[problem.severity]} ", "    ")
    ]


def _spread_row(run: Run, name: str, spread: Spread, values: Sequence[float]) -> list[str]:
    cells = [figure(spread.mean), figure(spread.median), figure(spread.std)]
    for p in run.spec.percentiles:
        value = figure(dict(spread.percentiles).get(p, 0.0))
        cells.append(value + ("?" if spread.count < needed(p) else ""))
    return [name.upper(), *cells, histogram(values), _TITLES[name]]


def saved_lines(folder: Path, columns: int | None = None) -> list[str]:
    """A saved run or series again."""
    if store.is_series(folder):
        return series_lines(store.load_series(folder), store.load_runs(folder), folder, columns)
    return run_lines(store.load_run(folder), store.load_rows(folder), folder, columns)


def run_lines(
    run: Run, rows: Sequence[RequestRow], folder: Path | None = None, columns: int | None = None
) -> list[str]:
    """One run on one page."""
    lines = [
        *_headline_lines(headline(run), columns),
        *wrapped(verdict_line(run), columns),
        *_problem_lines(run, columns),
    ]
    lines += ["", *_rate_lines(run, columns), "", *_latency_lines(run, rows, columns)]
    return [*lines, *_timeline_lines(run, rows, columns), "", *fact_lines(_facts(run, folder), columns)]


def _rate_lines(run: Run, columns: int | None) -> list[str]:
    s = run.summary
    rates = [
        f"{figure(s.request_throughput)} req/s",
        *([f"{figure(s.output_throughput)} output tok/s"] if run.spec.workload.writes else []),
        f"{figure(s.input_throughput)} input tok/s",
        *([f"peak {figure(s.max_output_tokens_per_s)} tok/s"] if run.spec.workload.writes else []),
    ]
    lines = flowing(rates, columns, gap="   ")
    if s.request_goodput is not None:
        share = s.request_goodput / s.request_throughput if s.request_throughput else 0.0
        levels = ", ".join(f"{slo.metric} ≤ {slo.limit_ms:g} ms" for slo in run.spec.goodput if slo.metric != "itl")
        lines += wrapped(f"{figure(s.request_goodput)} req/s good ({share:.0%}): {levels}", columns)
    for slo in run.spec.goodput:
        if count := s.of(slo.metric).count:
            value = statistic(s, slo)
            verdict = "meets" if value <= slo.limit_ms else "misses"
            doubt = "?" if count < needed(slo.percentile) else ""
            lines += wrapped(f"{verdict} {slo}: {figure(value)} ms{doubt}", columns)
    return lines


def _latency_lines(run: Run, rows: Sequence[RequestRow], columns: int | None) -> list[str]:
    values = latencies_s(rows)
    percentiles = [f"P{p:g}" for p in run.spec.percentiles]
    headings = ["ms", "mean", "median", "std", *percentiles, "distribution", ""]
    table = [_spread_row(run, name, run.summary.of(name), values[name]) for name in _TITLES if values[name]]
    return list(table_lines(headings, table, 1, columns, spared=("", "distribution", "std"), tail=2))


def _timeline_lines(run: Run, rows: Sequence[RequestRow], columns: int | None) -> list[str]:
    over = timeline(rows, run.summary.duration_s)
    if len(over.tokens_per_s) <= 2:
        return []
    notes = (f"up to {figure(max(over.tokens_per_s))}", f"mean {run.summary.mean_concurrency:.1f}")
    names = ("tok/s over time   ", "requests at once  ")
    width = 40 if columns is None else min(40, columns - len(names[0]) - 2 - max(map(len, notes)))
    plots = (sparkline(over.tokens_per_s, width), sparkline(over.concurrency, width))
    width = max(map(len, plots))
    return ["", *(f"{name}{plot:<{width}}  {note}" for name, plot, note in zip(names, plots, notes, strict=True))]


def _facts(run: Run, folder: Path | None) -> list[tuple[str, str]]:
    s, server = run.summary, run.server
    facts: list[tuple[str, str]] = []
    if server is not None:
        facts.append((
            "server",
            f"queue up to {server.peak_waiting:.0f}, KV cache up to {server.peak_kv_use:.0%}, "
            f"{server.preemptions:.0f} preemptions, prefix hits {server.prefix_hit_share:.0%}",
        ))  # fmt: skip
    else:
        facts.append(("server", "no /metrics: queue, cache and other traffic are unknown"))
    late = dict(s.lag.percentiles).get(99.0, 0.0)
    facts.append(("generator", f"late by {s.lag.median:.2f} ms (median), {late:.2f} ms (P99)"))
    if run.limit is not None:
        facts += [("limit", run.limit.sentence), ("", f"→ {run.limit.advice}; rates: {run.limit.basis}")]
        if run.limit.roof_tokens_per_s:
            share = s.output_throughput / run.limit.roof_tokens_per_s
            roof = figure(run.limit.roof_tokens_per_s)
            facts.append(("", f"the plan predicts {roof} tok/s for this load: {share:.0%} of it reached"))
    if run.cost is not None:
        facts.append(("cost", _cost_text(run.cost)))
    facts += [("note", note) for note in run.notes]
    if folder is not None:
        facts.append(("saved", tied(str(folder))))
    return facts


def _cost_text(cost: TokenCost) -> str:
    text = f"{rounded(cost.gpu_hours_per_million_output)} GPU-hours per million output tokens"
    if cost.money_per_million_output is None:
        return text
    return f"{text}, {rounded(cost.money_per_million_output)} in money ({cost.price_per_gpu_hour:g} per GPU-hour)"


def series_lines(series: Series, runs: Sequence[Run], folder: Path, columns: int | None = None) -> list[str]:
    """A sweep, a search or repeats as a table; a load whose run is doubtful is marked."""
    lines = [*_headline_lines(f"{headline(runs[0]).rsplit(' · ', 1)[0]} · times in ms", columns), ""] if runs else []
    writes = all(run.spec.workload.writes for run in runs)
    top = max((throughput(run) for run in runs), default=0.0)
    p = max((run.spec.percentiles[-1] for run in runs), default=99.0)
    headings = [
        "load",
        "req/s",
        "out tok/s",
        "tok/s each",
        "TTFT P50",
        f"TTFT P{p:g}",
        "TPOT P50",
        f"TPOT P{p:g}",
        "",
    ]
    if not writes:
        headings = ["load", "req/s", "in tok/s", "E2EL P50", f"E2EL P{p:g}", ""]
    table = [_series_row(run, p, top) for run in runs]
    lines += table_lines(headings, table, 1, columns, spared=("", "tok/s each", "TPOT P50", "TTFT P50"))
    seen: dict[str, list[str]] = {}
    for run in runs:
        for problem in run.problems:
            mark = _SEVERITY[problem.severity]
            text = f"{run.spec.load.label}: {problem.text}"
            seen.setdefault(f"{mark} {problem.kind}", wrapped(text, columns, f"{mark} ", "  "))
    lines += ["", *(line for entry in seen.values() for line in entry)] if seen else []
    facts = [(name, text) for name, text in series.findings.items() if isinstance(text, str)]
    if runs and runs[-1].limit is not None and series.kind in ("quick", "sweep"):
        best = max(runs, key=lambda run: run.summary.output_throughput)
        if best.limit is not None:
            facts += [("limit", f"at {best.spec.load.label}: {best.limit.sentence}"), ("", f"→ {best.limit.advice}")]
    facts += [("saved", tied(str(folder))), ("", tied(f"corral bench report {folder.name} -o report.html"))]
    return [*lines, "", *fact_lines(facts, columns)]


def _series_row(run: Run, p: float, top: float) -> list[str]:
    s = run.summary
    mark = {"valid": "", "caution": " !", "invalid": " ✗"}[run.verdict]
    figures: tuple[float, ...] = (
        s.request_throughput,
        s.output_throughput,
        1000 / s.tpot.median if s.tpot.median else 0.0,
        s.ttft.median,
        dict(s.ttft.percentiles).get(p, 0.0),
        s.tpot.median,
        dict(s.tpot.percentiles).get(p, 0.0),
    )
    if not run.spec.workload.writes:
        figures = (s.request_throughput, s.input_throughput, s.e2el.median, dict(s.e2el.percentiles).get(p, 0.0))
    return [f"{run.spec.load.label}{mark}", *map(figure, figures), bar(throughput(run), top, 16)]


def throughput(run: Run) -> float:
    """Tokens per second: of the answers, or of the texts where answers have none."""
    return run.summary.output_throughput if run.spec.workload.writes else run.summary.input_throughput


def comparison_lines(
    names: tuple[str, str],
    differences: Sequence[MetricDifference],
    changed: Sequence[tuple[str, str, str]],
    repeats: bool,
    columns: int | None = None,
) -> list[str]:
    """Two runs side by side."""
    table = [
        [d.name, figure(d.a), figure(d.b), f"{d.change:+.1f}%", d.verdict, f"{d.low:+.1f}% to {d.high:+.1f}%"]
        for d in differences
    ]
    headings = ["", "a", "b", "change", "is", "95% interval"]
    lines = [f"a: {names[0]}", f"b: {names[1]}", ""]
    lines += [*table_lines(headings, table, 1, columns, spared=("95% interval",), tail=2), ""]
    if not repeats:
        lines += wrapped(
            "Single runs: the intervals know nothing of changes from run to run. `--repeat 5` measures them.", columns
        )
    if changed:
        lines_of_changes = [
            line for name, a, b in changed for line in wrapped(f"{name}: {a}  |  {b}", columns, "  ", "    ")
        ]
        return [*lines, "What differs:", *lines_of_changes]
    return [*lines, "Nothing known differs between the two set-ups."]
