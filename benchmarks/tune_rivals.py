"""What a tuning run is compared with: the flags of others, and random search for as long as the race took.

    python benchmarks/tune_rivals.py RUN [--flags stock] [--flags digitalocean] [--random]

RUN is a run of `corral tune` that is over. With `--flags` the same race is run again with a vendor's flags as one
more setup, measured like the rest, and never combined with other settings. With `--random` setups are then drawn at
random, one value of every knob or none, until as much time is spent as the race took. The best draw meets the race's
choice in four fresh starts, A B B A: the best of many is flattered by having been chosen.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from corral.base.errors import DoesNotFitError
from corral.deploy.lifecycle.decision import DeployRequest, sized
from corral.engines.settings import read_back, vllm_defaults
from corral.lab.report.tune import TrialLines, tune_lines
from corral.lab.tune.knobs import BASE, Knob, KnobKind, Setup
from corral.lab.tune.race import LONGER, Race, RaceResult, expected_costs, verdict
from corral.lab.tune.store import TuneRun, find_run, new_run
from corral.lab.tune.trials import Gain, Purpose, Trial, TrialOrder, gain_of, scores_of
from corral.lab.tune.tuner import make_trial, tune
from corral.plan.candidate import is_large
from corral.plan.contract import UTILISATION, Plan
from corral.plan.settings import own_largest

VENDORS = ("stock", "digitalocean")
# its documented deployment, without the split over nodes, which the plan decides
DIGITALOCEAN = (
    "--enforce-eager --dtype float16 --gpu-memory-utilization 0.99 --max-num-batched-tokens 65536"
    " --no-enable-chunked-prefill"
)
MEETINGS = 4


def vendor_knobs(plan: Plan, request: DeployRequest, wanted: Sequence[str]) -> tuple[Knob, ...]:
    """Knobs whose only value is a line of flags."""
    lines = {"stock": _stock, "digitalocean": _digitalocean}
    named = dict.fromkeys(wanted)
    return tuple(Knob(f"baseline {name}", (lines[name](plan, request),), KnobKind.BASELINE) for name in named)


def _stock(plan: Plan, request: DeployRequest) -> str:
    """vLLM's own defaults for everything that the plan decides."""
    default = vllm_defaults(is_large(plan.inventory), plan.parallel.data)
    line = (
        f"--max-num-seqs {default['max_num_seqs']} --max-num-batched-tokens {default['max_num_batched_tokens']}"
        f" --api-server-count {default['api_servers']} --stream-interval 1 --gpu-memory-utilization {UTILISATION}"
        " --no-enforce-eager --async-scheduling"
    )
    with contextlib.suppress(DoesNotFitError):
        fixed = {**request.fixed, **read_back(shlex.split(line)).fields}
        settings = sized(replace(request, fixed=fixed))[1].plan.settings
        if settings.max_graph_size:  # an old vLLM does not know the flag
            line += f" --max-cudagraph-capture-size {own_largest(settings, plan.inventory.kind)}"
    return line


def _digitalocean(_: Plan, request: DeployRequest) -> str:
    context = "" if request.goal.context or "max_model_len" in request.fixed else " --max-model-len 8192"
    return DIGITALOCEAN + context


@dataclass(frozen=True)
class RandomSearch:
    """Trials of setups drawn at random, and those in which the best of them met the race's choice."""

    draws: tuple[Trial, ...] = ()
    meetings: tuple[Trial, ...] = ()

    @property
    def spent_s(self) -> float:
        return sum(one.of_budget_s for one in self.draws)

    @property
    def best(self) -> Setup | None:
        scored = [one for one in self.draws if one.score]
        return max(scored, key=lambda one: one.score or 0.0).setup if scored else None

    def with_trial(self, trial: Trial) -> RandomSearch:
        if trial.purpose is Purpose.SCREEN:
            return replace(self, draws=(*self.draws, trial))
        return replace(self, meetings=(*self.meetings, trial))

    def gain_of_race(self, raced: Sequence[Trial], choice: Setup) -> Gain | None:
        """Of the race's choice over the best draw; None where they are the same, or never met."""
        if self.best is None or self.best == choice:
            return None
        ours, theirs = (scores_of(self.meetings, one) for one in (choice, self.best))
        return gain_of([*raced, *self.draws, *self.meetings], ours, theirs)


def next_random(
    race: Race, raced: Sequence[Trial], result: RaceResult, search: RandomSearch, seed: int
) -> TrialOrder | None:
    """The next draw, or the next meeting; None when both are over."""
    short_s, _ = expected_costs(race, raced)
    if search.spent_s + short_s <= result.spent_s:
        return TrialOrder(_drawn(race, seed, len(search.draws)), Purpose.SCREEN, race.measure_s)
    met = len(search.meetings)
    if search.best is None or search.best == result.best or met >= MEETINGS:
        return None
    setup = result.best if met % MEETINGS in (0, 3) else search.best
    return TrialOrder(setup, Purpose.FINAL, LONGER * race.measure_s)


def _drawn(race: Race, seed: int, number: int) -> Setup:
    chance, setup = random.Random(f"{seed} {number}"), BASE
    for knob in race.knobs:
        if knob.kind is not KnobKind.BASELINE and (value := chance.choice((None, *knob.values))) is not None:
            setup = setup.with_(knob.name, value)
    return setup


def race_with(run: TuneRun, vendors: Sequence[str]) -> TuneRun:
    """The race of a run again, with vendors' flags as further setups."""
    spec = run.spec
    knobs = vendor_knobs(sized(spec.request)[1].plan, spec.request, vendors)
    again = new_run(replace(spec, race=replace(spec.race, knobs=(*knobs, *spec.race.knobs))), f"{run.name}-vendors")
    tune(again, TrialLines(quiet=False))
    return again


def search(run: TuneRun) -> None:
    spec, raced, found = run.spec, run.trials(), RandomSearch()
    result, watcher = verdict(spec.race, raced), TrialLines(quiet=False)
    while order := next_random(spec.race, raced, result, found, spec.bench.workload.seed):
        number = len(raced) + len(found.draws) + len(found.meetings) + 1
        watcher.begins(number, order, max(0.0, result.spent_s - found.spent_s))
        found = found.with_trial(make_trial(run, spec, order, number, watcher))
    print(f"random search, {len(found.draws)} draws in {found.spent_s:.0f} s: {found.best}")
    print(f"{result.best} over it: {found.gain_of_race(raced, result.best) or 'the same choice, or never compared'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--flags", action="append", default=[], choices=VENDORS)
    parser.add_argument("--random", action="store_true")
    options = parser.parse_args()
    run = find_run(options.run)
    if options.flags:
        run = race_with(run, options.flags)
        print("\n".join(tune_lines(run, run.trials(), verdict(run.spec.race, run.trials()), None)))
    if options.random:
        search(run)


if __name__ == "__main__":
    main()
