"""The journal of a deployment: append-only JSON lines, each synced to disk before it counts.

A line is written with one `write` to a file opened for appending, so writers in several processes do not tear each
other's lines. A torn last line (power loss) is ignored by the reader and closed by the next writer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.record import to_json

__all__ = ["Event", "Follower", "append_event", "read_events"]


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
    try:
        body = json.loads(line)
        known = (float(body.pop("t")), str(body.pop("kind")), int(body.pop("rank", 0)))
        return Event(*known, float(body.pop("elapsed_s", 0.0)), body)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_events(path: Path) -> list[Event]:
    """All whole events of a journal; an absent file is an empty journal."""
    return list(Follower(path).new())


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
                if inode != self._inode:  # a new journal in the place of the old one: a job's next life
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
