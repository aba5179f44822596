"""The jobs of a scheduler that work on a batch: one small file for each, and what the scheduler says of them.

A job is known by its number and by the deployment whose script it runs; the jobs of one deployment follow each other,
each submitted by the one before when its time was nearly up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from corral.batch.core.folder import JobFolder
from corral.deployment.state import State
from corral.errors import CorralError
from corral.files import make_private_dir, write_atomic
from corral.record import dump_json, load_json
from corral.slurm import commands
from corral.slurm.states import standing

__all__ = ["QueuedJob", "Standing", "add_job", "cancel_waiting", "jobs_of", "standings"]


@dataclass(frozen=True)
class QueuedJob:
    """One job, as kept with the batch."""

    id: str
    deployment: str
    submitted_s: float


@dataclass(frozen=True)
class Standing:
    """How a job stands; `ended` is None when the scheduler cannot be asked."""

    id: str
    deployment: str
    state: str
    text: str
    remedy: str
    ended: bool | None
    waiting: bool


def add_job(folder: JobFolder, id: str, deployment: str) -> None:
    make_private_dir(folder.jobs)
    write_atomic(folder.jobs / f"{id}.json", dump_json(QueuedJob(id, deployment, time.time())))


def jobs_of(folder: JobFolder, deployment: str | None = None) -> list[QueuedJob]:
    """The jobs of a batch, or those that followed each other for one of its deployments, oldest first."""
    if not folder.jobs.is_dir():
        return []
    found = [load_json(QueuedJob, path) for path in folder.jobs.glob("*.json")]
    chosen = [job for job in found if deployment in (None, job.deployment)]
    return sorted(chosen, key=lambda job: (job.submitted_s, job.id))


def standings(folder: JobFolder) -> list[Standing]:
    """What the scheduler says now."""
    return [_standing(job) for job in jobs_of(folder)]


def _standing(job: QueuedJob) -> Standing:
    try:
        found = commands.find_job(job.id)
    except CorralError as error:  # it cannot be asked: nothing is known, and nothing has failed
        return Standing(job.id, job.deployment, State.UNKNOWN, error.message, error.remedy, None, False)
    if found is None:
        return Standing(job.id, job.deployment, State.STOPPED, f"job {job.id} is over and forgotten", "", True, False)
    if found.state == "COMPLETED":
        return Standing(job.id, job.deployment, State.STOPPED, f"job {job.id} has ended", "", True, False)
    said = standing(found)
    if found.state == "RUNNING":
        return Standing(job.id, job.deployment, "running", f"job {job.id} runs on {found.nodes}", "", False, False)
    return Standing(
        job.id, job.deployment, said.state, said.text, said.remedy, said.ended, said.state is State.QUEUED
    )


def cancel_waiting(folder: JobFolder, but: str = "") -> list[str]:
    """Take jobs that have not begun out of the queue; their numbers."""
    waiting = [job.id for job in standings(folder) if job.waiting and job.id != but]
    for id in waiting:
        commands.cancel(id)
    return waiting
