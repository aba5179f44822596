"""The job of a deployment on SLURM: as kept in its folder, as SLURM shows it, and what both say of the agents."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.deployment.folder import DeploymentFolder
from corral.deployment.state import Reason, State
from corral.errors import CorralError, UnreachableError
from corral.record import load_json
from corral.slurm import commands
from corral.slurm.commands import SlurmJob
from corral.slurm.states import standing
from corral.targets.base import AgentsStatus

__all__ = ["Submitted", "agents_of", "forgotten", "is_over", "look", "submitted_job", "unasked"]

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


def look(folder: DeploymentFolder, kept: Submitted) -> SlurmJob | None:
    """The job now; what has ended stays as it was, and news from the agents make SLURM worth asking again."""
    if kept.last is not None and standing(kept.last).ended:
        return kept.last
    agents = _stamp(folder.rank(0).agent)
    if _seen_agents.get(str(folder.path)) != agents:
        commands.forget_answers()
    job = commands.find_job(kept.id)
    _seen_agents[str(folder.path)] = agents
    return job


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_ino, found.st_mtime_ns)


def is_over(id: str, patience_s: float) -> bool:
    """Wait until the job has left its nodes."""
    deadline = time.monotonic() + patience_s
    while True:
        commands.forget_answers()
        job = commands.jobs().get(id)
        if job is None or standing(job).ended:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def agents_of(folder: DeploymentFolder, kept: Submitted, job: SlurmJob) -> AgentsStatus:
    """What SLURM says, where it says more than the agents do."""
    found = standing(job, str(folder.job_log))
    if found.ended and kept.stop_asked:
        return AgentsStatus(False, state=State.STOPPED, reason=Reason.REQUESTED, overrules=True)
    if job.state in RUNS:
        if _agents_run(folder, job):
            return AgentsStatus(True, where=job.nodes)
        text = f"job {job.id} runs on {job.nodes}; its agents are starting"
        return AgentsStatus(True, where=job.nodes, state=State.STARTING, text=text, overrules=True)
    return AgentsStatus(
        not found.ended, False, job.nodes, found.state, found.reason, found.text, found.remedy,
        overrules=found.caused or found.state in (State.DRAINING, State.STARTING),
    )  # fmt: skip


def _agents_run(folder: DeploymentFolder, job: SlurmJob) -> bool:
    """Whether the agents of this life of the job have begun; what an earlier life wrote does not count."""
    head = folder.rank(0)
    if not head.agent.exists():
        return False
    with contextlib.suppress(CorralError, OSError):
        address: dict[str, Any] = load_json(dict, head.address)
        return bool(address.get("life") == f"{job.id}.{job.restarts}")
    return False


def unasked(folder: DeploymentFolder, kept: Submitted, error: CorralError) -> AgentsStatus:
    """SLURM cannot be asked: the agents' heartbeat may still be heard, and nothing else is known."""
    if not isinstance(error, UnreachableError):
        raise error
    if folder.rank(0).heartbeat.exists() and kept.last is not None and kept.last.state in RUNS:
        return AgentsStatus(None, where=kept.last.nodes)
    seen = f"job {kept.id} was last seen {kept.last.state.lower()}" if kept.last else f"job {kept.id} was submitted"
    text = f"{error.message.rstrip('.')}; {seen}"
    return AgentsStatus(None, state=State.UNKNOWN, text=text, remedy="Wait: the job goes on without the controller.")


def forgotten(kept: Submitted) -> AgentsStatus:
    last = kept.last.state.lower() if kept.last else "being submitted"
    text = f"SLURM no longer knows job {kept.id}, which was last seen {last}"
    reason = Reason.REQUESTED if kept.stop_asked else Reason.JOB_FORGOTTEN
    state = State.STOPPED if kept.stop_asked else State.FAILED
    return AgentsStatus(False, False, "", state, reason, text, "Start it again with `corral up`.")
