"""The race over settings: on made-up servers with known optima and noise it ends with the right choice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_rivals import RandomSearch, next_random

from corral.lab.report.tune import sentence
from corral.lab.tune.knobs import BASE, Knob, KnobKind, Setup
from corral.lab.tune.parallel_trials import next_beside, run_beside
from corral.lab.tune.race import Race, RaceEnd, RaceResult, next_order, verdict
from corral.lab.tune.trials import LEAST_NOISE, Purpose, Trial, TrialOrder, noise_of

KNOBS = (
    Knob("max_num_seqs", ("512", "2048")),
    Knob("max_num_batched_tokens", ("16384", "2048", "32768")),
    Knob("api_servers", ("4", "8")),
    Knob("stream_interval", ("4",)),
    Knob("async_scheduling", ("off",)),
)
RACE = Race(KNOBS, budget_s=40 * 60, measure_s=15, start_s=50)
Surface = Callable[[Setup], float]


def surface(effects: dict[tuple[str, str], float]) -> Surface:
    """A server whose speed is 100 times the effects of all choices."""
    return lambda setup: 100.0 * math.prod(effects.get(choice, 1.0) for choice in setup.choices)


def best_of(true: Surface) -> float:
    """The optimum of the whole grid."""
    setups = [BASE]
    for knob in KNOBS:
        setups += [setup.with_(knob.name, value) for setup in setups for value in knob.values]
    return max(map(true, setups))


def measured(setup: Setup, purpose: Purpose, true: Surface, chance: random.Random, long: bool) -> Trial:
    start, inside = chance.gauss(0, 0.02), chance.gauss(0, 0.008 if long else 0.015)
    return Trial(setup, purpose, true(setup) * math.exp(start + inside), took_s=80 if long else 65, start_s=50)


def raced(true: Surface, seed: int, race: Race = RACE) -> tuple[RaceResult, list[Trial]]:
    chance = random.Random(seed)
    trials: list[Trial] = []
    while order := next_order(race, trials):
        assert len(trials) < 200, "endless"
        long = order.measure_s > race.measure_s
        trials.append(measured(order.setup, order.purpose, true, chance, long))
    return verdict(race, trials), trials


def random_surface(seed: int) -> Surface:
    """Most settings do little, some a lot, some harm."""
    chance = random.Random(seed * 7 + 1)
    effects = {}
    for knob in KNOBS:
        for value in knob.values:
            effects[knob.name, value] = math.exp(chance.choice([0.0, 0.0, -0.1, -0.4, 0.05, 0.15, 0.3]))
    return surface(effects)


def test_the_right_choice_or_no_difference_in_95_of_100() -> None:
    good = 0
    for seed in range(100):
        true = random_surface(seed)
        found, trials = raced(true, seed)
        assert sum(one.took_s for one in trials) <= RACE.budget_s
        good += true(found.best) >= 0.97 * best_of(true)
    assert good >= 95, good


def test_where_nothing_helps_nothing_is_claimed() -> None:
    flat = surface({})
    claimed = sum(raced(flat, seed)[0].outcome is RaceEnd.BETTER for seed in range(100))
    assert claimed <= 5, claimed


def test_it_beats_random_search_of_equal_cost() -> None:
    ours = theirs = 0.0
    for seed in range(100):
        true, chance = random_surface(seed), random.Random(seed + 1000)
        found, trials = raced(true, seed)
        search = RandomSearch()
        while order := next_random(RACE, trials, found, search, seed):
            assert len(search.draws) + len(search.meetings) < 200, "endless"
            long = order.measure_s > RACE.measure_s
            search = search.with_trial(measured(order.setup, order.purpose, true, chance, long))
        assert search.best is not None
        assert found.spent_s - 80 <= search.spent_s <= found.spent_s
        met = [one.setup for one in search.meetings]
        assert met in ([found.best, search.best, search.best, found.best], [])
        assert (search.gain_of_race(trials, found.best) is None) == (not met)
        ours += true(found.best) / best_of(true)
        theirs += true(search.best) / best_of(true)
    assert ours > theirs + 2, (ours, theirs)  # percent points of the optimum, in the mean


def test_it_beats_a_grid_that_is_walked_for_as_long() -> None:
    """As `vllm bench sweep serve` walks the combinations it is given, one by one, until the time is spent."""
    grid = [
        Setup(tuple(sorted((knob.name, value) for knob, value in zip(KNOBS, values, strict=True) if value)))
        for values in itertools.product(*(("", *knob.values) for knob in KNOBS))
    ]
    ours = theirs = 0.0
    for seed in range(100):
        true, chance = random_surface(seed), random.Random(seed + 2000)
        found, trials = raced(true, seed)
        seen = [(measured(one, Purpose.SCREEN, true, chance, False).score or 0.0, one) for one in grid[: len(trials)]]
        ours += true(found.best) / best_of(true)
        theirs += true(max(seen, key=lambda pair: pair[0])[1]) / best_of(true)
    assert ours > theirs + 2, (ours, theirs)


def test_on_a_loud_machine_the_same_choice_is_made_again() -> None:
    """As on a shared CPU: starts differ by half, one setting gives five times the speed, another gives nothing."""
    race = Race((Knob("max_num_seqs", ("512",)), Knob("stream_interval", ("4",))), 12 * 60, 3, 20)
    true = surface({("max_num_seqs", "512"): 5.0})
    choices = []
    for seed in range(100):
        chance = random.Random(seed)
        trials: list[Trial] = []
        while order := next_order(race, trials):
            score = true(order.setup) * math.exp(chance.gauss(0, 0.5))
            trials.append(Trial(order.setup, order.purpose, score, took_s=32, start_s=20))
        choices.append(verdict(race, trials).best)
    alone = choices.count(Setup.of(max_num_seqs="512"))
    assert alone >= 85, alone
    assert choices.count(BASE) <= 10


@pytest.mark.parametrize(("noise", "budget_s"), [(0.03, 200), (0.03, 300), (0.2, 500)])
def test_a_setting_that_was_only_lucky_does_not_come_along(noise: float, budget_s: float) -> None:
    """One flag that somebody brought costs three quarters, nothing else matters, and time allows a few trials."""
    brought = Knob("given max_num_seqs", ("",), KnobKind.WITHOUT)
    knobs = (brought, Knob("max_num_batched_tokens", ("4096", "8192", "16384")), Knob("stream_interval", ("4",)))
    race, true = Race(knobs, budget_s, measure_s=2, start_s=25), surface({(brought.name, ""): 4.0})
    choices = []
    for seed in range(100):
        chance, trials = random.Random(seed), list[Trial]()
        while order := next_order(race, trials):
            score = true(order.setup) * math.exp(chance.gauss(0, noise))
            trials.append(Trial(order.setup, order.purpose, score, took_s=31, start_s=25))
        choices.append(verdict(race, trials).best)
    alone = choices.count(Setup.of(**{brought.name: ""}))
    assert alone >= 90, alone  # 25 to 40, and 73, where the luckiest went to the final


BROUGHT = tuple(Knob(name, ("",), KnobKind.WITHOUT) for name in ("given eager", "given --no-chunks", "given seqs"))


def test_flags_that_somebody_copied_are_left_out_at_once() -> None:
    """The whole loss is recovered within a budget of ten starts, and what helps beyond it is found on top of that."""
    effects = {("given eager", ""): 1.8, ("given --no-chunks", ""): 1.1, ("api_servers", "4"): 1.3}
    true, bare = surface(effects), Setup(tuple((knob.name, "") for knob in BROUGHT))
    short = Race((*BROUGHT, *KNOBS), budget_s=10 * 70, measure_s=15, start_s=50)
    for seed in range(20):
        found, trials = raced(true, seed, short)
        assert trials[1].setup == Setup(tuple(sorted(bare.choices)))
        assert found.outcome is RaceEnd.BETTER
        assert true(found.best) >= 1.9 * true(BASE)
    long = Race((*BROUGHT, *KNOBS), budget_s=40 * 60, measure_s=15, start_s=50)
    reached = [true(raced(true, seed, long)[0].best) / (100 * 1.8 * 1.1 * 1.3) for seed in range(20)]
    assert sum(share >= 0.97 for share in reached) >= 19, reached


def test_flags_that_help_stay_although_the_others_go() -> None:
    """Two brought flags cost a lot, the third is worth 20%: it is brought back."""
    true = surface({("given eager", ""): 1.8, ("given --no-chunks", ""): 1.1, ("given seqs", ""): 0.8})
    race = Race((*BROUGHT, *KNOBS), budget_s=60 * 60, measure_s=15, start_s=50)
    good = 0
    for seed in range(20):
        found, _ = raced(true, seed, race)
        good += true(found.best) >= 0.97 * 180 * 1.1
        by_name = {one.knob: one.gain for one in found.findings}
        loss = by_name["given seqs"]
        assert loss is not None
        assert loss.value < 0
    assert good >= 19, good


def test_a_final_that_the_budget_cut_short_counts_where_it_is_clear() -> None:
    """As measured on an H200 from somebody's flags: +83% alone, and the budget ended in the second round."""
    eager = Setup.of(**{"given eager": ""})
    race = Race(BROUGHT[:1], budget_s=510, measure_s=4, start_s=60)
    made = [(BASE, "screen", 9106.6), (eager, "screen", 14444.3), (eager, "final", 14784.4), (BASE, "final", 7046.6)]
    trials = [Trial(setup, Purpose(purpose), score, 100, 60) for setup, purpose, score in made]
    found = verdict(race, [*trials, Trial(BASE, Purpose.FINAL, 7941.5, 54, 45)])
    assert found.outcome is RaceEnd.BETTER
    assert found.best == eager
    assert found.gain is not None
    assert found.gain.low > 0.1  # the base's first trial was shorter, too
    unclear = [Trial(one.setup, one.purpose, 8000.0 + at * 100, 100, 60) for at, one in enumerate(trials)]
    assert verdict(race, unclear).outcome is RaceEnd.UNFINISHED


def test_longer_measurements_score_higher_and_that_is_neither_gain_nor_noise() -> None:
    other = Setup.of(api_servers="8")
    short = [(BASE, "screen", 100.0), (other, "screen", 101.0), (BASE, "screen", 99.5)]
    race = Race(KNOBS, budget_s=300, measure_s=15, start_s=50)
    trials = [Trial(setup, Purpose(purpose), score, 65, 50) for setup, purpose, score in short]
    found = verdict(race, [*trials, Trial(other, Purpose.FINAL, 106.5, 80, 50)])
    assert found.outcome is RaceEnd.UNFINISHED
    chance = random.Random(3)
    rounds = [(one, 106.0 * chance.gauss(1.0, 0.005)) for _ in range(5) for one in (BASE, other)]
    again = [Trial(BASE, Purpose.SCREEN, 100.0 * chance.gauss(1.0, 0.005), 65, 50) for _ in range(4)]
    whole = [*trials, *again, *(Trial(one, Purpose.FINAL, score, 80, 50) for one, score in rounds)]
    assert noise_of(whole)[0] == LEAST_NOISE
    assert verdict(race, whole).outcome is RaceEnd.NO_DIFFERENCE


def test_a_value_that_failed_after_it_worked_is_not_tried_until_the_time_is_over() -> None:
    race = Race((Knob("a", ("1", "2")),), budget_s=3600, measure_s=15, start_s=50)
    trials: list[Trial] = []
    while order := next_order(race, trials):
        seen = sum(one.setup == order.setup for one in trials)
        worked = order.setup.choices != (("a", "1"),) or not seen
        trials.append(
            Trial(order.setup, order.purpose, (101.0 if order.setup.choices else 100.0) if worked else None, 65)
        )
    assert sum(one.setup == Setup.of(a="1") for one in trials) <= 4 + 6


def test_a_first_start_that_fetched_the_model_does_not_end_the_run() -> None:
    race = Race(KNOBS, budget_s=2400, measure_s=15, start_s=50)
    assert next_order(race, [Trial(BASE, Purpose.SCREEN, 100.0, 1300, 1280)]) is not None


def test_flags_of_another_number_format_are_compared_with_and_not_chosen() -> None:
    race = replace(RACE, knobs=(*KNOBS, Knob("baseline digitalocean", ("--dtype float16",), KnobKind.BASELINE)))
    other = Setup.of(**{"baseline digitalocean": "--dtype float16"})
    trials = [Trial(setup, Purpose.SCREEN, score, 65) for setup, score in ((BASE, 100.0), (other, 200.0))]
    assert verdict(race, trials).finalist == BASE


def test_the_base_needs_no_turn_in_a_final_that_was_cut_short() -> None:
    """Nothing was chosen by its earlier trials, so they count."""
    eager = Setup.of(**{"given eager": ""})
    race = Race(BROUGHT[:1], budget_s=270, measure_s=4, start_s=60)
    made = [(BASE, "screen", 9106.6), (eager, "screen", 14444.3), (BASE, "screen", 8941.5), (eager, "final", 14784.4)]
    trials = [Trial(setup, Purpose(purpose), score, 65, 60) for setup, purpose, score in made]
    found = verdict(race, trials)
    assert (found.outcome, found.best) == (RaceEnd.BETTER, eager)
    assert found.gain is not None
    assert (found.gain.trials, found.gain.low > 0.3) == (3, True)
    assert verdict(race, trials[:3]).outcome is RaceEnd.UNFINISHED  # what was chosen has not been measured again


@pytest.mark.parametrize("minutes", [5, 6, 9])
def test_a_short_budget_claims_nothing_where_nothing_helps(minutes: float) -> None:
    race = Race((*BROUGHT, *KNOBS), minutes * 60, measure_s=4, start_s=50)
    claimed = sum(raced(surface({}), seed, race)[0].outcome is RaceEnd.BETTER for seed in range(100))
    assert claimed <= 5, claimed
    gain = surface(dict.fromkeys([(knob.name, "") for knob in BROUGHT], 1.25))  # 1.95 together, as on the H200
    found = [raced(gain, seed, race)[0] for seed in range(40)]
    assert sum(one.outcome is RaceEnd.BETTER for one in found) >= 38


def test_two_settings_that_help_are_found_together() -> None:
    true = surface(
        {("api_servers", "8"): 1.2, ("max_num_batched_tokens", "16384"): 1.1, ("max_num_seqs", "512"): 0.7}
    )
    found, _ = raced(true, 3)
    assert found.outcome is RaceEnd.BETTER
    assert found.best == Setup.of(api_servers="8", max_num_batched_tokens="16384")
    assert found.gain is not None
    assert found.gain.low < 0.32 < found.gain.high


def test_a_setup_that_does_not_start_costs_one_trial() -> None:
    def start(setup: Setup) -> float | None:
        return None if dict(setup.choices).get("max_num_seqs") == "2048" else 100.0

    trials: list[Trial] = []
    while order := next_order(RACE, trials):
        score = start(order.setup)
        trials.append(Trial(order.setup, order.purpose, score, 60, 50, why="" if score else "out of memory"))
    broken = [one for one in trials if one.score is None]
    assert len(broken) == 1
    finding = next(
        one for one in verdict(RACE, trials).findings if one.value == "2048" and one.knob == "max_num_seqs"
    )
    assert finding.gain is None
    assert finding.why == "out of memory"


def test_a_base_that_never_starts_ends_the_race() -> None:
    trials: list[Trial] = []
    while order := next_order(RACE, trials):
        trials.append(Trial(order.setup, order.purpose, None, 60, why="no GPU"))
    assert len(trials) == 2
    assert verdict(RACE, trials).outcome is RaceEnd.NOTHING_WORKED


@pytest.mark.parametrize(
    ("knobs", "budget_s"), [((*BROUGHT, *KNOBS), 40 * 60.0), ((*BROUGHT, *KNOBS), 5 * 60.0), (KNOBS, 40 * 60.0)]
)
def test_a_base_that_does_not_start_is_met_by_nobody(knobs: tuple[Knob, ...], budget_s: float) -> None:
    """As on an H200: somebody's flags were refused, the plan's own served, and the base "stayed"."""
    true, race = surface({("api_servers", "4"): 1.3}), Race(knobs, budget_s, measure_s=15, start_s=50)
    chance, trials = random.Random(3), list[Trial]()
    while order := next_order(race, trials):
        assert len(trials) < 100, "endless"
        if order.setup == BASE:
            trials.append(Trial(BASE, order.purpose, None, 40, why="refused"))
        else:
            trials.append(measured(order.setup, order.purpose, true, chance, order.measure_s > race.measure_s))
    found = verdict(race, trials)
    assert sum(one.setup == BASE for one in trials) == 2
    assert found.outcome is RaceEnd.BETTER
    assert found.best != BASE
    if budget_s > 600:
        assert dict(found.best.choices)["api_servers"] == "4"
    assert sentence(found).startswith("The base does not start, and this does: ")


def test_a_setup_says_what_it_leaves_out_once_and_what_it_sets_beside_another() -> None:
    bare = Setup.of(**{knob.name: "" for knob in BROUGHT})
    assert str(bare.with_("api_servers", "4")) == "without --no-chunks, eager, seqs; api_servers=4"
    assert bare.with_("api_servers", "4").without("given seqs").beside(bare) == "with seqs, api_servers=4"


def test_a_small_budget_names_what_it_left_out() -> None:
    race = Race(KNOBS, budget_s=11 * 60, measure_s=15, start_s=50)
    found, trials = raced(surface({("max_num_seqs", "512"): 1.3}), 5, race)
    assert sum(one.took_s for one in trials) <= race.budget_s
    assert found.left_out
    assert any(one.purpose is Purpose.FINAL for one in trials)


@given(seed=st.integers(0, 10_000), cut=st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_what_comes_next_follows_from_the_trials_alone(seed: int, cut: int) -> None:
    """A race that was killed and read back goes on as if nothing had been."""
    _, trials = raced(random_surface(seed), seed)
    before = trials[:cut]
    order = next_order(RACE, list(before))
    if cut < len(trials):
        assert order is not None
        assert (order.setup, order.purpose) == (trials[cut].setup, trials[cut].purpose)


def test_a_budget_of_three_starts_is_spent() -> None:
    """On a busy CPU one trial took a third of it, and the race ended there: the rest was kept for a final."""
    race, trials = Race((BROUGHT[0], *KNOBS), budget_s=200, measure_s=2, start_s=25), list[Trial]()
    while order := next_order(race, trials):
        score = 40.0 if order.setup == BASE else 160.0
        trials.append(Trial(order.setup, order.purpose, score, took_s=65, start_s=50))
    assert [one.purpose.value for one in trials] == ["screen", "screen", "final"]
    assert trials[1].setup == trials[2].setup == Setup.of(**{BROUGHT[0].name: ""})
    assert verdict(race, trials).best == trials[1].setup


def test_a_slow_first_start_does_not_end_the_race() -> None:
    """On an H200 the first start took 97 s of a budget of 8 minutes, and later ones 40."""
    race = Race(KNOBS, budget_s=480, measure_s=4, start_s=600)
    true, trials = surface({("max_num_seqs", "512"): 2.0}), [Trial(BASE, Purpose.SCREEN, 100.0, 101, 97)]
    assert verdict(race, trials).outcome is RaceEnd.UNFINISHED
    while order := next_order(race, trials):
        trials.append(Trial(order.setup, order.purpose, true(order.setup), 50, 40))
    assert sum(one.took_s for one in trials) <= race.budget_s
    assert verdict(race, trials).outcome is RaceEnd.BETTER


# Side by side


def test_a_screen_runs_wide_and_what_depends_on_results_waits() -> None:
    under_way: list[TrialOrder] = []
    while order := next_beside(RACE, [], under_way):
        under_way.append(order)
        assert len(under_way) < 50
    assert under_way[0].setup == BASE
    singles = {BASE.with_(knob.name, value) for knob in KNOBS for value in knob.values}
    assert singles <= {one.setup for one in under_way}  # all that needs no result, with the base again in between
    assert {one.purpose for one in under_way} == {Purpose.SCREEN}
    assert all(len(one.setup.choices) <= 1 for one in under_way)  # what helped together is not known yet


def test_a_final_runs_in_pairs() -> None:
    _, trials = raced(surface({("api_servers", "8"): 1.3}), 3)
    first = next(at for at, one in enumerate(trials) if one.purpose is Purpose.FINAL)
    order = next_order(RACE, trials[:first])
    assert order is not None
    beside = next_beside(RACE, trials[:first], [order])
    assert beside is not None
    assert {order.setup, beside.setup} == {BASE, trials[first].setup}


def test_side_by_side_comes_to_the_same_kind_of_choice() -> None:
    """Four at once, each in a place of its own; the threads end in any order."""
    good = 0
    for seed in range(12):
        true, trials = random_surface(seed), list[Trial]()
        busy: set[int] = set()

        def make(order: TrialOrder, number: int, place: int) -> Trial:
            assert place not in busy  # noqa: B023
            busy.add(place)  # noqa: B023
            chance = random.Random(f"{seed} {number}")  # noqa: B023 - not of the order in which threads end
            made = measured(order.setup, order.purpose, true, chance, order.measure_s > RACE.measure_s)  # noqa: B023
            busy.discard(place)  # noqa: B023
            return made

        run_beside(RACE, trials, 4, make, lambda *_: None, lambda _: None, lambda: None)
        assert all(one.spent_s is not None for one in trials)
        good += true(verdict(RACE, trials).best) >= 0.97 * best_of(true)
    assert good >= 10, good


@pytest.mark.parametrize("budget_s", [900.0, 1200.0, 2400.0])
def test_servers_that_are_measured_one_by_one_keep_to_the_budget(budget_s: float) -> None:
    """Groups of four start together in 60 s, then each is measured for a minute: as on one GPU."""
    race = Race(KNOBS, budget_s=budget_s, measure_s=60, start_s=60)
    trials, spent_s = list[Trial](), 0.0
    while True:
        group: list[TrialOrder] = []
        while len(group) < 4 and (order := next_beside(race, trials, group, in_turns=True)):
            group.append(order)
        if not group:
            break
        for at, order in enumerate(group):
            took_s = 0 if at else 60
            spent_s += took_s + order.measure_s
            waited_s = sum(one.measure_s for one in group[:at])
            trials.append(
                Trial(
                    order.setup,
                    order.purpose,
                    100.0,
                    60 + order.measure_s,
                    60 + waited_s,
                    spent_s=took_s + order.measure_s,
                )
            )
    assert len(trials) >= 6
    assert spent_s <= budget_s


def test_an_error_in_one_trial_ends_the_others() -> None:
    told = []

    def make(order: TrialOrder, number: int, place: int) -> Trial:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_beside(RACE, [], 3, make, lambda *_: None, lambda _: None, lambda: told.append("ended"))
    assert told == ["ended"]
