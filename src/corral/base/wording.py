"""Numbers and lengths of time as people write them."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 row`, `2,000 rows`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """`36 ms`, `4.2 s`, `3 min 10 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours = minutes // 60
    if minutes < 60:
        parts = (minutes, "min"), (rest, "s")
    elif hours < 48:
        parts = (hours, "h"), (minutes % 60, "min")
    else:
        parts = (hours // 24, "d"), (hours % 24, "h")
    return " ".join(f"{number} {unit}" for number, unit in parts if number)
