"""How long the phases of a start usually take here, and time in words."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Expected", "duration"]

OVERDUE = 2.0  # times what is usual; then it is said
OVERDUE_LEAST_S = 5.0  # beyond what is usual; shorter delays are nobody's concern


def duration(seconds: float) -> str:
    """Seconds as a person says them: 4.2 s, 3 min 10 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


@dataclass(frozen=True)
class Expected:
    """How long one phase is expected to take."""

    seconds: float
    remembered: bool = False  # from earlier starts here; otherwise by the plan, which is rougher

    @property
    def text(self) -> str:
        length = duration(self.seconds)
        return f"usually {length} here" if self.remembered else f"about {length} expected"

    def is_overdue(self, elapsed_s: float) -> bool:
        return elapsed_s > max(OVERDUE * self.seconds, self.seconds + OVERDUE_LEAST_S)
