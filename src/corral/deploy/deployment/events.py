"""The journal of a deployment: append-only JSON lines, each synced to disk before it counts.

A line is written with one `write` to a file opened for appending, so writers in several processes do not tear each
other's lines. A torn last line (power loss) is ignored by the reader and closed by the next writer. A journal may
come from a node that lies: a line that is no event is skipped, and a detail of the wrong type is left out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.base.errors import DataError
from corral.base.record import to_json
from corral.base.untrusted import parse_json, plain, plain_json
from corral.deploy.deployment.state import Reason, State

LONGEST_LINE_BYTES = 1 << 18
LONGEST_KIND = 40  # a kind of event
LATEST_S = 1e11  # the year 5138: what the system's own functions can still show
MOST_RANKS = 1 << 20
MOST_COUNT = 1 << 60
WORDS = {"state": frozenset(State) - {State.UNKNOWN}, "reason": frozenset(Reason)}  # no agent writes "unknown"
COUNTS = ("done", "total", "percent", "failed_rank", "log_from", "attempt", "of")
TEXTS = ("text", "phase", "node")


@dataclass(frozen=True)
class Event:
    """One line of the journal: when, what kind, and its details."""

    time_s: float
    kind: str
    rank: int = 0
    elapsed_s: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        return self.details.get(key, default)


def append_event(path: Path, kind: str, rank: int = 0, elapsed_s: float = 0.0, **details: Any) -> None:
    """Write one event and sync it."""
    body = {"t": round(time.time(), 3), "kind": kind, "rank": rank, "elapsed_s": round(elapsed_s, 3)}
    line = json.dumps({**body, **to_json(details)}, ensure_ascii=False) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        end = os.lseek(descriptor, 0, os.SEEK_END)
        if end and os.pread(descriptor, 1, end - 1) != b"\n":
            line = "\n" + line
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse(line: bytes) -> Event | None:
    """One line as an event; None for a line that no agent can have written."""
    try:
        body = parse_json(line, "an event", LONGEST_LINE_BYTES)
    except DataError:
        return None
    if not isinstance(body, dict):
        return None
    time_s, kind, rank, elapsed_s = (body.pop(name, 0) for name in ("t", "kind", "rank", "elapsed_s"))
    known = _is_number(time_s) and 0 < time_s < LATEST_S and isinstance(kind, str) and 0 < len(kind) <= LONGEST_KIND
    placed = type(rank) is int and 0 <= rank <= MOST_RANKS and _is_number(elapsed_s) and abs(elapsed_s) < LATEST_S
    if not (known and placed):
        return None
    details = {name: value for name, value in plain_json(body).items() if _fits(name, value)}
    if kind == "state" and "state" not in details:
        return None
    if kind == "observed":
        details = {name: value for name, value in details.items() if _is_number(value)}
    return Event(float(time_s), plain(kind), rank, float(elapsed_s), details)


def _fits(name: str, value: Any) -> bool:
    """Whether a detail has the type that its readers expect; details for people may be anything."""
    if name in WORDS:
        return isinstance(value, str) and value in WORDS[name]
    if name in COUNTS:
        return type(value) is int and 0 <= value <= MOST_COUNT
    if name in ("exit_code", "signal"):
        return value is None or (type(value) is int and abs(value) <= MOST_COUNT)
    if name in TEXTS:
        return isinstance(value, str)
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_events(path: Path) -> list[Event]:
    """All whole events of a journal; an absent file is an empty journal."""
    return list(Follower(path).new())


def last_state(path: Path) -> Event | None:
    """The last change of state in a journal; None when there is none."""
    return next((event for event in reversed(read_events(path)) if event.kind == "state"), None)


class Follower:
    """Reads a journal as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def new(self) -> Iterator[Event]:
        """The events written since the last call."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:  # a new journal in the place of the old one: a job's next attempt
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].splitlines():
            event = _parse(line)
            if event is not None:
                yield event
