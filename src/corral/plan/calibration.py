"""What deployments taught: differences between plans and reports, kept in `<home>/calibration.jsonl`.

The next plan for the same kind of GPU and the same engine version takes the median of what was missing (of the same
model, where it was deployed before) out of the KV cache, and the median speed at which weights were read.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import median

from corral.errors import CorralError, DataError
from corral.plan.candidate import Tuning
from corral.plan.reconcile import Differences
from corral.record import from_json, to_json

__all__ = ["append", "calibration_path", "learn", "read"]

_MOST_GIB = 16.0  # a larger difference is a mistake, not a lesson


def calibration_path(home: Path) -> Path:
    return home / "calibration.jsonl"


def append(home: Path, differences: Differences) -> None:
    """Add one lesson, durably; a crash can only cut the last line."""
    home.mkdir(parents=True, exist_ok=True)
    line = json.dumps(to_json(differences), ensure_ascii=False) + "\n"
    try:
        handle = os.open(calibration_path(home), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, line.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise DataError(f"{calibration_path(home)} cannot be written: {error.strerror}.", "Free space.") from error


def read(home: Path) -> list[Differences]:
    """All lessons; lines that cannot be read (cut off, of another version) are left out."""
    try:
        lines = calibration_path(home).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    lessons = []
    for line in lines:
        try:
            lessons.append(from_json(Differences, json.loads(line)))
        except (ValueError, CorralError):
            continue
    return lessons


def learn(lessons: list[Differences], gpu: str, model: str = "", engine_version: str = "") -> Tuning:
    """The built-in numbers, corrected by the lessons for this kind and version (the last one seen when not named)."""
    built_in = Tuning()
    mine = [lesson for lesson in lessons if lesson.gpu == gpu]
    wanted = engine_version or (mine[-1].engine_version if mine else "")
    mine = [lesson for lesson in mine if lesson.engine_version == wanted]
    if not mine:
        return built_in
    same = [lesson for lesson in mine if lesson.model == model]
    gaps = [d.missing_gib for d in same or mine if d.missing_gib is not None and abs(d.missing_gib) <= _MOST_GIB]
    speeds = [d.storage_gb_s for d in mine if d.storage_gb_s]
    memory, speed = built_in.memory, built_in.speed
    if gaps:
        memory = replace(memory, correction_gib=median(gaps))
    if speeds:
        speed = replace(speed, storage_gb_s=round(median(speeds), 2))
    whose = f"of {model}" if same else f"on {gpu}"
    return Tuning(memory, speed, f"{len(same or mine)} earlier deployments {whose} with vLLM {wanted}")
