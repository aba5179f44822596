"""The Live view: the load of every server now and over the last hour, GPUs, and batches and tuning runs under way.

Servers are read once a second while a page is open; more than sixteen, less often. The chart of an hour has only
what was read while a page was open.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from corral.base.errors import CorralError
from corral.base.record import to_json
from corral.base.wording import counted
from corral.console.context import ConsoleContext, LatestValue, answer, events
from corral.console.statuses import file_stamp
from corral.lab.tune.race import RaceEnd, verdict
from corral.lab.tune.store import TuneRun, all_runs
from corral.use.batch.core.folder import BatchFolder, known_outputs
from corral.use.batch.inspect import inspect
from corral.use.llm.top import Line, ReadyServer, Watch, ready_servers

SHOWN = 12
RATE_S = 60.0  # speeds are means over the last minute


@dataclass(frozen=True)
class JobProgress:
    """One batch or tune."""

    kind: str  # batch, tune
    name: str
    state: str
    done: float
    total: float
    unit: str  # rows, s
    failed: int
    model: str
    text: str = ""
    rate: float | None = None  # a second
    eta_s: float | None = None


class Jobs:
    """Reads batches and tuning runs again and again; one whose files did not change is not read."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._known: dict[str, tuple[tuple[Any, ...], JobProgress]] = {}
        self._seen: dict[str, deque[tuple[float, float]]] = {}

    def read(self) -> list[JobProgress]:
        outputs = known_outputs()[:SHOWN]
        runs = sorted(all_runs(), key=lambda run: -file_stamp(run.folder / "trials.jsonl")[0])[:SHOWN]
        readers: list[tuple[str, tuple[Any, ...], Callable[[], JobProgress]]] = []
        for output in outputs:
            folder = BatchFolder(output)
            stamp: tuple[Any, ...] = (
                file_stamp(folder.ledger),
                file_stamp(folder.spec),
                self._clock() // 10,
            )  # a runner may be gone
            readers.append((f"batch {output}", stamp, lambda output=output: _batch(output)))  # type: ignore[misc]
        for run in runs:
            stamp = (file_stamp(run.folder / "trials.jsonl"), file_stamp(run.folder / "tune.json"))
            readers.append((f"tune {run.name}", stamp, lambda run=run: _tune(run)))  # type: ignore[misc]
        found = []
        for key, stamp, read in readers:
            with contextlib.suppress(CorralError, OSError):
                found.append(self._paced(key, self._progress(key, stamp, read)))
        gone = self._known.keys() - {key for key, _, _ in readers}
        for key in gone:
            self._known.pop(key, None)
            self._seen.pop(key, None)
        return found

    def _progress(self, key: str, stamp: tuple[Any, ...], read: Callable[[], JobProgress]) -> JobProgress:
        if key not in self._known or self._known[key][0] != stamp:
            self._known[key] = (stamp, read())
        return self._known[key][1]

    def _paced(self, key: str, now: JobProgress) -> JobProgress:
        """The job with its speed since it was first read here."""
        seen, at_s = self._seen.setdefault(key, deque(maxlen=120)), self._clock()
        seen.append((at_s, now.done))
        while len(seen) > 2 and seen[0][0] < at_s - RATE_S:
            seen.popleft()
        span = at_s - seen[0][0]
        rate = (now.done - seen[0][1]) / span if span > 1 else 0.0
        if rate <= 0 or now.state != "running" or now.kind != "batch":
            return now
        left = (now.total - now.done) / rate
        return replace(now, rate=round(rate, 3), eta_s=round(left, 1))


def _batch(output: Path) -> JobProgress:
    now = inspect(str(output))
    done = now.fine + now.failed
    return JobProgress("batch", str(output), str(now.state.value), done, now.rows, "rows", now.failed, now.model,
                       now.reason)  # fmt: skip


def _tune(run: TuneRun) -> JobProgress:
    spec, trials = run.spec, run.trials()
    spent, failed = sum(one.took_s for one in trials), sum(one.score is None for one in trials)
    text = counted(len(trials), "trial")
    state = verdict(spec.race, trials).outcome.value if trials else RaceEnd.UNFINISHED.value
    left = max(0.0, spec.race.budget_s - spent)
    return JobProgress("tune", run.name, state, spent, spec.race.budget_s, "s", failed, spec.model, text, None, left)


FIELDS = "index,name,power.draw,memory.used,memory.total,utilization.gpu"
PATIENCE_S = 5.0
MOST = 64


@dataclass(frozen=True)
class GpuLoad:
    """One GPU now; None where it does not report a figure."""

    index: int
    name: str
    power_w: float | None
    used_mib: float | None
    total_mib: float | None
    use: float | None  # 0 to 1


def read_gpus() -> list[GpuLoad]:
    """All GPUs of this machine; empty where there are none, or nvidia-smi is missing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus_load(done.stdout) if done.returncode == 0 else []


def parse_gpus_load(text: str) -> list[GpuLoad]:
    found = []
    for line in text.splitlines()[:MOST]:
        words = [word.strip() for word in line.split(",")]
        if len(words) == 6 and words[0].isdigit():
            power, used, total, use = map(_number, words[2:])
            share = None if use is None else use / 100
            found.append(GpuLoad(int(words[0]), words[1][:80], power, used, total, share))
    return found


def gpu_figures(gpus: Sequence[GpuLoad]) -> dict[str, float | None]:
    """Power (W) and memory (GiB) by name: of each GPU, and the mean and the largest of all."""
    found: dict[str, float | None] = {}
    read = {"power": [one.power_w for one in gpus], "memory": [_gib(one.used_mib) for one in gpus]}
    for figure, values in read.items():
        found |= {f"{figure} {one.index}": value for one, value in zip(gpus, values, strict=True)}
        known = [value for value in values if value is not None]
        found[f"{figure} mean"] = sum(known) / len(known) if known else None
        found[f"{figure} most"] = max(known, default=None)
    return found


def _gib(mib: float | None) -> float | None:
    return None if mib is None else mib / 1024


def _number(word: str) -> float | None:
    try:
        value = float(word)  # "[N/A]" where a GPU does not say
    except ValueError:
        return None
    return value if 0 <= value < 1e9 else None


SLOW_S = 5.0  # between readings of what changes seldom: which servers there are, GPUs, batches
EACH_S = 1 / 16  # beyond sixteen servers a round takes longer than a second
ALL = "all servers"
GPU = "gpu "  # before the names of its figures in the history
ADDED = ("tok_s", "prompt_s", "running", "waiting")
WORST = ("kv", "ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95")
Figures = dict[str, float | None]


def routes(context: ConsoleContext) -> list[Route]:
    live = _Live(context)
    return [
        Route("/api/live/stream", live.stream),
        Route("/api/live/history", live.history),
        Route("/api/live/gpus", live.gpus),
    ]


def figures_of(line: Line) -> Figures:
    """A server's figures by their short names."""
    reading, load = line.reading, line.load
    return {
        "tok_s": load.generated_tokens_per_s if load else None,
        "prompt_s": load.prompt_tokens_per_s if load else None,
        "running": reading.running if reading else None,
        "waiting": reading.waiting if reading else None,
        "kv": reading.kv_use if reading else None,
        "prefix": load.prefix_hit_share if load else None,
        "ttft_p50": line.ttft_s[0],
        "ttft_p95": line.ttft_s[1],
        "tpot_p50": line.tpot_s[0],
        "tpot_p95": line.tpot_s[1],
    }


def sums_of(each: list[Figures]) -> Figures:
    """All servers as one: speeds and requests added up; of use and times the worst."""
    found: Figures = {}
    for names, joined in ((ADDED, sum), (WORST, max)):
        for name in names:
            known = [value for one in each if (value := one.get(name)) is not None]
            found[name] = joined(known) if known else None
    return found


class _Live:
    def __init__(self, context: ConsoleContext) -> None:
        self._context = context
        self._feed: LatestValue[dict[str, Any]] = LatestValue(self._read)
        self._watch = Watch(latencies=True)
        self._jobs = Jobs(context.clock)
        self._slow_read_s = -1e9
        self._servers: dict[str, ReadyServer] = {}
        self._gpus: list[GpuLoad] = []
        self._under_way: list[JobProgress] = []
        self._round_s = -1e9
        self._lines: list[Line] = []

    async def stream(self, _: Request) -> Response:
        return events(self._news())

    async def _news(self) -> AsyncIterator[dict[str, Any]]:
        values = self._feed.values()
        try:
            async for value in values:
                yield value
        finally:
            await values.aclose()
            if not self._feed.listeners:
                self._slow_read_s = -1e9
                await self._watch.close()

    async def history(self, request: Request) -> Response:
        """An hour of one server's figures."""
        name = request.query_params.get("name", ALL)
        kept = self._context.history
        return answer({"name": name, "figures": {
            figure: kept.series(f"{figure} {name}") for figure in (*ADDED, *WORST, "prefix")
        }})  # fmt: skip

    async def gpus(self, _: Request) -> Response:
        """An hour of this machine's GPUs."""
        kept = self._context.history
        return answer({"figures": {name: kept.series(f"{GPU}{name}") for name in gpu_figures(self._gpus)}})

    async def _read(self) -> dict[str, Any]:
        loop_s = asyncio.get_running_loop().time()
        if loop_s - self._slow_read_s > SLOW_S:
            self._slow_read_s = loop_s
            await asyncio.to_thread(self._read_slow)
            self._watch.set([(name, one.endpoint) for name, one in self._servers.items()])
        if loop_s - self._round_s >= len(self._servers) * EACH_S - 0.1:
            self._round_s = loop_s
            self._lines = await self._watch.read()
        return self._snapshot()

    def _read_slow(self) -> None:
        self._servers = {one.name: one for one in ready_servers()}
        self._gpus = read_gpus()
        self._under_way = self._jobs.read()

    def _snapshot(self) -> dict[str, Any]:
        now_s, kept = self._context.clock(), self._context.history
        known = [line for line in self._lines if line.name in self._servers]
        figures = {line.name: figures_of(line) for line in known}
        for name in figures:
            own = sums_of([one for member, one in figures.items() if self._servers[member].fleet == name])
            for figure in WORST:  # a gateway measures no time per token: the slowest member stands for the fleet
                if figures[name][figure] is None:
                    figures[name][figure] = own[figure]
        whole = sums_of([one for name, one in figures.items() if not self._servers[name].members])
        for name, one in ((ALL, whole), *figures.items()):
            kept.add(now_s, {f"{figure} {name}": value for figure, value in one.items()})
        gpus = gpu_figures(self._gpus) if self._gpus else {}
        kept.add(now_s, {f"{GPU}{name}": value for name, value in gpus.items()})
        rows = [_row(line, self._servers[line.name], figures[line.name]) for line in known]
        return {"now_s": now_s, "servers": rows, "all": whole, "gpus": to_json(self._gpus), "gpu_figures": gpus,
                "jobs": to_json(self._under_way)}  # fmt: skip


def _row(line: Line, server: ReadyServer, figures: Figures) -> dict[str, Any]:
    about = {"name": line.name, "model": line.model, "problem": line.problem}
    return {**about, "fleet": server.fleet, "members": server.members, **figures}
