"""What deployments taught: differences between plans and reports, kept in `<home>/calibration.jsonl`.

The next plan for the same kind of GPU and the same engine version takes the median of what was missing (of the same
model, where it was deployed before) out of the KV cache. The median speed at which weights were read, of any version,
takes the place of the assumed one; before a first start, what `corral doctor` measured does.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import median

from corral.base.errors import CorralError, DataError
from corral.base.record import from_json, to_json
from corral.plan.candidate import Tuning
from corral.plan.memory import Coefficients
from corral.plan.reconcile import Differences
from corral.plan.storage import recall_storage_speed

_MOST_GIB = 16.0  # a larger difference is a mistake, not a lesson


def calibration_path(home: Path) -> Path:
    return home / "calibration.jsonl"


def append_lesson(home: Path, differences: Differences) -> None:
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


def read_lessons(home: Path) -> list[Differences]:
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


def learn_tuning(lessons: list[Differences], gpu: str, model: str = "", engine_version: str = "") -> Tuning:
    """The built-in numbers, corrected by the lessons for this kind and version (the last one seen when not named)."""
    mine = [lesson for lesson in lessons if lesson.gpu == gpu]
    wanted = _public(engine_version or (mine[-1].engine_version if mine else ""))
    mine = [lesson for lesson in mine if _public(lesson.engine_version) == wanted]
    built_in = Tuning(Coefficients.of_version(wanted))
    if not mine:
        return built_in
    same = [lesson for lesson in mine if lesson.model == model]
    found = [lesson.gap_gib(built_in.memory.counts_graphs) for lesson in same or mine]
    gaps = [gap for gap in found if gap is not None and abs(gap) <= _MOST_GIB]
    memory = replace(built_in.memory, correction_gib=median(gaps)) if gaps else built_in.memory
    whose = f"of {model}" if same else f"on {gpu}"
    number = len(same or mine)
    return Tuning(
        memory, built_in.speed, f"{number} earlier deployment{'s' * (number > 1)} {whose} with vLLM {wanted}"
    )


def _public(version: str) -> str:
    """Without the mark of a build: `0.26.0+cu130` and `0.26.0` are one version."""
    return version.partition("+")[0]


def known_tuning(home: Path, gpu: str, model: str, engine_version: str = "") -> Tuning:
    """Everything that was learned here about nodes with this kind of GPU (or `CPU`), and about the model on them."""
    lessons = read_lessons(home)
    tuning = learn_tuning(lessons, gpu, model, engine_version)
    speeds = [lesson.storage_gb_s for lesson in lessons if lesson.gpu == gpu and lesson.storage_gb_s]
    reading = recall_storage_speed(home, gpu)
    if speeds:
        starts = f"{len(speeds)} earlier start{'s' * (len(speeds) > 1)}"
        speed = replace(
            tuning.speed, storage_gb_s=round(median(speeds), 2), storage_basis=f"measured at {starts} on {gpu}"
        )
    elif reading is not None:
        speed = replace(tuning.speed, storage_gb_s=round(reading.gb_s, 2), storage_basis=reading.basis)
    else:
        return tuning
    return replace(tuning, speed=speed)
