"""One reader for many listeners: it reads once a second while somebody listens, and not at all otherwise."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")
EVERY_S = 1.0


class Newsfeed(Generic[T]):
    """What `read` gives, again and again, to whoever listens."""

    def __init__(self, read: Callable[[], Awaitable[T]], every_s: float = EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self._listeners: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self._latest: T | None = None
        self._failure: Exception | None = None

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    async def values(self) -> AsyncGenerator[T, None]:
        """Each reading from now on; a listener that is slow gets the newest, not all."""
        mine = asyncio.Event()
        self._listeners.add(mine)
        if self._task is None:
            self._latest, self._failure = None, None
            self._task = asyncio.create_task(self._go())
        elif self._latest is not None:
            mine.set()
        try:
            while True:
                await mine.wait()
                mine.clear()
                if self._failure is not None:
                    raise self._failure
                if self._latest is not None:
                    yield self._latest
        finally:
            self._listeners.discard(mine)
            await self._stop_unheard()

    async def _stop_unheard(self) -> None:
        task = self._task
        if not self._listeners and task is not None:
            self._task = None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _go(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                self._latest = await self._read()
            except Exception as error:  # of the reader: its listeners are told, and ask again
                self._failure = error
            for one in self._listeners:
                one.set()
            if self._failure is not None:
                self._task = None
                return
            await asyncio.sleep(max(0.05, self._every_s - (loop.time() - began)))
