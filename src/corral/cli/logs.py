"""`corral logs NAME`: the engine's own log."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import click

from corral.base.errors import NotFoundError
from corral.base.untrusted import plain
from corral.cli.options import deployment_argument, json_option
from corral.deploy.deployment.diagnosis import last_lines
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED
from corral.deploy.lifecycle.deployments import status
from corral.serve.fleet.chain import choose_folder

BLOCK_BYTES = LONGEST_LINE_BYTES = 1 << 20
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@click.command()
@deployment_argument
@click.option("--follow", "-f", is_flag=True, help="Follow the log as it grows, until the deployment ends.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Which rank's log.")
@click.option("--lines", "-n", type=click.IntRange(min=1), help="Only the last lines.")
@json_option('Each line as JSON: {"rank", "line"}.')
def command(name: str | None, follow: bool, rank: int, lines: int | None, as_json: bool) -> None:
    """Print the engine's log."""
    folder = choose_folder(name)
    status(folder)  # copies what was written on other nodes
    files = folder.known_rank(rank)
    if not files.log.exists() and not follow:
        raise NotFoundError(
            f"{folder.name!r} has written no log yet.", f"Follow it: corral logs {shlex.quote(folder.name)} -f"
        )
    offset = 0
    if lines:
        for line in last_lines(files.log, lines):
            _show(line, rank, as_json)
        offset = files.log.stat().st_size if files.log.exists() else 0
    for line in _new_lines(files.log, offset, folder if follow else None):
        _show(line, rank, as_json)


def _show(line: str, rank: int, as_json: bool) -> None:
    # an engine's log may contain anything, also control sequences for the terminal
    click.echo(
        json.dumps({"rank": rank, "line": line}, ensure_ascii=False) if as_json else plain(COLOUR.sub("", line))
    )


def _new_lines(log: Path, offset: int, following: DeploymentFolder | None) -> Iterator[str]:
    rest = b""
    while True:
        ended = following is None or status(following).state in ENDED
        if log.exists():
            if log.stat().st_size < offset:  # trimmed by the agent
                offset = 0
            for block in _blocks(log, offset):
                offset += len(block)
                *whole, rest = (rest + block.replace(b"\0", b"")).split(b"\n")  # zeros: holes of a mirrored log
                rest = rest[-LONGEST_LINE_BYTES:]
                for line in whole:
                    yield line.decode("utf-8", "replace").rpartition("\r")[2]
        if ended:
            if rest:
                yield rest.decode("utf-8", "replace").rpartition("\r")[2]
            return
        time.sleep(0.2)


def _blocks(log: Path, offset: int) -> Iterator[bytes]:
    with log.open("rb") as file:
        file.seek(offset)
        while block := file.read(BLOCK_BYTES):
            yield block
