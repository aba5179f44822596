"""`corral console`: one page in the browser for everything Corral runs."""

from __future__ import annotations

import json
import os
import signal
import threading

import click

from corral.cli.options import json_option


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True,
              help="Port; 0 takes any free one.")  # fmt: skip
@click.option("--bind", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--host", "hosts", multiple=True, metavar="NAME",
              help="A name by which browsers may reach it, besides 127.0.0.1 and localhost; repeatable.")  # fmt: skip
@click.option("--read-only", is_flag=True, help="Only show: nothing can be started or stopped, and no prompt sent.")
@click.option("--playground", is_flag=True, help="With --read-only: the playground may still send prompts to models.")
@click.option("--open/--no-open", "opens", default=True, help="Open the page in the browser (default), or do not.")
@json_option("Address, link and process id as one JSON line.")
def command(
    port: int, bind: str, hosts: tuple[str, ...], read_only: bool, playground: bool, opens: bool, as_json: bool
) -> None:
    """Show everything on one page: deployments, load, a playground, plans, runs. Ctrl-C ends the page, nothing else.

    The link that it prints opens the page once, in one browser; when it has been used, another is printed.
    """
    from corral.console.server import Console, ConsoleOptions, open_browser

    ended, used = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        ended.set()
        used.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, end)
    page = None
    with Console(ConsoleOptions(port, bind, read_only, playground, hosts), used=used.set) as console:
        link = console.link()
        _print_link(console.url, link, as_json)
        if opens and _has_screen():
            page = open_browser(link)
        while not ended.is_set():
            used.wait()
            used.clear()
            if page is not None:
                page.unlink(missing_ok=True)  # its link is used up
            if not ended.is_set():
                _print_next_link(console.link(), as_json)


def _has_screen() -> bool:
    """Whether a browser can open a window here: a shell over ssh has no display."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) or os.uname().sysname == "Darwin"


def _print_link(url: str, link: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"url": url, "link": link, "pid": os.getpid()}))
        return
    click.echo(link)
    click.echo("  The link opens the page once. Ctrl-C ends the console and nothing else.", err=True)
    if os.environ.get("SSH_CONNECTION"):
        port = url.rpartition(":")[2]
        click.echo(f"  From your own machine: ssh -L {port}:127.0.0.1:{port} {os.uname().nodename}", err=True)


def _print_next_link(link: str, as_json: bool) -> None:
    click.echo(json.dumps({"link": link}) if as_json else f"used; for another browser: {link}", err=not as_json)
