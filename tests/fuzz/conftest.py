"""Time for the fuzz tier: FUZZ_SECONDS are shared by all its tests; each goes on until its share is over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

ROUND = 50  # examples between two looks at the clock

Fuzz = Callable[[st.SearchStrategy[object], Callable[[object], None]], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seconds = float(os.environ.get("FUZZ_SECONDS", "20"))
    for item in items:
        item.stash[SHARE] = seconds / max(1, len(items))


SHARE = pytest.StashKey[float]()


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    """Feeds a check with examples, fresh ones in every round, until this test's share of the time is over."""

    def run(strategy: st.SearchStrategy[object], check: Callable[[object], None]) -> None:
        until = time.monotonic() + request.node.stash[SHARE]
        number = 0
        while number == 0 or time.monotonic() < until:

            @seed(number + int(os.environ.get("FUZZ_SEED", "0")))
            @settings(
                max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck),
                phases=(Phase.generate, Phase.shrink),
            )  # fmt: skip
            @given(strategy)
            def once(value: object) -> None:
                check(value)

            once()
            number += 1

    return run
