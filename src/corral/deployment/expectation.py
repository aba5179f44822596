"""Time in words."""

from __future__ import annotations

__all__ = ["duration"]


def duration(seconds: float) -> str:
    """Seconds as a person says them: 4.2 s, 3 min 10 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
