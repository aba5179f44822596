"""Numbers of a query string, checked: what a browser sends is refused with its name and its range."""

from __future__ import annotations

import math
from collections.abc import Mapping

from corral.base.errors import UsageError

MOST = 10**15  # no count, place or size on a page is larger


def whole_number(given: Mapping[str, str], name: str, least: int = 0, most: int = MOST) -> int | None:
    """A whole number; None where it was left out, or left empty."""
    text = given.get(name, "").strip()
    if not text:
        return None
    fits = text.isascii() and text.isdigit() and len(text) <= len(str(MOST))
    if not fits or not least <= int(text) <= most:
        upper = f" to {most:,}" if most < MOST else " on"
        raise UsageError(f"{name} cannot be {text[:40]!r}.", f"Give a whole number from {least:,}{upper}.")
    return int(text)


def real_number(given: Mapping[str, str], name: str) -> float | None:
    """A finite number; None where it was left out, or left empty."""
    text = given.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{name} cannot be {text[:40]!r}.", "Give a number.")
    return value
