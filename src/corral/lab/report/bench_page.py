"""One self-contained HTML file of a run or a series: no script, no font, no image is loaded from anywhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from corral.lab.bench.gate import needed
from corral.lab.bench.limit import FrontEnd, roof
from corral.lab.bench.metrics import RequestRow, Spread, latencies_s
from corral.lab.bench.server_metrics import ServerSample
from corral.lab.bench.store import Run, Series
from corral.lab.report.bench import figure, headline, timeline
from corral.lab.report.svg import Curve, chart, histogram
from corral.plan.speed import rounded

_STYLE = """
:root{--bg:#fbfbfa;--fg:#1d2329;--dim:#66707a;--line:#dcdfe2;--card:#fff;--c1:#2563c9;--c2:#c2410c;--c3:#15803d;
--good:#15803d;--warn:#b45309;--bad:#b91c1c}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e6e8ea;--dim:#98a2ac;--line:#2e343a;--card:#1b1f23;
--c1:#6aa5ff;--c2:#ff9a5c;--c3:#5fd08a;--good:#5fd08a;--warn:#f0b24a;--bad:#ff7b72}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 16px 48px}h1{font-size:1.35rem;margin:.2em 0}
h2{font-size:1.05rem;margin:1.8em 0 .6em}.sub{color:var(--dim);overflow-wrap:anywhere}
.verdict{border-left:5px solid;padding:.5em .9em;margin:1em 0;background:var(--card);border-radius:4px}
.valid{border-color:var(--good)}.caution{border-color:var(--warn)}.invalid{border-color:var(--bad)}
.verdict ul{margin:.3em 0;padding-left:1.2em}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px}
.card{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.55em .8em}
.card b{display:block;font-size:1.3rem;font-variant-numeric:tabular-nums}.card span{color:var(--dim);font-size:.85rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:6px;padding:8px}
figcaption{font-size:.9rem;padding:0 4px 4px}svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto;margin-bottom:14px}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{padding:.35em .6em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}.facts td{white-space:normal;text-align:left;overflow-wrap:anywhere}
.facts td:first-child{color:var(--dim);width:11em}
@media(max-width:480px){table{font-size:.82rem}th,td{padding:.35em .3em}.facts td:first-child{width:8em}}
.grid{stroke:var(--line);stroke-width:1}.tick{fill:var(--dim);font-size:12.5px}.axis{fill:var(--fg);font-size:13px}
polyline{fill:none;stroke-width:2}.c1{stroke:var(--c1);stroke-width:2}.c2{stroke:var(--c2);stroke-width:2}
.c3{stroke:var(--c3);stroke-width:2}.d1,.b1{fill:var(--c1)}.d2{fill:var(--c2)}.d3{fill:var(--c3)}
.mark{stroke:var(--c2);stroke-width:1.5;stroke-dasharray:3 3}
"""
_NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (after the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def document(title: str, body: Sequence[str]) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _figure(caption: str, drawing: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{drawing}</figure>" if drawing else ""


def cards(pairs: Sequence[tuple[str, str]]) -> str:
    cells = (f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in pairs)
    return f'<div class="cards">{"".join(cells)}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if heads else ""
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def verdict_box(verdict: str, sentence: str, problems: Sequence[str]) -> str:
    listed = f"<ul>{''.join(f'<li>{escape(p)}</li>' for p in problems)}</ul>" if problems else ""
    return f'<div class="verdict {verdict}"><b>{escape(sentence)}</b>{listed}</div>'


def _when(run: Run) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(run.created_s))


_SENTENCES = {"valid": "Valid", "caution": "Read with caution", "invalid": "Invalid: do not use these figures"}


def run_page(run: Run, rows: Sequence[RequestRow], samples: Sequence[ServerSample], name: str) -> str:
    """The report of one run."""
    s = run.summary
    body = [f"<h1>Benchmark {escape(name)}</h1>", f'<p class="sub">{escape(headline(run))}<br>{_when(run)}</p>']
    body.append(verdict_box(run.verdict, _SENTENCES[run.verdict], [p.text for p in run.problems]))
    shown = [
        ("output tokens/s", figure(s.output_throughput)),
        ("requests/s", figure(s.request_throughput)),
        ("median TTFT, ms", figure(s.ttft.median)),
        ("median TPOT, ms", figure(s.tpot.median)),
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
    for metric in _NAMES:
        found = run.summary.of(metric)
        cells = [metric.upper(), figure(found.mean), figure(found.median), figure(found.std)]
        for p in run.spec.percentiles:
            doubt = " ?" if found.count < needed(p) else ""
            cells.append(figure(dict(found.percentiles).get(p, 0.0)) + doubt)
        rows.append(cells)
    return table(heads, rows)


def _distributions(run: Run, rows: Sequence[RequestRow]) -> list[str]:
    values = {metric: [one * 1000 for one in found] for metric, found in latencies_s(rows).items()}
    figures = []
    for metric, title in _NAMES.items():
        found = run.summary.of(metric)
        marks = [("P50", found.median), *((f"P{p:g}", v) for p, v in found.percentiles if p > 50)]
        figures.append(_figure(title, histogram(title, "ms", values[metric], marks)))
    return figures


def _over_time(run: Run, rows: Sequence[RequestRow], samples: Sequence[ServerSample]) -> list[str]:
    over = timeline(rows, run.summary.duration_s)
    at = [(n + 0.5) * over.step_s for n in range(len(over.tokens_per_s))]
    curves = [Curve("output tok/s", tuple(zip(at, over.tokens_per_s, strict=True)), dots=False)]
    if run.limit is not None and run.limit.roof_tokens_per_s and at:
        top = run.limit.roof_tokens_per_s
        curves.append(Curve("the plan's prediction", ((at[0], top), (at[-1], top)), 2, dashed=True, dots=False))
    drawn = [_figure("Output tokens per second", chart("Output tokens per second", "s", "tok/s", curves))]
    loads = [Curve("requests under way", tuple(zip(at, over.concurrency, strict=True)), dots=False)]
    if samples:
        loads.append(Curve("running", tuple((s.at_s, s.running) for s in samples), 3, dots=False))
        loads.append(Curve("waiting", tuple((s.at_s, s.waiting) for s in samples), 2, dots=False))
    drawn.append(_figure("Requests at once", chart("Requests at once", "s", "requests", loads)))
    good = [row for row in rows if row.ok and row.chunk_ns]
    step = max(1, len(good) // 400)
    firsts = tuple((row.asked_ns / 1e9, row.ttft_s * 1000) for row in sorted(good, key=lambda r: r.asked_ns)[::step])
    drawn.append(_figure("TTFT over time", chart("TTFT over time", "s", "ms", [Curve("TTFT", firsts, dots=False)])))
    if any(s.kv_use for s in samples):
        kv = [Curve("KV cache", tuple((s.at_s, s.kv_use * 100) for s in samples), 3, dots=False)]
        drawn.append(_figure("KV cache in use", chart("KV cache in use", "s", "%", kv)))
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
    found = [(key.replace("_", " "), text) for key, text in series.findings.items() if isinstance(text, str)]
    if found:
        body.append(table((), found, "facts"))
    best = max(runs, key=lambda run: run.summary.output_throughput)
    body += ["<h2>The curve</h2>", '<div class="charts">', *_curves(runs), "</div>"]
    body += _limit(best)
    top = _top(runs)
    heads = ["load", "req/s", "output tok/s", "tok/s each", "TTFT P50", f"P{top:g}", "TPOT P50", f"P{top:g}"]
    heads += ["E2EL P50", ""]
    rows = []
    for run in runs:
        s = run.summary
        each = 1000 / s.tpot.median if s.tpot.median else 0.0
        cells = [figure(value) for value in (s.request_throughput, s.output_throughput, each)]
        cells += [figure(s.ttft.median), _cut(s.ttft, top), figure(s.tpot.median), _cut(s.tpot, top)]
        mark = "" if run.verdict == "valid" else run.verdict
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


def _cut(found: Spread, p: float) -> str:
    return figure(dict(found.percentiles).get(p, 0.0)) + (" ?" if found.count < needed(p) else "")


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

    throughput = [curve("measured", [run.summary.output_throughput for run in ordered])]
    plan, work = ordered[0].plan, ordered[0].spec.workload
    if plan is not None and not rates:
        front = FrontEnd.of(plan, ordered[0].fingerprint.api_servers)
        roofs = [roof(plan, x, work.input_len, work.output_len, front.processes) for x in xs]
        points = tuple((x, r) for x, r in zip(xs, roofs, strict=True) if r is not None)
        throughput.append(Curve("the plan's roofline", points, 2, dashed=True, dots=False))
    top = _top(runs)
    cut = [dict(run.summary.ttft.percentiles).get(top, 0.0) for run in ordered]
    firsts = [curve("P50", [run.summary.ttft.median for run in ordered]), curve(f"P{top:g}", cut, 2)]
    cut = [dict(run.summary.tpot.percentiles).get(top, 0.0) for run in ordered]
    gaps = [curve("P50", [run.summary.tpot.median for run in ordered]), curve(f"P{top:g}", cut, 2)]
    trade = [
        (1000 / run.summary.tpot.median if run.summary.tpot.median else 0.0, run.summary.output_throughput)
        for run in ordered
    ]
    drawn = [
        _figure("Throughput", chart("Throughput", x_label, "output tok/s", throughput, log)),
        _figure("Time to first token", chart("Time to first token", x_label, "ms", firsts, log)),
        _figure("Time per output token", chart("Time per output token", x_label, "ms", gaps, log)),
    ]
    pareto = [Curve("runs", tuple(trade), 3, labels=labels)]
    title = "Speed of one user against throughput of all"
    return [*drawn, _figure(title, chart(title, "tok/s of one user", "output tok/s", pareto, zero_x=True))]
