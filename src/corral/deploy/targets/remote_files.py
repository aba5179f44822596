"""What lies on a node and what lies here: files packed for a node, and what its agent writes brought here.

The mirror has the same names and the same offsets as the original, so that everything that reads a deployment's
folder works on nodes elsewhere too. A long log is brought from its end; what was left out stays a hole.
"""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

from corral.base.bundle import bundle
from corral.base.files import make_private_dir, write_atomic
from corral.base.processes import Identity
from corral.base.record import dump_json
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder, RankFolder
from corral.deploy.deployment.state import Reason, State
from corral.deploy.launch.render import LaunchSpec
from corral.deploy.targets.remote_answers import MIRRORED, Heartbeat, NodeReport


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
