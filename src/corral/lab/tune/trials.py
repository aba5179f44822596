"""Trials of a tuning run, and their statistics: means, noise between starts, gains with their intervals."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from corral.lab.bench.compare import t_quantile
from corral.lab.tune.knobs import Setup

LEAST_NOISE = 0.01  # starts vary at least this much
ENOUGH = 8  # degrees of freedom, from which one is spent on the effect of longer measurements
EDGES = 0.1  # by which the first and last seconds may lower a short measurement's score more than a long one's
CLEAR = 0.02  # an interval within ± this is "no difference" beyond doubt


class Purpose(enum.StrEnum):
    """The stage of the race that a trial belongs to."""

    SCREEN = "screen"
    HALVE = "halve"
    FINAL = "final"


@dataclass(frozen=True)
class TrialOrder:
    """A trial to make."""

    setup: Setup
    purpose: Purpose
    measure_s: float


@dataclass(frozen=True)
class Roofline:
    """What a trial's server could give at the load it got, in the unit of the score (see `lab.tune.objective`)."""

    hardware: float | None
    planned: float


@dataclass(frozen=True)
class Trial:
    """A finished trial; a higher score is better, and scores are above 0."""

    setup: Setup
    purpose: Purpose
    score: float | None  # None: it did not start, or could not be measured
    took_s: float
    start_s: float = 0.0  # of it, until the server was ready
    why: str = ""  # where there is no score
    run: str = ""  # the measurement's folder
    roofline: Roofline | None = None
    spent_s: float | None = None  # of the run's time, where trials ran side by side; None: all that it took

    @property
    def of_budget_s(self) -> float:
        return self.took_s if self.spent_s is None else self.spent_s


@dataclass(frozen=True)
class Gain:
    """A ratio of scores against another setup's (the base's, unless said), minus one, with its 95% interval."""

    value: float
    low: float
    high: float
    trials: int

    @property
    def beyond_doubt(self) -> bool:
        """Whether more rounds would change nothing; twice the interval, because repeated tests find chance
        differences.
        """
        half = (self.high - self.low) / 2
        return (abs(self.value) > 2 * half and self.trials >= 4) or max(-self.low, self.high) < CLEAR

    def __str__(self) -> str:
        return f"{self.value:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


def scores_of(trials: Sequence[Trial], setup: Setup, purpose: Purpose | None = None) -> list[float]:
    return [
        math.log(one.score)
        for one in trials
        if one.setup == setup and one.score and (purpose is None or one.purpose is purpose)
    ]


def setups_of(trials: Sequence[Trial]) -> list[Setup]:
    return list(dict.fromkeys(one.setup for one in trials))


def noise_of(trials: Sequence[Trial]) -> tuple[float, int]:
    """The standard deviation between starts of one setup, over all setups, and its degrees of freedom.

    Longer measurements score a little higher than those of the screen. As far as that effect is the same for all
    setups that have both, it is not noise; with few trials it cannot be estimated, and counts as noise.
    """
    squares = lengths = product = 0.0  # sums within setups: of scores, of lengths, of their products
    freedom = 0
    for setup in setups_of(trials):
        scored = [(math.log(one.score), one.purpose is not Purpose.SCREEN) for one in trials
                 if one.setup == setup and one.score]  # fmt: skip
        if len(scored) > 1:
            score, length = (fmean(values) for values in zip(*scored, strict=True))
            squares += sum((value - score) ** 2 for value, _ in scored)
            lengths += sum((is_long - length) ** 2 for _, is_long in scored)
            product += sum((value - score) * (is_long - length) for value, is_long in scored)
            freedom += len(scored) - 1
    if lengths and freedom >= ENOUGH:
        edge = min(EDGES, max(0.0, product / lengths))
        squares, freedom = max(0.0, squares - 2 * edge * product + edge * edge * lengths), freedom - 1
    return (max(LEAST_NOISE, math.sqrt(squares / freedom)) if freedom else 2 * LEAST_NOISE), freedom


def compared(trials: Sequence[Trial], setup: Setup, other: Setup, purpose: Purpose | None = None) -> Gain | None:
    """What one setup gains over another, from trials of one purpose, or of all."""
    return gain_of(trials, scores_of(trials, setup, purpose), scores_of(trials, other, purpose))


def gain_of(trials: Sequence[Trial], ours: list[float], base: list[float], doubt: float = 0.0) -> Gain | None:
    """The ratio of two sets of scores; `doubt` widens the interval by what the two may differ in besides noise."""
    if not ours or not base:
        return None
    noise, freedom = noise_of(trials)
    half = t_quantile(freedom) * noise * math.sqrt(1 / len(ours) + 1 / len(base)) + doubt
    middle = fmean(ours) - fmean(base)
    return Gain(math.expm1(middle), math.expm1(middle - half), math.expm1(middle + half), len(ours) + len(base))


def mean_score(trials: Sequence[Trial]) -> float:
    """The mean logarithm of all scores; 0 where there is none."""
    scored = [math.log(one.score) for one in trials if one.score]
    return fmean(scored) if scored else 0.0


def score_of(trials: Sequence[Trial], setup: Setup) -> float:
    scored = scores_of(trials, setup)
    return fmean(scored) if scored else -math.inf
