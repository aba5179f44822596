"""Looking at a job from outside: how it stands, asking it to stop, checking an input without a job."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from corral.batch.check import Problem, read_problems, scan
from corral.batch.folder import JobFolder
from corral.batch.job import load_record
from corral.batch.ledger import FINE, read_ledger
from corral.batch.lock import holder_of
from corral.batch.recipe import Recipe
from corral.batch.rows import open_source
from corral.processes import Identity

__all__ = ["Checked", "Standing", "ask_to_stop", "check_input", "inspect"]


@dataclass(frozen=True)
class Standing:
    """A job as it stands now; `state` is running, done, or how it was left."""

    output: str
    errors: str
    state: str
    reason: str
    rows: int
    fine: int
    failed: int
    model: str
    input: str
    created_s: float
    holder: Identity | None


@dataclass(frozen=True)
class Row:
    line: int
    text: str
    id: str | None


@dataclass(frozen=True)
class Checked:
    """What a check found."""

    rows: int
    kind: str
    problems: tuple[Row, ...]


def inspect(output: str) -> Standing:
    """How a job stands, from its ledger: what it says is on disk."""
    folder, record = load_record(output)
    fine = failed = 0
    for entry in read_ledger(folder):
        if entry.kind == FINE:
            fine += 1
        else:
            failed += 1
    holder = holder_of(folder.lock)
    state, reason = _state(folder, fine + failed >= record.rows, holder is not None)
    return Standing(
        output=output,
        errors=str(folder.errors),
        state=state,
        reason=reason,
        rows=record.rows,
        fine=fine,
        failed=failed,
        model=record.model,
        input=record.input,
        created_s=record.created_s,
        holder=holder,
    )


def _state(folder: JobFolder, complete: bool, held: bool) -> tuple[str, str]:
    if held:
        return "running", ""
    try:
        kept = msgspec.json.decode(folder.state.read_bytes())
    except (OSError, msgspec.DecodeError):
        kept = {"state": "", "details": {}}
    if complete and (folder.live or kept["state"] == "done"):
        return "done", ""
    if kept["state"] in ("stopped", "cancelled", "failed"):
        reason = kept["details"].get("error", {}).get("message", "") if kept["state"] == "failed" else ""
        return kept["state"], reason
    return "interrupted", "its runner ended without a word (killed, or the machine went down)"


def ask_to_stop(output: str) -> str:
    """Ask the runner of a job to stop; returns what will happen, in words."""
    folder, _ = load_record(output)
    holder = holder_of(folder.lock)
    if holder is None:
        return f"{output}: nobody is working on it"
    descriptor = os.open(folder.cancel, os.O_WRONLY | os.O_CREAT, 0o600)
    os.close(descriptor)
    return f"{output}: asked process {holder.pid} on {holder.host} to stop; `corral batch resume` continues"


def check_input(given: str, format_: str | None, recipe: Recipe) -> Checked:
    """Check an input on its own."""
    source = open_source(given, format_)
    with tempfile.TemporaryDirectory(prefix="corral-check-") as place:
        folder = JobFolder(Path(place) / "check.jsonl")
        folder.create()
        scanned = scan(source, recipe, folder)
        scanned.problems.close()
        problems = sorted(read_problems(scanned.problems.path), key=lambda p: p.line)
    return Checked(len(scanned.table), scanned.recipe.kind, tuple(map(_row, problems)))


def _row(problem: Problem) -> Row:
    return Row(problem.line, problem.text, problem.id)
