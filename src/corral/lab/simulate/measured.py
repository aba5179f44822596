"""A saved run of `corral bench`, to which a simulation is fitted, or with which it is compared.

Only the send time, the lengths, and the times of the first and the last token of each request are used, so runs whose
rows were reduced to these can be used as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.errors import DataError, UsageError
from corral.lab.bench import store
from corral.lab.bench.metrics import RequestRow, latencies_s, percentile
from corral.lab.simulate.engine import EngineShape
from corral.lab.simulate.outcome import Recorder
from corral.lab.simulate.requests import ClosedLoop, OpenLoop, RequestSource, SimRequest
from corral.plan.contract import Plan

METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class RunFigures:
    """Latencies of a run in ms, sorted, and its throughput."""

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    e2el: tuple[float, ...]
    duration_s: float
    output_tokens: int

    def percentile(self, metric: str, p: float) -> float:
        return percentile(getattr(self, metric), p)

    def mean(self, metric: str) -> float:
        values = getattr(self, metric)
        return math.fsum(values) / len(values) if values else 0.0

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0


class ExactRecorder(Recorder):
    """Keeps every latency: for runs that were measured, which are short."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, list[float]] = {name: [] for name in METRICS}
        self.next_moment_s = math.inf  # its moments are not needed

    def finished(self, at_s: float, sent_s: float, first_s: float, prompt: int, output: int) -> None:
        self.completed += 1
        self.output_tokens += output
        self._values["ttft"].append((first_s - sent_s) * 1000)
        self._values["e2el"].append((at_s - sent_s) * 1000)
        if output > 1:
            self._values["tpot"].append((at_s - first_s) * 1000 / (output - 1))
        self.first_s, self.last_s = min(self.first_s, sent_s), max(self.last_s, at_s)

    def figures(self) -> RunFigures:
        ttft, tpot, e2el = (tuple(sorted(self._values[name])) for name in METRICS)
        return RunFigures(ttft, tpot, e2el, max(0.0, self.last_s - self.first_s), self.output_tokens)


@dataclass(frozen=True)
class LoadPoint:
    """A load by its averages."""

    at_once: float  # requests, on one replica
    prompt: float
    output: float


@dataclass(frozen=True)
class MeasuredRun:
    """One run with what a simulation of it needs."""

    name: str
    run: store.Run
    rows: tuple[RequestRow, ...]
    figures: RunFigures
    shape: EngineShape
    data: int
    assumed: tuple[str, ...] = ()  # what its files do not contain

    @property
    def plan(self) -> Plan | None:
        return self.run.plan

    @property
    def point(self) -> LoadPoint:
        rows, figures = self.rows, self.figures
        prompt, output = (
            sum(values) / len(rows) for values in zip(*[(r.input_tokens, r.output_tokens) for r in rows], strict=True)
        )
        return LoadPoint(sum(figures.e2el) / 1000 / max(1e-9, figures.duration_s), prompt, output)

    def source(self) -> RequestSource:
        """The same load again: its times in an open loop, its lengths and its concurrency in a closed one."""
        load, work = self.run.spec.load, self.run.spec.workload
        rows = sorted(self.rows, key=lambda row: row.n)
        if load.open:
            ordered = sorted(rows, key=lambda row: row.asked_ns)
            return OpenLoop(self._request(row, row.asked_ns / 1e9) for row in ordered)
        limit = load.seconds or math.inf
        concurrency = load.concurrency or len(rows)
        whole = rows if limit == math.inf else itertools.islice(itertools.cycle(rows), work.num_prompts)
        starts = [row.asked_ns / 1e9 for row in rows[:concurrency]]
        return ClosedLoop((self._request(row, 0.0) for row in whole), concurrency, limit, starts_s=starts)

    def _request(self, row: RequestRow, at_s: float) -> SimRequest:
        work = self.run.spec.workload
        shares = work.dataset == "prefix_repetition"
        group, shared = (row.n % work.num_prefixes, work.prefix_len) if shares else (-1, 0)
        return SimRequest(row.n, at_s, max(1, row.input_tokens), max(1, row.output_tokens), group, shared)


def load_measured(references: Sequence[str]) -> list[MeasuredRun]:
    """The runs with these names; of a series, all of its runs."""
    runs = []
    for reference in references:
        folder = store.find(reference)
        parts = store.load_series(folder).runs if store.is_series(folder) else ("",)
        runs += [_read(folder / part) for part in parts]
    return runs


def _read(folder: Path) -> MeasuredRun:
    run, rows = store.load_run(folder), [row for row in store.load_rows(folder) if row.ok and row.chunk_ns]
    if not rows:
        raise DataError(f"the run {folder.name} has no answered request.", "Leave it out.")
    if run.spec.workload.dataset == "multi_turn":
        raise UsageError(
            f"the run {folder.name} has conversations, whose turns a simulation cannot replay yet.",
            "Leave it out; runs of random, prefix_repetition and trace can be used.",
        )
    shape, data, assumed = _shape(run)
    return MeasuredRun(folder.name, run, tuple(rows), _figures(rows), shape, data, assumed)


def _figures(rows: Sequence[RequestRow]) -> RunFigures:
    values = latencies_s(rows)
    ttft, tpot, e2el = (tuple(sorted(one * 1000 for one in values[metric])) for metric in METRICS)
    begin, end = min(row.asked_ns for row in rows), max(row.chunk_ns[-1] for row in rows)
    return RunFigures(ttft, tpot, e2el, (end - begin) / 1e9, sum(row.output_tokens for row in rows))


def _shape(run: store.Run) -> tuple[EngineShape, int, tuple[str, ...]]:
    """The engine's settings: as its flags say, or its plan, or vLLM's defaults."""
    flags, cache, plan = _flag_values(run.fingerprint.flags), run.fingerprint.cache, run.plan
    shape, assumed, data = EngineShape(), [], 1
    if plan is not None:
        s, data = plan.settings, plan.parallel.data
        blocks = max(1, plan.memory.kv_cache_tokens_per_replica // s.block_size)
        shape = EngineShape(s.max_num_batched_tokens, s.max_num_seqs, s.block_size, blocks)
    elif "max-num-seqs" not in flags:
        assumed.append(f"{shape.token_budget:,} tokens a step and {shape.max_seqs} sequences at most")
    shape = replace(
        shape,
        token_budget=int(flags.get("max-num-batched-tokens", shape.token_budget)),
        max_seqs=int(flags.get("max-num-seqs", shape.max_seqs)),
        prefix_cache=cache.get("enable_prefix_caching", "True") == "True",
    )
    if cache.get("num_gpu_blocks", "").isdecimal() and cache.get("block_size", "").isdecimal():
        shape = replace(shape, blocks=int(cache["num_gpu_blocks"]), block_size=int(cache["block_size"]))
    elif plan is None:
        assumed.append("a KV cache without limit")
    return shape, data, tuple(assumed)


def _flag_values(flags: Sequence[str]) -> dict[str, str]:
    """The whole numbers among an engine's flags."""
    pairs = (flag.replace("=", " ", 1).partition(" ") for flag in flags)
    return {name.lstrip("-").replace("_", "-"): value for name, _, value in pairs if value.isdecimal()}
