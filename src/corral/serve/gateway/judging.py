"""Whether a member works, by its progress: bytes of answers, and the counters of its metrics. Nothing asks /health.

A member that has requests and has not moved for a while is hung. How long that while is depends on the member: many
times its longest usual pause, so that a slow machine is not called dead and a quick one is not waited for. A member
that moves at a fraction of the others' speed is slow: it still gets requests, as many as its speed earns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from corral.serve.fleet.record import Judgement

LEAST_STALL_S, MOST_STALL_S, FIRST_STALL_S = 8.0, 180.0, 60.0
PAUSES = 10.0  # times its longest usual pause
FADE = 0.98  # of the longest pause, at every movement
SLOW_SHARE = 0.25


@dataclass(slots=True)
class MemberProgress:
    """When a member last moved; times are monotonic."""

    moved_s: float = 0.0
    busy_since_s: float = 0.0  # of the oldest stretch of having requests; 0: it has none
    longest_pause_s: float = 0.0
    moves: int = 0
    hung: bool = False

    def busy(self, now_s: float) -> None:
        if not self.busy_since_s:
            self.busy_since_s = now_s

    def idle(self) -> None:
        self.busy_since_s = 0.0

    def moved(self, now_s: float) -> None:
        """Bytes of an answer came, or a counter has grown."""
        since = max(self.moved_s, self.busy_since_s)
        if self.busy_since_s and since:
            pause = now_s - since
            longest = self.longest_pause_s * FADE
            self.longest_pause_s = pause if pause > longest else longest
            self.moves += 1
        self.moved_s = now_s

    def stall_s(self) -> float:
        """How long it may stand still with work before it counts as hung."""
        if self.moves < 3:
            return FIRST_STALL_S
        return min(MOST_STALL_S, max(LEAST_STALL_S, PAUSES * self.longest_pause_s))


def judge(progress: MemberProgress, now_s: float, speed: float = 1.0, reachable: bool = True) -> Judgement:
    """What to think of a member now; `speed`: relative to the others, `reachable`: its metrics are answered."""
    if progress.hung:  # until it has answered a request again
        return Judgement.HUNG
    if progress.busy_since_s:
        still_s = now_s - max(progress.moved_s, progress.busy_since_s)
        if still_s > (progress.stall_s() if reachable else LEAST_STALL_S):
            return Judgement.HUNG
    elif not reachable:
        return Judgement.GONE
    return Judgement.SLOW if speed < SLOW_SHARE else Judgement.OK


def relative_speed(own: float, others: Sequence[float]) -> float:
    """A member's tokens per second and sequence, beside the median of the others; 1 where one cannot tell."""
    known = [one for one in others if one > 0]
    if own <= 0 or len(known) < 1:
        return 1.0
    return min(1.0, own / median(known))
