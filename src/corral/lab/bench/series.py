"""Several measurements that belong together: repeats, sweeps, the quick profile, and the search for a limit.

The search finds the highest load that still meets its service levels, in few probes. A saturating probe (closed loop,
many at once) measures the most that the server can finish; the answer lies below. From there the search narrows
geometrically: each probe offers a rate in the open loop, and passes when every service level is met and the server
keeps up, so that first-token times do not grow with time (a queue that grows breaks any service level sooner or
later, however short the probe). It ends when the bracket is narrower than the tolerance, or after `most` probes.
`Searching` is pure: it returns the next load and receives whether it passed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, UsageError
from corral.lab.bench import store
from corral.lab.bench.gate import Problem
from corral.lab.bench.measure import Bench, Finished
from corral.lab.bench.metrics import RequestRow, Summary, slope_of, statistic
from corral.lab.bench.spec import LoadShape, Slo, Spec, refuse_tokens

_GROWTH = 0.015  # seconds of waiting gained per second: the queue grows


@dataclass(frozen=True)
class Probe:
    """One load that was tried."""

    load: float
    passed: bool
    why: str = ""
    run: str = ""


@dataclass
class Searching:
    """Narrows the bracket between the highest load that passed and the lowest that did not."""

    ceiling: float  # the most the server finishes
    tolerance: float = 0.03
    most: int = 12
    whole: bool = False  # loads are whole numbers (concurrency)
    probes: list[Probe] = field(default_factory=list)

    @property
    def best(self) -> float | None:
        return max((probe.load for probe in self.probes if probe.passed), default=None)

    @property
    def worst(self) -> float | None:
        """The lowest load that failed above the best that passed."""
        best = self.best or 0.0
        return min((probe.load for probe in self.probes if not probe.passed and probe.load > best), default=None)

    def next(self) -> float | None:
        """The load to try, or None when the answer is known well enough."""
        if len(self.probes) >= self.most:
            return None
        best, worst = self.best, self.worst
        if not self.probes:
            return self._round(self.ceiling * 0.95)
        if best is None:
            lowest = min(probe.load for probe in self.probes)
            if lowest <= self.ceiling / 4096 or (self.whole and lowest <= 1):
                return None
            return self._round(lowest / (1.25 if len(self.probes) == 1 else 2.0))
        if worst is None:
            return self._round(best * 1.08)
        if worst / best <= 1 + self.tolerance or (self.whole and worst - best <= 1):
            return None
        return self._round(math.sqrt(best * worst))

    def add(self, probe: Probe) -> None:
        self.probes.append(probe)

    def _round(self, load: float) -> float:
        if not self.whole:
            return float(f"{load:.4g}")
        tried = {probe.load for probe in self.probes}
        load = max(1, round(load))
        return float(load if load not in tried else load + 1)


def probe_requests(slos: Sequence[Slo], rate: float, seconds: float, most: int = 5000) -> int:
    """Requests of one probe: long enough in time, and enough for the highest percentile among the service levels."""
    from corral.lab.bench.gate import needed

    least = max((needed(slo.percentile) for slo in slos), default=50)
    return min(most, max(math.ceil(rate * seconds), min(least, 1000)))


def backlog_slope(rows: Sequence[RequestRow]) -> float:
    """Seconds of first-token time gained per second of sending, 0 unless that is more than chance (t over 4)."""
    points = [(row.intended_ns / 1e9, row.ttft_s) for row in rows if row.ok and row.chunk_ns]
    if len(points) < 20:
        return 0.0
    slope, error = slope_of(points)
    return slope if slope > 4 * error else 0.0


def passes(slos: Sequence[Slo], summary: Summary, rows: Sequence[RequestRow], open_loop: bool) -> tuple[bool, str]:
    """Whether a probe met every service level, and the first that it missed."""
    if summary.failed:
        return False, f"{summary.failed} requests failed"
    for slo in slos:
        value = statistic(summary, slo)
        if value > slo.limit_ms:
            return False, f"{slo.metric} {slo.statistic} was {value:,.1f} ms"
    if open_loop and (slope := backlog_slope(rows)) > _GROWTH:
        return False, f"the queue grew: {slope * 1000:.0f} ms of waiting more every second"
    return True, ""


_DISTURBANCES = ("generator_lag", "zero_tokens", "other_traffic")
_TRIES = 3
OnRun = Callable[[Finished], None]


async def measure_series(
    bench: Bench, kind: str, specs: Sequence[Spec], folder: Path, on_run: OnRun | None = None
) -> list[Finished]:
    """Measure each spec into a subfolder; the list is saved after each, so that an interrupted series is readable."""
    series = _SeriesFolder(kind, folder)
    done = []
    for spec in specs:
        finished = await series.measure(bench, spec)
        done.append(finished)
        if on_run is not None:
            on_run(finished)
    return done


class _SeriesFolder:
    """Keeps series.json up to date with the runs that were made."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._saved = store.Series(store.VERSION, kind, time.time())
        self.folder = folder

    async def measure(self, bench: Bench, spec: Spec) -> Finished:
        name = f"p{len(self._saved.runs) + 1:02d}"
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        try:
            return await bench.run(spec, folder)
        finally:
            if (folder / "run.json").is_file():
                self._saved = replace(self._saved, runs=(*self._saved.runs, name))
                self.save()
            else:
                folder.rmdir()

    def save(self, **findings: Any) -> store.Series:
        self._saved = replace(self._saved, findings={**self._saved.findings, **findings})
        store.save_series(self.folder, self._saved)
        return self._saved


def reseeded(spec: Spec, number: int) -> Spec:
    """The same with other prompts, so that those of an earlier run in the prefix cache are not used."""
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
    most_each: int = 200


def quick_specs(base: Spec) -> list[Spec]:
    """A few seconds with one, some and many requests at once: latency, and the throughput that is reached."""
    quick = _Quick()
    base = replace(base, percentiles=(90.0,), load=LoadShape(concurrency=1, seconds=quick.seconds))
    specs = sweep_specs(base, quick.concurrencies)
    return [
        replace(spec, workload=replace(spec.workload, num_prompts=quick.most_each * (spec.load.concurrency or 1)))
        for spec in specs
    ]


def _judgeable(base: Spec, slos: Sequence[Slo]) -> Spec:
    """The spec, unless its answers say nothing about one of the service levels."""
    refuse_tokens(base.workload, slos)
    for slo in slos:
        if base.workload.one_token and slo.metric in ("tpot", "itl"):
            raise UsageError(
                f"{slo} cannot be judged with --output-len 1: {slo.metric} needs two tokens.",
                "Raise --output-len, or limit ttft or e2el.",
            )
    return base


async def _measure_probe(series: _SeriesFolder, bench: Bench, spec: Spec, done: list[Finished]) -> Finished:
    """One probe, added to `done`; one that this machine itself disturbed is measured again."""
    disturbed: list[Problem] = []
    for _ in range(_TRIES):
        finished = await series.measure(bench, reseeded(spec, 100 + len(done)))
        done.append(finished)
        disturbed = [p for p in finished.run.problems if p.kind in _DISTURBANCES]
        if not disturbed:
            return finished
    raise CorralError(f"the search cannot go on: {disturbed[0].text}.", f"The probes are in {series.folder}.")


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
    on_ceiling: Callable[[float, int], None] | None = None,
) -> tuple[Searching, list[Finished]]:
    """Find the highest rate (or concurrency) that meets every service level; every probe is a saved run.

    `on_ceiling` is told what the saturated server finished per second, and how many requests a probe near it sends.
    """
    base = _judgeable(base.for_task(bench.task), slos)
    series = _SeriesFolder("search", folder)
    base = replace(base, percentiles=tuple(sorted({*base.percentiles, *(slo.percentile for slo in slos), 99.0})))
    done: list[Finished] = []
    if over == "rate":
        ceiling = await _saturated_rate(series, bench, base, seconds, saturate, done)
        searching = Searching(ceiling, tolerance, most - 1)
        if on_ceiling is not None:
            on_ceiling(ceiling, probe_requests(slos, ceiling, seconds))
    else:
        searching = Searching(float(saturate), tolerance, most, whole=True)
    while (offered := searching.next()) is not None:
        finished = await _measure_probe(
            series, bench, _probe_spec(base, slos, over, offered, seconds, len(done)), done
        )
        passed, why = passes(slos, finished.run.summary, finished.rows, over == "rate")
        probe = Probe(offered, passed, why, finished.folder.name)
        searching.add(probe)
        if on_probe is not None:
            on_probe(probe, finished)
    series.save(**_findings(searching, slos, over, len(done)), probes=[vars(probe) for probe in searching.probes])
    return searching, done


async def _saturated_rate(
    series: _SeriesFolder, bench: Bench, base: Spec, seconds: float, saturate: int, done: list[Finished]
) -> float:
    """Requests that the server finishes per second with `saturate` at once: at the beginning and the end less is
    finished, and the steady middle shows what it can do. The run is added to `done`.
    """
    load = LoadShape(concurrency=saturate, seconds=seconds)
    count = max(saturate * 4, min(base.workload.num_prompts, 4000))
    first = replace(base, load=load, workload=replace(base.workload, num_prompts=count))
    done.append(await series.measure(bench, first))
    return steady_rate(done[0].rows, saturate) or max(done[0].run.summary.request_throughput, 0.01)


def steady_rate(rows: Sequence[RequestRow], at_once: int) -> float | None:
    """Requests finished per second between the first and the last tenth of the answers, and at most what `at_once`
    requests of their mean duration allow: equal answers end together, and their ends alone show no rate.
    """
    done = [row for row in rows if row.ok]
    ends = sorted(row.done_ns for row in done)
    cut = len(ends) // 10
    inner = ends[cut : len(ends) - cut] if len(ends) >= 50 else ends
    if len(inner) < 2 or inner[-1] == inner[0]:
        return None
    by_ends = (len(inner) - 1) / ((inner[-1] - inner[0]) / 1e9)
    mean_s = sum(row.done_ns - row.sent_ns for row in done) / len(done) / 1e9
    return min(by_ends, min(at_once, len(done)) / mean_s) if mean_s > 0 else by_ends


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
    levels = ", ".join(map(str, slos))
    best, worst = searching.best, searching.worst
    if best is None:
        lowest = min((probe for probe in searching.probes), key=lambda probe: probe.load)
        text = f"no load that was tried keeps {levels}; at {lowest.load:.15g} {unit}: {lowest.why}"
    else:
        above = next((probe for probe in searching.probes if probe.load == worst), None)
        text = f"{best:.4g} {unit} is the highest load that keeps {levels}"
        text += f"; at {above.load:.4g} {above.why}" if above else "; nothing higher was tried"
    return {"answer": text, "best": best, "first_failure": worst, "probes_made": probes}
