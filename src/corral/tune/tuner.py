"""The race on real servers: start a setup, measure it, stop it, write the trial down, ask what comes next."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from corral.bench.measure import Bench
from corral.client.client import run as run_loop
from corral.client.endpoint import Endpoint
from corral.deployment.expectation import Expected
from corral.deployment.folder import DeploymentFolder
from corral.errors import CorralError, DoesNotFitError
from corral.lifecycle import bringup, deployments
from corral.lock import exclusive_lock
from corral.tune.knobs import tuned_wish
from corral.tune.objective import measure_score
from corral.tune.race import RaceResult, Trial, TrialOrder, next_order, verdict
from corral.tune.setups import BASE, Knob, Setup
from corral.tune.store import TuneRun, TuneSpec

__all__ = ["Pruned", "TuneWatcher", "fitting_knobs", "settings_found", "tune"]

LONGEST_NAME = 60
OLD_LOCK_S = 86_400.0


class TuneWatcher(Protocol):
    """Is told how a run goes."""

    def begins(self, number: int, order: TrialOrder, left_s: float) -> None: ...

    def phase(self, text: str) -> None: ...

    def ended(self, trial: Trial, so_far: RaceResult) -> None: ...


@dataclass(frozen=True)
class Pruned:
    """A value that cannot run here, and why; it is never started."""

    setup: Setup
    because: str


def fitting_knobs(wish: bringup.Wish, knobs: Sequence[Knob]) -> tuple[tuple[Knob, ...], tuple[Pruned, ...]]:
    """The knobs with the values that a plan exists for."""
    kept, pruned = [], []
    for knob in knobs:
        values = []
        for value in knob.values:
            setup = BASE.with_(knob.name, value)
            try:
                bringup.sized(tuned_wish(wish, knobs, setup))
                values.append(value)
            except (DoesNotFitError, CorralError) as error:
                pruned.append(Pruned(setup, error.message))
        if values:
            kept.append(replace(knob, values=tuple(values)))
    return tuple(kept), tuple(pruned)


def tune(run: TuneRun, watcher: TuneWatcher) -> RaceResult:
    """Go on with a run until there is nothing left to learn or no time; whatever ends it, nothing is left running."""
    with exclusive_lock(run.folder / "lock", lambda who: watcher.phase(f"waiting for {who}"), silent_s=OLD_LOCK_S):
        spec, trials = run.spec, run.trials()
        race = spec.race
        while order := next_order(race, trials):
            watcher.begins(len(trials) + 1, order, race.budget_s - sum(one.took_s for one in trials))
            trial = _made(run, spec, order, len(trials) + 1, watcher)
            run.add(trial)
            trials.append(trial)
            watcher.ended(trial, verdict(race, trials))
        return verdict(race, trials)


def _made(run: TuneRun, spec: TuneSpec, order: TrialOrder, number: int, watcher: TuneWatcher) -> Trial:
    began_s, start_s, folder = time.monotonic(), 0.0, run.trial_folder(number)

    def trial(score: float | None, why: str = "") -> Trial:
        took_s = time.monotonic() - began_s
        return Trial(order.setup, order.purpose, score, round(took_s, 2), round(start_s, 2), why, str(folder))

    try:
        with _served(run, spec, order.setup, watcher) as endpoint:
            start_s = time.monotonic() - began_s
            watcher.phase("measuring")
            value = run_loop(_score(endpoint, spec, order, folder, number))
    except CorralError as error:
        return trial(None, error.message.removeprefix(f"{_name(run)!r} failed: "))
    return trial(value)


async def _score(endpoint: Endpoint, spec: TuneSpec, order: TrialOrder, folder: Path, number: int) -> float:
    async with Bench(endpoint) as bench:
        found = await measure_score(bench, spec.bench, spec.objective, order.measure_s, folder, number)
        return found.value


def _name(run: TuneRun) -> str:
    """Of the deployments that are measured, one after the other."""
    return f"tune-{run.name}"[:LONGEST_NAME]


@contextlib.contextmanager
def _served(run: TuneRun, spec: TuneSpec, setup: Setup, watcher: TuneWatcher) -> Iterator[Endpoint]:
    """The setup's server while it is measured."""
    name = _name(run)
    wish = replace(tuned_wish(spec.wish, spec.race.knobs, setup), name=name)
    folder = DeploymentFolder.of(name)
    try:
        status = bringup.bring_up(wish, _Phases(watcher.phase))
        assert status.endpoint is not None
        yield status.endpoint
    finally:
        if folder.record.is_file():
            with contextlib.suppress(CorralError):
                deployments.stop(folder)


class _Phases:
    """A start's phases, as one word each."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def phase(self, name: str, expected: Expected | None = None) -> None:
        self._tell(name)

    def detail(self, text: str, done: int = 0, total: int = 0, news: bool = False) -> None:
        pass

    def note(self, text: str) -> None:
        pass


def settings_found(run: TuneRun) -> tuple[dict[str, object], tuple[str, ...]]:
    """The best setup of a run, as fields of a plan and arguments of vLLM."""
    spec = run.spec
    best = verdict(spec.race, run.trials()).best
    wish = tuned_wish(spec.wish, spec.race.knobs, best)
    return dict(wish.fixed), wish.extra_args
