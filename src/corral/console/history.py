"""The last hour of a figure, by name: all that the console remembers, and it is lost with it.

A point every few seconds, in arrays of plain numbers: some hundred figures of an hour take a few MiB, and no more
however long it runs.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

HOUR_S = 3600.0
STEP_S = 5.0
MOST_SERIES = 2000  # some figures of some hundred servers
Point = tuple[float, float | None]


class History:
    """Points of time and value; None is a gap."""

    def __init__(self, step_s: float = STEP_S, most_series: int = MOST_SERIES) -> None:
        self._rings: dict[str, tuple[array[float], array[float]]] = {}
        self._step_s, self._most_series = step_s, most_series

    def add(self, at_s: float, values: Mapping[str, float | None]) -> None:
        """One moment's values; those that come sooner than a step after the last are passed over."""
        for name, value in values.items():
            times, numbers = self._rings.get(name) or (array("d"), array("d"))
            if times and at_s - times[-1] < self._step_s * 0.9:
                continue
            times.append(at_s)
            numbers.append(math.nan if value is None else value)
            if at_s - times[0] > HOUR_S * 1.1:
                first = next(number for number, moment in enumerate(times) if moment >= at_s - HOUR_S)
                del times[:first], numbers[:first]
            self._rings.pop(name, None)
            self._rings[name] = (times, numbers)  # the youngest stands last
        old = [name for name, (times, _) in self._rings.items() if times[-1] < at_s - HOUR_S]
        for name in [*old, *list(self._rings)[: max(0, len(self._rings) - self._most_series)]]:
            self._rings.pop(name, None)

    def series(self, name: str, since_s: float = 0.0) -> list[Point]:
        """The points of one figure, oldest first."""
        times, numbers = self._rings.get(name) or (array("d"), array("d"))
        pairs = zip(times, numbers, strict=True)
        return [(moment, None if math.isnan(value) else value) for moment, value in pairs if moment >= since_s]

    def names(self) -> list[str]:
        return sorted(self._rings)

    @property
    def points(self) -> int:
        """How many are kept in all."""
        return sum(len(times) for times, _ in self._rings.values())
