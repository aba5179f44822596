"""The fake engine's pace on a clock that only the test moves: every token is due exactly when it should be."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from corral.fake import pace as module
from corral.fake.pace import FakeEngine, FakeJob, Pace

MS = 1_000_000


class Clock:
    """Time stands still until the next thing is due."""

    def __init__(self) -> None:
        self.now = 1_000 * MS
        self.rings: dict[Callable[[], None], int] = {}

    def run(self) -> None:
        while self.rings:
            call = min(self.rings, key=self.rings.__getitem__)
            self.now = max(self.now, self.rings.pop(call))
            call()


class Tokens:
    """Takes a job's tokens, and keeps when they came."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.ended_ms = clock, 0.0
        self.at_ms: list[float] = []

    def emit(self, step: int, now: int) -> None:
        self.at_ms.append(self.clock.now / MS - 1000)

    def finish(self, now: int) -> None:
        self.ended_ms = self.clock.now / MS - 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()

    class SetTimer:
        def __init__(self, loop: object, call: Callable[[], None]) -> None:
            self.call = call

        def set(self, due_ns: int) -> None:
            made.rings[self.call] = min(due_ns, made.rings.get(self.call, due_ns))

    monkeypatch.setattr(module, "PreciseTimer", SetTimer)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: made.now))
    return made


def run(
    clock: Clock, pace: Pace, count: int, steps: int = 1, **job: Any
) -> tuple[list[tuple[FakeJob, Tokens]], FakeEngine]:
    """So many requests at one moment, until all have their answers."""
    engine = FakeEngine(cast("Any", None), pace)  # the alarm is the only one who needs the loop
    made = []
    for number in range(count):
        tokens = Tokens(clock)
        one = FakeJob(
            tokens, 1, steps, job.get("prompt", 0), job.get("uncached", 0), job.get("streamed", True), number
        )
        made.append((one, tokens))
    for one, _ in made:
        engine.submit(one, clock.now)
    clock.run()
    return made, engine


@pytest.mark.parametrize("streamed", [True, False])
def test_first_token_and_gaps(clock: Clock, streamed: bool) -> None:
    pace = Pace(ttft_s=0.05, itl_s=0.01, prefill_tokens_per_s=1000)
    ((job, tokens),), _ = run(clock, pace, 1, 11, uncached=21, streamed=streamed)
    assert job.first_ns / MS - 1000 == 71
    assert tokens.ended_ms == 171
    assert not streamed or tokens.at_ms == [71 + 10 * n for n in range(11)]


def test_only_so_many_sequences_run_at_once(clock: Clock) -> None:
    made, _ = run(clock, Pace(ttft_s=0.05, max_seqs=2), 6)
    assert [tokens.ended_ms for _, tokens in made] == [50, 50, 100, 100, 150, 150]


def test_requests_per_second_are_a_knee(clock: Clock) -> None:
    made, _ = run(clock, Pace(requests_per_s=50), 10)
    assert [tokens.ended_ms for _, tokens in made] == [20 * n for n in range(10)]


def test_tokens_per_second_are_shared(clock: Clock) -> None:
    pace = Pace(ttft_s=0.01, itl_s=0.001, tokens_per_s=400)
    made, _ = run(clock, pace, 8, 20)
    for _, tokens in made:
        gaps = [after - before for before, after in zip(tokens.at_ms, tokens.at_ms[1:], strict=False)]
        assert gaps == [20] * 19  # 8 / 400
    ((_, alone),), _ = run(clock, pace, 1, 20)
    assert alone.at_ms[-1] - alone.at_ms[0] == 19 * 2.5


def test_a_full_cache_preempts_the_youngest(clock: Clock) -> None:
    made, engine = run(clock, Pace(itl_s=0.002, kv_tokens=60), 3, 40)
    assert engine.preemptions >= 1
    assert [len(tokens.at_ms) for _, tokens in made] == [40, 40, 40]
    ends = [tokens.ended_ms for _, tokens in made]
    assert ends == sorted(ends)
    assert ends[0] < ends[2]
    assert engine.kv_used == 0


def test_jitter_is_the_requests_own(clock: Clock) -> None:
    pace = Pace(itl_s=0.01, jitter=0.4)
    ((_, one),), _ = run(clock, pace, 1, 100)
    gaps = [after - before for before, after in zip(one.at_ms, one.at_ms[1:], strict=False)]
    assert 6 <= min(gaps) < 8
    assert 12 < max(gaps) <= 14
