"""Trials side by side: which ones need not wait for those under way, and several of them at once.

What comes next is a function of the trials made (`race`). A trial may begin beside others when it would come next
whatever they bring: that is tried with several outcomes in mind. So a screen runs as wide as there is room, a final
in pairs, and nothing is decided before it is known.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from math import exp

from corral.lab.tune.race import Race, expected_costs, next_order
from corral.lab.tune.trials import Trial, TrialOrder, mean_score

_OUTCOMES = ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (0.5, 2.0), (2.0, 0.5))  # of those under way, by turns


def next_beside(
    race: Race, trials: Sequence[Trial], under_way: Sequence[TrialOrder], in_turns: bool = False
) -> TrialOrder | None:
    """A trial that can begin now; None when it depends on those under way, or when there is none."""
    found = {
        next_order(race, [*trials, *_imagined(race, trials, under_way, factors, in_turns)]) for factors in _OUTCOMES
    }
    return found.pop() if len(found) == 1 else None


def _imagined(
    race: Race,
    trials: Sequence[Trial],
    under_way: Sequence[TrialOrder],
    factors: tuple[float, float],
    in_turns: bool,
) -> list[Trial]:
    """Those under way as if they had ended; they take their time together, but for measurements `in_turns`."""
    short_s, long_s = expected_costs(race, trials)
    made = []
    for at, order in enumerate(under_way):
        took_s = short_s if order.measure_s <= race.measure_s else long_s
        score = exp(mean_score(trials)) * factors[at % 2]
        further_s = max(order.measure_s, took_s - race.start_s) if in_turns else 0.0
        made.append(Trial(order.setup, order.purpose, score, took_s, spent_s=further_s if at else took_s))
    return made


Made = Callable[[TrialOrder, int, int], Trial]  # of an order, the trial's number, and its place


def run_beside(
    race: Race,
    trials: list[Trial],
    places: int,
    make: Made,
    begins: Callable[[int, TrialOrder], None],
    ended: Callable[[Trial], None],
    abandon: Callable[[], None],
    in_turns: bool = False,
) -> None:
    """Make trials, as many at once as there are places, until there is nothing left to learn or no time.

    `abandon` ends the servers of those under way, when something else ends this: their threads are waited for.
    """
    under_way: dict[Future[Trial], tuple[TrialOrder, int]] = {}
    numbers, clock = itertools.count(len(trials) + 1), time.monotonic()

    def fill() -> None:
        orders = [order for order, _ in under_way.values()]
        while len(under_way) < places and (order := next_beside(race, trials, orders, in_turns)):
            number = next(numbers)
            place = min(set(range(places)) - {taken for _, taken in under_way.values()})
            begins(number, order)
            under_way[pool.submit(make, order, number, place)] = (order, place)
            orders.append(order)

    with ThreadPoolExecutor(places) as pool:
        try:
            fill()
            while under_way:
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    del under_way[future]
                    now = time.monotonic()
                    trials.append(replace(future.result(), spent_s=round(now - clock, 2)))
                    clock = now
                    ended(trials[-1])
                fill()
        except BaseException:
            abandon()
            raise
