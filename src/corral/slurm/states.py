"""Every state that SLURM gives a job, and every reason to wait, in Corral's words: two tables. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass

from corral.deployment.state import Reason, State
from corral.slurm.commands import SlurmJob

__all__ = ["STATES", "WAITS", "JobVerdict", "standing"]


@dataclass(frozen=True)
class JobVerdict:
    """A job's state in Corral's words. `caused` says that the agents' last word may be its consequence."""

    state: State
    reason: Reason | None
    text: str
    remedy: str = ""
    ended: bool = False
    caused: bool = False


# SLURM's word -> (state, reason, what happened, what to do); in braces what is known of the job
_AGAIN = "Start it again with `corral up`."
STATES: dict[str, tuple[State, Reason | None, str, str]] = {
    "PENDING": (State.QUEUED, None, "waits in the queue", ""),
    "REQUEUED": (State.QUEUED, None, "was put back into the queue", ""),
    "REQUEUE_HOLD": (State.QUEUED, None, "was put back into the queue and is held", "`scontrol release {job}`"),
    "REQUEUE_FED": (State.QUEUED, None, "was put back into the queue of its federation", ""),
    "RESV_DEL_HOLD": (State.QUEUED, None, "is held: its reservation was deleted", "Start it anew without it."),
    "SPECIAL_EXIT": (State.QUEUED, None, "was put back into the queue by a special exit and is held", ""),
    "CONFIGURING": (State.STARTING, None, "waits for its nodes to boot", ""),
    "POWER_UP_NODE": (State.STARTING, None, "waits for its nodes to be powered up", ""),
    "RUNNING": (State.STARTING, None, "runs", ""),
    "RESIZING": (State.STARTING, None, "is changing its size", ""),
    "SIGNALING": (State.STARTING, None, "is being sent a signal", ""),
    "SUSPENDED": (State.UNKNOWN, None, "was suspended by SLURM: nothing answers until it goes on", ""),
    "STOPPED": (State.UNKNOWN, None, "was stopped by a signal but keeps its nodes", "`scontrol resume {job}`"),
    "COMPLETING": (State.DRAINING, None, "is ending", ""),
    "STAGE_OUT": (State.DRAINING, None, "is ending: its files are copied out", ""),
    "COMPLETED": (State.FAILED, Reason.JOB_ENDED, "ended, and its agents left no word", "Its output: `{log}`."),
    "FAILED": (State.FAILED, Reason.JOB_FAILED, "failed with exit code {code}", "Its output: `{log}`."),
    "LAUNCH_FAILED": (State.FAILED, Reason.JOB_FAILED, "could not be launched on {nodes}", "Its output: `{log}`."),
    "RECONFIG_FAIL": (State.FAILED, Reason.NODE_LOST, "ended because a node could not be set up", _AGAIN),
    "TIMEOUT": (
        State.FAILED,
        Reason.WALLTIME,
        "reached its time limit and was killed",
        "Ask for more with --time; --slurm signal_s=… drains earlier.",
    ),
    "DEADLINE": (State.FAILED, Reason.DEADLINE, "could not end before its deadline", "Leave --deadline out."),
    "NODE_FAIL": (State.FAILED, Reason.NODE_LOST, "lost a node of {nodes}", _AGAIN),
    "BOOT_FAIL": (State.FAILED, Reason.BOOT_FAILED, "ended because its nodes did not boot: {nodes}", _AGAIN),
    "OUT_OF_MEMORY": (
        State.FAILED,
        Reason.OUT_OF_HOST_MEMORY,
        "used more main memory than it asked for and was killed",
        "Ask for more: --slurm mem=0 is the whole node's.",
    ),
    "PREEMPTED": (State.FAILED, Reason.PREEMPTED, "had to make room for a job of higher priority",
                  f"{_AGAIN} With --slurm requeue=true it comes back by itself."),
    "CANCELLED": (State.STOPPED, Reason.CANCELLED, "was cancelled {by}", _AGAIN),
    "REVOKED": (State.STOPPED, Reason.CANCELLED, "was taken by a sibling in the federation", _AGAIN),
}  # fmt: skip
NOT_KNOWN = (State.UNKNOWN, None, "is in a state that Corral does not know", "")
# the agents may have written "stopped: requested" because SLURM ended them
CAUSED = frozenset({"CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "REVOKED"})

# SLURM's reason for waiting -> what it means, and what to do when waiting will not help
WAITS = {
    "Resources": ("the nodes it asks for are in use", ""),
    "Priority": ("jobs of higher priority come first", ""),
    "BeginTime": ("it may not start before a set time", ""),
    "Dependency": ("it waits for another job", ""),
    "JobHeldUser": ("it is held by its user", "`scontrol release {job}` lets it go."),
    "JobHeldAdmin": ("it is held by an administrator", "Ask the cluster's administrators."),
    "launch failed requeued held": ("it could not be launched and is held", "`scontrol release {job}` tries again."),
    "Reservation": ("its reservation has not begun", ""),
    "ReqNodeNotAvail": ("nodes it needs are down, drained or reserved", ""),
    "Nodes required for job are DOWN": ("nodes it needs are down, drained or reserved", ""),
    "Licenses": ("a licence it needs is in use", ""),
    "Cleaning": ("what is left of its last run is being cleared", ""),
    "None": ("the scheduler has not looked at it yet", ""),
    "PartitionDown": ("its partition is down", "Name another with --partition."),
    "PartitionInactive": ("its partition takes no jobs now", "Name another with --partition."),
    "PartitionTimeLimit": ("it asks for more time than its partition allows", "Ask for less with --time."),
    "PartitionNodeLimit": ("it asks for more nodes than its partition allows", "Ask for fewer with --nodes."),
    "PartitionConfig": ("its partition does not allow what it asks for", "`corral slurm partitions` shows limits."),
    "BadConstraints": ("no node can be what it asks for", "Correct --slurm constraint=…"),
    "InvalidAccount": ("its account is not valid", "Name another with --account."),
    "InvalidQOS": ("its quality of service is not valid", "Correct --slurm qos=…"),
    "QOS": ("a limit of its quality of service is reached", ""),
    "Assoc": ("a limit of its account is reached", ""),
    "MaxJobs": ("a limit on jobs is reached", ""),
}


def standing(job: SlurmJob, log: str = "job.log", now_s: float | None = None) -> JobVerdict:
    """A job in Corral's words."""
    state, reason, what, remedy = STATES.get(job.state, NOT_KNOWN)
    known = {
        "job": job.id,
        "log": log,
        "code": job.exit_code,
        "nodes": job.nodes or "its nodes",
        "by": f"by {job.cancelled_by}" if job.cancelled_by else "by `scancel`: by you or by an administrator",
    }
    text = f"job {job.id} {what.format_map(known)}"
    if state is State.QUEUED:
        why, help_ = _wait(job.reason)
        again = ", again," if job.restarts and job.state == "PENDING" else ""
        text = f"job {job.id}{again} {what}: {why}" + _expected(job.start_s, time.time() if now_s is None else now_s)
        remedy = help_ or remedy
    if job.state not in STATES:
        text += f": {job.state}"
    remedy = remedy.format_map(known)
    ended = state in (State.FAILED, State.STOPPED)
    return JobVerdict(state, reason, text, remedy, ended, job.state in CAUSED or state is State.QUEUED)


def _wait(reason: str) -> tuple[str, str]:
    for name, words in WAITS.items():
        if reason.startswith(name) or (not reason and name == "None"):
            return (f"{words[0]} ({reason})", words[1]) if reason else words
    return f"SLURM says {reason}", ""


def _expected(start_s: float | None, now_s: float) -> str:
    if start_s is None or start_s <= now_s:
        return ""
    form = "%H:%M" if start_s - now_s < 43200 else "%-d %b %H:%M"
    return f"; expected to start at {time.strftime(form, time.localtime(start_s))}"
