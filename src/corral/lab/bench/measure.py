"""One measurement from spec to saved run: read the server, warm up, load, summarise, judge, save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.errors import AccessError, CorralError, EngineError, UnreachableError, UsageError
from corral.base.record import load_json
from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.client.errors import KeyRefusedError, ServerGoneError, StrangerError
from corral.deploy.lifecycle.deployments import Record, plan_of
from corral.lab.bench import store
from corral.lab.bench.datasets import Vocabulary, learn_vocabulary, load_prompts
from corral.lab.bench.fingerprint import Fingerprint, find_folder, read_fingerprint
from corral.lab.bench.gate import judge, verdict
from corral.lab.bench.limit import cost_of, distance
from corral.lab.bench.load import RequestOutcome, drive, send_times
from corral.lab.bench.metrics import RequestRow, summarise
from corral.lab.bench.server_metrics import MetricsWatcher, ServerSample, delta
from corral.lab.bench.spec import LoadShape, Spec, Workload
from corral.plan.contract import Plan

_WARM = 0x3A97_11ED  # warm-up prompts differ from all that are measured
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Finished:
    """A saved run."""

    folder: Path
    run: store.Run
    rows: list[RequestRow]


CONNECTIONS = 16384  # more than any sensible concurrency; opened only as needed


class Bench:
    """Measures one endpoint, several times if wanted; use it as an async context manager."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        plan: Plan | None = None,
        price: float | None = None,
        gpus: int | None = None,
        detailed: bool = False,
        on_progress: OnProgress | None = None,
        task: str | None = None,
    ) -> None:
        self._client = Client(endpoint, connections=CONNECTIONS)
        self._watch_client = Client(endpoint, connections=2)
        self._plan, self._price, self._gpus, self._detailed = plan, price, gpus, detailed
        self.task = task or "generate"
        self._task_known = task is not None
        self._on_progress = on_progress or (lambda *_: None)
        self._vocabulary: Vocabulary | None = None
        self._fingerprint: Fingerprint | None = None

    async def __aenter__(self) -> Bench:
        try:
            await self._client.models()
        except ServerGoneError as error:
            raise UnreachableError(error.message, "Check the address; `corral ps` lists deployments.") from error
        folder = find_folder(self._client)
        self._plan = self._plan or (plan_of(folder) if folder else None)
        if folder and not self._task_known:
            with contextlib.suppress(CorralError, OSError):
                self.task = load_json(Record, folder.record).task
        self._fingerprint = await read_fingerprint(self._client, folder, self._plan)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        await self._watch_client.close()

    @property
    def plan(self) -> Plan | None:
        return self._plan

    async def run(self, spec: Spec, folder: Path) -> Finished:
        """Measure once and save into `folder`, even when the run has to be stopped; then the reason is raised."""
        assert self._fingerprint is not None
        spec = spec.for_task(self.task)
        if self._client.limits.stall_s != spec.stall_s:
            await self._client.close()
            self._client = Client(self._client.endpoint, connections=CONNECTIONS, stall_s=spec.stall_s)
        vocabulary = await self._learn_vocabulary(spec.workload)
        prompts = load_prompts(spec.workload, vocabulary)
        times = send_times(spec.load, len(prompts), spec.workload.seed, [p.at_s for p in prompts])
        await self._warm_up(spec, vocabulary)
        watcher = MetricsWatcher(self._watch_client)
        await watcher.start()
        total = len(prompts)
        outcome = await drive(
            self._client,
            prompts,
            spec.workload,
            spec.load,
            times,
            lambda n: self._on_progress(spec.load.label, n, 0 if spec.load.seconds else total),
        )
        if not outcome.interrupted:
            await watcher.stop(settled=sum(row.ok for row in outcome.rows))
        finished = self._finish(spec, outcome, watcher.samples, vocabulary, folder)
        self._raise(outcome, finished, total)
        return finished

    async def _learn_vocabulary(self, workload: Workload) -> Vocabulary | None:
        if not workload.synthetic:
            return None
        if self._vocabulary is None:
            self._vocabulary = await learn_vocabulary(self._client)
        if workload.task == "rerank" and self._vocabulary.ids:  # a query is text
            return Vocabulary(self._vocabulary.words, exact=False)
        return self._vocabulary

    async def _warm_up(self, spec: Spec, vocabulary: Vocabulary | None) -> None:
        if not spec.warmup:
            return
        work = spec.workload
        warm = replace(work, dataset="random", file=None, num_prompts=spec.warmup, seed=work.seed ^ _WARM)
        label = f"{spec.load.label}, warm-up"
        self._on_progress(label, 0, spec.warmup)
        prompts = load_prompts(warm, vocabulary)
        concurrency = min(spec.warmup, spec.load.concurrency or spec.warmup)
        outcome = await drive(self._client, prompts, warm, LoadShape(concurrency=concurrency), [0] * len(prompts),
                              lambda n: self._on_progress(label, n, spec.warmup))  # fmt: skip
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.stopped_by is not None:
            raise outcome.stopped_by
        if not any(row.ok for row in outcome.rows):
            row = outcome.rows[0]
            raise EngineError(f"every warm-up request failed: {row.message}", "`corral status` describes the server.")

    def _finish(
        self,
        spec: Spec,
        outcome: RequestOutcome,
        samples: list[ServerSample],
        vocabulary: Vocabulary | None,
        folder: Path,
    ) -> Finished:
        assert self._fingerprint is not None
        capped = spec.load.open and spec.load.concurrency is not None
        wanted = tuple(sorted({*spec.percentiles, *(slo.percentile for slo in spec.goodput), 99.0}))
        summary = summarise(
            outcome.rows, outcome.duration_s, wanted, spec.goodput, outcome.heartbeat_s, capped=capped
        )
        server = delta(samples)
        stopped = _why_stopped(outcome)
        problems = judge(spec, outcome.rows, summary, server, stopped, vocabulary.exact if vocabulary else True)
        plan = self._plan
        gpus = self._gpus or ((plan.gpus or 0) if plan else 0)
        run = store.Run(
            version=store.VERSION,
            created_s=time.time(),
            spec=spec,
            fingerprint=self._fingerprint,
            summary=summary,
            verdict=verdict(problems),
            problems=problems,
            notes=(vocabulary.note,) if vocabulary and vocabulary.note else (),
            server=server,
            limit=distance(plan, summary, server, self._fingerprint.api_servers)
            if plan and spec.workload.writes
            else None,
            cost=cost_of(summary, gpus, self._price),
            plan=plan,
            heartbeat_ms=_thinned(outcome.heartbeat_s),
        )
        store.save_run(folder, run, outcome.rows, samples, self._detailed)
        return Finished(folder, run, outcome.rows)

    def _raise(self, outcome: RequestOutcome, finished: Finished, total: int) -> None:
        if outcome.interrupted:
            raise KeyboardInterrupt
        error = outcome.stopped_by
        if error is None:
            return
        done = finished.run.summary.completed
        where = f"What was measured is in {finished.folder}."
        text = f"{error.message} {done} of {total} requests had been answered."
        kind: type[CorralError] = UnreachableError if isinstance(error, ServerGoneError) else UsageError
        if isinstance(error, KeyRefusedError | StrangerError):
            kind = AccessError
        raise kind(text, f"{error.remedy} {where}", folder=str(finished.folder))


def _why_stopped(outcome: RequestOutcome) -> str:
    if outcome.interrupted:
        return "interrupted before the end"
    return f"stopped before the end: {outcome.stopped_by.message}" if outcome.stopped_by else ""


def _thinned(beats_s: list[float]) -> tuple[float, ...]:
    ordered = sorted(beats_s)
    step = max(1, len(ordered) // 1000)
    return tuple(round(v * 1000, 4) for v in ordered[::step])
