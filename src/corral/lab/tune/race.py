"""What to measure next, and the result of the measurements. Pure: both are functions of the trials made so far.

A start costs far more than a measurement, and two starts of one setup differ by more than two measurements of one
start: so each trial is a fresh start, and noise is judged between starts. The race has four stages:

1. *Screen*: the base; without all flags that the user brought, where there are any; then every value of every knob
   alone, the most promising first, with the setup they are added to again every few trials; then the values that
   helped together. Values are added to the base, or, where leaving the user's flags out is clearly better, to that.
   What the budget has no room for is left out, and named.
2. *Halve*: the best few are started again and measured for longer; the better half stays, until one is left.
3. *Final*: that one and the base in turns, A B A B, until the difference is clear or the rounds are spent.
4. The verdict rests on the final alone, because the best of many is flattered by having been chosen. Where its
   interval includes no gain, the base stays: "no difference" is a result. A final that the budget cut short counts
   where its interval is clear: it is wider, and the trials did not choose when it ended. The base's trials of earlier
   stages then count as well, nothing was chosen by them; but they are shorter, which the interval allows for.

A setup that does not start costs one trial. Where the base does not start, twice, the plan's own flags take its place
in the final, and are the result where nothing is better. Everything follows from the trials, so a race that was
killed continues where it was.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from corral.lab.tune.knobs import BASE, Knob, KnobKind, Setup
from corral.lab.tune.trials import (
    EDGES,
    LEAST_NOISE,
    Gain,
    Purpose,
    Trial,
    TrialOrder,
    compared,
    gain_of,
    noise_of,
    score_of,
    scores_of,
    setups_of,
)

BASE_EVERY = 5  # trials of the screen between two of the base
SEMIFINALISTS = 4
FEWEST_ROUNDS, MOST_ROUNDS = 3, 6
DOUBTS = 2.0  # times the noise, within which one start cannot distinguish two settings
LOUD = 0.1  # noise, above which each setting of a combination must show a gain …
PROOF = 2.0  # … of so many standard errors
# factor by which the noise may exceed its estimate (in one of five cases), by its degrees of freedom
NOISE_FACTOR = (4.0, 3.95, 2.12, 1.73, 1.56, 1.46, 1.40, 1.36, 1.32, 1.29, 1.27)
FAR_BETTER = 0.1  # gain of leaving out all flags of the user, from which on values are added to that instead
FINAL_SHARE = 0.4  # of the budget, at most, that is kept for the final
LONGER = 2  # times a screen's measurement, from the second stage on


class RaceEnd(enum.StrEnum):
    """The outcome of a race."""

    BETTER = "better"
    NO_DIFFERENCE = "no difference"
    UNFINISHED = "unfinished"  # the budget ended before a final
    NOTHING_WORKED = "nothing worked"


@dataclass(frozen=True)
class Race:
    """The knobs of a race, and its budget."""

    knobs: tuple[Knob, ...]
    budget_s: float
    measure_s: float
    start_s: float  # expected, until starts were measured


@dataclass(frozen=True)
class KnobFinding:
    """The effect of one value of one knob, alone."""

    knob: str
    value: str
    gain: Gain | None  # None: it never worked, or there is nothing to compare it with
    why: str = ""
    measured: bool = False


@dataclass(frozen=True)
class RaceResult:
    """The result of a race."""

    outcome: RaceEnd
    best: Setup  # to be used: the base unless another is better, or it does not start
    gain: Gain | None  # of the finalist against the reference, from the final alone
    finalist: Setup
    reference: Setup  # the finalist's opponent: the base, or what replaces a base that does not start
    leader: Setup  # so far, by all trials
    anchor: Setup  # to which single values were added: the base, or that without the user's own flags
    findings: tuple[KnobFinding, ...]
    left_out: tuple[Setup, ...]  # never tried: the budget had no room
    noise: float  # standard deviation between starts of one setup, relative
    spent_s: float
    gave_up: bool = False  # the finalist did not start again


# The next trial


def next_order(race: Race, trials: Sequence[Trial]) -> TrialOrder | None:
    """The next trial; None when there is nothing left to learn, or no time."""
    if not trials:
        return TrialOrder(BASE, Purpose.SCREEN, race.measure_s)
    left_s = race.budget_s - sum(one.of_budget_s for one in trials)
    if len(trials) >= 2 and all(one.score is None for one in trials[:2]):
        return None  # nothing starts
    short_s, long_s = expected_costs(race, trials)
    final_s = min(2 * FEWEST_ROUNDS * long_s, FINAL_SHARE * race.budget_s)
    if not any(one.purpose is Purpose.FINAL for one in trials):
        halving = _next_of_halving(trials)
        alone = len(setups_of(trials)) < 2  # nothing to compare the base with
        room = left_s >= short_s if alone else left_s - short_s >= final_s
        if room and not any(one.purpose is Purpose.HALVE for one in trials):
            setup = _next_of_screen(race, trials)
            if setup is not None:
                return TrialOrder(setup, Purpose.SCREEN, race.measure_s)
        if halving is not None and left_s - long_s >= final_s:
            return TrialOrder(halving, Purpose.HALVE, LONGER * race.measure_s)
    if left_s < long_s:
        return None
    if _failed(trials, BASE) == 1:
        return TrialOrder(BASE, Purpose.SCREEN, race.measure_s)  # once more: a start may fail by chance
    setup = _next_of_final(race, trials)
    return TrialOrder(setup, Purpose.FINAL, LONGER * race.measure_s) if setup is not None else None


def _tries(trials: Sequence[Trial], setup: Setup, purpose: Purpose | None = None) -> int:
    """How often a setup was started, whether it worked or not."""
    return sum(one.setup == setup and purpose in (None, one.purpose) for one in trials)


def _failed(trials: Sequence[Trial], setup: Setup) -> int:
    """How often a setup that never worked did not start."""
    return 0 if scores_of(trials, setup) else _tries(trials, setup)


def _reference(race: Race, trials: Sequence[Trial]) -> Setup:
    """The opponent of the finalist."""
    if _failed(trials, BASE) < 2:
        return BASE
    bare = _bare(race)
    return bare if scores_of(trials, bare) else max(setups_of(trials), key=lambda one: score_of(trials, one))


def expected_costs(race: Race, trials: Sequence[Trial]) -> tuple[float, float]:
    """How long a trial of the screen takes, and a later one: start, measurement, end."""
    short = [one.took_s for one in trials if one.purpose is Purpose.SCREEN and one.score]
    long = [one.took_s for one in trials if one.purpose is not Purpose.SCREEN and one.score]
    # the first start fetches and compiles what later ones find, so its time alone would be too long
    expected_s = race.start_s + race.measure_s
    short_s = median(short) if len(short) > 2 else min([*short, expected_s] if len(short) < 2 else short)
    return short_s, max(short_s, median(long)) if long else short_s + (LONGER - 1) * race.measure_s


def _bare(race: Race) -> Setup:
    """The plan's own flags, without any of the user's."""
    bare = BASE
    for knob in race.knobs:
        if knob.kind is KnobKind.WITHOUT:
            bare = bare.with_(knob.name, knob.values[0])
    return bare


def _anchor(race: Race, trials: Sequence[Trial]) -> Setup:
    """The setup to which single values are added; by the first trials alone, so that it does not change later."""
    bare = _bare(race)
    if bare == BASE or not scores_of(trials, bare):
        return BASE
    base = scores_of(trials, BASE)
    return bare if not base or scores_of(trials, bare)[0] > base[0] + FAR_BETTER else BASE


def _alone(anchor: Setup, knob: Knob, value: str) -> Setup:
    """The anchor with one choice changed; a flag that it leaves out comes back."""
    return anchor.without(knob.name) if knob.name in dict(anchor.choices) else anchor.with_(knob.name, value)


def _singles(race: Race, anchor: Setup) -> list[Setup]:
    """Every value alone: each knob's most promising first, then each one's next; flags that come back are last."""
    deepest = max((len(knob.values) for knob in race.knobs), default=0)
    candidates = [
        (knob.name in dict(anchor.choices), _alone(anchor, knob, knob.values[at]))
        for at in range(deepest)
        for knob in race.knobs
        if at < len(knob.values)
    ]
    return [setup for _, setup in sorted(candidates, key=lambda pair: pair[0])]


def _next_of_screen(race: Race, trials: Sequence[Trial]) -> Setup | None:
    """The next setup of the screen; None when every promising one was tried."""
    tried, anchor = setups_of(trials), _anchor(race, trials)
    if _bare(race) not in tried:
        return _bare(race)
    since = next((at for at, one in enumerate(reversed(trials)) if one.setup == anchor), None)
    hopeless = _failed(trials, anchor) > 1
    if not hopeless and (since is None or since >= BASE_EVERY):
        return anchor
    for setup in _singles(race, anchor):
        if setup not in tried:
            return setup
    for setup in (*_doubtful(race, trials), *(one for one in _together(race, trials) if one not in tried)):
        return setup
    return anchor if since and not hopeless and len(scores_of(trials, anchor)) < 2 else None


def _helpful(race: Race, trials: Sequence[Trial]) -> list[tuple[float, str, str]]:
    """The best value of each knob that seems to help, the most helpful first."""
    anchor = _anchor(race, trials)
    start, noise = score_of(trials, anchor), noise_of(trials)[0]
    candidates = []
    for knob in race.knobs:
        if knob.kind is KnobKind.BASELINE:
            continue  # a whole set of flags: compared with, not combined
        scores = {value: score_of(trials, _alone(anchor, knob, value)) for value in knob.values}
        best = max(scores, key=lambda value: scores[value], default="")
        if scores.get(best, -math.inf) - start > max(LEAST_NOISE, 0.5 * noise):
            gain = scores[best] - start
            candidates.append((gain, knob.name, best))
    return sorted(candidates, reverse=True)


def _doubtful(race: Race, trials: Sequence[Trial]) -> list[Setup]:
    """Values tried once, where one start does not show whether they help, or which of two helps more."""
    doubt, anchor = DOUBTS * noise_of(trials)[0], _anchor(race, trials)
    candidates = []
    for knob in race.knobs:
        setups = (anchor, *(_alone(anchor, knob, value) for value in knob.values))
        scores = {one: score_of(trials, one) for one in setups}
        leading = [one for one, score in scores.items() if score > max(scores.values()) - doubt]
        if len(leading) > 1:
            candidates += [one for one in leading if one != anchor and _tries(trials, one) == 1]
    return candidates


def _together(race: Race, trials: Sequence[Trial]) -> list[Setup]:
    """Combinations of the values that helped alone: all of them, then without the least helpful ones."""
    setup = _anchor(race, trials)
    knobs, candidates = {knob.name: knob for knob in race.knobs}, []
    for _, name, value in _helpful(race, trials):
        setup = _alone(setup, knobs[name], value)
        candidates.append(setup)
    return candidates[1:][::-1]


def _next_of_halving(trials: Sequence[Trial]) -> Setup | None:
    """The next setup to start again: of the best four those tried once, then of the best two those tried twice."""
    base, noise = score_of(trials, BASE), noise_of(trials)[0]
    rivals = [one for one in setups_of(trials) if one != BASE and score_of(trials, one) > base - noise]
    rivals.sort(key=lambda one: score_of(trials, one), reverse=True)
    for size, wanted in ((SEMIFINALISTS, 2), (2, 3)):
        for setup in rivals[:size]:
            if _tries(trials, setup) < wanted:
                return setup
    return None


def _finalist(race: Race, trials: Sequence[Trial]) -> Setup:
    """The setup that is compared with the base; it does not change once the final has begun."""
    reference = _reference(race, trials)
    begun = [one.setup for one in trials if one.purpose is Purpose.FINAL and one.setup not in (BASE, reference)]
    if begun:
        return begun[0]
    rivals = [
        one for one in setups_of(trials) if one != BASE and scores_of(trials, one) and not _changes_answers(race, one)
    ]
    noise, _ = noise_of(trials)
    # with the noise subtracted: one lucky start does not beat a setup that was good three times
    best = max(
        rivals, key=lambda one: score_of(trials, one) - noise / math.sqrt(len(scores_of(trials, one))), default=BASE
    )
    best = _plainest(race, trials, best)
    return best if score_of(trials, best) > score_of(trials, reference) else reference


def _changes_answers(race: Race, setup: Setup) -> bool:
    """Whether it computes in another number format, as a vendor's flags may: it is compared with, not chosen."""
    whole = {knob.name for knob in race.knobs if knob.kind is KnobKind.BASELINE}
    return any(name in whole and "--dtype" in value for name, value in setup.choices)


def _plainest(race: Race, trials: Sequence[Trial], best: Setup) -> Setup:
    """The same without settings that are not shown to add anything.

    Where starts differ much, or the budget left values untried, chance adds other settings to the best combination in
    each run. Where they differ little and all was tried, a setting in doubt costs nothing, and leaving it out would
    lose small gains.
    """
    noise, freedom = noise_of(trials)
    noise *= NOISE_FACTOR[min(freedom, len(NOISE_FACTOR) - 1)]
    if freedom and noise <= LOUD and not _untried(race, trials):
        return best
    count = len(scores_of(trials, best))
    for one in sorted(setups_of(trials), key=lambda one: (len(one.choices), -score_of(trials, one))):
        if one != BASE and one.choices and set(one.choices) < set(best.choices) and scores_of(trials, one):
            doubt = PROOF * noise * math.sqrt(1 / count + 1 / len(scores_of(trials, one)))
            if score_of(trials, one) >= score_of(trials, best) - doubt:
                return one
    return best


def _untried(race: Race, trials: Sequence[Trial]) -> list[Setup]:
    """Single values that were never tried."""
    tried = setups_of(trials)
    return [setup for setup in _singles(race, _anchor(race, trials)) if setup not in tried]


def _next_of_final(race: Race, trials: Sequence[Trial]) -> Setup | None:
    """The next setup of the final; None when it is over."""
    finalist, reference = _finalist(race, trials), _reference(race, trials)
    if finalist == reference:
        return None
    made = [one for one in trials if one.purpose is Purpose.FINAL]
    ours = sum(one.setup == finalist for one in made)
    base = len(made) - ours
    if ours == base and ours >= FEWEST_ROUNDS:
        gain = compared(trials, finalist, reference, Purpose.FINAL)
        if ours >= MOST_ROUNDS or gain is None or gain.beyond_doubt:
            return None
    # A B, then B A, and so on: a drift over time affects both alike
    first, second = (finalist, reference) if min(ours, base) % 2 == 0 else (reference, finalist)
    return first if ours == base else second


# The result


def _final_gain(trials: Sequence[Trial], finalist: Setup, reference: Setup) -> Gain | None:
    """The gain in the final; where that was cut short, over all trials of the reference."""
    ours = scores_of(trials, finalist, Purpose.FINAL)
    if _is_final_complete(trials, finalist, reference):
        return gain_of(trials, ours, scores_of(trials, reference, Purpose.FINAL))
    return gain_of(trials, ours, scores_of(trials, reference), doubt=EDGES)


def _is_final_complete(trials: Sequence[Trial], finalist: Setup, reference: Setup) -> bool:
    return all(len(scores_of(trials, one, Purpose.FINAL)) >= FEWEST_ROUNDS for one in (finalist, reference))


def _outcome(trials: Sequence[Trial], finalist: Setup, reference: Setup, gain: Gain | None) -> RaceEnd:
    if not any(one.score for one in trials):
        return RaceEnd.NOTHING_WORKED
    if len(setups_of(trials)) < 2:
        return RaceEnd.UNFINISHED  # there is only the base
    if reference != BASE:
        return RaceEnd.BETTER  # than one that does not start
    unclear = gain is None or (gain.low <= 0 and not _is_final_complete(trials, finalist, reference))
    if finalist != reference and unclear:
        return RaceEnd.UNFINISHED
    return RaceEnd.BETTER if gain is not None and gain.low > 0 else RaceEnd.NO_DIFFERENCE


def verdict(race: Race, trials: Sequence[Trial]) -> RaceResult:
    """The result of the trials so far."""
    finalist, reference = _finalist(race, trials), _reference(race, trials)
    gain = _final_gain(trials, finalist, reference) if finalist != reference else None
    tried, anchor = setups_of(trials), _anchor(race, trials)
    return RaceResult(
        _outcome(trials, finalist, reference, gain),
        best=finalist if gain is not None and gain.low > 0 else reference,
        gain=gain,
        finalist=finalist,
        reference=reference,
        leader=max(tried, key=lambda one: score_of(trials, one), default=BASE),
        anchor=anchor,
        findings=tuple(_finding(trials, anchor, knob, value) for knob in race.knobs for value in knob.values),
        left_out=tuple(_untried(race, trials)),
        noise=noise_of(trials)[0],
        spent_s=sum(one.of_budget_s for one in trials),
        gave_up=bool(_tries(trials, finalist, Purpose.FINAL)) and not scores_of(trials, finalist, Purpose.FINAL),
    )


def _finding(trials: Sequence[Trial], anchor: Setup, knob: Knob, value: str) -> KnobFinding:
    """The effect of a value alone; for a flag that the anchor leaves out, the effect of leaving it out."""
    setup = _alone(anchor, knob, value)
    with_it, without = (anchor, setup) if knob.name in dict(anchor.choices) else (setup, anchor)
    why = next((one.why for one in reversed(trials) if one.setup == setup and one.score is None), "")
    return KnobFinding(knob.name, value, compared(trials, with_it, without), why, bool(scores_of(trials, setup)))
