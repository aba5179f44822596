"""The runner of a batch inside a job of a scheduler, beside the model that the same job serves.

It ends when the batch is done, and the job with it. Near the time limit (SIGUSR1) it finishes what is under way and
queues the job once more, up to a number of jobs, and only when this one got anything done: a model that takes the
whole time to load would do so for ever. When the job is put back into the queue (preempted, or a node was lost) the
next attempt of the runner takes over at once what this one had claimed. When the model goes down for good, so does
the runner.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.base.errors import CorralError, LaunchError
from corral.base.record import load_json
from corral.client.endpoint import Absence, Endpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle import deployments
from corral.deploy.targets.base import OwnJob, Queue, Target
from corral.serve.resolve import describe
from corral.use.batch.batch import Result, again, carry_out
from corral.use.batch.core.run import Listener
from corral.use.batch.core.runner import Counts, Runner, RunnerSettings
from corral.use.batch.jobs.submit import add_job, cancel_waiting, jobs_of
from corral.use.batch.serving import Served
from corral.use.batch.sharing.shared import Sharing
from corral.use.batch.spec import load_record

WARNING = "SIGUSR1"


@dataclass(frozen=True)
class InJob:
    """Where this runner finds itself."""

    deployment: str
    runners: int = 1
    max_jobs: int = 10
    agents: int = 0  # the process that holds the model's agents

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
    def own(self) -> OwnJob:
        return self.queue.own_job(os.environ)


@dataclass(frozen=True)
class InJobOutcome:
    """How it went, and the job that goes on."""

    result: Result | None
    next_job: str = ""
    text: str = ""


class _OwnServer:
    """The model of this job: found by the address that its head wrote in this attempt of the job."""

    def __init__(self, here: InJob, model: str) -> None:
        self.name, self._here, self._model = here.deployment, here, model

    def find(self) -> Endpoint | None:
        folder = self._here.folder
        with contextlib.suppress(CorralError, OSError):
            if self._here.queue.is_placed(folder, self._here.own):
                return load_json(Endpoint, folder.endpoint)
        return None

    def absence(self) -> Absence:
        """What it is doing; when it goes down, so does this job."""
        return Absence(describe(deployments.status(self._here.folder), time.time()))

    def seats(self) -> int | None:
        plan = deployments.plan_of(self._here.folder)
        return plan.seats if plan else None


class _AgentWatch:
    """Passes on what happens, and stops the runner when the model's agents are gone."""

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
    """The warning came before the runner was at work."""


def run_in_job(
    output: str, here: InJob, settings: RunnerSettings, listener: Listener, *, row_order: str = "input"
) -> InJobOutcome:
    """Work on a batch until it is done or this job must end."""
    folder, record = load_record(output)
    order, where = again(output)
    watch = _AgentWatch(listener, here.agents)

    @contextlib.contextmanager
    def serve() -> Iterator[Served]:
        facts = {"model": record.model, "models": (record.model,)}
        yield Served.by(lambda: [where.way_to(_OwnServer(here, record.model))], facts, (here.deployment,))

    sharing = Sharing(here.runners, counted=False, part_name_file=here.folder.path / "part")
    with _warned(watch):
        try:
            result = carry_out(
                order, where, settings, watch, row_order=row_order, sharing=sharing, serve=serve
            )  # fmt: skip
        except _WarnedError:
            return _hand_on(output, here, None)
        if result.summary.done:
            with contextlib.suppress(CorralError):  # they would find nothing to do
                cancel_waiting(folder, but=here.own.id)
            return InJobOutcome(result)
        if watch.gone:
            raise _model_gone(output, here)
        if result.summary.stopped_by == WARNING:
            return _hand_on(output, here, result)
    return InJobOutcome(result, text=_continue(output))


@contextlib.contextmanager
def _warned(watch: _AgentWatch) -> Iterator[None]:
    """The warning ends a runner that has not begun, and must not kill one that puts the output together."""

    def warn(*_: object) -> None:
        if not watch.begun:
            watch.begun = True
            raise _WarnedError

    before = signal.signal(signal.SIGUSR1, warn)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _hand_on(output: str, here: InJob, result: Result | None) -> InJobOutcome:
    """Queue the job once more, if that can help."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    folder, _ = load_record(output)
    done = result.summary.fine + result.summary.failed if result else 0
    count = len(jobs_of(folder, here.deployment))
    if not done:
        text = "this job finished no row in its time, and is not queued again"
        return InJobOutcome(result, text=f"{text}. Ask for more with --time. {_continue(output)}")
    if count >= here.max_jobs:
        return InJobOutcome(result, text=f"{count} jobs were used (--max-jobs). {_continue(output)}")
    id = here.queue.hand_on(here.folder, here.own.id)
    add_job(folder, id, here.deployment, here.target)
    return InJobOutcome(
        result, id, f"job {id} goes on when this one is over ({count + 1} of at most {here.max_jobs})"
    )


def _model_gone(output: str, here: InJob) -> LaunchError:
    try:
        now = deployments.status(here.folder)
        text, remedy = f"{now.state}: {now.text}", now.remedy
    except CorralError as error:
        text, remedy = error.message, error.remedy
    return LaunchError(f"the model of this job went down ({text}).", f"{remedy} {_continue(output)}".strip())


def _continue(output: str) -> str:
    return f"Everything up to here is kept; continue: corral batch resume {shlex.quote(output)}"
