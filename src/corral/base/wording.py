"""Numbers, lengths of time and time limits as people and schedulers write them."""

from __future__ import annotations

import re


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


def time_limit_s(text: str) -> float | None:
    """The seconds of a time limit as `sbatch --time` takes it (`30`, `4:00:00`, `2-12`); None for no limit, or no
    time.

    One number alone is minutes, two are minutes and seconds.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match:
        return None
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, secs = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, secs = numbers
    else:
        hours, (minutes, secs) = 0, [*numbers, 0][:2]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs)


def time_limit_text(time_s: float) -> str:
    """Seconds as a time limit that `sbatch --time` takes."""
    minutes, secs = divmod(round(time_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{secs:02}" if days else f"{hours}:{minutes:02}:{secs:02}"
