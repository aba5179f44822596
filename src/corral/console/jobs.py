"""Batches and tunes that are under way: how far, how fast, until when, and what failed."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError
from corral.base.wording import counted
from corral.console.standings import mark_of
from corral.lab.tune.race import RaceEnd, verdict
from corral.lab.tune.store import TuneRun, all_runs
from corral.use.batch.core.folder import BatchFolder, known_outputs
from corral.use.batch.inspect import inspect

SHOWN = 12
RATE_S = 60.0  # speeds are means over the last minute of looking


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
    """Looks at them again and again; one whose files did not change is not read."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._known: dict[str, tuple[tuple[Any, ...], JobProgress]] = {}
        self._seen: dict[str, deque[tuple[float, float]]] = {}

    def look(self) -> list[JobProgress]:
        outputs = known_outputs()[:SHOWN]
        runs = sorted(all_runs(), key=lambda run: -mark_of(run.folder / "trials.jsonl")[0])[:SHOWN]
        looks: list[tuple[str, tuple[Any, ...], Callable[[], JobProgress]]] = []
        for output in outputs:
            folder = BatchFolder(output)
            stamp: tuple[Any, ...] = (
                mark_of(folder.ledger),
                mark_of(folder.spec),
                self._clock() // 10,
            )  # a runner may be gone
            looks.append((f"batch {output}", stamp, lambda output=output: _batch(output)))  # type: ignore[misc]
        for run in runs:
            stamp = (mark_of(run.folder / "trials.jsonl"), mark_of(run.folder / "tune.json"))
            looks.append((f"tune {run.name}", stamp, lambda run=run: _tune(run)))  # type: ignore[misc]
        found = []
        for key, stamp, read in looks:
            with contextlib.suppress(CorralError, OSError):
                found.append(self._paced(key, self._progress(key, stamp, read)))
        gone = self._known.keys() - {key for key, _, _ in looks}
        for key in gone:
            self._known.pop(key, None), self._seen.pop(key, None)
        return found

    def _progress(self, key: str, stamp: tuple[Any, ...], read: Callable[[], JobProgress]) -> JobProgress:
        if key not in self._known or self._known[key][0] != stamp:
            self._known[key] = (stamp, read())
        return self._known[key][1]

    def _paced(self, key: str, now: JobProgress) -> JobProgress:
        """With its speed, as seen from here."""
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
