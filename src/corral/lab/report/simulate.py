"""Forecasts and validations for people: lines for the terminal, and one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from corral.base.wording import counted
from corral.lab.report.bench import figure
from corral.lab.report.html import cards, document, table
from corral.lab.report.svg import Curve, chart
from corral.lab.report.tables import table_lines, wrapped
from corral.lab.simulate.forecast import STEP_ERROR, Forecast, SimServer
from corral.lab.simulate.outcome import SimOutcome, SloResult
from corral.lab.simulate.validation import Validation

HEADS = ["LOAD", "REPLICAS", "TTFT P50", "P99", "TPOT P50", "E2EL P50", "P99", "OUT TOK/S", "KV", "PREEMPTED", "SLO"]
SPARED = ("PREEMPTED", "KV", "P99", "TPOT P50")


def _ms(value: float) -> str:
    return f"{value / 1000:,.2f} s" if value >= 1000 else f"{value:.1f} ms"


def _row(one: Forecast) -> list[str]:
    outcome = one.outcome
    t, p, e = outcome.latencies["ttft"], outcome.latencies["tpot"], outcome.latencies["e2el"]
    met_text = {None: "-", True: "met", False: "not met"}[one.meets]
    values = [_ms(t["p50"]), _ms(t["p99"]), _ms(p["p50"]), _ms(e["p50"]), _ms(e["p99"])]
    used = f"{outcome.peak_kv_use:.0%}"
    return [one.label, str(outcome.members), *values, figure(outcome.output_throughput), used,
            str(outcome.preemptions), met_text]  # fmt: skip


def error_sentence(server: SimServer, rows: Sequence[Forecast]) -> str:
    """A sentence about the error of these forecasts."""
    if server.fit is None:
        return f"Error: not known. Step times come from {server.basis}; `--from RUN` fits them to measured runs."
    interval_text = _range(rows[0]) if len(rows) == 1 else "of each load, below"
    doubt = f" {server.fit.doubt}" if server.fit.doubt else ""
    return (
        f"Error: {interval_text} (nine of ten held-out figures lay within"
        f" such intervals: step times {STEP_ERROR:.0%} longer or shorter, and the worst error of the fit on its own"
        f" runs); {server.basis}.{doubt}"
    )


def _range(one: Forecast) -> str:
    """The interval of a forecast's figures."""
    outcome = [(name, *one.interval[name]) for name in ("ttft", "tpot", "e2el") if one.interval]
    return ", ".join(f"{name.upper()} {low:+.0%} to {high:+.0%}" for name, low, high in outcome) or "not known"


def slo_sentence(outcome: SloResult) -> str:
    """Whether a service level is met, and how many requests are within its limit."""
    slo = outcome.slo
    limit = f"{slo.limit_ms / 1000:g} s" if slo.limit_ms >= 1000 else f"{slo.limit_ms:g} ms"
    name = f"{slo.metric.upper()} {slo.statistic.upper() if slo.statistic.startswith('p') else slo.statistic}"
    met_text = f"{name} {_ms(outcome.value_ms)}, limit {limit}: {'met' if outcome.met else 'missed'}"
    return f"{met_text}; {outcome.within:.1%} of the requests had theirs within {limit}."


def rate_sentence(limits: tuple[float | None, ...], rates: tuple[float, float], levels: str) -> str:
    """A sentence with the highest rate, and with a fit the rates between which it lies."""
    low, high = rates
    best, *around = limits
    if best is None:
        text = f"{low:g} requests per second do not meet {levels}"
    else:
        untried = " (more was not tried)" if best == high else ""
        text = f"The highest rate that meets {levels} is {best:.3g} requests per second{untried}"
    if set(around) <= {best}:
        return f"{text}."
    worst, quickest = (f"less than {low:g}" if one is None else f"{one:.3g}" for one in around)
    return f"{text}; {worst} if steps take longer than the fit says, {quickest} if they are shorter."


def behind_sentence(outcome: SimOutcome) -> str:
    """A warning that more requests arrive than are answered; empty where the servers keep up."""
    if not outcome.gained:
        return ""
    come, answered = figure(outcome.arrival_rate), figure(outcome.arrival_rate * (1 - outcome.gained))
    return (
        f"It does not keep up: in the second half {come} requests arrive each second and {answered} are answered, so"
        " these latencies are of a short time. More requests (--num-prompts) show whether they go on growing."
    )


def _judged(outcome: SimOutcome) -> list[str]:
    """Sentences about the service levels of a load."""
    return [text for text in (*map(slo_sentence, outcome.slos), behind_sentence(outcome)) if text]


def forecast_lines(server: SimServer, rows: Sequence[Forecast], answer: str, columns: int | None) -> Iterator[str]:
    """The forecasts for a terminal."""
    yield from table_lines(HEADS, [_row(one) for one in rows], 1, columns, SPARED)
    yield ""
    if answer:
        yield from wrapped(answer, columns)
    yield from wrapped(error_sentence(server, rows), columns)
    for text in dict.fromkeys(text for one in rows for text in one.beyond):
        yield from wrapped(f"Beyond what was measured: {text}.", columns)
    refused = sum(one.outcome.refused for one in rows)
    if refused:
        yield f"{refused:,} requests are longer than the KV cache and were refused."
    for one in rows:
        name = f"{one.label}, {counted(one.outcome.members, 'replica')}"
        if one.interval and len(rows) > 1:
            yield from wrapped(f"{name}: {_range(one)}.", columns)
        for text in _judged(one.outcome):
            yield from wrapped(f"{name}: {text}", columns)
    hours = ", ".join(figure(one.gpu_hours) for one in rows if one.gpu_hours)
    if hours:
        money = ", ".join(f"{one.cost:,.2f}" for one in rows if one.cost is not None)
        yield from wrapped(f"GPU hours: {hours}{'; cost: ' + money if money else ''}", columns)


def validation_lines(outcome: Validation, columns: int | None) -> Iterator[str]:
    """The table of errors."""
    heads = ["HELD OUT", "REQUESTS", "E2EL MEAN", "SIMULATED", "PLANNER", "TTFT P50", "SIMULATED", "PLANNER", "TOK/S"]
    rows = []
    for one in outcome.held_out:
        planned = one.planned
        e2el, ttft = (f"{planned.e2el_mean:+.0%}", f"{planned.ttft_p50:+.0%}") if planned else ("-", "-")
        rows.append([
            one.name, str(one.requests), _ms(one.e2el_mean_ms), f"{one.simulated.e2el_mean:+.1%}", e2el,
            _ms(one.ttft_p50_ms), f"{one.simulated.ttft_p50:+.1%}", ttft, f"{one.simulated.throughput:+.1%}",
        ])  # fmt: skip
    yield from table_lines(heads, rows, 1, columns, ("REQUESTS",), tail=0)
    yield ""
    for name, metric in (("E2EL", "e2el_mean"), ("TTFT P50", "ttft_p50"), ("throughput", "throughput")):
        simulated, planned_ = outcome.median_error(metric), outcome.median_error(metric, planned=True)
        planner_text = f"; the planner alone {planned_:.1%}" if planned_ is not None else ""
        yield from wrapped(f"{name}: median error {simulated:.1%}{planner_text}; on the fitted runs"
                           f" {outcome.fit.typical(metric):.1%}", columns)  # fmt: skip
    names = {"e2el": "E2EL", "ttft": "TTFT P50", "tpot": "TPOT P50", "throughput": "throughput"}
    parts = ", ".join(f"{label} {outcome.covered(name)}" for name, label in names.items())
    text = f"within the interval of the forecast, of {len(outcome.held_out)} held-out runs: {parts}"
    yield from wrapped(text, columns)
    for limit in outcome.limits:
        measured, simulated_ = (f"{one:.3g}" if one else "outside" for one in (limit.measured, limit.simulated))
        off = f" ({limit.error:+.1%})" if limit.error is not None else ""
        yield from wrapped(f"highest rate with {limit.slo}: measured {measured}, simulated {simulated_} req/s{off}",
                           columns)  # fmt: skip
    yield from wrapped(outcome.fit.doubt, columns) if outcome.fit.doubt else ()
    for text in outcome.assumed:
        yield f"assumed, because the runs do not say: {text}"


def forecast_page(server: SimServer, rows: Sequence[Forecast], answer: str) -> str:
    """One self-contained file with charts."""
    body = ["<h1>Simulation</h1>", f'<p class="sub">{escape(error_sentence(server, rows))}</p>']
    if answer:
        body.append(f"<p><strong>{escape(answer)}</strong></p>")
    body += [f"<p>Beyond what was measured: {escape(text)}.</p>" for one in rows for text in one.beyond]
    body.append(table(HEADS, [_row(one) for one in rows]))
    for one in rows:
        moments = one.outcome.moments
        body.append(f"<h2>{escape(one.label)}, {counted(one.outcome.members, 'replica')}</h2>")
        if one.interval:
            body.append(f"<p>{escape(_range(one))}</p>")
        body += [f"<p>{escape(text)}</p>" for text in _judged(one.outcome)]
        body.append(cards([
            ("requests", f"{one.outcome.completed:,}"), ("output tok/s", figure(one.outcome.output_throughput)),
            ("prompt tokens from the cache", f"{one.outcome.cached_tokens:,}"),
            ("preemptions", f"{one.outcome.preemptions:,}"),
        ]))  # fmt: skip
        curves = {
            "KV cache in use, %": [("in use", [(m.at_s, 100 * m.kv_use) for m in moments])],
            "requests": [("running", [(m.at_s, float(m.running)) for m in moments]),
                         ("waiting", [(m.at_s, float(m.waiting)) for m in moments])],
            "preemptions so far": [("preemptions", [(m.at_s, float(m.preemptions)) for m in moments])],
        }  # fmt: skip
        for title, lines in curves.items():
            drawn = [Curve(name, tuple(points), n + 1, dots=False) for n, (name, points) in enumerate(lines)]
            body.append(f"<figure>{chart(title, 'seconds', title, drawn)}</figure>")
    return document("Simulation", body)
