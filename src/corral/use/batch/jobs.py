"""A batch as jobs of a scheduler: checked here and queued; each job starts the model, runs the batch, and ends
itself.

The input is checked before anything is queued, and what the target can refuse (a model that does not fit, a load
longer than the time limit) is refused. Every job is one deployment with a runner beside it; several jobs share the
batch's rows. One small file for each job lies in the batch's folder. The jobs of one deployment follow each other.

The runner in a job ends when the batch is done, and the job with it. Near the time limit (SIGUSR1) it finishes the
rows under way and queues the job once more, up to a number of jobs, and only when this one finished any row: a model
that takes the whole time to load would be queued for ever. When the scheduler requeues the job (preempted, or a node
was lost) the next attempt takes over the claims of this one at once. When the model goes down for good, so does the
runner.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.errors import ConflictError, CorralError, LaunchError
from corral.base.files import make_private_dir
from corral.base.home import home_dir
from corral.base.processes import OWN_COMMAND
from corral.base.record import load_json, save_record
from corral.client.endpoint import Absence, Endpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED, Reason
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.decision import sized
from corral.deploy.targets.base import JobState, OwnJob, Queue, Target, load_target
from corral.serve.fleet.start import bring_up
from corral.serve.resolve import describe
from corral.use.batch.batch import BatchResult, run_batch, saved_spec
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.ledger import read_ledger
from corral.use.batch.core.run import Listener
from corral.use.batch.core.runner import Counts, Runner, RunnerSettings
from corral.use.batch.in_process import as_used
from corral.use.batch.parts import runners_of
from corral.use.batch.serving import Served, facts_of, started_name
from corral.use.batch.shared import Sharing, brief_lock, forget_failed
from corral.use.batch.spec import BatchServers, BatchSpec, folder_of, load_record, prepare


@dataclass(frozen=True)
class QueuedJob:
    """One job of a scheduler, as kept with the batch."""

    id: str
    deployment: str
    submitted_s: float
    target: str
    options: dict[str, Any]  # of the target
    end: QueuedState | None = None  # once it was seen to have ended

    @property
    def queue(self) -> Queue:
        target = load_target(self.target, self.options)
        assert isinstance(target, Queue)
        return target


@dataclass(frozen=True)
class QueuedState:
    """The state of a job; `ended` is None when the scheduler cannot be asked."""

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
        """Whether it has ended or can never start."""
        return bool(self.ended) or self.reason is Reason.CANNOT_START


def is_queued(servers: BatchServers) -> bool:
    """Whether a batch runs as jobs of a scheduler."""
    more = servers.start_model.more if servers.start_model else {}
    return "target" in more and isinstance(load_target(more["target"], more.get("target_options", {})), Queue)


def add_job(folder: BatchFolder, id: str, deployment: str, target: Target) -> None:
    make_private_dir(folder.jobs)
    job = QueuedJob(id, deployment, time.time(), target.name, target.options())
    save_record(folder.jobs / f"{id}.json", job)


def jobs_of(folder: BatchFolder, deployment: str | None = None) -> list[QueuedJob]:
    """The jobs of a batch, or those of one of its deployments, oldest first."""
    if not folder.jobs.is_dir():
        return []
    jobs = [load_json(QueuedJob, path) for path in folder.jobs.glob("*.json")]
    jobs = sorted(jobs, key=lambda job: (job.submitted_s, job.id))
    jobs += _unrecorded(folder, {job.deployment: job for job in jobs}, {job.id for job in jobs})
    return [job for job in jobs if deployment in (None, job.deployment)]


def _unrecorded(folder: BatchFolder, newest: Mapping[str, QueuedJob], known: Collection[str]) -> list[QueuedJob]:
    """Jobs that were queued when the disk was full, or by a runner that was killed; each gets its record."""
    found = []
    for name, job in newest.items():
        its = DeploymentFolder.of(name)
        with contextlib.suppress(CorralError, OSError):  # what cannot be asked now is found later
            runner = load_json(deployments.Record, its.record).target_options.get("runner", ())
            id = deployments.job_of(its) if str(folder.output) in runner else ""
            if id and id not in known:
                found.append(replace(job, id=id, submitted_s=time.time(), end=None))
                save_record(folder.jobs / f"{id}.json", found[-1])
    return found


def queued_states(folder: BatchFolder) -> list[QueuedState]:
    """The states of a batch's jobs, asked of the scheduler now."""
    return [_state_of(folder, job) for job in jobs_of(folder)]


def _state_of(folder: BatchFolder, job: QueuedJob) -> QueuedState:
    """The state of a job; its end is kept, because schedulers forget."""
    if job.end is not None:
        return job.end
    status = job.queue.job_status(job.id)
    state = QueuedState(
        job.id, job.deployment, status.state, status.text, status.remedy, status.ended, status.waiting, status.reason
    )
    if status.ended and status.reason is not Reason.JOB_FORGOTTEN:
        with contextlib.suppress(OSError):  # a full disk does not hide the state
            save_record(folder.jobs / f"{job.id}.json", replace(job, end=state))
    return state


def cancel_hopeless(folder: BatchFolder) -> None:
    """Cancel jobs that can never start."""
    for job in jobs_of(folder):
        if _state_of(folder, job).reason is Reason.CANNOT_START:
            job.queue.cancel_job(job.id)


def cancel_waiting(folder: BatchFolder, but: str = "") -> list[str]:
    """Cancel jobs that have not begun, except `but`; their numbers."""
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
    spec: BatchSpec,
    servers: BatchServers,
    max_jobs: int | None,
    runner_options: Sequence[str],
    reporter: Any,
) -> SubmittedBatch:
    """Queue jobs until as many as `servers` asks for are active; `runner_options` go to the runner in each."""
    assert servers.start_model is not None
    jobs = servers.jobs
    folder = folder_of(str(Path(spec.output).absolute()), spec.ordered)
    name = started_name(spec.output)
    target, decision = sized(servers.start_model.request(name), reporter.note)
    assert isinstance(target, Queue)
    cancel_hopeless(folder)
    busy = _active(folder)
    if len(busy) >= jobs:
        raise _at_work(spec.output, busy, jobs)
    rows, done = _checked(spec, folder, servers, facts_of(decision))
    if done:
        return SubmittedBatch(spec.output, rows, (), True)
    limit = max_jobs or servers.start_model.more.get("target_options", {}).get("max_jobs") or MAX_JOBS
    queued = []
    for number in _free(name, jobs - len(busy)):
        runner = [*_python(), "batch", "in-job", str(folder.output), "--deployment", number, "--jobs", str(jobs),
                  "--max-jobs", str(limit), *runner_options]  # fmt: skip
        options = target.with_runner(servers.start_model.more.get("target_options", {}), runner)
        bring_up(servers.start_model.request(number, target_options=options), reporter, wait=False)
        queued.append(target.job_of(DeploymentFolder.of(number)))
        add_job(folder, queued[-1], number, target)
    return SubmittedBatch(spec.output, rows, tuple(queued))


def _checked(spec: BatchSpec, folder: BatchFolder, servers: BatchServers, facts: dict[str, Any]) -> tuple[int, bool]:
    """Check the input and write down the spec; the number of rows, and whether all are done already."""
    with brief_lock(folder) as lock:
        others = runners_of(folder)
        batch = prepare(spec, folder, servers, busy=bool(others), **facts)
        if spec.retry_failed and not others:
            forget_failed(batch, lock)
        done = not folder.shared.is_dir() and sum(1 for _ in read_ledger(folder)) >= batch.record.rows
    return batch.record.rows, done and (folder.output.exists() or not batch.record.rows)


def _active(folder: BatchFolder) -> list[QueuedState]:
    return [job for job in queued_states(folder) if not job.over] if folder.jobs.is_dir() else []


def _at_work(output: str, busy: list[QueuedState], jobs: int) -> ConflictError:
    return ConflictError(
        f"{output} is being worked on: {'; '.join(job.text for job in busy)}.",
        f"`corral batch status {shlex.quote(output)}` shows how far; --jobs {max(len(busy), jobs) + 1} adds a job.",
        jobs=[job.id for job in busy],
    )


def _free(name: str, count: int) -> list[str]:
    """Names of deployments that are not in use."""
    names: list[str] = []
    number = 0
    while len(names) < count:
        number += 1
        folder = DeploymentFolder.of(f"{name}-{number}")
        if not folder.record.is_file() or deployments.status(folder).state in ENDED:
            names.append(f"{name}-{number}")
    return names


def _python() -> list[str]:
    """The command that runs this Corral inside a job; its home is named, because a site may clear the environment."""
    return ["env", f"CORRAL_HOME={home_dir()}", *OWN_COMMAND]


WARNING = "SIGUSR1"


@dataclass(frozen=True)
class OwnDeployment:
    """The deployment in whose job this runner works."""

    deployment: str
    runners: int = 1
    max_jobs: int = 10
    agents: int = 0  # process that holds the model's agents

    @property
    def folder(self) -> DeploymentFolder:
        return DeploymentFolder.of(self.deployment)

    @functools.cached_property
    def target(self) -> Target:
        return deployments.target_of(load_json(deployments.Record, self.folder.record))

    @property
    def queue(self) -> Queue:
        assert isinstance(self.target, Queue)
        return self.target

    @property
    def job(self) -> OwnJob:
        return self.queue.own_job(os.environ)


@dataclass(frozen=True)
class InJobOutcome:
    """The result of a runner in a job, and the job that continues the batch."""

    result: BatchResult | None
    next_job: str = ""
    text: str = ""


class _OwnServer:
    """The model of this job, found by the address that its head node wrote in this attempt of the job."""

    def __init__(self, own: OwnDeployment) -> None:
        self.name, self._own = own.deployment, own

    def find(self) -> Endpoint | None:
        folder = self._own.folder
        with contextlib.suppress(CorralError, OSError):
            if self._own.queue.is_placed(folder, self._own.job):
                return load_json(Endpoint, folder.endpoint)
        return None

    def absence(self) -> Absence:
        """What the model is doing; when it goes down, so does this job."""
        return Absence(describe(deployments.status(self._own.folder), time.time()))

    def seats(self) -> int | None:
        plan = deployments.plan_of(self._own.folder)
        return plan.seats if plan else None


class _AgentWatch:
    """A listener that also stops the runner when the model's agents are gone."""

    def __init__(self, inner: Listener, agents: int) -> None:
        self._inner, self._agents = inner, agents
        self.gone = self.begun = False

    def note(self, kind: str, text: str) -> None:
        self._inner.note(kind, text)

    def tick(self, counts: Counts, runner: Runner) -> None:
        self.begun = True
        if self._agents and not runner.stopped and not Path(f"/proc/{self._agents}").exists():
            self.gone = True
            self._inner.note("stopping", "the model's agents are gone")
            runner.stop()
        self._inner.tick(counts, runner)


class _WarnedError(BaseException):
    """The time limit's warning came before the runner had begun."""


def run_in_job(
    output: str, own: OwnDeployment, settings: RunnerSettings, listener: Listener, *, row_order: str = "input"
) -> InJobOutcome:
    """Work on a batch until it is done or this job must end."""
    folder, record = load_record(output)
    spec, servers = saved_spec(output)
    watch = _AgentWatch(listener, own.agents)

    @contextlib.contextmanager
    def serve() -> Iterator[Served]:
        facts = {"model": record.model, "models": (record.model,)}
        yield Served.by(lambda: [as_used(servers, _OwnServer(own))], facts, (own.deployment,))

    sharing = Sharing(own.runners, counted=False, part_name_file=own.folder.path / "part")
    with _warned(watch):
        try:
            result = run_batch(
                spec, servers, settings, watch, row_order=row_order, sharing=sharing, serve=serve
            )  # fmt: skip
        except _WarnedError:
            return _queue_again(output, own, None)
        if result.summary.done:
            with contextlib.suppress(CorralError):  # they would find nothing to do
                cancel_waiting(folder, but=own.job.id)
            return InJobOutcome(result)
        if watch.gone:
            raise _model_gone(output, own)
        if result.summary.stopped_by == WARNING:
            return _queue_again(output, own, result)
    return InJobOutcome(result, text=_continue(output))


@contextlib.contextmanager
def _warned(watch: _AgentWatch) -> Iterator[None]:
    """Let the warning (SIGUSR1) end a runner that has not begun, and not kill one that puts the output together."""

    def warn(*_: object) -> None:
        if not watch.begun:
            watch.begun = True
            raise _WarnedError

    before = signal.signal(signal.SIGUSR1, warn)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _queue_again(output: str, own: OwnDeployment, result: BatchResult | None) -> InJobOutcome:
    """Queue the job once more, if this one made progress and the number of jobs allows it."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    folder, _ = load_record(output)
    done = result.summary.fine + result.summary.failed if result else 0
    count = len(jobs_of(folder, own.deployment))
    if not done:
        text = "this job finished no row in its time, and is not queued again"
        return InJobOutcome(result, text=f"{text}. Ask for more with --time. {_continue(output)}")
    if count >= own.max_jobs:
        return InJobOutcome(result, text=f"{count} jobs were used (--max-jobs). {_continue(output)}")
    id = own.queue.submit_successor(own.folder, own.job.id)
    with contextlib.suppress(OSError):  # without a record it is found by its launch id
        add_job(folder, id, own.deployment, own.target)
    return InJobOutcome(result, id, f"job {id} goes on when this one is over ({count + 1} of at most {own.max_jobs})")


def _model_gone(output: str, own: OwnDeployment) -> LaunchError:
    try:
        now = deployments.status(own.folder)
        text, remedy = f"{now.state}: {now.text}", now.remedy
    except CorralError as error:
        text, remedy = error.message, error.remedy
    return LaunchError(f"the model of this job went down ({text}).", f"{remedy} {_continue(output)}".strip())


def _continue(output: str) -> str:
    return f"Everything up to here is kept; continue: corral batch resume {shlex.quote(output)}"
