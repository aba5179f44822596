"""The console as a process: its paths, a socket, uvicorn, and the link that opens the page."""

from __future__ import annotations

import contextlib
import html
import importlib.resources
import platform
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from corral import __version__
from corral.base.errors import CorralError, NotFoundError
from corral.base.files import make_private_dir, write_atomic
from corral.base.home import home_dir
from corral.console import fleet, keys, live, models, plans, play, runs
from corral.console.context import ConsoleContext, answer, refusal
from corral.console.guard import Guard, Tickets
from corral.console.play import ASKING, TELLING
from corral.serve.asgi_server import Hosted
from corral.serve.connections import LIMITS, ServerLimits

VIEWS = (fleet, live, play, plans, models, runs, keys)
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}


def make_app(context: ConsoleContext) -> Starlette:
    """Everything behind the guard."""

    async def about(_: Request) -> Response:
        known = {
            "version": __version__,
            "host": platform.node(),
            "keys": not context.read_only and keys.has_gateways(),
        }
        return answer({**known, "read_only": context.read_only, "asks": context.asks})

    async def command(request: Request) -> Response:
        return answer(context.commands.read(request.path_params["id"]))

    async def commands(_: Request) -> Response:
        return answer({"commands": context.commands.all()})

    routes = [
        Route("/", _page),
        Route("/static/{name:path}", _file),
        Route("/api/about", about),
        Route("/api/commands", commands),
        Route("/api/commands/{id}", command),
        *(route for view in VIEWS for route in view.routes(context)),
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


ENDING_S = 1  # streams never end by themselves


@dataclass(frozen=True)
class ConsoleOptions:
    """The options of `corral console`."""

    port: int = 8765
    bind: str = "127.0.0.1"
    read_only: bool = False
    playground: bool = False  # whether models may be asked nevertheless
    hosts: tuple[str, ...] = ()  # names it answers to, besides this machine's own
    limits: ServerLimits = LIMITS


class Console:
    """The console in a thread of its own: `with Console(options) as console: console.link()`."""

    def __init__(
        self, options: ConsoleOptions, context: ConsoleContext | None = None, used: Callable[[], None] = lambda: None
    ) -> None:
        self.options = options
        self.tickets = Tickets(used)
        asks = options.playground or not options.read_only
        context = context or ConsoleContext(read_only=options.read_only, asks=asks)
        static_files()
        open_paths = (*TELLING, *(ASKING if asks else ())) if options.read_only else None
        self._app = Guard(make_app(context), self.tickets, open_paths, options.hosts)

    def __enter__(self) -> Self:
        self._hosted = Hosted(self.options.bind, self.options.port, "corral-console", ENDING_S, self.options.limits)
        self._hosted.start(self._app)
        return self

    def __exit__(self, *_: object) -> None:
        self._hosted.close()

    @property
    def url(self) -> str:
        bind = self.options.bind
        host = "127.0.0.1" if bind in ("0.0.0.0", "::") else f"[{bind}]" if ":" in bind else bind  # noqa: S104
        return f"http://{host}:{self._hosted.port}"

    def link(self) -> str:
        """A link that opens the page once."""
        return f"{self.url}/?once={self.tickets.issue()}"


def open_browser(link: str) -> Path:
    """Open the link in the user's browser, by way of a private file: a command line is everybody's to read."""
    folder = home_dir() / "console"
    make_private_dir(folder)
    path = folder / "open.html"
    there = html.escape(link, quote=True)
    write_atomic(
        path, f'<!doctype html><meta http-equiv="refresh" content="0;url={there}"><a href="{there}">Open</a>'
    )
    with contextlib.suppress(webbrowser.Error):
        webbrowser.open(path.as_uri())
    return path
