"""Many requests at once, answers in the order asked: what replaces the thread pool of the workshops.

A window of requests is kept in flight on one event loop; a failure that trying again can mend is tried again with a
growing, jittered pause, and everything else is the request's own error. Nothing is written to disk: for work that
must survive this process there is `corral batch`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from corral.client.client import Client
from corral.client.errors import OverloadedError, RequestError
from corral.client.reply import Reply

__all__ = ["CONCURRENCY", "RETRIES", "fan_out", "patient"]

T = TypeVar("T")
CONCURRENCY = 256  # vLLM's own default of sequences at once; more would wait in its queue
RETRIES = 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0


async def patient(client: Client, path: str, body: Mapping[str, Any], retries: int = RETRIES) -> Reply:
    """One request, tried again while that can help."""
    for attempt in range(retries + 1):
        try:
            return await client.request(path, body)
        except RequestError as error:
            if not error.retryable or attempt == retries:
                raise
            await asyncio.sleep(_pause_s(error, attempt))
    raise AssertionError("unreachable")


def _pause_s(error: RequestError, attempt: int) -> float:
    asked = error.retry_after_s if isinstance(error, OverloadedError) else None
    pause = asked if asked is not None else _FIRST_PAUSE_S * 2**attempt
    return min(pause, _LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)  # noqa: S311 (spreads load, keeps no secret)


async def fan_out(
    client: Client,
    requests: Iterable[tuple[str, Mapping[str, Any]]],
    take: Callable[[Reply], T],
    *,
    concurrency: int = CONCURRENCY,
    retries: int = RETRIES,
    stop_at_error: bool = True,
    on_done: Callable[[int], None] | None = None,
) -> list[T | RequestError]:
    """`take` of every answer, in order. The first error ends it all, or takes its answer's place."""
    results: dict[int, T | RequestError] = {}
    numbered = enumerate(requests)

    async def worker() -> None:
        for number, (path, body) in numbered:
            try:
                results[number] = take(await patient(client, path, body, retries))
            except RequestError as error:
                if stop_at_error:
                    raise
                results[number] = error
            if on_done is not None:
                on_done(len(results))

    workers = [asyncio.ensure_future(worker()) for _ in range(max(1, concurrency))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[number] for number in range(len(results))]
