"""Many requests at once, with answers in the order of the requests; and the rule for trying a request again.

A window of requests is kept in flight on one event loop. A failure that may pass is tried again with growing pauses
(`retried`); any other error belongs to its request. Nothing is written to disk: work that must survive this process
is for `corral batch`.
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


def backoff_s(attempt: int, base_s: float, cap_s: float, retry_after_s: float | None = None) -> float:
    """How long to wait before the next attempt: doubling, capped, jittered; never less than the server asked for."""
    ceiling = min(cap_s, base_s * 2.0 ** min(attempt, 30))
    return max(random.uniform(0.5, 1.0) * ceiling, retry_after_s or 0.0)  # noqa: S311 - spreads load, guards nothing


async def retried(send: Callable[[], Awaitable[T]], retries: int = RETRIES) -> T:
    """The answer to a request, which is sent again while its failure may pass."""
    for attempt in range(retries):
        try:
            return await send()
        except RequestError as error:
            if not error.retryable:
                raise
            wait_s = error.retry_after_s if isinstance(error, OverloadedError) else None
            wait_s = None if wait_s is None else min(wait_s, LONGEST_PAUSE_S)  # a caller waits for this answer
            await asyncio.sleep(backoff_s(attempt, FIRST_PAUSE_S, LONGEST_PAUSE_S, wait_s))
    return await send()


CONCURRENCY = 256  # vLLM's own default of sequences at once; more would wait in its queue


async def fan_out(
    client: Client,
    requests: Iterable[tuple[str, Mapping[str, Any]]],
    read: Callable[[Reply], T],
    *,
    concurrency: int = CONCURRENCY,
    retries: int = RETRIES,
    stop_at_error: bool = True,
    on_done: Callable[[int], None] | None = None,
) -> list[T | RequestError]:
    """`read` of every answer, in order. The first error ends all requests, or stands in place of its answer."""
    results: dict[int, T | RequestError] = {}
    numbered = enumerate(requests)

    async def worker() -> None:
        for number, (path, body) in numbered:
            try:
                results[number] = read(await retried(partial(client.request, path, body), retries))
            except RequestError as error:
                if stop_at_error:
                    raise
                results[number] = error
            if on_done is not None:
                on_done(len(results))

    await run_workers(worker, concurrency)
    return [results[number] for number in range(len(results))]


async def run_workers(worker: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Run `count` workers until all are done; the first error cancels the others."""
    workers = [asyncio.ensure_future(worker()) for _ in range(max(1, count))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
