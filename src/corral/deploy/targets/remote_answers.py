"""What a node answers to the commands of `node/remote.py`, decoded: expected names, checked types, bounded sizes.

A node may be anybody's by now. Nothing in its answer may choose a path on this machine, a size without limit, or a
type that a reader does not expect; what cannot be meant is one error that names the host, and nothing is written.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from corral.base.errors import DataError
from corral.base.processes import Identity
from corral.base.record import from_json
from corral.base.untrusted import last_object

# The files of a rank that are brought here, and up to which length: an agent cuts its engine's log at 64 MiB
MIRRORED = {"events.jsonl": 64 << 20, "engine.log": 256 << 20, "load.jsonl": 8 << 20}
PIECE_BYTES = 4 << 20  # as in node/remote.py
OLDEST_S = 10 * 365 * 86400.0
REMEDY = "Something other than Corral's agent answers there: look at the node."


@dataclass(frozen=True)
class LogPiece:
    """A part of one of the mirrored files."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class Heartbeat:
    """The agent's last sign of life."""

    t: float = 0.0
    state: str = ""
    phase: str = ""


@dataclass(frozen=True)
class NodeReport:
    """How a rank stands, and what it wrote since the last report."""

    missing: bool = False  # the node has no such folder
    boot_id: str = ""
    alive: bool | None = None  # None: no agent ever wrote who it is
    pieces: Mapping[str, LogPiece] | None = None
    agent: Identity | None = None
    agent_age_s: float = 0.0
    heartbeat: Heartbeat | None = None
    heartbeat_age_s: float = 0.0


@dataclass(frozen=True)
class Started:
    pid: int = 0
    error: str = ""


@dataclass(frozen=True)
class Stopped:
    """Processes and containers that could not be ended."""

    left: tuple[int | str, ...]
    containers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Removed:
    """Whether the deployment's folder is gone from the node."""

    removed: bool


def read_removed(text: str, host: str) -> Removed:
    return from_json(Removed, _answer(text, host), _what(host))


def read_started(text: str, host: str) -> Started:
    return from_json(Started, _answer(text, host), _what(host))


def read_stopped(text: str, host: str) -> Stopped:
    return from_json(Stopped, _answer(text, host), _what(host))


def read_report(text: str, host: str, held: Mapping[str, int]) -> NodeReport:
    """The report, whose pieces must continue what is `held` here, or begin anew."""
    body = _answer(text, host)
    files = body.pop("files", {})
    if not isinstance(files, dict):
        raise DataError(f"{_what(host)}: its files must be an object.", REMEDY)
    flat = {name.replace(".json", ""): value for name, value in body.items()}
    report = from_json(NodeReport, {**flat, "pieces": None}, _what(host))
    for age_s in (report.agent_age_s, report.heartbeat_age_s):
        if not 0.0 <= age_s <= OLDEST_S:
            raise DataError(f"{_what(host)} says that a file is {age_s:g} s old.", REMEDY)
    pieces = {name: _piece(name, part, held.get(name, 0), host) for name, part in files.items()}
    fitting = {name: piece for name, piece in pieces.items() if piece.offset + len(piece.data) <= MIRRORED[name]}
    return replace(report, pieces=fitting)


def _piece(name: str, part: Any, held: int, host: str) -> LogPiece:
    if name not in MIRRORED:
        raise DataError(f"{_what(host)} holds {name!r}, which was not asked for.", REMEDY)
    if not isinstance(part, dict) or type(part.get("offset")) is not int or not isinstance(part.get("data"), str):
        raise DataError(f"{_what(host)}: its {name} must have an offset and data.", REMEDY)
    try:
        data = base64.b64decode(part["data"], validate=True)
    except (binascii.Error, ValueError):
        raise DataError(f"{_what(host)}: the data of its {name} is not base64.", REMEDY) from None
    offset: int = part["offset"]
    ahead = offset > held and name == "engine.log"  # brought from its end
    if not (offset in (0, held) or ahead) or len(data) > PIECE_BYTES:
        raise DataError(
            f"{_what(host)}: {len(data):,} bytes at {offset:,} do not continue its {name}; {held:,} are here.",
            REMEDY,
        )
    return LogPiece(offset, data)


def _answer(text: str, host: str) -> dict[str, Any]:
    """The node's object; the name it has for itself is of no interest."""
    body = last_object(text, _what(host), remedy=REMEDY)
    body.pop("host", None)
    return body


def _what(host: str) -> str:
    return f"the answer of {host}"
