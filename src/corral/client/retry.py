"""Trying again: how long to wait before it, and a request that is tried again while that can help."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from corral.client.errors import OverloadedError, RequestError

T = TypeVar("T")
RETRIES = 4
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0


def backoff_s(attempt: int, base_s: float, cap_s: float, asked_s: float | None = None) -> float:
    """How long to wait before the next attempt: doubling, capped, jittered; never less than the server asked for."""
    ceiling = min(cap_s, base_s * 2.0 ** min(attempt, 30))
    return max(random.uniform(0.5, 1.0) * ceiling, asked_s or 0.0)  # noqa: S311 - spreads load, guards nothing


async def retried(ask: Callable[[], Awaitable[T]], retries: int = RETRIES) -> T:
    """The answer, asked for again while the failure is one that may pass."""
    for attempt in range(retries):
        try:
            return await ask()
        except RequestError as error:
            if not error.retryable:
                raise
            asked_s = error.retry_after_s if isinstance(error, OverloadedError) else None
            if asked_s is not None:
                asked_s = min(asked_s, LONGEST_PAUSE_S)  # somebody waits for this answer
            await asyncio.sleep(backoff_s(attempt, FIRST_PAUSE_S, LONGEST_PAUSE_S, asked_s))
    return await ask()
