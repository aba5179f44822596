"""Looking at a job from outside: how it stands, asking it to stop, checking an input without a job."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from corral.base.lock import SILENT_S, TOUCH_S, holder_of, lock_holder, silence_s
from corral.base.processes import Identity
from corral.deploy.targets.base import JobState
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.ledger import read_ledger
from corral.use.batch.core.run import BatchState
from corral.use.batch.input.check import RowProblem, read_problems, scan
from corral.use.batch.input.recipe import Recipe
from corral.use.batch.input.rows import open_source
from corral.use.batch.jobs.submit import QueuedState, cancel_waiting, queued_states
from corral.use.batch.sharing.parts import all_parts, claim_path, held_blocks, load_division, runners_of
from corral.use.batch.spec import BatchRecord, load_record


@dataclass(frozen=True)
class BatchStatus:
    """A job as it stands now; `state` is running, done, or how it was left."""

    output: str
    errors: str
    state: BatchState | JobState
    reason: str
    rows: int
    fine: int
    failed: int
    model: str
    input: str
    created_s: float
    holder: Identity | None
    runners: tuple[Identity, ...] = ()  # all who work on it
    blocks: Blocks | None = None  # when several may
    jobs: tuple[QueuedState, ...] = ()  # of a scheduler

    @property
    def done(self) -> bool:
        return self.state is BatchState.DONE


@dataclass(frozen=True)
class Blocks:
    """A batch that several runners may work on is done in blocks of rows."""

    size: int
    count: int
    done: int
    held: int


@dataclass(frozen=True)
class CheckedRow:
    line: int
    text: str
    id: str | None


@dataclass(frozen=True)
class Checked:
    """What a check found."""

    rows: int
    kind: str
    problems: tuple[CheckedRow, ...]


def inspect(output: str) -> BatchStatus:
    """How a job stands, from its ledger: what it says is on disk."""
    folder, record = load_record(output)
    counts, done = [0, 0], bytearray(record.rows)
    for one in (folder, *all_parts(folder)):
        for entry in read_ledger(one):
            if entry.row < record.rows and not done[entry.row]:
                done[entry.row] = 1
                counts[entry.kind] += 1
    fine, failed = counts
    jobs = queued_states(folder)
    found = _runners(folder, jobs_over=bool(jobs) and all(job.over for job in jobs))
    runners = [one.who for one in found if not one.gone]
    holder = runners[0] if runners else None
    state: BatchState | JobState
    state, reason = _state(folder, fine + failed >= record.rows, found)
    if state not in (BatchState.RUNNING, BatchState.DONE) and (alive := [job for job in jobs if not job.over]):
        reason = reason if found and state is BatchState.INTERRUPTED else ""  # who was killed there
        state = alive[0].state
    elif jobs and state not in (BatchState.RUNNING, BatchState.DONE):
        reason = next((job.text for job in reversed(jobs) if job.reason), jobs[-1].text)
    return BatchStatus(
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
        runners=tuple(runners),
        blocks=_blocks(folder, record, done),
        jobs=tuple(jobs),
    )


def _blocks(folder: BatchFolder, record: BatchRecord, done: bytearray) -> Blocks | None:
    """How the blocks stand; in another order than the input's, what is done is only estimated from the rows."""
    division = load_division(folder)
    if division is None:
        return None
    count, size = division.count(record.rows), division.size
    if division.row_order == "input":
        finished = {n for n in range(count) if done.find(0, n * size, (n + 1) * size) < 0}
    else:
        finished = set(range(sum(done) // size))
    try:
        held = held_blocks(folder)
    except FileNotFoundError:
        held = set()
    live = sum(holder_of(claim_path(folder, n)) is not None for n in held - finished)
    return Blocks(size, count, len(finished), live)


@dataclass(frozen=True)
class _Runner:
    """Somebody whose lock is there; `gone` when nothing is to be expected of them any more."""

    who: Identity
    gone: bool
    silent_s: float  # 0 for those whose process can be seen from here
    touched_s: float


def _runners(folder: BatchFolder, jobs_over: bool) -> list[_Runner]:
    """Everybody who works on it, or did and was killed. One in a job is gone with the job, if it is silent, too."""
    locks = [part.holder for part in all_parts(folder)]
    found = [one for lock in locks if (one := _runner(lock, jobs_over)) is not None]
    alone = None if any(not one.gone for one in found) else _runner(folder.lock, jobs_over)
    return [*found, alone] if alone else found


def _runner(lock: Path, jobs_over: bool) -> _Runner | None:
    who = lock_holder(lock)
    if who is None or not who.pid:
        return None
    try:
        touched_s = lock.stat().st_mtime
    except OSError:
        return None
    silent_s = 0.0 if who.is_among_ours() else silence_s(lock)
    gone = holder_of(lock) is None or (jobs_over and silent_s > 2 * TOUCH_S)
    return _Runner(who, gone, silent_s, touched_s)


def _silence(found: list[_Runner]) -> str:
    """Of runners elsewhere, whose process cannot be looked at: how long they have said nothing, when that is long."""
    late = [one for one in found if not one.gone and one.silent_s > 3 * TOUCH_S]
    told = [f"process {one.who.pid} on {one.who.host} has not been heard of for {one.silent_s:.0f} s" for one in late]
    return f"{', '.join(told)}; after {SILENT_S:.0f} s it counts as gone" if told else ""


def _state(folder: BatchFolder, complete: bool, found: list[_Runner]) -> tuple[BatchState, str]:
    if any(not one.gone for one in found):
        return BatchState.RUNNING, _silence(found)
    try:
        saved = msgspec.json.decode(folder.state.read_bytes())
    except (OSError, msgspec.DecodeError):
        saved = {"state": "", "details": {}}
    killed = [one for one in found if one.touched_s > saved.get("at_s", 0.0)]  # after it ended the last time
    if complete and (folder.live or saved["state"] == BatchState.DONE) and not folder.shared.is_dir():
        return BatchState.DONE, ""
    if saved["state"] in (BatchState.STOPPED, BatchState.CANCELLED, BatchState.FAILED) and not killed:
        failed = saved["state"] == BatchState.FAILED
        return BatchState(saved["state"]), saved["details"].get("error", {}).get("message", "") if failed else ""
    who = ", ".join(f"process {one.who.pid} on {one.who.host}" for one in killed or found)
    return BatchState.INTERRUPTED, f"its runner{f', {who},' if who else ''} is gone: killed, or the machine went down"


def ask_to_stop(output: str) -> str:
    """Ask the runner of a job to stop; returns what will happen, in words."""
    folder, _ = load_record(output)
    runners = runners_of(folder) or [one for one in (holder_of(folder.lock),) if one is not None]
    waiting = cancel_waiting(folder) if folder.jobs.is_dir() else []
    if waiting:
        gone = f"{output}: took job {', '.join(waiting)} out of the queue"
        if not runners:
            return f"{gone}; `corral batch resume` continues"
    if not runners:
        return f"{output}: nobody is working on it"
    descriptor = os.open(folder.cancel, os.O_WRONLY | os.O_CREAT, 0o600)
    os.close(descriptor)
    who = ", ".join(f"process {one.pid} on {one.host}" for one in runners)
    return f"{output}: asked {who} to stop; `corral batch resume` continues"


def check_input(given: str, format_: str | None, recipe: Recipe) -> Checked:
    """Check an input on its own."""
    source = open_source(given, format_)
    with tempfile.TemporaryDirectory(prefix="corral-check-") as temporary:
        folder = BatchFolder(Path(temporary) / "check.jsonl")
        folder.create()
        scanned = scan(source, recipe, folder)
        scanned.problems.close()
        problems = sorted(read_problems(scanned.problems.path), key=lambda p: p.line)
    return Checked(len(scanned.table), scanned.recipe.kind, tuple(map(_row, problems)))


def _row(problem: RowProblem) -> CheckedRow:
    return CheckedRow(problem.line, problem.text, problem.id)
