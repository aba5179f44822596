"""A batch as jobs of a scheduler: checked here, then queued; each job starts the model, works, and ends itself.

The input is read and checked before anything is queued, and what the target can refuse (a model that does not fit, a
load longer than the time limit) is refused. Every job is one deployment with a runner beside it (`in_job`); several
share the batch's rows.

The jobs of a scheduler that work on a batch: one small file for each, and what the scheduler says of them.

A job is known by its number and by the deployment whose script it runs; the jobs of one deployment follow each other,
each submitted by the one before when its time was nearly up.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.errors import ConflictError
from corral.base.files import make_private_dir, write_atomic
from corral.base.home import home_dir
from corral.base.record import dump_json, load_json
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED, Reason
from corral.deploy.lifecycle import bringup, deployments
from corral.deploy.targets.base import JobState, Queue, Target, load_target
from corral.serve.fleet.start import bring_up
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.ledger import read_ledger
from corral.use.batch.serving import BatchServers, facts_of, offline_name, where_record
from corral.use.batch.sharing.parts import runners_of
from corral.use.batch.sharing.shared import brief_lock, forget_failed
from corral.use.batch.spec import BatchOrder, folder_of, prepare


@dataclass(frozen=True)
class QueuedJob:
    """One job, as kept with the batch."""

    id: str
    deployment: str
    submitted_s: float
    target: str
    options: dict[str, Any]  # of the target
    end: QueuedState | None = None  # once somebody has seen it

    @property
    def queue(self) -> Queue:
        """Who can be asked about it."""
        found = load_target(self.target, self.options)
        assert isinstance(found, Queue)
        return found


@dataclass(frozen=True)
class QueuedState:
    """How a job stands; `ended` is None when the scheduler cannot be asked."""

    id: str
    deployment: str
    state: JobState
    text: str
    remedy: str
    ended: bool | None
    waiting: bool
    reason: Reason | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it: it has ended, or can never start."""
        return bool(self.ended) or self.reason is Reason.CANNOT_START


def is_queued(where: BatchServers) -> bool:
    """Whether a batch is done by jobs of a scheduler."""
    more = where.offline.more if where.offline else {}
    return "target" in more and isinstance(load_target(more["target"], more.get("target_options", {})), Queue)


def add_job(folder: BatchFolder, id: str, deployment: str, target: Target) -> None:
    make_private_dir(folder.jobs)
    job = QueuedJob(id, deployment, time.time(), target.name, target.options())
    write_atomic(folder.jobs / f"{id}.json", dump_json(job))


def jobs_of(folder: BatchFolder, deployment: str | None = None) -> list[QueuedJob]:
    """The jobs of a batch, or those that followed each other for one of its deployments, oldest first."""
    if not folder.jobs.is_dir():
        return []
    found = [load_json(QueuedJob, path) for path in folder.jobs.glob("*.json")]
    chosen = [job for job in found if deployment in (None, job.deployment)]
    return sorted(chosen, key=lambda job: (job.submitted_s, job.id))


def queued_states(folder: BatchFolder) -> list[QueuedState]:
    """What the scheduler says now."""
    return [_state_of(folder, job) for job in jobs_of(folder)]


def _state_of(folder: BatchFolder, job: QueuedJob) -> QueuedState:
    """How a job stands; how it ended is kept, for schedulers forget."""
    if job.end is not None:
        return job.end
    found = job.queue.job_status(job.id)
    state = QueuedState(
        job.id, job.deployment, found.state, found.text, found.remedy, found.ended, found.waiting, found.reason
    )
    if found.ended and found.reason is not Reason.JOB_FORGOTTEN:
        with contextlib.suppress(OSError):  # a full disk does not hide how it stands
            write_atomic(folder.jobs / f"{job.id}.json", dump_json(replace(job, end=state)))
    return state


def cancel_hopeless(folder: BatchFolder) -> None:
    """Take jobs that can never start out of the queue."""
    for job in jobs_of(folder):
        if _state_of(folder, job).reason is Reason.CANNOT_START:
            job.queue.cancel_job(job.id)


def cancel_waiting(folder: BatchFolder, but: str = "") -> list[str]:
    """Take jobs that have not begun out of the queue; their numbers."""
    waiting = [job for job in jobs_of(folder) if job.id != but and _state_of(folder, job).waiting]
    for job in waiting:
        job.queue.cancel_job(job.id)
    return [job.id for job in waiting]


MAX_JOBS = 10


@dataclass(frozen=True)
class SubmittedBatch:
    """What was queued."""

    output: str
    rows: int
    jobs: tuple[str, ...]
    done: bool = False  # there was nothing left to do


def submit(
    order: BatchOrder, where: BatchServers, jobs: int, max_jobs: int | None, words: Sequence[str], reporter: Any
) -> SubmittedBatch:
    """Queue as many jobs as are missing to `jobs`; `words` are options for the runner in each."""
    assert where.offline is not None
    folder = folder_of(str(Path(order.output).absolute()), order.ordered)
    name = offline_name(order.output)
    target, decision = bringup.sized(where.offline.request(name), reporter.note)
    assert isinstance(target, Queue)
    cancel_hopeless(folder)
    busy = _active(folder)
    if len(busy) >= jobs:
        raise _at_work(order.output, busy, jobs)
    rows, done = _checked(order, folder, where, facts_of(decision))
    if done:
        return SubmittedBatch(order.output, rows, (), True)
    most = max_jobs or where.offline.more.get("target_options", {}).get("max_jobs") or MAX_JOBS
    queued = []
    for number in _free(name, jobs - len(busy)):
        runner = [*_python(), "batch", "in-job", str(folder.output), "--deployment", number, "--jobs", str(jobs),
                  "--max-jobs", str(most), *words]  # fmt: skip
        options = target.with_runner(where.offline.more.get("target_options", {}), runner)
        bring_up(where.offline.request(number, target_options=options), reporter, wait=False)
        queued.append(target.job_of(DeploymentFolder.of(number)))
        add_job(folder, queued[-1], number, target)
    return SubmittedBatch(order.output, rows, tuple(queued))


def _checked(order: BatchOrder, folder: BatchFolder, where: BatchServers, facts: dict[str, Any]) -> tuple[int, bool]:
    """Check the input and write down the job; its rows, and whether all are done already."""
    with brief_lock(folder) as lock:
        others = runners_of(folder)
        made = prepare(order, folder, where_record(where), busy=bool(others), **facts)
        if order.retry_failed and not others:
            forget_failed(made, lock)
        done = not folder.shared.is_dir() and sum(1 for _ in read_ledger(folder)) >= made.record.rows
    return made.record.rows, done and (folder.output.exists() or not made.record.rows)


def _active(folder: BatchFolder) -> list[QueuedState]:
    return [job for job in queued_states(folder) if not job.over] if folder.jobs.is_dir() else []


def _at_work(output: str, busy: list[QueuedState], jobs: int) -> ConflictError:
    return ConflictError(
        f"{output} is being worked on: {'; '.join(job.text for job in busy)}.",
        f"`corral batch status {shlex.quote(output)}` shows how far; --jobs {max(len(busy), jobs) + 1} adds a job.",
        jobs=[job.id for job in busy],
    )


def _free(name: str, count: int) -> list[str]:
    """Names of deployments that nobody uses now."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        number += 1
        folder = DeploymentFolder.of(f"{name}-{number}")
        if not folder.record.is_file() or deployments.status(folder).state in ENDED:
            found.append(f"{name}-{number}")
    return found


def _python() -> list[str]:
    """Corral's own Python, on the shared file system; what a site keeps out of a job's environment is said."""
    return ["env", f"CORRAL_HOME={home_dir()}", sys.executable, "-m", "corral"]
