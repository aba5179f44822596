"""Keeping a deployment beyond its time limit: a successor is submitted early enough to be loaded before the end.

How early comes from what was measured: how long the last job waited in the queue and how long its engine took to be
ready, plus a margin. The decision (`next_step`) is pure; the loop around it may run in several places at once (in
every job of the chain, on a login node), because only who holds the chain's lock submits, after looking again.
"""

from __future__ import annotations

import enum
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from corral.base.errors import ConflictError, CorralError, UsageError
from corral.base.record import load_json
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED, Reason, State
from corral.deploy.lifecycle import bringup, deployments
from corral.deploy.lifecycle.decision import DeployRequest
from corral.deploy.lifecycle.successors import chain_lock, members, read_chain, successor_name, write_chain
from corral.deploy.targets.base import Queue

LOOK_S = 15.0
RETRY_S = 30.0
MOST_REFUSALS = 5
LEAST_MARGIN_S = 60.0
PLANNED_LOAD_S = 600.0  # where neither a measurement nor a plan says how long loading takes

# ends that are nobody's will and not the model's fault: the same again may well work
BAD_LUCK = frozenset(
    {Reason.WALLTIME, Reason.NODE_LOST, Reason.PREEMPTED, Reason.BOOT_FAILED, Reason.INTERRUPTED,
     Reason.JOB_FORGOTTEN, Reason.MACHINE_RESTARTED, Reason.PORT_TAKEN, Reason.AGENT_KILLED}
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """The last job of a chain, as far as the next one depends on it."""

    now_s: float
    name: str
    state: State
    reason: Reason | None = None
    text: str = ""  # the same in words, with what the target knows
    served: bool = False  # it was ready once
    jobs: int = 1
    unlucky: int = 0  # how many at the end of the chain have never been ready
    max_jobs: int | None = None
    last_request_s: float | None = None  # when it begins to drain
    queue_s: float = 0.0
    load_s: float = PLANNED_LOAD_S
    margin_s: float | None = None

    @property
    def lead_s(self) -> float:
        """How long before the end a successor has to be submitted."""
        margin = max(LEAST_MARGIN_S, self.load_s / 2) if self.margin_s is None else self.margin_s
        return self.queue_s + self.load_s + margin


class Action(enum.StrEnum):
    """What renewal does next."""

    WAIT = "wait"
    SUBMIT = "submit"  # a successor
    CLOSE = "close"  # nothing more will follow


@dataclass(frozen=True)
class Step:
    """What to do now, and why."""

    action: Action
    why: str
    wait_s: float = LOOK_S
    topic: str = ""  # waits on one topic are told once, though the figures in `why` change

    def is_told_as(self, topic: str) -> bool:
        return not self.why or self.topic == topic


def next_step(facts: Facts) -> Step:
    """What the last job's state and the clock ask for. Pure."""
    if facts.state in ENDED:
        return _after_the_end(facts)
    if facts.reason is Reason.CANNOT_START:
        return Step(Action.CLOSE, f"{facts.name} cannot start: {facts.text}")
    if facts.last_request_s is None or facts.state in (State.QUEUED, State.STAGING, State.STARTING, State.LOADING):
        return _waiting(facts, f"is {facts.state}")
    if facts.max_jobs is not None and facts.jobs >= facts.max_jobs:
        return _waiting(facts, f"is the last of {facts.max_jobs}")
    left = facts.last_request_s - facts.now_s
    if left > facts.lead_s:
        return replace(_waiting(facts, "serves", f" for {left:.0f} s more"), wait_s=min(LOOK_S, left - facts.lead_s))
    parts = f"queue {facts.queue_s:.0f} s, load {facts.load_s:.0f} s"
    return Step(
        Action.SUBMIT,
        f"{facts.name} serves for {left:.0f} s more, and a successor needs {facts.lead_s:.0f} ({parts})",
    )


def _waiting(facts: Facts, what: str, how_long: str = "") -> Step:
    return Step(Action.WAIT, f"{facts.name} {what}{how_long}", topic=f"{facts.name} {what}")


def _after_the_end(facts: Facts) -> Step:
    why = facts.reason.value.replace("_", " ") if facts.reason else "no reason known"
    if facts.text:  # what is kept must tell later why nothing followed
        why += f" ({facts.text})"
    if facts.reason in (Reason.REQUESTED, Reason.CANCELLED):
        return Step(Action.CLOSE, f"{facts.name} was ended: {why}")
    if not facts.served and facts.reason not in BAD_LUCK:
        return Step(Action.CLOSE, f"{facts.name} was never ready: {why}")
    if facts.max_jobs is not None and facts.jobs >= facts.max_jobs and facts.reason is not Reason.INTERRUPTED:
        return Step(Action.CLOSE, f"{facts.name} was the last of {facts.max_jobs}")
    if facts.unlucky >= MOST_REFUSALS:
        return Step(Action.CLOSE, f"the last {facts.unlucky} were never ready: {why}")
    return Step(Action.SUBMIT, f"{facts.name} has ended: {why}")


def look(folder: DeploymentFolder) -> Facts:
    """The facts of a chain now."""
    chain, all_of_it = read_chain(folder), members(folder)
    last = all_of_it[-1]
    base = Facts(time.time(), last.name, State.STAGING, jobs=len(all_of_it), max_jobs=chain.max_jobs)
    if not last.job.exists():
        # a successor is submitted by who holds the lock: one without a job was begun by somebody who is gone
        return replace(base, state=State.STOPPED, reason=Reason.INTERRUPTED) if len(all_of_it) > 1 else base
    status = deployments.status(last)
    record = load_json(deployments.Record, last.record)
    target = deployments.target_of(record)
    lease = target.lease(last) if isinstance(target, Queue) else None
    margin = record.target_options.get("renew_margin_s")
    return replace(
        base,
        state=status.state,
        reason=status.reason,
        text=status.text,
        served=status.timings.ready_s is not None,
        unlucky=_unlucky(all_of_it),
        last_request_s=lease.last_request_s if lease else None,
        queue_s=lease.queue_s if lease else 0.0,
        load_s=_load_s(all_of_it, status),
        margin_s=float(margin) if isinstance(margin, int | float | str) else None,
    )


def _unlucky(all_of_it: list[DeploymentFolder]) -> int:
    """How many at the end have left no sign of having been ready."""
    count = 0
    for one in reversed(all_of_it):
        if one.record.is_file() and deployments.status(one).timings.ready_s is not None:
            break
        count += 1
    return count


def _load_s(all_of_it: list[DeploymentFolder], status: deployments.Status) -> float:
    """As the newest that was ready needed; as planned when none was."""
    if status.timings.ready_s is not None:
        return status.timings.ready_s
    for one in reversed(all_of_it[:-1]):
        if one.record.is_file() and (ready_s := deployments.status(one).timings.ready_s) is not None:
            return ready_s
    from corral.plan.contract import Plan

    last = all_of_it[-1]
    planned = load_json(Plan, last.plan).speed.load_s if last.plan.is_file() else None
    return planned or PLANNED_LOAD_S


def renew(
    folder: DeploymentFolder,
    say: Callable[[str], None],
    once: bool = False,
    wanted: Callable[[], bool] = lambda: True,
) -> str:
    """Look after a chain until nothing more will follow, or nobody wants it; why, in words. `once`: what is due."""
    if not folder.request.is_file():
        raise UsageError(f"{folder.name!r} was not started with --renew.", "Start it with `corral up MODEL --renew`.")
    refusals, told = 0, ""
    while True:
        if closed := read_chain(folder).closed:
            return closed
        step = Step(Action.WAIT, "")
        try:
            step = next_step(look(folder))
            if step.action is not Action.WAIT:
                step = _act(folder, say)
            refusals = 0
        except CorralError as error:  # SLURM does not answer, or will not have it
            refusals += not _passes(error)
            say(error.in_full)
            step = Step(Action.WAIT, "", RETRY_S)
            if refusals >= MOST_REFUSALS:
                with chain_lock(folder, say):
                    write_chain(folder, replace(read_chain(folder), closed=error.message))
                continue
        if step.action is Action.WAIT and not step.is_told_as(told):
            told = step.topic
            say(step.why)
        if once:
            return read_chain(folder).closed or step.why
        until = time.monotonic() + (step.wait_s if step.action is Action.WAIT else 1.0)
        while time.monotonic() < until:
            if not wanted():
                return "the job that it was for has ended"
            time.sleep(min(1.0, max(0.0, until - time.monotonic())))


def _passes(error: CorralError) -> bool:
    from corral.base.errors import UnreachableError

    return isinstance(error, UnreachableError)


def _act(folder: DeploymentFolder, say: Callable[[str], None]) -> Step:
    """Do what is due, with the chain's lock held, if it is still due then."""
    with chain_lock(folder, say):
        chain = read_chain(folder)
        if chain.closed:
            return Step(Action.WAIT, "")
        facts = look(folder)
        step = next_step(facts)
        if step.action is Action.CLOSE:
            say(f"nothing more follows: {step.why}")
            write_chain(folder, replace(chain, closed=step.why))
        elif step.action is Action.SUBMIT:
            again = facts.reason is Reason.INTERRUPTED and facts.jobs > 1
            name = facts.name if again else successor_name(folder.name, facts.jobs + 1)
            say(f"submitting {name}: {step.why}")
            _submit(folder, name)
        return step


def _submit(folder: DeploymentFolder, name: str) -> None:
    """Make a successor. Its name is written down first, so that one that was begun is always known."""
    chain = read_chain(folder)
    if name not in chain.successors:
        write_chain(folder, replace(chain, successors=(*chain.successors, name)))
    successor = DeploymentFolder.of(name)
    if successor.path.exists() and not successor.job.exists():
        shutil.rmtree(successor.path)
    request = load_json(DeployRequest, folder.request)
    # a fixed port would be taken while both run on one node
    made = replace(request, name=name, follows=folder.name, port=None)
    try:
        bringup.bring_up(made, _Silent(), wait=False)
    except ConflictError:
        if not successor.job.exists():
            raise


class _Silent:
    """Nobody watches."""

    def phase(self, name: str, expected: object = None) -> None: ...

    def detail(self, text: str, done: int = 0, total: int = 0, news: bool = False) -> None: ...

    def note(self, text: str) -> None: ...
