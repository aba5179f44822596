"""The job of a deployment on SLURM: as kept in its folder, as SLURM shows it, and what both say of the agents."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, UnreachableError
from corral.base.record import load_json
from corral.base.ssh import announced_wait
from corral.deploy.deployment.diagnosis import last_lines
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder, RankFolder
from corral.deploy.deployment.state import ENDED, Reason, State
from corral.deploy.slurm import commands
from corral.deploy.slurm.commands import SlurmJob
from corral.deploy.slurm.preflight import REMEDY
from corral.deploy.slurm.script import NOT_SEEN
from corral.deploy.slurm.states import JobVerdict, exit_of, standing
from corral.deploy.targets.base import AgentsStatus

RUNS = ("RUNNING", "SIGNALING", "RESIZING")
_seen_agents: dict[str, tuple[int, int]] = {}  # the agents' file when SLURM was last asked


@dataclass(frozen=True)
class Submitted:
    """The job of a deployment, as kept in its folder."""

    id: str
    submitted_s: float
    time_s: float | None = None
    stop_asked: bool = False  # by `corral down`
    last: SlurmJob | None = None  # as SLURM last showed it


def submitted_job(folder: DeploymentFolder) -> Submitted | None:
    with contextlib.suppress(FileNotFoundError):
        return load_json(Submitted, folder.job)
    return None


def look(folder: DeploymentFolder, submitted: Submitted, patience_s: float = commands.LOOK_S) -> SlurmJob | None:
    """The job now; what has ended stays as it was, and news from the agents make SLURM worth asking again."""
    if submitted.last is not None and standing(submitted.last).ended:
        return submitted.last
    agents = _stamp(folder.rank(0).agent)
    if _seen_agents.get(str(folder.path)) != agents:
        commands.forget_answers()
    job = commands.find_job(submitted.id, patience_s)
    _seen_agents[str(folder.path)] = agents
    return job


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_ino, found.st_mtime_ns)


def is_over(id: str, patience_s: float, hopeless: Callable[[], bool] = lambda: False) -> bool:
    """Wait until the job has left its nodes, for so long, or until that can no longer be expected."""
    deadline = time.monotonic() + patience_s
    with announced_wait(f"waiting for SLURM to end job {id}"):
        while True:
            commands.forget_answers()
            job = commands.jobs(commands.PATIENCE_S).get(id)
            if job is None or standing(job).ended:
                return True
            if time.monotonic() > deadline or hopeless():
                return False
            time.sleep(0.5)


def has_lost_a_node(folder: DeploymentFolder, job: SlurmJob) -> bool:
    """Whether a rank of this attempt ended for a node that fell silent; the others end by themselves, too.

    SLURM keeps the job until that node answers, or is given up after SlurmdTimeout: five minutes on most clusters.
    """
    ends = [_last_state(rank) for rank in folder.ranks() if _is_of(rank, job)]
    return any(state in ENDED and reason == Reason.NODE_LOST for state, reason in ends)


def agents_of(
    folder: DeploymentFolder, submitted: Submitted, job: SlurmJob, own_output: bool = False
) -> AgentsStatus:
    """What SLURM says, where it says more than the agents do; `own_output`: the job's log is not in the folder."""
    found = standing(job, str(folder.job_log))
    if found.ended and submitted.stop_asked:
        return AgentsStatus(False, state=State.STOPPED, reason=Reason.REQUESTED, overrules=True)
    signalled = _ended_unasked(folder, submitted)
    if job.state in RUNS and _agents_run(folder, job):
        if signalled:  # SLURM told the agents to end, and will say why in a moment
            ending = f"job {job.id} is ending"
            return AgentsStatus(True, where=job.nodes, state=State.DRAINING, text=ending, overrules=True)
        return AgentsStatus(True, where=job.nodes)
    if job.state in RUNS:
        text = f"job {job.id} runs on {job.nodes}; its agents are starting"
        return AgentsStatus(True, where=job.nodes, state=State.STARTING, text=text, overrules=True)
    if found.reason is Reason.JOB_FAILED:
        found = _why_failed(folder, job, found, own_output)
    return AgentsStatus(
        not found.ended, False, job.nodes, found.state, found.reason, found.text, found.remedy,
        overrules=found.caused
        or found.state in (State.DRAINING, State.STARTING)
        or (signalled and found.reason is not Reason.JOB_ENDED),
    )  # fmt: skip


def _ended_unasked(folder: DeploymentFolder, submitted: Submitted) -> bool:
    """Whether the head's agent ended because it was told to, though not by `corral down`."""
    last = _last_state(folder.rank(0))
    return last == (State.STOPPED, Reason.REQUESTED) and not submitted.stop_asked


def _last_state(rank: RankFolder) -> tuple[str, str]:
    states = [event for event in read_events(rank.events) if event.kind == "state"]
    return (str(states[-1].get("state")), str(states[-1].get("reason") or "")) if states else ("", "")


def _why_failed(folder: DeploymentFolder, job: SlurmJob, found: JobVerdict, own_output: bool) -> JobVerdict:
    """Why a job failed, from what its nodes did and did not write."""
    ran = [rank for rank in folder.ranks() if rank.agent.exists() and _is_of(rank, job)]
    unseen = not any(_is_of(rank, job) for rank in folder.ranks()) and not (own_output or folder.job_log.exists())
    if unseen or exit_of(job.exit_code) == (NOT_SEEN, 0):
        text = f"job {job.id} found none of its files on {job.nodes}: the nodes do not see {folder.path}"
        return replace(found, reason=Reason.HOME_NOT_SHARED, text=text, remedy=REMEDY)
    silent = [rank for rank in ran if _last_state(rank)[0] not in ENDED]
    if silent:
        who = ", ".join(f"rank {rank.number} on {_address(rank).get('name')}" for rank in silent)
        text = f"the agent of {who} is gone without a word: it was killed, and job {job.id} ended with it"
        remedy = "Start it again with `corral up`; on a shared machine, find out who killed it."
        return replace(found, reason=Reason.AGENT_KILLED, text=text, remedy=remedy)
    said = "" if ran or own_output else _last_line(folder.job_log)
    return replace(found, text=f"{found.text}; its last words: {said}") if said else found


def _last_line(log: Path) -> str:
    lines = [line for line in last_lines(log, 20) if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def clear_up(folder: DeploymentFolder, job: SlurmJob) -> None:
    """The job is over: remove what killed agents had begun to write, and tell those that SLURM lost sight of."""
    for rank in folder.ranks():
        if job.state == "NODE_FAIL":  # its node may live without its slurmd, and nobody else ends what runs there
            rank.stop.touch(mode=0o600)
            continue
        for path in rank.path.glob(".*.tmp"):
            path.unlink(missing_ok=True)


def _address(rank: RankFolder) -> dict[str, Any]:
    with contextlib.suppress(CorralError, OSError):
        return load_json(dict, rank.address)
    return {}


def _is_of(rank: RankFolder, job: SlurmJob) -> bool:
    """Whether a rank came in this attempt of the job."""
    return bool(_address(rank).get("attempt") == f"{job.id}.{job.restarts}")


def _agents_run(folder: DeploymentFolder, job: SlurmJob) -> bool:
    """Whether the agents of this attempt of the job have begun; what an earlier attempt wrote does not count."""
    head = folder.rank(0)
    return head.agent.exists() and _is_of(head, job)


def unasked(folder: DeploymentFolder, submitted: Submitted, error: CorralError) -> AgentsStatus:
    """SLURM cannot be asked: the agents' heartbeat may still be heard, and nothing else is known."""
    if not isinstance(error, UnreachableError):
        raise error
    if folder.rank(0).heartbeat.exists() and submitted.last is not None and submitted.last.state in RUNS:
        return AgentsStatus(None, where=submitted.last.nodes)
    seen = f"was last seen {submitted.last.state.lower()}" if submitted.last else "was submitted"
    text = f"{error.message.rstrip('.')}; job {submitted.id} {seen}"
    return AgentsStatus(None, state=State.UNKNOWN, text=text, remedy="Wait: the job goes on without the controller.")


def forgotten(submitted: Submitted) -> AgentsStatus:
    last = submitted.last.state.lower() if submitted.last else "being submitted"
    text = f"SLURM no longer knows job {submitted.id}, which was last seen {last}"
    reason = Reason.REQUESTED if submitted.stop_asked else Reason.JOB_FORGOTTEN
    state = State.STOPPED if submitted.stop_asked else State.FAILED
    return AgentsStatus(False, False, "", state, reason, text, "Start it again with `corral up`.")
