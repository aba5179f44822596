"""The console as a process: a socket, uvicorn, and the link that opens it."""

from __future__ import annotations

import contextlib
import html
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from corral.base.files import make_private_dir, write_atomic
from corral.base.home import home_dir
from corral.console.app import make_app, static_files
from corral.console.context import ConsoleContext
from corral.console.guard import Guard, Tickets
from corral.console.play import ASKING, TELLING
from corral.serve.asgi_server import Hosted

ENDING_S = 1  # streams never end by themselves


@dataclass(frozen=True)
class ConsoleOptions:
    """Everything that can be set."""

    port: int = 8765
    bind: str = "127.0.0.1"
    read_only: bool = False
    playground: bool = False  # whether models may be asked nevertheless
    hosts: tuple[str, ...] = ()  # names it answers to, besides this machine's own


class Console:
    """The console in a thread of its own: `with Console(options) as console: console.link()`."""

    def __init__(
        self, options: ConsoleOptions, desk: ConsoleContext | None = None, used: Callable[[], None] = lambda: None
    ) -> None:
        self.options = options
        self.tickets = Tickets(used)
        asks = options.playground or not options.read_only
        desk = desk or ConsoleContext(read_only=options.read_only, asks=asks)
        static_files()
        open_paths = (*TELLING, *(ASKING if asks else ())) if options.read_only else None
        self._app = Guard(make_app(desk), self.tickets, open_paths, options.hosts)

    def __enter__(self) -> Self:
        self._hosted = Hosted(self.options.bind, self.options.port, "corral-console", ENDING_S)
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
