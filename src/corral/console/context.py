"""What every view of the console shares: its context, the form of its answers, checked numbers, the last hour of
figures.

A view is a module with `routes(context)`. It reads through the packages that know (lifecycle, plan, bench, batch, …)
and answers with JSON; it changes something only by running a `corral` command, whose line the page shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from corral.base.errors import (
    AccessError,
    ConflictError,
    CorralError,
    DataError,
    DoesNotFitError,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from corral.base.home import home_dir
from corral.base.record import to_json
from corral.console.commands import Commands

HOUR_S = 3600.0
STEP_S = 5.0
MOST_SERIES = 2000  # some figures of some hundred servers
Point = tuple[float, float | None]


class History:
    """The last hour of figures by name: a point every few seconds, None for a gap. Lost when the console ends.

    Kept in arrays of plain numbers: a hundred figures of an hour take a few MiB, however long it runs.
    """

    def __init__(self, step_s: float = STEP_S, most_series: int = MOST_SERIES) -> None:
        self._rings: dict[str, tuple[array[float], array[float]]] = {}
        self._step_s, self._most_series = step_s, most_series

    def add(self, at_s: float, values: Mapping[str, float | None]) -> None:
        """One moment's values; those that come sooner than a step after the last are passed over."""
        for name, value in values.items():
            times, numbers = self._rings.get(name) or (array("d"), array("d"))
            if times and at_s - times[-1] < self._step_s * 0.9:
                continue
            times.append(at_s)
            numbers.append(math.nan if value is None else value)
            if at_s - times[0] > HOUR_S * 1.1:
                first = next(number for number, moment in enumerate(times) if moment >= at_s - HOUR_S)
                del times[:first], numbers[:first]
            self._rings.pop(name, None)
            self._rings[name] = (times, numbers)  # the youngest stands last
        old = [name for name, (times, _) in self._rings.items() if times[-1] < at_s - HOUR_S]
        for name in [*old, *list(self._rings)[: max(0, len(self._rings) - self._most_series)]]:
            self._rings.pop(name, None)

    def series(self, name: str, since_s: float = 0.0) -> list[Point]:
        """The points of one figure, oldest first."""
        times, numbers = self._rings.get(name) or (array("d"), array("d"))
        pairs = zip(times, numbers, strict=True)
        return [(moment, None if math.isnan(value) else value) for moment, value in pairs if moment >= since_s]

    def names(self) -> list[str]:
        return sorted(self._rings)

    @property
    def points(self) -> int:
        """How many are kept in all."""
        return sum(len(times) for times, _ in self._rings.values())


LARGEST_BODY_BYTES = 4 << 20
STATUS: dict[type[CorralError], int] = {
    UsageError: 400,
    DataError: 400,
    AccessError: 403,
    NotFoundError: 404,
    ConflictError: 409,
    DoesNotFitError: 422,
    UnreachableError: 502,
}


@dataclass(frozen=True)
class ConsoleContext:
    """The state of the console itself; everything else is in the deployments' folders."""

    read_only: bool = False
    asks: bool = True  # whether the playground may ask models
    home: Path = field(default_factory=home_dir)
    history: History = field(default_factory=History)
    clock: Callable[[], float] = time.time
    commands: Commands = field(default_factory=Commands)


def answer(value: Any, status: int = 200) -> Response:
    """Any record or plain data as JSON."""
    return Response(msgspec.json.encode(to_json(value)), status, media_type="application/json")


def refusal(error: CorralError, status: int | None = None) -> Response:
    """An error with its remedy; `code` is the exit code that the command line has for it."""
    body = {"message": error.message, "remedy": error.remedy, "code": error.exit_code}
    known = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)
    return answer({"error": body}, status or known)


async def body_of(request: Request, most_bytes: int = LARGEST_BODY_BYTES) -> dict[str, Any]:
    """The JSON object of a request, within bounds."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > most_bytes:
            raise DataError(f"the request is longer than {most_bytes:,} bytes.", "Send less at once.")
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise DataError("the body is not a JSON object.", "Send one.")
    return body


def events(values: AsyncIterator[Any]) -> Response:
    """Server-sent events: each value as one `data:` line of JSON. A reader who leaves ends the iterator."""

    async def lines() -> AsyncIterator[bytes]:
        async for value in values:
            yield b"data: " + msgspec.json.encode(to_json(value)) + b"\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


MOST = 10**15  # no count, place or size on a page is larger


def whole_number(query: Mapping[str, str], name: str, least: int = 0, most: int = MOST) -> int | None:
    """A whole number; None where it was left out, or left empty."""
    text = query.get(name, "").strip()
    if not text:
        return None
    fits = text.isascii() and text.isdigit() and len(text) <= len(str(MOST))
    if not fits or not least <= int(text) <= most:
        upper = f" to {most:,}" if most < MOST else " on"
        raise UsageError(f"{name} cannot be {text[:40]!r}.", f"Give a whole number from {least:,}{upper}.")
    return int(text)


def real_number(query: Mapping[str, str], name: str) -> float | None:
    """A finite number; None where it was left out, or left empty."""
    text = query.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{name} cannot be {text[:40]!r}.", "Give a number.")
    return value


T = TypeVar("T")
EVERY_S = 1.0


class LatestValue(Generic[T]):
    """One reader for many listeners: it reads once a second while someone listens, and not at all otherwise."""

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
            except Exception as error:  # of the reader: raised at its listeners, which may ask again
                self._failure = error
            for one in self._listeners:
                one.set()
            if self._failure is not None:
                self._task = None
                return
            await asyncio.sleep(max(0.05, self._every_s - (loop.time() - began)))
