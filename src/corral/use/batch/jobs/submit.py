"""A batch as jobs of a scheduler: checked here, then queued; each job starts the model, works, and ends itself.

The input is read and checked before anything is queued, and what the target can refuse (a model that does not fit, a
load longer than the time limit) is refused. Every job is one deployment with a runner beside it (`in_job`); several
share the batch's rows.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.errors import ConflictError
from corral.base.home import home_dir
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED
from corral.deploy.lifecycle import bringup, deployments
from corral.deploy.targets.base import Queue
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.ledger import read_ledger
from corral.use.batch.job import BatchOrder, folder_of, prepare
from corral.use.batch.jobs.queued import QueuedState, add_job, cancel_hopeless, queued_states
from corral.use.batch.serving import Where, facts_of, offline_name, where_record
from corral.use.batch.sharing.parts import runners_of
from corral.use.batch.sharing.shared import brief_lock, forget_failed

MAX_JOBS = 10


@dataclass(frozen=True)
class SubmittedBatch:
    """What was queued."""

    output: str
    rows: int
    jobs: tuple[str, ...]
    done: bool = False  # there was nothing left to do


def submit(
    order: BatchOrder, where: Where, jobs: int, max_jobs: int | None, words: Sequence[str], reporter: Any
) -> SubmittedBatch:
    """Queue as many jobs as are missing to `jobs`; `words` are options for the runner in each."""
    assert where.offline is not None
    folder = folder_of(str(Path(order.output).absolute()), order.ordered)
    name = offline_name(order.output)
    target, decision = bringup.sized(where.offline.wish(name), reporter.note)
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
        bringup.bring_up(where.offline.wish(number, target_options=options), reporter, wait=False)
        queued.append(target.job_of(DeploymentFolder.of(number)))
        add_job(folder, queued[-1], number, target)
    return SubmittedBatch(order.output, rows, tuple(queued))


def _checked(order: BatchOrder, folder: BatchFolder, where: Where, facts: dict[str, Any]) -> tuple[int, bool]:
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
