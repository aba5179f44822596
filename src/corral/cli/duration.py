"""The type of options that take a length of time."""

from __future__ import annotations

import re

import click

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = r"(\d+(?:\.\d+)?)(ms|[hms])"
WRITTEN = r"(?=.)(\d+(\.\d+)?h)?\s*(\d+(\.\d+)?m(?!s))?\s*(\d+(\.\d+)?s)?\s*(\d+(\.\d+)?ms)?"


class Duration(click.ParamType[float]):
    """Seconds, from `90s`, `40m`, `1h30m` or `1.5`; a number alone is in `unit`."""

    name = "duration"

    def __init__(self, at_least_s: float = 0.0, unit: str = "s") -> None:
        self.at_least_s = at_least_s
        self.unit = unit

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        seconds = self._seconds(value.strip())
        if seconds is None:
            self.fail(f"{value!r} is not a duration: write 90s, 40m or 1h30m.", param, ctx)
        if seconds < self.at_least_s:
            self.fail(f"{value!r} is too short: at least {self.at_least_s:g} s.", param, ctx)
        return seconds

    def _seconds(self, text: str) -> float | None:
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return float(text) * SECONDS[self.unit]
        if not re.fullmatch(WRITTEN, text):
            return None
        return sum(float(number) * SECONDS[unit] for number, unit in re.findall(PART, text))
