"""What the files of a deployment still tell when some of them cannot be read: which launch it was, and where.

A full disk, an editor or a neighbour may have left any of them empty, cut off or changed. The launch id stands in
several, and every process of the launch carries it: that is enough to end what runs.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError
from corral.base.untrusted import parse_json
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.targets.base import target_class

_LAUNCH_ID = re.compile(rb'"launch_id"\s*:\s*"([A-Za-z0-9_.-]{1,100})"')
_TARGET = re.compile(rb'"target"\s*:\s*"([A-Za-z0-9_-]{1,40})"')
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Traces:
    """What was found; empty where no file tells it."""

    launch_id: str = ""
    target: str = ""
    target_options: dict[str, Any] = field(default_factory=dict)  # what makes the target again
    nodes: tuple[str, ...] = ()

    @property
    def hosts(self) -> dict[str, Any]:
        """What makes a target that names its nodes, where only the launch tells them."""
        known = self.target and self.nodes and "hosts" in target_class(self.target).REQUIRED
        return {"hosts": list(self.nodes)} if known else {}


def traces_of(folder: DeploymentFolder) -> Traces:
    """What the record, the launch and the ranks' own files tell together, each as far as it can be read."""
    files = [folder.record, folder.launch, *(rank.spec for rank in folder.ranks())]
    texts = [_bytes(path) for path in files]
    record, launch = _object(texts[0]), _object(texts[1])
    target_options, ranks = record.get("target_options"), launch.get("ranks")
    nodes = [rank.get("node") for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    return Traces(
        _first(_LAUNCH_ID, texts),
        _first(_TARGET, texts[:2]),
        target_options if isinstance(target_options, dict) else {},
        tuple(node for node in nodes if isinstance(node, str)),
    )


def _bytes(path: Path) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(_MOST_BYTES)
    return b""


def _object(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(CorralError):
        found = parse_json(text, "x")
        return found if isinstance(found, dict) else {}
    return {}


def _first(wanted: re.Pattern[bytes], texts: list[bytes]) -> str:
    """Read from the text, not from JSON: half a file still tells it."""
    found = (match[1].decode() for text in texts if (match := wanted.search(text)))
    return next(found, "")
