"""Several measurements that belong together: repeats, sweeps, the quick profile, and the search for a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, UsageError
from corral.lab.bench import store
from corral.lab.bench.gate import Problem
from corral.lab.bench.measure import Bench, Finished
from corral.lab.bench.search import Probe, Searching, passes, probe_requests
from corral.lab.bench.spec import LoadShape, Slo, Spec

_SPOILING = ("generator_lag", "zero_tokens", "other_traffic")
_TRIES = 3
OnRun = Callable[[Finished], None]


async def measure_series(
    bench: Bench, kind: str, specs: Sequence[Spec], folder: Path, on_run: OnRun | None = None
) -> list[Finished]:
    """Measure each spec into a subfolder; the list is saved after each, so that an interrupted series is readable."""
    book = _Book(kind, folder)
    done = []
    for spec in specs:
        finished = await book.measure(bench, spec)
        done.append(finished)
        if on_run is not None:
            on_run(finished)
    return done


class _Book:
    """Keeps series.json in step with the runs that were made."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._series = store.Series(store.VERSION, kind, time.time())
        self.folder = folder

    async def measure(self, bench: Bench, spec: Spec) -> Finished:
        name = f"p{len(self._series.runs) + 1:02d}"
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        try:
            return await bench.run(spec, folder)
        finally:
            if (folder / "run.json").is_file():
                self._series = replace(self._series, runs=(*self._series.runs, name))
                self.save()
            else:
                folder.rmdir()

    def save(self, **findings: Any) -> store.Series:
        self._series = replace(self._series, findings={**self._series.findings, **findings})
        store.save_series(self.folder, self._series)
        return self._series


def reseeded(spec: Spec, number: int) -> Spec:
    """The same with other prompts, so that no run finds the earlier one's in the prefix cache."""
    return replace(spec, workload=replace(spec.workload, seed=(spec.workload.seed + 7919 * number) % 2**31))


def _at_rate(load: LoadShape, rate: float) -> LoadShape:
    """The same load at another rate; a trace's own times would leave the rate without effect."""
    return replace(load, rate=rate, arrival="poisson" if load.arrival == "trace" else load.arrival)


def sweep_specs(base: Spec, concurrencies: Sequence[int] = (), rates: Sequence[float] = ()) -> list[Spec]:
    """One spec for each point of the curve."""
    loads = [LoadShape(concurrency=n, seconds=base.load.seconds) for n in concurrencies]
    loads += [_at_rate(base.load, rate) for rate in rates]
    specs = []
    for number, load in enumerate(loads):
        spec = reseeded(replace(base, load=load), number)
        concurrency = load.concurrency or 4
        specs.append(replace(spec, warmup=min(concurrency, 16) if number == 0 or base.warmup else base.warmup))
    return specs


@dataclass(frozen=True)
class _Quick:
    concurrencies: tuple[int, ...] = (1, 4, 16)
    seconds: float = 6.0
    most_per_place: int = 200


def quick_specs(base: Spec) -> list[Spec]:
    """A few seconds alone, with some, and with many at once: latency, and what there is of throughput."""
    quick = _Quick()
    base = replace(base, percentiles=(90.0,), load=LoadShape(concurrency=1, seconds=quick.seconds))
    specs = sweep_specs(base, quick.concurrencies)
    return [
        replace(
            spec, workload=replace(spec.workload, num_prompts=quick.most_per_place * (spec.load.concurrency or 1))
        )
        for spec in specs
    ]


def _refuse_unjudgeable(base: Spec, slos: Sequence[Slo]) -> None:
    for slo in slos:
        if base.workload.one_token and slo.metric in ("tpot", "itl"):
            raise UsageError(
                f"{slo} cannot be judged with --output-len 1: {slo.metric} needs two tokens.",
                "Raise --output-len, or limit ttft or e2el.",
            )


async def _measure_probe(book: _Book, bench: Bench, spec: Spec, done: list[Finished]) -> Finished:
    """One probe, added to `done`; one that a hiccup of this machine spoilt is measured once more."""
    spoilt: list[Problem] = []
    for _ in range(_TRIES):
        finished = await book.measure(bench, reseeded(spec, 100 + len(done)))
        done.append(finished)
        spoilt = [p for p in finished.run.problems if p.kind in _SPOILING]
        if not spoilt:
            return finished
    raise CorralError(f"the search cannot go on: {spoilt[0].text}.", f"The probes are in {book.folder}.")


async def search_limit(
    bench: Bench,
    base: Spec,
    slos: Sequence[Slo],
    folder: Path,
    *,
    over: str = "rate",
    seconds: float = 15.0,
    tolerance: float = 0.03,
    most: int = 12,
    saturate: int = 64,
    on_probe: Callable[[Probe, Finished], None] | None = None,
) -> tuple[Searching, list[Finished]]:
    """Find the highest rate (or concurrency) that keeps every promise; every probe is a saved run."""
    _refuse_unjudgeable(base, slos)
    book = _Book("search", folder)
    wanted = tuple(sorted({*base.percentiles, *(slo.percentile for slo in slos), 99.0}))
    base = replace(base, percentiles=wanted)
    done: list[Finished] = []
    if over == "rate":
        load = LoadShape(concurrency=saturate, seconds=seconds)
        count = max(saturate * 4, min(base.workload.num_prompts, 4000))
        first = replace(base, load=load, workload=replace(base.workload, num_prompts=count))
        done.append(await book.measure(bench, first))
        # while places are filled and drained less is finished: the steady middle tells what the server can do
        searching = Searching(_steady_rate(done[0]), tolerance, most - 1)
    else:
        searching = Searching(float(saturate), tolerance, most, whole=True)
    while (offered := searching.next()) is not None:
        finished = await _measure_probe(book, bench, _probe_spec(base, slos, over, offered, seconds, len(done)), done)
        passed, why = passes(slos, finished.run.summary, finished.rows, over == "rate")
        probe = Probe(offered, passed, why, finished.folder.name)
        searching.add(probe)
        if on_probe is not None:
            on_probe(probe, finished)
    book.save(**_findings(searching, slos, over, len(done)), probes=[vars(probe) for probe in searching.probes])
    return searching, done


def _steady_rate(finished: Finished) -> float:
    """Requests finished per second between the first and the last tenth of the answers."""
    ends = sorted(row.done_ns for row in finished.rows if row.ok)
    cut = len(ends) // 10
    inner = ends[cut : len(ends) - cut] if len(ends) >= 50 else ends
    if len(inner) < 2 or inner[-1] == inner[0]:
        return max(finished.run.summary.request_throughput, 0.01)
    return (len(inner) - 1) / ((inner[-1] - inner[0]) / 1e9)


def _probe_spec(base: Spec, slos: Sequence[Slo], over: str, offered: float, seconds: float, number: int) -> Spec:
    if over == "rate":
        load = replace(_at_rate(base.load, offered), concurrency=None, seconds=None)
        count = probe_requests(slos, offered, seconds)
    else:
        load = LoadShape(concurrency=int(offered), seconds=seconds * 4)
        count = probe_requests(slos, offered * 4, seconds)
    spec = reseeded(replace(base, load=load), number)
    return replace(spec, workload=replace(spec.workload, num_prompts=count), warmup=0)


def _findings(searching: Searching, slos: Sequence[Slo], over: str, probes: int) -> dict[str, Any]:
    unit = "req/s" if over == "rate" else "requests at once"
    promises = ", ".join(map(str, slos))
    best, worst = searching.best, searching.worst
    if best is None:
        lowest = min((probe for probe in searching.probes), key=lambda probe: probe.load)
        text = f"no load that was tried keeps {promises}; at {lowest.load:.15g} {unit}: {lowest.why}"
    else:
        above = next((probe for probe in searching.probes if probe.load == worst), None)
        text = f"{best:.4g} {unit} is the highest load that keeps {promises}"
        text += f"; at {above.load:.4g} {above.why}" if above else "; nothing higher was tried"
    return {"answer": text, "best": best, "first_failure": worst, "probes_made": probes}
