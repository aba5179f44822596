"""The HTML page of a saved run or series of `corral bench`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from corral.lab.bench import store
from corral.lab.bench.gate import needed
from corral.lab.bench.limit import FrontEnd, roof
from corral.lab.bench.metrics import RequestRow, Spread, latencies_s
from corral.lab.bench.server_metrics import ServerSample
from corral.lab.bench.store import Run, Series
from corral.lab.report.bench import figure, headline, throughput, timeline
from corral.lab.report.html import cards, document, drawing, table, verdict_box
from corral.lab.report.svg import Curve, chart, histogram
from corral.plan.speed import rounded

_NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (after the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


_CARDS = {True: ("ttft", "tpot"), False: ("e2el",)}


def _metrics(run: Run) -> dict[str, str]:
    """The latencies that the answers have."""
    return _NAMES if run.spec.workload.writes else {"e2el": _NAMES["e2el"]}


def _tokens(run: Run) -> str:
    return "output" if run.spec.workload.writes else "input"


def _when(run: Run) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(run.created_s))


_SENTENCES = {"valid": "Valid", "caution": "Read with caution", "invalid": "Invalid: do not use these figures"}


def saved_page(folder: Path) -> str:
    """The page of a saved run or series."""
    if store.is_series(folder):
        return series_page(store.load_series(folder), store.load_runs(folder), folder.name)
    return run_page(store.load_run(folder), store.load_rows(folder), store.load_samples(folder), folder.name)


def run_page(run: Run, rows: Sequence[RequestRow], samples: Sequence[ServerSample], name: str) -> str:
    """The report of one run."""
    s = run.summary
    body = [f"<h1>Benchmark {escape(name)}</h1>", f'<p class="sub">{escape(headline(run))}<br>{_when(run)}</p>']
    body.append(verdict_box(run.verdict, _SENTENCES[run.verdict], [p.text for p in run.problems]))
    shown = [
        (f"{_tokens(run)} tokens/s", figure(throughput(run))),
        ("requests/s", figure(s.request_throughput)),
        *(
            (f"median {name.upper()}, ms", figure(s.of(name).median))
            for name in _metrics(run)
            if name in _CARDS[run.spec.workload.writes]
        ),
        ("answers", f"{s.completed:,}"),
        ("failed", f"{s.failed:,}"),
    ]
    if s.request_goodput is not None:
        shown.insert(2, ("good requests/s", figure(s.request_goodput)))
    if run.cost is not None and run.cost.money_per_million_output is not None:
        shown.append(("money per million output tokens", rounded(run.cost.money_per_million_output)))
    body.append(cards(shown))
    body += _limit(run)
    body += ["<h2>Latencies</h2>", _latency_table(run), '<div class="charts">', *_distributions(run, rows), "</div>"]
    body += ["<h2>Over time</h2>", '<div class="charts">', *_over_time(run, rows, samples), "</div>"]
    body += ["<h2>What was measured on what</h2>", table((), _fact_rows(run), "facts"), _cache(run), _definitions()]
    return document(f"Benchmark {name}", body)


def _limit(run: Run) -> list[str]:
    if run.limit is None:
        return []
    text = run.limit.sentence[0].upper() + run.limit.sentence[1:]
    lines = [f"<p>{escape(text)}. Likely to help: {escape(run.limit.advice)}.</p>"]
    rows = [("memory bandwidth while decoding", f"{run.limit.decode_share:.0%}")]
    if run.limit.prefill_share is not None:
        rows.append(("FLOPs while prefilling", f"{run.limit.prefill_share:.0%}"))
    rows.append(("FLOPs over the run", f"{run.limit.compute_share:.0%}"))
    if run.limit.roof_tokens_per_s:
        reached = run.summary.output_throughput / run.limit.roof_tokens_per_s
        rows.append((f"of the plan's {figure(run.limit.roof_tokens_per_s)} tok/s", f"{reached:.0%}"))
    lines.append(cards([(name, value) for name, value in rows]))
    return ["<h2>Against the limit</h2>", *lines, f'<p class="sub">Rates: {escape(run.limit.basis)}.</p>']


def _latency_table(run: Run) -> str:
    heads = ["ms", "mean", "median", "std", *(f"P{p:g}" for p in run.spec.percentiles)]
    rows = []
    for metric in _metrics(run):
        spread = run.summary.of(metric)
        cells = [metric.upper(), figure(spread.mean), figure(spread.median), figure(spread.std)]
        for p in run.spec.percentiles:
            doubt = " ?" if spread.count < needed(p) else ""
            cells.append(figure(dict(spread.percentiles).get(p, 0.0)) + doubt)
        rows.append(cells)
    return table(heads, rows)


def _distributions(run: Run, rows: Sequence[RequestRow]) -> list[str]:
    values = {metric: [one * 1000 for one in seconds] for metric, seconds in latencies_s(rows).items()}
    figures = []
    for metric, title in _metrics(run).items():
        spread = run.summary.of(metric)
        marks = [("P50", spread.median), *((f"P{p:g}", v) for p, v in spread.percentiles if p > 50)]
        figures.append(drawing(title, histogram(title, "ms", values[metric], marks)))
    return figures


def _over_time(run: Run, rows: Sequence[RequestRow], samples: Sequence[ServerSample]) -> list[str]:
    over = timeline(rows, run.summary.duration_s)
    at = [(n + 0.5) * over.step_s for n in range(len(over.tokens_per_s))]
    what = _tokens(run)
    curves = [Curve(f"{what} tok/s", tuple(zip(at, over.tokens_per_s, strict=True)), dots=False)]
    if run.limit is not None and run.limit.roof_tokens_per_s and at:
        top = run.limit.roof_tokens_per_s
        curves.append(Curve("the plan's prediction", ((at[0], top), (at[-1], top)), 2, dashed=True, dots=False))
    title = f"{what.capitalize()} tokens per second"
    drawn = [drawing(title, chart(title, "s", "tok/s", curves))]
    loads = [Curve("requests under way", tuple(zip(at, over.concurrency, strict=True)), dots=False)]
    if samples:
        loads.append(Curve("running", tuple((s.at_s, s.running) for s in samples), 3, dots=False))
        loads.append(Curve("waiting", tuple((s.at_s, s.waiting) for s in samples), 2, dots=False))
    drawn.append(drawing("Requests at once", chart("Requests at once", "s", "requests", loads)))
    good = [row for row in rows if row.ok and row.chunk_ns]
    step = max(1, len(good) // 400)
    firsts = tuple((row.asked_ns / 1e9, row.ttft_s * 1000) for row in sorted(good, key=lambda r: r.asked_ns)[::step])
    name = "TTFT" if run.spec.workload.writes else "E2EL"
    title = f"{name} over time"
    drawn.append(drawing(title, chart(title, "s", "ms", [Curve(name, firsts, dots=False)])))
    if any(s.kv_use for s in samples):
        kv = [Curve("KV cache", tuple((s.at_s, s.kv_use * 100) for s in samples), 3, dots=False)]
        drawn.append(drawing("KV cache in use", chart("KV cache in use", "s", "%", kv)))
    return drawn


def _fact_rows(run: Run) -> list[tuple[str, str]]:
    f, work = run.fingerprint, run.spec.workload
    rows = [(name.replace("_", " "), value) for name, value in f.server.items()]
    if f.flags:
        rows.append(("engine flags", "  ".join(f.flags)))
    rows += [(name.replace("_", " "), value) for name, value in f.hardware.items()]
    lengths = f"{work.input_len} → {work.output_len} tokens" if work.synthetic else str(work.file)
    rows.append(("workload", f"{work.dataset}, {lengths}, {work.num_prompts} prompts, seed {work.seed}"))
    rows.append(("load", f"{run.spec.load.label}; warm-up {run.spec.warmup}"))
    s = run.summary
    late = dict(s.lag.percentiles).get(99.0, 0.0)
    rows.append(("generator's lag", f"median {s.lag.median:.2f} ms, P99 {late:.2f} ms"))
    if run.server is not None:
        d = run.server
        rows.append((
            "server during the run",
            f"queue up to {d.peak_waiting:.0f}, running up to {d.peak_running:.0f}, KV cache up to "
            f"{d.peak_kv_use:.0%}, {d.preemptions:.0f} preemptions, prefix hits {d.prefix_hit_share:.0%}",
        ))  # fmt: skip
    if s.errors:
        rows.append(("errors", ", ".join(f"{count} × {kind}" for kind, count in s.errors.items())))
    if run.cost is not None:
        rows.append(("cost", f"{rounded(run.cost.gpu_hours_per_million_output)} GPU-hours per million output tokens"))
    rows += [("note", note) for note in run.notes]
    rows.append(("generator", ", ".join(f"{name} {value}" for name, value in f.generator.items())))
    return rows


def _cache(run: Run) -> str:
    """What the engine says of its cache: long, and rarely read."""
    rows = [
        (name.replace("_", " "), value) for name, value in sorted(run.fingerprint.cache.items()) if value != "None"
    ]
    if not rows:
        return ""
    return f"<details><summary>The engine's cache configuration</summary>{table((), rows, 'facts')}</details>"


def _definitions() -> str:
    return (
        '<h2>Definitions</h2><p class="sub">As in <code>vllm bench serve</code>. TTFT: from handing over the request '
        "to the first chunk with a token. E2EL: to the last such chunk. TPOT: (E2EL − TTFT) / (output tokens − 1), "
        "per request. ITL: between neighbouring chunks, all requests together. Throughput: tokens of complete "
        "answers over the time from the first request's start to the last answer's end. Failed requests are in no "
        "average. A figure with “?” rests on too few requests.</p>"
    )


def series_page(series: Series, runs: Sequence[Run], name: str) -> str:
    """The report of a sweep, a search or repeats: the curve, against the plan's roofline where there is one."""
    first = runs[0]
    body = [f"<h1>Benchmark {escape(name)}: {escape(series.kind)}</h1>"]
    body.append(f'<p class="sub">{escape(headline(first).rsplit(" · ", 1)[0])}<br>{_when(first)}</p>')
    worst = max((run.verdict for run in runs), key=("valid", "caution", "invalid").index)
    problems = [f"{run.spec.load.label}: {p.text}" for run in runs for p in run.problems]
    sentence = {"valid": "All runs are valid", "caution": "Some figures are to be read with caution"}
    body.append(verdict_box(worst, sentence.get(worst, "Some runs are invalid: do not use them"), problems))
    findings = [(key.replace("_", " "), text) for key, text in series.findings.items() if isinstance(text, str)]
    if findings:
        body.append(table((), findings, "facts"))
    best = max(runs, key=lambda run: run.summary.output_throughput)
    body += ["<h2>The curve</h2>", '<div class="charts">', *_curves(runs), "</div>"]
    body += _limit(best)
    top = _top(runs)
    heads = ["load", "req/s", "output tok/s", "tok/s each", "TTFT P50", f"P{top:g}", "TPOT P50", f"P{top:g}"]
    heads += ["E2EL P50", ""]
    if not first.spec.workload.writes:
        heads = ["load", "req/s", "input tok/s", "E2EL P50", f"P{top:g}", ""]
    rows = []
    for run in runs:
        s = run.summary
        each = 1000 / s.tpot.median if s.tpot.median else 0.0
        cells = [figure(value) for value in (s.request_throughput, throughput(run), each)]
        cells += [figure(s.ttft.median), _cut(s.ttft, top), figure(s.tpot.median), _cut(s.tpot, top)]
        mark = "" if run.verdict == "valid" else run.verdict
        if not run.spec.workload.writes:
            cells = [cells[0], cells[1]]
            rows.append([run.spec.load.label, *cells, figure(s.e2el.median), _cut(s.e2el, top), mark])
            continue
        rows.append([run.spec.load.label, *cells, figure(s.e2el.median), mark])
    body += ["<h2>All runs (ms)</h2>", table(heads, rows)]
    body += [
        "<h2>What was measured on what</h2>",
        table((), _fact_rows(first), "facts"),
        _cache(first),
        _definitions(),
    ]
    return document(f"Benchmark {name}", body)


def _top(runs: Sequence[Run]) -> float:
    """The highest percentile that was asked for."""
    return max(run.spec.percentiles[-1] for run in runs)


def _cut(spread: Spread, p: float) -> str:
    return figure(dict(spread.percentiles).get(p, 0.0)) + (" ?" if spread.count < needed(p) else "")


def _offered(run: Run) -> float:
    return run.spec.load.rate if run.spec.load.rate is not None else float(run.spec.load.concurrency or 1)


def _curves(runs: Sequence[Run]) -> list[str]:
    ordered = sorted(runs, key=_offered)
    rates = ordered[0].spec.load.rate is not None
    x_label = "requests/s offered" if rates else "requests at once"
    labels = tuple(run.spec.load.label for run in ordered)
    xs = [_offered(run) for run in ordered]
    log = not rates and min(xs) > 0 and max(xs) / min(xs) >= 8

    def curve(name: str, values: Sequence[float], colour: int = 1) -> Curve:
        return Curve(name, tuple(zip(xs, values, strict=True)), colour, labels=labels)

    measured = [curve("measured", [throughput(run) for run in ordered])]
    plan, work = ordered[0].plan, ordered[0].spec.workload
    if plan is not None and not rates and work.writes:
        front = FrontEnd.of(plan, ordered[0].fingerprint.api_servers)
        roofs = [roof(plan, x, work.input_len, work.output_len, front.processes) for x in xs]
        points = tuple((x, r) for x, r in zip(xs, roofs, strict=True) if r is not None)
        measured.append(Curve("the plan's roofline", points, 2, dashed=True, dots=False))
    top = _top(runs)
    label = f"{_tokens(ordered[0])} tok/s"
    drawn = [drawing("Throughput", chart("Throughput", x_label, label, measured, log))]
    for metric in _CARDS[work.writes]:
        title = _NAMES[metric].partition(" (")[0]
        spreads = [run.summary.of(metric) for run in ordered]
        cut = [dict(one.percentiles).get(top, 0.0) for one in spreads]
        curves = [curve("P50", [one.median for one in spreads]), curve(f"P{top:g}", cut, 2)]
        drawn.append(drawing(title, chart(title, x_label, "ms", curves, log)))
    if not work.writes:
        return drawn
    trade = [
        (1000 / run.summary.tpot.median if run.summary.tpot.median else 0.0, run.summary.output_throughput)
        for run in ordered
    ]
    pareto = [Curve("runs", tuple(trade), 3, labels=labels)]
    title = "Speed of one user against throughput of all"
    return [*drawn, drawing(title, chart(title, "tok/s of one user", "output tok/s", pareto, zero_x=True))]
