"""The page of results that a terminal shows; plain lines, so that it can be piped and tested."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from corral.bench.compare import MetricDifference
from corral.bench.gate import needed
from corral.bench.metrics import Spread, gaps_s
from corral.bench.rows import RequestRow
from corral.bench.store import Run, Series
from corral.report.terminal_plots import bar, histogram, sparkline
from corral.report.timeline import timeline

__all__ = ["comparison_lines", "run_lines", "series_lines", "verdict_line"]

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2el": "whole answer",
}
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
    lengths = (
        f"{work.dataset} {work.input_len} → {work.output_len}" if work.synthetic else f"{work.dataset} {work.file}"
    )
    return f"{server.get('model', '')} on {where}{engine} · {lengths} tokens · {run.spec.load.label}"


def verdict_line(run: Run) -> str:
    s = run.summary
    failed = f", {s.failed} failed" if s.failed else ""
    return f"{_MARKS[run.verdict]}: {s.completed} answers in {s.duration_s:.1f} s{failed}"


def problem_lines(run: Run) -> list[str]:
    marks = {"invalid": "✗", "caution": "!"}
    return [f"  {marks[problem.severity]} {problem.text}" for problem in run.problems]


def _spread_row(run: Run, name: str, found: Spread, values: Sequence[float]) -> str:
    cells = [figure(found.mean), figure(found.median), figure(found.std)]
    for p in run.spec.percentiles:
        value = figure(dict(found.percentiles).get(p, 0.0))
        cells.append(value + ("?" if found.count < needed(p) else ""))
    row = "".join(f"{cell:>10}" for cell in cells)
    return f"{name.upper():<5}{row}   {histogram(values):<24}  {_TITLES[name]}"


def run_lines(run: Run, rows: Sequence[RequestRow], folder: Path | None = None) -> list[str]:
    """One run on one page."""
    s = run.summary
    good = [row for row in rows if row.ok and row.chunk_ns]
    lines = [headline(run), verdict_line(run), *problem_lines(run), ""]
    lines.append(
        f"{figure(s.request_throughput)} req/s   {figure(s.output_throughput)} output tok/s   "
        f"{figure(s.input_throughput)} input tok/s   peak {figure(s.max_output_tokens_per_s)} tok/s"
    )
    if s.request_goodput is not None:
        share = s.request_goodput / s.request_throughput if s.request_throughput else 0.0
        promises = ", ".join(f"{slo.metric} ≤ {slo.limit_ms:g} ms" for slo in run.spec.goodput)
        lines.append(f"{figure(s.request_goodput)} req/s good ({share:.0%}): {promises}")
    heads = ["mean", "median", "std", *(f"P{p:g}" for p in run.spec.percentiles)]
    lines += ["", "ms   " + "".join(f"{head:>10}" for head in heads) + "   distribution"]
    values = {
        "ttft": [row.ttft_s for row in good],
        "tpot": [t for row in good if (t := row.tpot_s) is not None],
        "itl": [gap for row in good for gap in gaps_s(row)],
        "e2el": [row.e2el_s for row in good],
    }
    lines += [_spread_row(run, name, s.of(name), values[name]) for name in _TITLES if values[name]]
    over = timeline(rows, s.duration_s)
    if len(over.tokens_per_s) > 2:
        lines += ["", f"tok/s over time   {sparkline(over.tokens_per_s):<40}  up to {figure(max(over.tokens_per_s))}"]
        lines.append(f"requests at once  {sparkline(over.concurrency):<40}  mean {s.mean_concurrency:.1f}")
    return lines + _facts(run, folder)


def _facts(run: Run, folder: Path | None) -> list[str]:
    s, server = run.summary, run.server
    rows: list[tuple[str, str]] = []
    if server is not None:
        rows.append((
            "server",
            f"queue up to {server.peak_waiting:.0f}, KV cache up to {server.peak_kv_use:.0%}, "
            f"{server.preemptions:.0f} preemptions, prefix hits {server.prefix_hit_share:.0%}",
        ))  # fmt: skip
    else:
        rows.append(("server", "no /metrics: queue, cache and other traffic are unknown"))
    late = dict(s.lag.percentiles).get(99.0, 0.0)
    rows.append(("generator", f"late by {s.lag.median:.2f} ms (median), {late:.2f} ms (P99)"))
    if run.limit is not None:
        rows += [("limit", run.limit.sentence), ("", f"→ {run.limit.advice}; rates: {run.limit.basis}")]
        if run.limit.roof_tokens_per_s:
            share = s.output_throughput / run.limit.roof_tokens_per_s
            roof = figure(run.limit.roof_tokens_per_s)
            rows.append(("", f"the plan predicts {roof} tok/s for this load: {share:.0%} of it reached"))
    if run.cost is not None:
        text = f"{run.cost.gpu_hours_per_million_output:.3g} GPU-hours per million output tokens"
        if run.cost.money_per_million_output is not None:
            text += (
                f", {run.cost.money_per_million_output:.3g} in money ({run.cost.price_per_gpu_hour:g} per GPU-hour)"
            )
        rows.append(("cost", text))
    rows += [("note", note) for note in run.notes]
    if folder is not None:
        rows.append(("saved", str(folder)))
    return ["", *(f"{name:<10} {text}" for name, text in rows)]


def series_lines(series: Series, runs: Sequence[Run], folder: Path) -> list[str]:
    """A sweep, a search or repeats as a table."""
    lines = [headline(runs[0]).rsplit(" · ", 1)[0], ""] if runs else []
    top = max((run.summary.output_throughput for run in runs), default=0.0)
    p = max((run.spec.percentiles[-1] for run in runs), default=99.0)
    head = f"{'load':<26}{'req/s':>9}{'out tok/s':>11}{'tok/s each':>11}{'TTFT P50':>10}"
    lines.append(f"{head}{f'P{p:g}':>9}{'TPOT P50':>10}{f'P{p:g}':>9}   ")
    for run in runs:
        s = run.summary
        each = 1000 / s.tpot.median if s.tpot.median else 0.0
        mark = {"valid": "", "caution": " !", "invalid": " ✗"}[run.verdict]
        cells = f"{figure(s.request_throughput):>9}{figure(s.output_throughput):>11}{figure(each):>11}"
        cells += f"{figure(s.ttft.median):>10}{figure(dict(s.ttft.percentiles).get(p, 0.0)):>9}"
        cells += f"{figure(s.tpot.median):>10}{figure(dict(s.tpot.percentiles).get(p, 0.0)):>9}"
        lines.append(f"{run.spec.load.label:<26}{cells}   {bar(s.output_throughput, top, 16)}{mark}")
    seen: dict[str, str] = {}
    for run in runs:
        for problem in run.problems:
            mark = "✗" if problem.severity == "invalid" else "!"
            seen.setdefault(f"{mark} {problem.kind}", f"{run.spec.load.label}: {problem.text}")
    lines += ["", *(f"{kind[0]} {text}" for kind, text in seen.items())] if seen else []
    lines += ["", *(f"{name:<10} {text}" for name, text in series.findings.items() if isinstance(text, str))]
    if runs and runs[-1].limit is not None and series.kind in ("quick", "sweep"):
        best = max(runs, key=lambda run: run.summary.output_throughput)
        if best.limit is not None:
            lines += [
                f"{'limit':<10} at {best.spec.load.label}: {best.limit.sentence}",
                f"{'':<10} → {best.limit.advice}",
            ]
    lines.append(f"{'saved':<10} {folder}")
    lines.append(f"{'':<10} corral bench report {folder.name} -o report.html")
    return lines


def comparison_lines(
    names: tuple[str, str],
    differences: Sequence[MetricDifference],
    changed: Sequence[tuple[str, str, str]],
    repeats: bool,
) -> list[str]:
    """Two runs side by side."""
    lines = [f"a: {names[0]}", f"b: {names[1]}", ""]
    lines.append(f"{'':<22}{'a':>12}{'b':>12}{'change':>10}   95% interval")
    for d in differences:
        interval = f"{d.low:+.1f}% to {d.high:+.1f}%"
        lines.append(f"{d.name:<22}{figure(d.a):>12}{figure(d.b):>12}{d.change:>+9.1f}%   {interval:<20} {d.verdict}")
    lines.append("")
    if not repeats:
        lines.append(
            "Single runs: the intervals know nothing of changes from run to run. `--repeat 5` measures them."
        )
    if changed:
        lines += ["What differs:", *(f"  {name}: {a}  |  {b}" for name, a, b in changed)]
    else:
        lines.append("Nothing known differs between the two set-ups.")
    return lines
