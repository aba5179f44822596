"""How fast storage reads where weights lie: the last measurement of `corral doctor` for each kind of node.

Kept in `<home>/storage.json`, so that a plan's load time need not be a guess. A start is the better witness
(`corral.plan.calibration`): it read all of a model, the way vLLM reads.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from corral.base.errors import CorralError
from corral.base.files import make_private_dir, write_atomic
from corral.base.record import dump_json, from_json


@dataclass(frozen=True)
class StorageReading:
    """One measurement, on the slowest of the nodes that were looked at."""

    gb_s: float
    file: str
    at_s: float

    @property
    def basis(self) -> str:
        return f"measured by `corral doctor` on {time.strftime('%Y-%m-%d', time.localtime(self.at_s))}"


def _all(home: Path) -> dict[str, StorageReading]:
    try:
        body = json.loads((home / "storage.json").read_text(encoding="utf-8"))
        return {str(kind): from_json(StorageReading, row) for kind, row in body.items()}
    except (OSError, ValueError, AttributeError, CorralError):  # none yet, or of another version
        return {}


def remember_storage_speed(home: Path, gpu: str, reading: StorageReading) -> None:
    """Keep the latest measurement for nodes with this kind of GPU (or `CPU`)."""
    make_private_dir(home)
    write_atomic(home / "storage.json", dump_json({**_all(home), gpu: reading}))


def recall_storage_speed(home: Path, gpu: str) -> StorageReading | None:
    return _all(home).get(gpu)
