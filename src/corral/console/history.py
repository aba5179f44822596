"""The last hour of a figure, by name: all that the console remembers, and it is lost with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

__all__ = ["HOUR_S", "History"]

HOUR_S = 3600.0
MOST_POINTS = 3600  # one a second
MOST_SERIES = 2000  # some figures of some hundred servers
Point = tuple[float, float | None]


class History:
    """Points of time and value, in rings; None is a gap."""

    def __init__(self, most_points: int = MOST_POINTS, most_series: int = MOST_SERIES) -> None:
        self._rings: dict[str, deque[Point]] = {}
        self._most_points, self._most_series = most_points, most_series

    def add(self, at_s: float, values: Mapping[str, float | None]) -> None:
        """One moment's values; series that nobody has added to for an hour are forgotten."""
        for name, value in values.items():
            ring = self._rings.pop(name, None)
            if ring is None:
                ring = deque(maxlen=self._most_points)
            ring.append((at_s, value))
            self._rings[name] = ring  # the youngest stands last
        old = [name for name, ring in self._rings.items() if ring[-1][0] < at_s - HOUR_S]
        for name in [*old, *list(self._rings)[: max(0, len(self._rings) - self._most_series)]]:
            self._rings.pop(name, None)

    def series(self, name: str, since_s: float = 0.0) -> list[Point]:
        """The points of one figure, oldest first."""
        return [point for point in self._rings.get(name, ()) if point[0] >= since_s]

    def names(self) -> list[str]:
        return sorted(self._rings)
