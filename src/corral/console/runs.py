"""The Runs view: saved measurements, alone, over each other and compared; the rows of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from corral.base.errors import CorralError, NotFoundError
from corral.base.record import to_json
from corral.console.context import ConsoleContext, answer, whole_number
from corral.lab.bench import store
from corral.lab.bench.compare import ListedRun, all_runs, compared
from corral.lab.bench.metrics import RequestRow, latencies_s, percentile
from corral.lab.bench.spec import METRICS
from corral.lab.report.bench import headline, timeline
from corral.lab.report.bench_page import saved_page
from corral.use.batch.core.folder import known_outputs
from corral.use.batch.inspect import failure_groups, inspect, rows_of

_CUTS = (*range(0, 100, 2), 99, 100)  # percentiles of a drawn distribution
_MOST_ROWS = 200


def routes(_: ConsoleContext) -> list[BaseRoute]:
    def path(name: str, work: Callable[[Mapping[str, str]], Any]) -> Route:
        async def handle(request: Request) -> Response:
            return answer(await run_in_threadpool(work, dict(request.query_params)))

        return Route(f"/api/runs{name}", handle, methods=["GET"])

    return [
        path("", lambda _: {"runs": run_list(), "batches": batch_list()}),
        path("/run", lambda query: run_page(query.get("name", ""))),
        path("/report", lambda query: {"html": report_of(query.get("name", ""))}),
        path("/compare", lambda query: comparison(query.get("a", ""), query.get("b", ""))),
        path("/batch", lambda query: batch_page(query.get("output", ""))),
        path("/rows", batch_rows),
    ]


# Measurements


def run_list() -> list[ListedRun]:
    """Newest first."""
    return sorted(all_runs(), key=lambda one: -one.created_s)


def _folder(name: str) -> Path:
    """The folder of a listed run, or of a point of a listed series; nothing outside."""
    known = {folder.name for folder in store.runs_dir().glob("*")} if store.runs_dir().is_dir() else set()
    first, _, point = name.partition("/")
    if first not in known or "/" in point or point in (".", ".."):
        raise NotFoundError(f"no run is called {name[:80]!r}.", "The list shows those there are.")
    return store.find(name) if point else store.runs_dir() / first


def run_page(name: str) -> dict[str, Any]:
    """A run with its curves, or a series with a line for each of its runs."""
    folder = _folder(name)
    if store.is_series(folder):
        series, runs = store.load_series(folder), store.load_runs(folder)
        points = [_figures(f"{name}/{part}", run) for part, run in zip(series.runs, runs, strict=True)]
        return {"kind": series.kind, "name": name, "findings": series.findings, "points": points}
    run = store.load_run(folder)
    rows = store.load_rows(folder)
    return {"kind": "run", **_figures(name, run), **_curves(run, rows)}


def _figures(name: str, run: store.Run) -> dict[str, Any]:
    s, limit = run.summary, run.limit
    return {
        "name": name,
        "title": headline(run),
        "label": run.label,
        "load": run.spec.load.label,
        "concurrency": run.spec.load.concurrency,
        "rate": run.spec.load.rate,
        "created_s": run.created_s,
        "verdict": run.verdict,
        "problems": [{"severity": one.severity, "text": one.text} for one in run.problems],
        "notes": run.notes,
        "completed": s.completed,
        "failed": s.failed,
        "errors": s.errors,
        "duration_s": s.duration_s,
        "request_throughput": s.request_throughput,
        "output_throughput": s.output_throughput,
        "input_throughput": s.input_throughput,
        "mean_concurrency": s.mean_concurrency,
        "latency": {metric: _spread(run, metric) for metric in METRICS},
        "limit": None if limit is None else {**to_json(limit), "sentence": limit.sentence,
                                             "reached": _reached(run)},
        "cost": run.cost,
        "facts": {**run.fingerprint.server, **run.fingerprint.hardware},
    }  # fmt: skip


def report_of(name: str) -> str:
    """The page that `corral bench report` writes."""
    return saved_page(_folder(name))


def _spread(run: store.Run, metric: str) -> dict[str, Any]:
    found = run.summary.of(metric)
    cuts = {f"p{p:g}": value for p, value in found.percentiles}
    return {"count": found.count, "mean": found.mean, "median": found.median, **cuts}


def _reached(run: store.Run) -> float | None:
    roof = run.limit.roof_tokens_per_s if run.limit else None
    return run.summary.output_throughput / roof if roof else None


def _curves(run: store.Run, rows: Sequence[RequestRow]) -> dict[str, Any]:
    over = timeline(rows, run.summary.duration_s)
    values = latencies_s(rows)
    return {
        "timeline": {"step_s": over.step_s, "tokens_per_s": over.tokens_per_s, "concurrency": over.concurrency},
        "distribution": {"percent": _CUTS, **{name: _cut(found) for name, found in values.items()}},
    }


def _cut(values: Sequence[float]) -> list[float]:
    """Milliseconds at each percentile of `_CUTS`."""
    ordered = sorted(values)
    return [percentile(ordered, p) * 1000 for p in _CUTS] if ordered else []


def comparison(a: str, b: str) -> dict[str, Any]:
    """Two runs side by side: what changed, and whether that is more than noise."""
    found = compared(_folder(a), _folder(b))
    invalid = [name for name, bad in zip((a, b), found.invalid, strict=True) if bad]
    compared_figures = {"figures": found.rows, "differs": found.differs, "repeats": found.repeats}
    return {"a": a, "b": b, **compared_figures, "invalid": invalid}


# Batches


def batch_list() -> list[dict[str, Any]]:
    """Batches that left a note, the one worked on last first."""
    found = []
    for output in known_outputs()[:100]:
        try:
            found.append(_batch_status(str(output)))
        except (CorralError, OSError) as error:
            words = str(error)
            found.append({"output": str(output), "shown": _shown(output), "state": "unreadable", "reason": words})
    return found


def _batch_status(output: str) -> dict[str, Any]:
    s = inspect(output)
    return {
        "output": s.output, "shown": _shown(Path(s.output)),
        "state": s.state, "reason": s.reason, "rows": s.rows, "fine": s.fine, "failed": s.failed,
        "model": s.model, "input": _shown(Path(s.input)) if s.input else "",
        "created_s": s.created_s, "runners": len(s.runners),
    }  # fmt: skip


def _shown(path: Path) -> str:
    """A path as people write it: what lies in their home begins with ~."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def _known(output: str) -> str:
    if Path(output) not in known_outputs():
        raise NotFoundError(f"no batch writes to {output[:200]!r}.", "The list shows those that are known.")
    return output


def batch_page(output: str) -> dict[str, Any]:
    """How a batch stands, and what its rows failed of."""
    return {**_batch_status(_known(output)), "failures": failure_groups(output)}


def batch_rows(query: Mapping[str, str]) -> dict[str, Any]:
    """A page of its rows: those answered, or those that failed of one cause."""
    at, count = whole_number(query, "at") or 0, whole_number(query, "count", 1, _MOST_ROWS) or 50
    failed = query.get("failed") == "1"
    found = rows_of(_known(query.get("output", "")), failed, at, count, query.get("code", ""), query.get("like", ""))
    return {"rows": found, "at": at}
