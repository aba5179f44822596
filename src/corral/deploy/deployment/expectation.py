"""How long the phases of a start usually take here, how far one is, and time in words."""

from __future__ import annotations

from dataclasses import dataclass

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


def amount(done: int, total: int) -> str:
    """Progress as `k/N (p%)`, in bytes where the numbers are bytes."""
    if total > 1_000_000:
        return f"{done / 1e9:.2f}/{total / 1e9:.2f} GB ({100 * done / total:.0f}%)"
    return f"{done}/{total} ({100 * done / total:.0f}%)"


def left_s(took_s: float, first: int, done: int, total: int) -> float | None:
    """Seconds that are left, where the way from `first` to `done` took so many; None: it cannot be told."""
    return took_s * (total - done) / (done - first) if first < done < total else None


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
