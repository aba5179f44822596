"""Many requests at once, answers in the order asked: what replaces the thread pool of the workshops.

A window of requests is kept in flight on one event loop; a failure that may pass is tried again (`client.fanout`),
and everything else is the request's own error. Nothing is written to disk: for work that must survive this process
there is `corral batch`.

Trying again: how long to wait before it, and a request that is tried again while that can help.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from corral.client.client import Client
from corral.client.errors import OverloadedError, RequestError
from corral.client.reply import Reply

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


CONCURRENCY = 256  # vLLM's own default of sequences at once; more would wait in its queue


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
                results[number] = take(await retried(partial(client.request, path, body), retries))
            except RequestError as error:
                if stop_at_error:
                    raise
                results[number] = error
            if on_done is not None:
                on_done(len(results))

    await run_workers(worker, concurrency)
    return [results[number] for number in range(len(results))]


async def run_workers(worker: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """So many workers at once until all are done; the first error ends the others, and none outlives this."""
    workers = [asyncio.ensure_future(worker()) for _ in range(max(1, count))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
