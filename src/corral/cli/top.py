"""`corral top`: the load of every ready deployment, live."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from corral.base.errors import NotFoundError
from corral.cli.options import Duration, json_option
from corral.lab.report.screen import print_json, print_table

if TYPE_CHECKING:
    from corral.client.endpoint import Endpoint
    from corral.use.llm.top import Line


@click.command(context_settings={"max_content_width": 118})
@click.argument("names", nargs=-1)
@click.option("--url", "urls", multiple=True, metavar="URL", help="Watch any vLLM server by its address; repeatable.")
@click.option("--key-file", metavar="FILE", help="File with its key.")
@click.option("--interval", "interval_s", type=Duration(0.2), default=1.0, show_default=True,
              metavar="TIME", help="Time between looks; speeds are means over it.")  # fmt: skip
@click.option("--once", is_flag=True, help="Look once, over one interval; print and end.")
@json_option()
def command(
    names: tuple[str, ...], urls: tuple[str, ...], key_file: str | None, interval_s: float, once: bool, as_json: bool
) -> None:
    """Requests running and waiting, KV-cache use, tokens per second and time to first token, per deployment."""
    from corral.client.client import run
    from corral.lab.report.top import HEADINGS, row_of

    servers = _servers(names, urls, key_file)
    if not servers:
        raise NotFoundError("no deployment is ready.", "Start one with `corral up`, or give --url.")
    if once or as_json or not sys.stdout.isatty():
        lines = run(_twice(servers, interval_s))
        print_json(lines) if as_json else print_table(HEADINGS, [row_of(line) for line in lines])
        return
    try:
        run(_live(names, urls, key_file, interval_s))
    except KeyboardInterrupt:
        return


def _servers(names: tuple[str, ...], urls: tuple[str, ...], key_file: str | None) -> list[tuple[str, Endpoint]]:
    from corral.serve.resolve import ready_endpoint, server_at
    from corral.use.llm.top import ready_servers

    if names or urls:
        named = [(name, ready_endpoint(name)) for name in names]
        return named + [(_without_scheme(url), server_at(url, key_file)) for url in urls]
    found = [(one.name, one.endpoint) for one in ready_servers()]
    if not found and os.environ.get("OPENAI_BASE_URL"):
        endpoint = server_at(None, key_file)
        return [(_without_scheme(endpoint.root), endpoint)]
    return found


def _without_scheme(url: str) -> str:
    """An address by what tells it from others, where there is little room."""
    return url.partition("://")[2].rstrip("/").removesuffix("/v1") or url


async def _twice(servers: list[tuple[str, Endpoint]], interval_s: float) -> list[Line]:
    from corral.use.llm.top import Watch

    watch = Watch(servers)
    try:
        await watch.read()
        await asyncio.sleep(interval_s)
        return await watch.read()
    finally:
        await watch.close()


async def _live(names: tuple[str, ...], urls: tuple[str, ...], key_file: str | None, interval_s: float) -> None:
    from corral.lab.report.screen import LiveLines
    from corral.lab.report.top import screen_lines
    from corral.use.llm.top import Watch

    watch, screen = Watch(_servers(names, urls, key_file)), LiveLines(sys.stdout)
    found_s = time.monotonic()
    try:
        await watch.read()
        with _leaving() as left:
            while not await _set_within(left, interval_s):
                if not names and not urls and time.monotonic() - found_s > 5:
                    watch.set(await asyncio.to_thread(_servers, names, urls, key_file))
                    found_s = time.monotonic()
                screen.draw(screen_lines(await watch.read(), shutil.get_terminal_size().columns))
    finally:
        screen.leave()
        await watch.close()


@contextlib.contextmanager
def _leaving() -> Iterator[asyncio.Event]:
    """An event that is set when `q` is pressed; never where stdin is no terminal."""
    left = asyncio.Event()
    if not sys.stdin.isatty():
        yield left
        return
    import termios
    import tty

    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        pressed = os.read(terminal, 64)
        if not pressed:
            loop.remove_reader(terminal)
        if b"q" in pressed.lower():
            left.set()

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSANOW)  # Ctrl-C stays a signal
    loop.add_reader(terminal, read)
    try:
        yield left
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSANOW, before)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
