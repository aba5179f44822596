"""What every path of the console needs, and the one shape of its answers.

A view is a module with `routes(desk)`. It reads through the packages that know (lifecycle, plan, bench, batch, …) and
answers with JSON; what changes something it does by running a `corral` command, whose line the page shows.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from corral.console.history import History

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
class Desk:
    """The console's own few things; everything else lies in the deployments' folders."""

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


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object of a request, within bounds."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > LARGEST_BODY_BYTES:
            raise DataError(f"the request is longer than {LARGEST_BODY_BYTES:,} bytes.", "Send less at once.")
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
