"""Random search for as long as the race took, on the same server, as something to compare the race with. Pure.

Each trial draws one value of every knob, or none. When as much time is spent as the race took, the best draw meets
the race's choice in four fresh starts, A B B A: the best of many is flattered by having been chosen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from corral.lab.tune.knobs import BASE, KnobKind, Setup
from corral.lab.tune.race import LONGER, Race, expected_costs, verdict
from corral.lab.tune.trials import Gain, Purpose, Trial, TrialOrder, compared

MEETINGS = 4


@dataclass(frozen=True)
class RandomFound:
    """What random search came to."""

    best: Setup
    draws: int
    spent_s: float
    gain: Gain | None  # of the race's choice over it, from their meetings; None: they are the same, or never met


def next_random(race: Race, trials: Sequence[Trial], seed: int) -> TrialOrder | None:
    """The next trial of the search, or of the meeting; None when both are over."""
    made = [one for one in trials if one.purpose is Purpose.RANDOM]
    found = verdict(race, trials)
    short_s, _ = expected_costs(race, trials)
    if sum(one.of_budget_s for one in made) + short_s <= found.spent_s:
        return TrialOrder(_drawn(race, seed, len(made)), Purpose.RANDOM, race.measure_s)
    theirs, met = _best(made), sum(one.purpose is Purpose.MEET for one in trials)
    if theirs is None or theirs == found.best or met >= MEETINGS:
        return None
    setup = found.best if met % MEETINGS in (0, 3) else theirs
    return TrialOrder(setup, Purpose.MEET, LONGER * race.measure_s)


def _drawn(race: Race, seed: int, number: int) -> Setup:
    chance, setup = random.Random(f"{seed} {number}"), BASE  # noqa: S311 - a search, not a secret
    for knob in race.knobs:
        if knob.kind is not KnobKind.BASELINE and (value := chance.choice((None, *knob.values))) is not None:
            setup = setup.with_(knob.name, value)
    return setup


def _best(made: Sequence[Trial]) -> Setup | None:
    scored = [one for one in made if one.score]
    return max(scored, key=lambda one: one.score or 0.0).setup if scored else None


def random_found(ours: Setup, trials: Sequence[Trial]) -> RandomFound | None:
    """What the search has found so far beside the race's own choice; None where none was made."""
    made = [one for one in trials if one.purpose is Purpose.RANDOM]
    theirs = _best(made)
    if theirs is None:
        return None
    gain = compared(trials, ours, theirs, Purpose.MEET) if ours != theirs else None
    return RandomFound(theirs, len(made), sum(one.of_budget_s for one in made), gain)
