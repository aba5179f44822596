"""The jobs of a scheduler that work on a batch: one small file for each, and what the scheduler says of them.

A job is known by its number and by the deployment whose script it runs; the jobs of one deployment follow each other,
each submitted by the one before when its time was nearly up.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import Any

from corral.base.files import make_private_dir, write_atomic
from corral.base.record import dump_json, load_json
from corral.deploy.deployment.state import Reason
from corral.deploy.targets.base import JobState, Queue, Target, load_target
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.serving import Where


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


def is_queued(where: Where) -> bool:
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
