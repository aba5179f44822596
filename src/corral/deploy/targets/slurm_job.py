"""The job of a deployment on SLURM: the record in its folder, the queue's answer, and what both say of the agents.

A controller that does not answer leaves the job unknown, never failed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, UnreachableError
from corral.base.files import write_atomic
from corral.base.record import dump_json, load_json
from corral.base.ssh import announced_wait
from corral.deploy.deployment.diagnosis import last_lines
from corral.deploy.deployment.events import append_event, last_state
from corral.deploy.deployment.folder import DeploymentFolder, RankFolder
from corral.deploy.deployment.state import ENDED, Reason, State
from corral.deploy.doctor.finding import Finding, warning
from corral.deploy.slurm import commands
from corral.deploy.slurm.commands import SlurmJob
from corral.deploy.slurm.options import SlurmOptions
from corral.deploy.slurm.preflight import REMEDY
from corral.deploy.slurm.script import NOT_SEEN
from corral.deploy.slurm.states import JobVerdict, exit_of, job_verdict
from corral.deploy.targets.base import AgentsStatus, JobState, JobStatus, Lease, OwnJob, is_of_launch, launch_id_of

END_PATIENCE_S = 90.0  # for a cancelled job: KillWait and epilogues
CANCEL_S, UNSEEN_S = 2.0, 3.0  # for `scancel`, and for the agents' end, while `squeue` does not answer
LOST_PATIENCE_S = 5.0  # for one that has lost a node: SLURM ends it once the node answers, or is given up
SIGNAL_EARLY_S = 60.0  # SLURM may send a signal this much early, says sbatch's manual
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


class SlurmJobs:
    """The jobs of SLURM: `targets.base.Queue`, and what they say of a deployment's agents."""

    chosen: SlurmOptions

    def job_of(self, folder: DeploymentFolder) -> str:
        submitted = self._submitted(folder)
        return submitted.id if submitted else ""

    def submit_successor(self, folder: DeploymentFolder, current: str) -> str:
        id = submit(folder, f"--dependency=afterany:{current}", after=current)
        with contextlib.suppress(OSError):  # a full disk: the job is found by its launch id
            write_atomic(folder.job, dump_json(Submitted(id, time.time(), self.chosen.time_s)))
        return id

    def _submitted(
        self, folder: DeploymentFolder, launch_id: str = "", patience_s: float = commands.LOOK_S
    ) -> Submitted | None:
        """The newest job with the deployment's launch id. It may have no record: the command that submitted it was
        killed before sbatch answered, or the disk was full. Only a runner submits a second job under one launch id.
        """
        recorded = submitted_job(folder)
        if recorded is not None and not self.chosen.runner:
            return recorded
        if recorded is None:
            if not folder.started.exists():
                return None
            commands.forget_answers()  # they may be older than the job
        try:
            since_s = _begun_s(folder) if recorded is None else None
            ids = commands.jobs_of_launch(launch_id or launch_id_of(folder), since_s, patience_s)
        except UnreachableError:
            if recorded is None:
                raise
            return recorded
        if not ids or (recorded and int(ids[-1]) <= int(recorded.id)):
            return recorded
        found = Submitted(ids[-1], _begun_s(folder), self.chosen.time_s)
        with contextlib.suppress(OSError):
            write_atomic(folder.job, dump_json(found))
            append_event(folder.staging, "adopted", text=f"job {found.id} had no record: found by its launch id")
        return found

    def with_renewal(self, options: Mapping[str, object]) -> dict[str, object]:
        return {**options, "renew": True}

    def with_keeper(self, options: Mapping[str, object]) -> dict[str, object]:
        return {**options, "keeper": True}

    def with_runner(self, options: Mapping[str, object], runner: Sequence[str]) -> dict[str, object]:
        return {"requeue": True, **options, "runner": list(runner)}

    def own_job(self, environ: Mapping[str, str]) -> OwnJob:
        id = environ.get("SLURM_JOB_ID", "")
        return OwnJob(id, f"{id}.{environ.get('SLURM_RESTART_COUNT', '0')}")

    def is_placed(self, folder: DeploymentFolder, own: OwnJob) -> bool:
        with contextlib.suppress(CorralError, OSError):
            rendezvous: dict[str, Any] = load_json(dict, folder.path / "rendezvous.json")
            return bool(rendezvous.get("attempt") == own.attempt)
        return False

    def job_status(self, id: str) -> JobStatus:
        try:
            job = commands.find_job(id)
        except CorralError as error:  # the controller does not answer: nothing is known, and nothing has failed
            return JobStatus(JobState.UNKNOWN, error.message, error.remedy, None)
        if job is None:
            text = f"job {id} is over, and SLURM no longer knows how it ended"
            return JobStatus(JobState.STOPPED, text, ended=True, reason=Reason.JOB_FORGOTTEN)
        if job.state == "COMPLETED":
            return JobStatus(JobState.STOPPED, f"job {id} has ended", ended=True)
        if job.state == "RUNNING":
            return JobStatus(JobState.RUNNING, f"job {id} runs on {job.nodes}")
        verdict = job_verdict(job)
        waiting = verdict.state is State.QUEUED
        return JobStatus(
            JobState(verdict.state), verdict.text, verdict.remedy, verdict.ended, waiting, verdict.reason
        )

    def cancel_job(self, id: str) -> None:
        commands.cancel(id)

    def agents(self, folder: DeploymentFolder) -> AgentsStatus:
        try:
            submitted = self._submitted(folder)
        except UnreachableError as error:
            text = f"{error.message.rstrip('.')}; whether a job was submitted is not known"
            return AgentsStatus(None, state=State.UNKNOWN, text=text, remedy=error.remedy)
        if submitted is None:
            return AgentsStatus(False)
        try:
            job = read_job(folder, submitted)
        except CorralError as error:
            return _without_controller(folder, submitted, error)
        if job is None:
            return _forgotten(submitted)
        if job != submitted.last and (submitted.last is None or job.state != submitted.last.state):
            with contextlib.suppress(OSError):
                write_atomic(folder.job, dump_json(replace(submitted, last=job)))
                if job_verdict(job).ended:
                    _clear_up(folder, job)
        return _agents_of(folder, submitted, job, own_output=bool(self.chosen.output))

    def lease(self, folder: DeploymentFolder) -> Lease | None:
        submitted = submitted_job(folder)
        job = read_job(folder, submitted) if submitted else None
        if submitted is None or job is None:
            return None
        if job_verdict(job).state is State.QUEUED:  # what SLURM expects is no promise
            return Lease(submitted.submitted_s)
        ends_s = job.end_s or (job.start_s + submitted.time_s if job.start_s and submitted.time_s else None)
        drains_s = ends_s - self.chosen.signal_s - SIGNAL_EARLY_S if ends_s else None
        return Lease(submitted.submitted_s, job.start_s, drains_s, bool(job.restarts))

    def stop(self, folder: DeploymentFolder, launch_id: str, grace_s: float) -> bool:
        submitted = self._submitted(folder, launch_id)
        if submitted is None and not folder.started.exists():
            return True
        for rank in folder.ranks():  # also of a job that SLURM makes of an interrupted `sbatch` only now
            rank.stop.touch(mode=0o600)
        if submitted is None:
            return True
        others = self._others(launch_id, submitted)
        for id in others:
            commands.cancel(id)
        return self._end(folder, submitted, grace_s) and all(_is_over(id, END_PATIENCE_S) for id in others)

    def _others(self, launch_id: str, newest: Submitted) -> list[str]:
        """The other jobs of a launch that have not ended: a batch hands over from one to the next."""
        if not self.chosen.runner:
            return []
        ids, known = commands.jobs_of_launch(launch_id, None), commands.jobs()
        return [id for id in ids if id != newest.id and id in known and not job_verdict(known[id]).ended]

    def _end(self, folder: DeploymentFolder, submitted: Submitted, grace_s: float) -> bool:
        """End a job; whether it is over."""
        try:
            job = read_job(folder, submitted)
        except UnreachableError as error:
            return _end_unseen(folder, submitted, error)
        if job is None or job_verdict(job).ended:
            return True
        write_atomic(folder.job, dump_json(replace(submitted, stop_asked=True)))

        def lost() -> bool:
            return _has_lost_a_node(folder, job)

        if job_verdict(job).state is not State.QUEUED and not lost():  # the agents end their engines and write so
            commands.cancel(submitted.id, "TERM")
            if _is_over(submitted.id, grace_s + 20, lost):
                return True
        commands.cancel(submitted.id)
        if _is_over(submitted.id, LOST_PATIENCE_S if lost() else END_PATIENCE_S):
            return True
        if lost():
            raise _not_ended(job)
        return False


def _end_unseen(folder: DeploymentFolder, submitted: Submitted, error: UnreachableError) -> bool:
    """Cancel a job while SLURM does not say how it is; its agents write their end where this machine sees it."""
    with contextlib.suppress(OSError):
        write_atomic(folder.job, dump_json(replace(submitted, stop_asked=True)))
    with contextlib.suppress(CorralError):
        commands.cancel(submitted.id, patience_s=CANCEL_S)
    deadline = time.monotonic() + UNSEEN_S
    while time.monotonic() < deadline:
        ranks = [rank for rank in folder.ranks() if rank.agent.exists()]
        if ranks and all(_end_of(rank)[0] in ENDED for rank in ranks):
            return True
        time.sleep(0.2)
    raise UnreachableError(
        f"{error.message.rstrip('.')}; whether job {submitted.id} has ended is not known.",
        "Its agents were told to end. Run the same `corral down` again when SLURM answers.",
    )


def _not_ended(job: SlurmJob) -> UnreachableError:
    return UnreachableError(
        f"job {job.id} on {job.nodes} is cancelled, but a node does not answer, so what runs there may go on.",
        "All else was stopped; an agent that is cut off ends its engine by itself within seconds, and SLURM ends the"
        " job when the node is back or given up. Run the same `corral down` again then.",
    )


def orphan_jobs(owned: Collection[str]) -> Iterator[Finding]:
    """Jobs with launch ids that neither `owned` nor the folder of their script has, which may be in another home."""
    try:
        known = commands.jobs(commands.PATIENCE_S)
        carried = {id: launch for id, launch in commands.launches_in_queue().items() if launch not in owned}
        for id, launch in carried.items():
            if job_verdict(known[id]).ended:
                continue
            folder = DeploymentFolder(commands.script_of(id).parent)
            if not is_of_launch(folder, launch):
                text = (
                    f"job {id} ({known[id].state.lower()}) is of launch {launch}, which {folder.path} does not have"
                )
                yield warning("orphan", text, f"If you do not need it: scancel {id}")
    except (CorralError, OSError) as error:
        yield warning("orphans", f"SLURM's jobs are not known: {error}", getattr(error, "remedy", ""))


def submit(folder: DeploymentFolder, *options: str, after: str = "0") -> str:
    """Submit a deployment's script; the id of its job, which comes `after` the one before. Where sbatch got no answer
    in time, the queue is asked whether the job is there all the same.
    """
    launch_id = launch_id_of(folder)
    try:
        return commands.submit(folder.script, *options, launch_id=launch_id)
    except UnreachableError as error:
        if error.details.get("queued") is False:
            raise
        commands.forget_answers()
        ids = commands.jobs_of_launch(launch_id, None, commands.PATIENCE_S)
        if ids and int(ids[-1]) > int(after):
            return ids[-1]
        raise


def _begun_s(folder: DeploymentFolder) -> float:
    """When the first job of a deployment was submitted, or was about to be."""
    with contextlib.suppress(OSError):
        return folder.started.stat().st_mtime
    return time.time()


def submitted_job(folder: DeploymentFolder) -> Submitted | None:
    with contextlib.suppress(FileNotFoundError):
        return load_json(Submitted, folder.job)
    return None


def read_job(folder: DeploymentFolder, submitted: Submitted, patience_s: float = commands.LOOK_S) -> SlurmJob | None:
    """The job now; an ended job stays as it was, and a new agent's file makes the kept answer stale."""
    if submitted.last is not None and job_verdict(submitted.last).ended:
        return submitted.last
    agents, seen = _stamp(folder.rank(0).agent), _seen_agents.get(str(folder.path))
    if seen != agents:
        commands.forget_answers(0.0 if seen else commands.FRESH_S)  # one question for all that are read at once
    job = commands.find_job(submitted.id, patience_s)
    _seen_agents[str(folder.path)] = agents
    return job


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return (stat.st_ino, stat.st_mtime_ns)


def _is_over(id: str, patience_s: float, hopeless: Callable[[], bool] = lambda: False) -> bool:
    """Wait until the job has left its nodes; false after `patience_s`, or once waiting is `hopeless`."""
    deadline = time.monotonic() + patience_s
    with announced_wait(f"waiting for SLURM to end job {id}"):
        while True:
            commands.forget_answers()
            job = commands.jobs(commands.PATIENCE_S).get(id)
            if job is None or job_verdict(job).ended:
                return True
            if time.monotonic() > deadline or hopeless():
                return False
            time.sleep(0.5)


def _has_lost_a_node(folder: DeploymentFolder, job: SlurmJob) -> bool:
    """Whether a rank of this attempt ended because of a lost node; the others end by themselves, too.

    SLURM keeps the job until that node answers, or is given up after SlurmdTimeout: five minutes on most clusters.
    """
    ends = [_end_of(rank) for rank in folder.ranks() if _is_of(rank, job)]
    return any(state in ENDED and reason == Reason.NODE_LOST for state, reason in ends)


def _agents_of(
    folder: DeploymentFolder, submitted: Submitted, job: SlurmJob, own_output: bool = False
) -> AgentsStatus:
    """What SLURM knows beyond the agents; `own_output`: the job's log is not in the folder."""
    verdict = job_verdict(job, str(folder.job_log))
    if verdict.ended and submitted.stop_asked:
        return AgentsStatus(False, state=State.STOPPED, reason=Reason.REQUESTED, overrules=True)
    signalled = _was_signalled(folder, submitted)
    if job.state in RUNS and _agents_run(folder, job):
        if signalled:  # SLURM told the agents to end, and will give the reason in a moment
            ending = f"job {job.id} is ending"
            return AgentsStatus(True, where=job.nodes, state=State.DRAINING, text=ending, overrules=True)
        return AgentsStatus(True, where=job.nodes)
    if job.state in RUNS:
        text = f"job {job.id} runs on {job.nodes}; its agents are starting"
        return AgentsStatus(True, where=job.nodes, state=State.STARTING, text=text, overrules=True)
    if verdict.reason is Reason.JOB_FAILED:
        verdict = _why_failed(folder, job, verdict, own_output)
    return AgentsStatus(
        not verdict.ended, False, job.nodes, verdict.state, verdict.reason, verdict.text, verdict.remedy,
        overrules=verdict.caused
        or verdict.state in (State.DRAINING, State.STARTING)
        or (signalled and verdict.reason is not Reason.JOB_ENDED),
    )  # fmt: skip


def _was_signalled(folder: DeploymentFolder, submitted: Submitted) -> bool:
    """Whether the head's agent ended because it was told to, though not by `corral down`."""
    return _end_of(folder.rank(0)) == (State.STOPPED, Reason.REQUESTED) and not submitted.stop_asked


def _end_of(rank: RankFolder) -> tuple[str, str]:
    """The last state of a rank, and its reason."""
    last = last_state(rank.events)
    return (str(last.get("state")), str(last.get("reason") or "")) if last else ("", "")


def _why_failed(folder: DeploymentFolder, job: SlurmJob, verdict: JobVerdict, own_output: bool) -> JobVerdict:
    """Why a job failed, from what its nodes did and did not write."""
    ran = [rank for rank in folder.ranks() if rank.agent.exists() and _is_of(rank, job)]
    unseen = not any(_is_of(rank, job) for rank in folder.ranks()) and not (own_output or folder.job_log.exists())
    if unseen or exit_of(job.exit_code) == (NOT_SEEN, 0):
        text = f"job {job.id} found none of its files on {job.nodes}: the nodes do not see {folder.path}"
        return replace(verdict, reason=Reason.HOME_NOT_SHARED, text=text, remedy=REMEDY)
    silent = [rank for rank in ran if _end_of(rank)[0] not in ENDED]
    if silent:
        who = ", ".join(f"rank {rank.number} on {_address(rank).get('name')}" for rank in silent)
        text = f"the agent of {who} disappeared without writing why: it was killed, and job {job.id} ended with it"
        remedy = "Start it again with `corral up`; on a shared machine, find out who killed it."
        return replace(verdict, reason=Reason.AGENT_KILLED, text=text, remedy=remedy)
    last = "" if ran or own_output else _last_line(folder.job_log)
    return replace(verdict, text=f"{verdict.text}; its last line: {last}") if last else verdict


def _last_line(log: Path) -> str:
    lines = [line for line in last_lines(log, 20) if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def _clear_up(folder: DeploymentFolder, job: SlurmJob) -> None:
    """After a job: delete half-written files of killed agents, and stop agents on nodes that SLURM lost."""
    for rank in folder.ranks():
        if (
            job.state == "NODE_FAIL"
        ):  # its node may be up without its slurmd, and then nothing else ends what runs there
            rank.stop.touch(mode=0o600)
            continue
        for path in rank.path.glob(".*.tmp"):
            path.unlink(missing_ok=True)


def _address(rank: RankFolder) -> dict[str, Any]:
    with contextlib.suppress(CorralError, OSError):
        return load_json(dict, rank.address)
    return {}


def _is_of(rank: RankFolder, job: SlurmJob) -> bool:
    """Whether a rank's files are of this attempt of the job."""
    return bool(_address(rank).get("attempt") == f"{job.id}.{job.restarts}")


def _agents_run(folder: DeploymentFolder, job: SlurmJob) -> bool:
    """Whether the agents of this attempt of the job have started."""
    head = folder.rank(0)
    return head.agent.exists() and _is_of(head, job)


def _without_controller(folder: DeploymentFolder, submitted: Submitted, error: CorralError) -> AgentsStatus:
    """What is known while SLURM does not answer: the agents' heartbeat, and the job as it was last seen."""
    if not isinstance(error, UnreachableError):
        raise error
    if folder.rank(0).heartbeat.exists() and submitted.last is not None and submitted.last.state in RUNS:
        return AgentsStatus(None, where=submitted.last.nodes)
    seen = f"was last seen {submitted.last.state.lower()}" if submitted.last else "was submitted"
    text = f"{error.message.rstrip('.')}; job {submitted.id} {seen}"
    return AgentsStatus(None, state=State.UNKNOWN, text=text, remedy="Wait: the job goes on without the controller.")


def _forgotten(submitted: Submitted) -> AgentsStatus:
    last = submitted.last.state.lower() if submitted.last else "being submitted"
    text = f"SLURM no longer knows job {submitted.id}, which was last seen {last}"
    reason = Reason.REQUESTED if submitted.stop_asked else Reason.JOB_FORGOTTEN
    state = State.STOPPED if submitted.stop_asked else State.FAILED
    return AgentsStatus(False, False, "", state, reason, text, "Start it again with `corral up`.")
