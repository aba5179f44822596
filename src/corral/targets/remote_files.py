"""What lies on a node and what lies here: files packed for a node, and what its agent writes brought here.

The mirror has the same names and the same offsets as the original, so that everything that reads a deployment's
folder works on nodes elsewhere too. A long log is brought from its end; what was left out stays a hole.
"""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.bundle import bundle
from corral.deployment.events import read_events
from corral.deployment.folder import DeploymentFolder, RankFolder
from corral.files import make_private_dir, write_atomic
from corral.launch.render import LaunchSpec
from corral.record import dump_json

__all__ = ["last_state", "last_word", "mirror", "mirrored_sizes", "pack"]

MIRRORED = ("events.jsonl", "engine.log")


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


def mirror(rank: RankFolder, found: Mapping[str, Any]) -> None:
    """Write here what the agent wrote there; one writer at a time is enough, a second one writes the same."""
    if found.get("missing"):
        return
    make_private_dir(rank.path)
    for name, part in found["files"].items():
        data = base64.b64decode(part["data"])
        path = rank.path / name
        path.touch(mode=0o600)
        with path.open("r+b") as file:
            if part["offset"] == 0 and _size(path) and data:
                file.truncate(0)
            file.seek(part["offset"])  # what was left out of a long log stays a hole, so that offsets agree
            file.write(data)
    for name, path in (("agent.json", rank.agent), ("heartbeat.json", rank.heartbeat)):
        if found.get(name):
            write_atomic(path, json.dumps(found[name]))
            moment = time.time() - float(found[f"{name}_age_s"])
            os.utime(path, (moment, moment))


def last_word(rank: RankFolder) -> str:
    """How a rank says that it ended without its head; empty when it does not."""
    states = [event for event in read_events(rank.events) if event.kind == "state"]
    if states and states[-1].get("state") == "failed":
        return str(states[-1].get("text", ""))
    return ""


def last_state(rank: RankFolder) -> str:
    states = [event.get("state") for event in read_events(rank.events) if event.kind == "state"]
    return str(states[-1]) if states else ""
