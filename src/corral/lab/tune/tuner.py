"""The race on real servers: start a setup, measure it, stop it, write the trial down, choose the next.

Several trials run at once where each has hardware of its own: as jobs of a scheduler, or on GPUs of their own. On the
same GPUs servers may start together, but nothing starts during a measurement (see `lab.tune.parallel_trials`).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from corral.base.errors import CorralError
from corral.base.lock import exclusive_lock
from corral.client.client import run as run_loop
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import Expected
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.decision import DeployRequest
from corral.lab.bench.measure import Bench
from corral.lab.tune.knobs import BASE, Knob, Setup, tuned_request
from corral.lab.tune.objective import measure_score, roofline
from corral.lab.tune.parallel_trials import Turns, run_beside, with_part
from corral.lab.tune.race import RaceResult, next_order, verdict
from corral.lab.tune.store import TuneRun, TuneSpec
from corral.lab.tune.trials import Roofline, Trial, TrialOrder
from corral.serve.fleet.start import bring_up

LONGEST_NAME = 60


class TuneWatcher(Protocol):
    """Receives the progress of a run."""

    def begins(self, number: int, order: TrialOrder, left_s: float) -> None: ...

    def phase(self, text: str) -> None: ...

    def waits(self, who: str) -> None: ...

    def ended(self, trial: Trial, so_far: RaceResult) -> None: ...


@dataclass(frozen=True)
class Pruned:
    """A value that cannot run here, and why; it is never started."""

    setup: Setup
    because: str


def fitting_knobs(
    request: DeployRequest, knobs: Sequence[Knob], check: Callable[[DeployRequest], object]
) -> tuple[tuple[Knob, ...], tuple[Pruned, ...]]:
    """The knobs with the values that pass the check (there is a plan for them), and those that do not."""
    kept, pruned = [], []
    for knob in knobs:
        values = []
        for value in knob.values:
            setup = BASE.with_(knob.name, value)
            try:
                check(tuned_request(request, knobs, setup))
                values.append(value)
            except CorralError as error:
                pruned.append(Pruned(setup, error.message))
        if values:
            kept.append(replace(knob, values=tuple(values)))
    return tuple(kept), tuple(pruned)


def tune(run: TuneRun, watcher: TuneWatcher) -> RaceResult:
    """Continue a run until there is nothing left to learn or no time; no server is left running, however it ends."""
    with exclusive_lock(run.folder / "lock", watcher.waits):
        spec, trials = run.spec, run.trials()
        race, turns = spec.race, Turns(spec.in_turns)

        def begins(number: int, order: TrialOrder) -> None:
            watcher.begins(number, order, max(0.0, race.budget_s - sum(one.of_budget_s for one in trials)))

        def ended(trial: Trial) -> None:
            run.add(trial)
            watcher.ended(trial, verdict(race, trials))

        def make(order: TrialOrder, number: int, slot: int) -> Trial:
            return make_trial(run, spec, order, number, watcher, turns, slot)

        def abandon() -> None:
            turns.end()
            _end_all(run, spec)

        _end_all(run, spec)  # a killed run may have left some
        try:
            if spec.slots > 1:
                run_beside(race, trials, spec.slots, make, begins, ended, abandon, spec.in_turns)
            while order := next_order(race, trials):
                begins(len(trials) + 1, order)
                trials.append(make(order, len(trials) + 1, 0))
                ended(trials[-1])
        finally:
            _end_all(run, spec)
        return verdict(race, trials)


def _end_all(run: TuneRun, spec: TuneSpec) -> None:
    """Stop all servers of this run."""
    for slot in range(spec.slots):
        _stop(_name(run, slot))


def make_trial(
    run: TuneRun,
    spec: TuneSpec,
    order: TrialOrder,
    number: int,
    watcher: TuneWatcher,
    turns: Turns | None = None,
    slot: int = 0,
) -> Trial:
    """Start a setup's server, measure it, and stop it; a failure is a trial without a score."""
    turns = turns or Turns(shared=False)
    began_s, start_s, folder = time.monotonic(), 0.0, run.trial_folder(number)
    waited = [0.0]  # for a turn

    def trial(score: float | None, why: str = "", bounds: Roofline | None = None) -> Trial:
        took_s = time.monotonic() - began_s - sum(waited)
        spent = (round(took_s, 2), round(start_s, 2))
        return Trial(order.setup, order.purpose, score, *spent, why, str(folder), bounds)

    try:
        with _served(run, spec, order.setup, watcher, turns, slot, waited) as (endpoint, start_s):
            watcher.phase("measuring")
            value, bounds = run_loop(_score(endpoint, spec, order, folder, number))
    except CorralError as error:
        return trial(None, error.message.removeprefix(f"{_name(run, slot)!r} failed: "))
    return trial(value, bounds=bounds)


async def _score(
    endpoint: Endpoint, spec: TuneSpec, order: TrialOrder, folder: Path, number: int
) -> tuple[float, Roofline | None]:
    async with Bench(endpoint) as bench:
        found = await measure_score(bench, spec.bench, spec.objective, order.measure_s, folder, number)
        return found.value, roofline(bench.plan, spec.objective, found.summary)


def _name(run: TuneRun, slot: int) -> str:
    """The name of the deployments in a slot, one after the other; no other run uses it."""
    name = f"tune-{run.name}"
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(run.name.encode()).hexdigest()[:8]}"
    return name + (f"+{slot + 1}" if slot else "")


@contextlib.contextmanager
def _served(
    run: TuneRun,
    spec: TuneSpec,
    setup: Setup,
    watcher: TuneWatcher,
    turns: Turns,
    slot: int,
    waited: list[float],
) -> Iterator[tuple[Endpoint, float]]:
    """The setup's server while it is measured, and the seconds of its start; `waited` gets the waits for a turn."""
    name = _name(run, slot)
    share = spec.shares[slot] if spec.shares else spec.request.share
    request = tuned_request(spec.request, spec.race.knobs, setup)
    request = replace(with_part(request, spec.slots) if spec.in_turns else request, name=name, share=share)
    asked_s = time.monotonic()
    with turns.start():
        began_s = time.monotonic()
        waited.append(began_s - asked_s)
        try:
            status = bring_up(request, _Phases(watcher.phase))
        except BaseException:
            _stop(name)
            raise
    ready_s = time.monotonic()
    try:
        with turns.measurement():
            waited.append(time.monotonic() - ready_s)
            try:
                assert status.endpoint is not None
                yield status.endpoint, ready_s - began_s
            finally:
                _stop(name)  # before others start or are measured
    finally:
        _stop(name)  # where it was never measured


def _stop(name: str) -> None:
    """Stop a server; also one that failed, of which processes may be left."""
    folder = DeploymentFolder.of(name)
    if not folder.record.is_file():
        return
    with contextlib.suppress(CorralError):
        if deployments.status(folder).state is State.STOPPED:
            return
    with contextlib.suppress(CorralError):
        deployments.stop(folder)


class _Phases:
    """Passes on the names of a start's phases."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def phase(self, name: str, expected: Expected | None = None) -> None:
        self._show(name)

    def detail(self, text: str, done: int = 0, total: int = 0, news: bool = False) -> None:
        pass

    def note(self, text: str) -> None:
        pass


def settings_found(run: TuneRun) -> tuple[dict[str, object], tuple[str, ...]]:
    """The best setup of a run, as fields of a plan and arguments of vLLM."""
    spec = run.spec
    best = verdict(spec.race, run.trials()).best
    request = tuned_request(spec.request, spec.race.knobs, best)
    return dict(request.fixed), request.extra_args
