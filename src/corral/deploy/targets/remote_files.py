"""What lies on a node and what lies here: files packed for a node, and what its agent writes brought here.

The mirror has the same names and the same offsets as the original, so that everything that reads a deployment's
folder works on nodes elsewhere too. A long log is brought from its end; what was left out stays a hole.

What a node answers to the commands of `node/remote.py`, decoded: expected names, checked types, bounded sizes.

A node may be anybody's by now. Nothing in its answer may choose a path on this machine, a size without limit, or a
type that a reader does not expect; what cannot be meant is one error that names the host, and nothing is written.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.bundle import bundle
from corral.base.errors import DataError
from corral.base.files import make_private_dir, write_atomic
from corral.base.processes import Identity
from corral.base.record import dump_json, from_json
from corral.base.untrusted import last_object
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder, RankFolder
from corral.deploy.deployment.state import Reason, State
from corral.deploy.launch.render import LaunchSpec

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


def pack(spec: LaunchSpec, folder: DeploymentFolder, texts: Mapping[str, object]) -> bytes:
    """The files of one node: Corral's own, the key, the token, the rank's order."""
    files = {f"node/{file.name}": bundle(file.resource).encode() for file in spec.files}
    files |= {"key": folder.key.read_bytes(), "token": folder.token.read_bytes()}
    files |= {name: dump_json(body).encode() for name, body in texts.items()}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def mirrored_sizes(rank: RankFolder) -> dict[str, int]:
    """How much of each file is here already."""
    return {name: _size(rank.path / name) for name in MIRRORED}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def mirror(rank: RankFolder, found: NodeReport) -> None:
    """Write here what the agent wrote there; one writer at a time is enough, a second one writes the same."""
    if found.missing:
        return
    make_private_dir(rank.path)
    for name, piece in (found.pieces or {}).items():
        descriptor = os.open(rank.path / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            if piece.offset == 0 and piece.data:
                file.truncate(0)
            file.seek(piece.offset)  # what was left out of a long log stays a hole, so that offsets agree
            file.write(piece.data)
    _mirror_record(rank.agent, found.agent, found.agent_age_s)
    _mirror_record(rank.heartbeat, found.heartbeat, found.heartbeat_age_s)


def _mirror_record(path: Path, record: Identity | Heartbeat | None, age_s: float) -> None:
    """A small file, as old here as it is there."""
    if record is not None:
        write_atomic(path, dump_json(record))
        moment = time.time() - age_s
        os.utime(path, (moment, moment))


def last_word(rank: RankFolder) -> tuple[Reason, str] | None:
    """Why a rank has failed, as it says itself; None when it does not."""
    states = [event for event in read_events(rank.events) if event.kind == "state"]
    if not states or states[-1].get("state") != State.FAILED:
        return None
    said = states[-1].get("reason")
    known = isinstance(said, str) and said in {reason.value for reason in Reason}
    return Reason(said) if known else Reason.NODE_LOST, str(states[-1].get("text", ""))


def last_state(rank: RankFolder) -> State | None:
    """The state that a rank wrote last; None when it wrote none."""
    states = [event.get("state") for event in read_events(rank.events) if event.kind == "state"]
    return State(states[-1]) if states else None
