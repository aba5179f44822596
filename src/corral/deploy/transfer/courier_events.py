"""The events of a courier, decoded: one JSON object per line, from a machine that may lie.

Every kind of event is a frozen record here. A line that is no event is skipped (a login script may print); an event
with a wrong type or an impossible number is an error of that courier. Which paths of a manifest may be written is
checked where they are written (`node/courier/manifest.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.base.errors import DataError
from corral.base.record import from_json
from corral.base.untrusted import parse_json, plain, plain_json

LONGEST_LINE_BYTES = 512 << 20  # a manifest of two million files
LONGEST_TEXT = 2000
MOST_BYTES = 1 << 60
MOST_S = 1e9
_ADDRESS = re.compile(r"[0-9A-Za-z.:%_-]{1,255}")
_SHA256, _GIT_SHA1 = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
_HTTP = re.compile(r"https?://[^\s\x00-\x1f]{1,2000}")


@dataclass(frozen=True)
class CourierRow:
    """One file of a manifest."""

    path: str
    kind: str
    size: int
    mode: int = 0o644
    mtime_ns: int | None = None
    target: str = ""
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True)
class _Listening:
    address: str
    port: int
    writable: bool = True
    free_bytes: int = 0


@dataclass(frozen=True)
class _Manifest:
    files: tuple[CourierRow, ...]
    commit: str = ""
    url: str = ""


@dataclass(frozen=True)
class _Seen:
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Hashes:
    hashes: dict[str, str]


@dataclass(frozen=True)
class _Need:
    bytes: int
    held: tuple[tuple[int, int], ...]
    damaged: tuple[str, ...]
    foreign: bool
    free_bytes: int
    have_bytes: int
    files: int
    unknown: tuple[int, ...]
    freed_bytes: int = 0


@dataclass(frozen=True)
class _Held:
    held: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Pace:
    done: int
    total: int


@dataclass(frozen=True)
class _Damaged:
    file: int
    path: str
    source: str


@dataclass(frozen=True)
class _Changed:
    path: str
    how: str
    was_bytes: int
    now_bytes: int
    more: int


@dataclass(frozen=True)
class _Unchanged:
    pass


@dataclass(frozen=True)
class _Done:
    bytes: int
    seconds: float


@dataclass(frozen=True)
class _Failed:
    text: str
    status: int | None = None
    errno: int | None = None


@dataclass(frozen=True)
class _ReadSpeed:
    bytes: int
    seconds: float
    bytes_per_s: float


@dataclass(frozen=True)
class _Starved:
    details: dict[str, Any] = field(default_factory=dict)


KINDS: dict[str, type] = {
    "listening": _Listening, "manifest": _Manifest, "seen": _Seen, "hashes": _Hashes, "need": _Need, "held": _Held,
    "hashing": _Pace, "checking": _Pace, "progress": _Pace, "damaged": _Damaged, "done": _Done, "failed": _Failed,
    "read-speed": _ReadSpeed, "starved": _Starved, "changed": _Changed, "unchanged": _Unchanged,
}  # fmt: skip


def read_event(line: bytes) -> dict[str, Any] | None:
    """One line as the event it is, with the types of its kind; None for a line that is no event at all."""
    if not line.startswith(b'{"event"'):
        return None
    body = parse_json(line, "what the copying program there says", LONGEST_LINE_BYTES, "Look at the host.")
    kind = body.pop("event")
    if not isinstance(kind, str) or kind not in KINDS:
        raise DataError(
            f"the copying program there sent the event {plain(repr(kind), 100)}, which does not exist.",
            "Look at the host.",
        )
    if kind != "manifest":  # paths of files are kept as they are, also those that are no text
        body = plain_json(body)
    event = {**vars(from_json(KINDS[kind], body, f"the event {kind!r}")), "event": kind}
    _refuse_impossible(event)
    return event


def _refuse_impossible(event: Mapping[str, Any]) -> None:
    wrong = next((name for name, value in event.items() if not _is_possible(name, value)), None)
    if wrong is not None:
        shown = plain(repr(event[wrong]), 100)
        raise DataError(
            f"the copying program there says {event['event']!r} with {wrong} = {shown}.", "Look at the host."
        )


def _is_possible(name: str, value: Any) -> bool:
    """Whether a field's value is possible; a name means the same in all kinds of event."""
    if name == "port":
        return bool(0 < value < 65536)
    if name == "address":
        return bool(_ADDRESS.fullmatch(value))
    if name == "url":
        return not value or bool(_HTTP.fullmatch(value))
    if name == "files" and isinstance(value, tuple):
        return all(map(_is_row, value))
    if name == "hashes":
        return all(
            number.isdecimal() and len(number) < 10 and _SHA256.fullmatch(sha) for number, sha in value.items()
        )
    if name == "held":
        return all(number >= 0 and 0 <= have <= MOST_BYTES for number, have in value)
    if name == "unknown":
        return all(number >= 0 for number in value)
    if name in ("text", "path", "source", "how"):
        return len(value) <= LONGEST_TEXT
    if name in ("seconds", "bytes_per_s"):
        return bool(0 <= value <= (MOST_S if name == "seconds" else MOST_BYTES))
    return not isinstance(value, int) or isinstance(value, bool) or 0 <= value <= MOST_BYTES


def _is_row(row: CourierRow) -> bool:
    hashes = (row.sha256 is None or _SHA256.fullmatch(row.sha256)) and (
        row.git_sha1 is None or _GIT_SHA1.fullmatch(row.git_sha1)
    )
    numbers = 0 <= row.size <= MOST_BYTES and 0 <= row.mode <= 0o7777 and 0 <= (row.mtime_ns or 0) <= 1 << 62
    return bool(hashes) and numbers and row.kind in ("file", "link", "folder") and 0 < len(row.path) <= 4096
