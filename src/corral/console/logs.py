"""An engine's log and a deployment's journal as the page reads them: last lines, those with a word, what is new.

Whatever an engine or a node wrote is cleaned of control characters; the page shows it as text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.untrusted import plain
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LINES = 400
LONGEST_LINE = 4000
BLOCK_BYTES = 1 << 20
SEARCHED_BYTES = 64 << 20  # from the end
TAIL_BYTES = 256 << 10
MOST_EVENTS = 400


@dataclass(frozen=True)
class LogPage:
    """Some lines of a log, and from where to ask for more."""

    lines: tuple[str, ...]
    end: int  # the byte after the last whole line
    size: int
    found: int | None = None  # lines that hold the word, of those searched


def read_log(folder: DeploymentFolder, rank: int, search: str = "", after: int | None = None) -> LogPage:
    """The end of a rank's log, or what came after a byte, or the last lines that hold a word in any case."""
    return read_log_file(folder.known_rank(rank).log, search, after)


def read_log_file(log: Path, search: str = "", after: int | None = None) -> LogPage:
    """The same of any log."""
    try:
        size = log.stat().st_size
    except FileNotFoundError:
        return LogPage((), 0, 0)
    if after is not None and 0 <= after <= size:
        begin = after
    else:
        begin = max(0, size - (SEARCHED_BYTES if search else TAIL_BYTES))
    kept: deque[str] = deque(maxlen=LINES)
    end, found, wanted = begin, 0, search.casefold()
    for line, at in _lines(log, begin, whole=after is not None or begin == 0):
        end = at
        text = _clean(line)
        if not wanted or wanted in text.casefold():
            found += 1
            kept.append(text)
    return LogPage(tuple(kept), end, size, found if search else None)


def _lines(log: Path, begin: int, whole: bool) -> Iterator[tuple[bytes, int]]:
    """Whole lines and the byte after each; where reading begins in the middle of one, that is left out."""
    rest, at = b"", begin
    with log.open("rb") as file:
        file.seek(begin)
        while block := file.read(BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                at += len(line) + 1
                if whole:
                    yield line, at
                whole = True
            if len(rest) > BLOCK_BYTES:  # a line without end
                at += len(rest)
                yield rest, at
                rest = b""


def _clean(line: bytes) -> str:
    text = line.replace(b"\0", b"").decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    return plain(COLOUR.sub("", text))[:LONGEST_LINE]


def read_journal(folder: DeploymentFolder) -> list[dict[str, Any]]:
    """What happened, newest first; of what was written in one millisecond, the later line."""
    return read_journals([folder.staging, *(rank.events for rank in folder.ranks())])


def read_journals(journals: Sequence[Path]) -> list[dict[str, Any]]:
    """The events of several journals as one."""
    events = [event for journal in journals for event in read_events(journal)]
    newest = sorted(events, key=lambda event: event.time_s)[::-1][:MOST_EVENTS]
    return [
        {"at_s": one.time_s, "elapsed_s": one.elapsed_s, "rank": one.rank, "kind": one.kind, "details": one.details}
        for one in newest
    ]
