"""The console's paths: the page and its files, what the page asks first, and each view's own."""

from __future__ import annotations

import importlib.resources
import platform
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from corral import __version__
from corral.base.errors import CorralError, NotFoundError
from corral.console import fleet, live, plans, play, runs
from corral.console.context import ConsoleContext, answer, refusal

VIEWS = (fleet, live, play, plans, runs)
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}


def make_app(desk: ConsoleContext) -> Starlette:
    """Everything behind the guard."""

    async def about(_: Request) -> Response:
        known = {"version": __version__, "host": platform.node()}
        return answer({**known, "read_only": desk.read_only, "asks": desk.asks})

    async def command(request: Request) -> Response:
        return answer(desk.commands.look(request.path_params["id"]))

    async def commands(_: Request) -> Response:
        return answer({"commands": desk.commands.all()})

    routes = [
        Route("/", _page),
        Route("/static/{name:path}", _file),
        Route("/api/about", about),
        Route("/api/commands", commands),
        Route("/api/commands/{id}", command),
        *(route for view in VIEWS for route in view.routes(desk)),
    ]
    answers: Any = {CorralError: _failed, OSError: _failed, HTTPException: _unknown, ClientDisconnect: _failed}
    answers[Exception] = _unexpected
    return Starlette(routes=routes, exception_handlers=answers)


@cache
def static_files() -> dict[str, bytes]:
    """Every file of the page by its name, as it was when the console began."""
    root = importlib.resources.files("corral.console") / "static"
    found = {one.name: one.read_bytes() for one in root.iterdir() if one.is_file()}
    return found | {f"vendor/{one.name}": one.read_bytes() for one in (root / "vendor").iterdir()}


async def _page(_: Request) -> Response:
    return Response(static_files()["index.html"], media_type="text/html")


async def _file(request: Request) -> Response:
    name = request.path_params["name"]
    kind = TYPES.get(name.rpartition(".")[2])
    if kind is None or name not in static_files():
        raise NotFoundError(f"there is no file {name[:80]!r}.")
    return Response(static_files()[name], media_type=kind)


def _failed(_: Request, error: Exception) -> Response:
    if isinstance(error, CorralError):
        return refusal(error)
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return refusal(CorralError(f"{words or 'the request broke off'}.", "Try it again."), 500)


def _unexpected(_: Request, error: Exception) -> Response:
    words = f"an unexpected error: {type(error).__name__}: {error}"
    return refusal(CorralError(words, "Please report it."), 500)


def _unknown(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    return refusal(NotFoundError(f"there is no {request.method} {request.url.path[:200]}."), status)
