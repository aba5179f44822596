"""The Live view: load of every server now and over the last hour, GPUs, and batches and tunes under way.

Servers are asked once a second while somebody looks; more than a few, in turn less often. What is drawn as an hour is
what was read while somebody looked: a gap is a time without anybody.

Power, memory and use of this machine's GPUs, where `nvidia-smi` can tell.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from corral.base.record import to_json
from corral.console.context import ConsoleContext, LatestValue, answer, events
from corral.console.jobs import JobProgress, Jobs
from corral.use.llm.top import Line, ReadyServer, Watch, ready_servers

FIELDS = "index,name,power.draw,memory.used,memory.total,utilization.gpu"
PATIENCE_S = 5.0
MOST = 64


@dataclass(frozen=True)
class GpuLoad:
    """One GPU now; None: it does not say."""

    index: int
    name: str
    power_w: float | None
    used_mib: float | None
    total_mib: float | None
    use: float | None  # 0 to 1


def read_gpus() -> list[GpuLoad]:
    """All GPUs of this machine; empty where there are none, or nobody can be asked."""
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


SELDOM_S = 5.0  # between looks at what changes seldom: which servers there are, GPUs, batches
EACH_S = 1 / 16  # beyond sixteen servers a round takes longer than a second
ALL = "all servers"
GPU = "gpu "  # before the names of its figures in the history
ADDED = ("tok_s", "prompt_s", "running", "waiting")
WORST = ("kv", "ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95")
Figures = dict[str, float | None]


def routes(desk: ConsoleContext) -> list[Route]:
    live = _Live(desk)
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
    def __init__(self, desk: ConsoleContext) -> None:
        self._desk = desk
        self._feed: LatestValue[dict[str, Any]] = LatestValue(self._look)
        self._watch = Watch(latencies=True)
        self._jobs = Jobs(desk.clock)
        self._seldom_s = -1e9
        self._servers: dict[str, ReadyServer] = {}
        self._gpus: list[GpuLoad] = []
        self._under_way: list[JobProgress] = []
        self._turn_s = -1e9
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
                self._seldom_s = -1e9
                await self._watch.close()

    async def history(self, request: Request) -> Response:
        """An hour of one server's figures."""
        name = request.query_params.get("name", ALL)
        kept = self._desk.history
        return answer({"name": name, "figures": {
            figure: kept.series(f"{figure} {name}") for figure in (*ADDED, *WORST, "prefix")
        }})  # fmt: skip

    async def gpus(self, _: Request) -> Response:
        """An hour of this machine's GPUs."""
        kept = self._desk.history
        return answer({"figures": {name: kept.series(f"{GPU}{name}") for name in gpu_figures(self._gpus)}})

    async def _look(self) -> dict[str, Any]:
        loop_s = asyncio.get_running_loop().time()
        if loop_s - self._seldom_s > SELDOM_S:
            self._seldom_s = loop_s
            await asyncio.to_thread(self._look_seldom)
            self._watch.set([(name, one.endpoint) for name, one in self._servers.items()])
        if loop_s - self._turn_s >= len(self._servers) * EACH_S - 0.1:
            self._turn_s = loop_s
            self._lines = await self._watch.read()
        return self._told()

    def _look_seldom(self) -> None:
        self._servers = {one.name: one for one in ready_servers()}
        self._gpus = read_gpus()
        self._under_way = self._jobs.look()

    def _told(self) -> dict[str, Any]:
        now_s, kept = self._desk.clock(), self._desk.history
        known = [line for line in self._lines if line.name in self._servers]
        figures = {line.name: figures_of(line) for line in known}
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
