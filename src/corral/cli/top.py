"""`corral top`: the load of every ready deployment, live; drawn for 60, 80 and 120 columns."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

import click

from corral.base.errors import NotFoundError
from corral.cli.options import Duration
from corral.lab.report.screen import print_json, print_table

if TYPE_CHECKING:
    from corral.client.endpoint import Endpoint
    from corral.use.llm.top import Line


WIDE, MEDIUM = 118, 78  # columns from which on there is room for more
HEADINGS = ["NAME", "RUNNING", "WAITING", "KV USE", "TOK/S", "PROMPT TOK/S", "TTFT", "PREFIX HITS", "MODEL"]
SHORT = {"RUNNING": "RUN", "WAITING": "WAIT", "KV USE": "KV", "PROMPT TOK/S": "PROMPT/S", "PREFIX HITS": "HITS"}
NARROW = ["NAME", "RUNNING", "WAITING", "KV USE", "TOK/S", "TTFT"]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 118})
@click.argument("names", nargs=-1)
@click.option("--url", "urls", multiple=True, metavar="URL", help="Watch any vLLM server by its address; repeatable.")
@click.option("--key-file", metavar="FILE", help="File with its key.")
@click.option("--interval", "interval_s", type=Duration(0.2), default=1.0, show_default=True,
              metavar="TIME", help="Time between looks; speeds are means over it.")  # fmt: skip
@click.option("--once", is_flag=True, help="Two looks, one interval apart; print and leave.")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON document.")
def command(
    names: tuple[str, ...], urls: tuple[str, ...], key_file: str | None, interval_s: float, once: bool, as_json: bool
) -> None:
    """Requests running and waiting, KV-cache use, tokens per second and time to first token, per deployment."""
    from corral.client.client import run

    servers = _servers(names, urls, key_file)
    if not servers:
        raise NotFoundError("no deployment is ready.", "Start one with `corral up`, or give --url.")
    if once or as_json or not sys.stdout.isatty():
        lines = run(_twice(servers, interval_s))
        print_json(lines) if as_json else print_table(HEADINGS, [_row(line) for line in lines])
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
        await watch.look()
        await asyncio.sleep(interval_s)
        return await watch.look()
    finally:
        await watch.close()


async def _live(names: tuple[str, ...], urls: tuple[str, ...], key_file: str | None, interval_s: float) -> None:
    from rich.live import Live

    from corral.use.llm.top import Watch

    watch = Watch(_servers(names, urls, key_file))
    looked = time.monotonic()
    try:
        await watch.look()
        with Live(auto_refresh=False, screen=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                if not names and not urls and time.monotonic() - looked > 5:
                    watch.set(await asyncio.to_thread(_servers, names, urls, key_file))
                    looked = time.monotonic()
                live.update(_drawn(await watch.look(), live.console.width), refresh=True)
    finally:
        await watch.close()


def _drawn(lines: list[Line], columns: int) -> Any:
    """The table for a terminal: what matters most at 60 columns, everything but the model at 80, all at 120."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", caption="Ctrl-C leaves", caption_justify="left")
    shown = HEADINGS if columns >= WIDE else HEADINGS[:-1] if columns >= MEDIUM else NARROW
    for heading in shown:
        side: Literal["left", "right"] = "left" if heading in ("NAME", "MODEL") else "right"
        room = {"NAME": 24 if columns >= MEDIUM else 16, "MODEL": 25}.get(heading)
        table.add_column(SHORT.get(heading, heading), justify=side, no_wrap=True, overflow="ellipsis", max_width=room)
    for line in lines:
        if line.reading is None:
            table.add_row(line.name, *[""] * (len(shown) - 1))
            continue
        cells = dict(zip(HEADINGS, _row(line), strict=True))
        if columns >= WIDE and line.reading.kv_use is not None:
            cells["KV USE"] = f"{_bar(line.reading.kv_use)} {cells['KV USE']}"
        table.add_row(*(cells[heading] for heading in shown))
    return _with_problems(table, [line for line in lines if line.reading is None])


def _with_problems(table: Any, silent: list[Line]) -> Any:
    from rich.console import Group
    from rich.text import Text

    return Group(table, *(Text(f"{line.name}: {line.problem}", style="red") for line in silent))


def _bar(share: float, width: int = 10) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


def _row(line: Line) -> list[str]:
    if line.reading is None:
        return [line.name, "-", "-", "-", "-", "-", "-", "-", line.problem]
    reading, load = line.reading, line.load
    use = "-" if reading.kv_use is None else f"{reading.kv_use:.1%}"
    return [
        line.name,
        "-" if reading.running is None else str(reading.running),
        "-" if reading.waiting is None else str(reading.waiting),
        use,
        _number(load.generated_tokens_per_s if load else None),
        _number(load.prompt_tokens_per_s if load else None),
        "-" if load is None or load.ttft_s is None else f"{load.ttft_s * 1000:,.0f} ms",
        "-" if load is None or load.prefix_hit_share is None else f"{load.prefix_hit_share:.0%}",
        line.model,
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"
