"""SLURM's job states and reasons to wait as Corral's states, reasons and remedies: two tables. Pure."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from corral.deploy.deployment.state import NO_ROOM, Reason, State
from corral.deploy.slurm.commands import SlurmJob


@dataclass(frozen=True)
class JobVerdict:
    """A job as a state of Corral. `caused`: what the agents wrote last may be its consequence."""

    state: State
    reason: Reason | None
    text: str
    remedy: str = ""
    ended: bool = False
    caused: bool = False


# SLURM's state -> (state, reason, what happened, what to do); in braces what is known of the job
_AGAIN = "Start it again with `corral up`."
_CANCEL = "`scancel {job}` takes it out of the queue; then start it again."
STATES: dict[str, tuple[State, Reason | None, str, str]] = {
    "PENDING": (State.QUEUED, None, "waits in the queue", ""),
    "REQUEUED": (State.QUEUED, None, "was put back into the queue", ""),
    "REQUEUE_HOLD": (State.QUEUED, None, "was put back into the queue and is held", "`scontrol release {job}`"),
    "REQUEUE_FED": (State.QUEUED, None, "was put back into the queue of its federation", ""),
    "RESV_DEL_HOLD": (State.QUEUED, None, "is held: its reservation was deleted", "Start it again without it."),
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
    "COMPLETED": (State.FAILED, Reason.JOB_ENDED, "ended, and its agents reported nothing", "Its output: `{log}`."),
    "FAILED": (State.FAILED, Reason.JOB_FAILED, "failed {code}", "Its output: `{log}`."),
    "NO_ROOM": (State.FAILED, Reason.NO_SPACE, "ended because the disk that it writes to is full, or a quota on it",
                "Make room, then continue."),
    "LAUNCH_FAILED": (State.FAILED, Reason.JOB_FAILED, "could not be launched on {nodes}", "Its output: `{log}`."),
    "RECONFIG_FAIL": (State.FAILED, Reason.NODE_LOST, "ended because a node could not be set up", _AGAIN),
    "TIMEOUT": (
        State.FAILED,
        Reason.WALLTIME,
        "reached its time limit and was killed",
        "Ask for more with --time; --slurm signal_s=… drains earlier.",
    ),
    "DEADLINE": (State.FAILED, Reason.DEADLINE, "could not end before its deadline", "Leave --slurm deadline=… out."),
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
    "DependencyNeverSatisfied": ("the job it waits for ended in another way than it asks", _CANCEL),
    "JobHeldUser": ("it is held by its user", "`scontrol release {job}` lets it go."),
    "JobHeldAdmin": ("it is held by an administrator", "Ask the cluster's administrators."),
    "launch failed requeued held": ("it could not be launched and is held", "`scontrol release {job}` tries again."),
    "Reservation": ("its reservation has not begun", ""),
    "ReservationDeleted": ("its reservation was deleted", "Start it again without the reservation."),
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
    "BadConstraints": ("no node has what it asks for", "Correct --slurm constraint=…, or ask for less of a node."),
    "FedJobLock": ("its federation decides about it", ""),
    "InvalidAccount": ("its account is not valid", "Name another with --account."),
    "AccountNotAllowed": ("its account may not use this partition", "Name another --account or --partition."),
    "InvalidQOS": ("its quality of service is not valid", "Correct --slurm qos=…"),
    "QOSNotAllowed": ("its quality of service may not be used here", "Correct --slurm qos=…, or name a --partition."),
    "QOS": ("a limit of its quality of service is reached", ""),
    "Assoc": ("a limit of its account is reached", ""),
    "MaxJobs": ("a limit on jobs is reached", ""),
}
# limits on a single job of an account or a quality of service
PER_JOB = re.compile(r"(Assoc|QOS)(Max\w*Per(Job|Node)|Min)")
PER_JOB_LIMITS = {
    "Wall": ("more time than its {whose} allows a job", "Ask for less with --time."),
    "Minutes": ("more GPU or CPU time than its {whose} allows a job", "Ask for less with --time or --nodes."),
    "Node": ("more nodes than its {whose} allows a job", "Ask for fewer with --nodes."),
    "GRES": ("more GPUs than its {whose} allows a job", "Ask for fewer: --slurm gpus_per_node=… or --nodes."),
    "Mem": ("more memory than its {whose} allows a job", "Ask for less: --slurm mem=…"),
    "Cpu": ("more CPUs than its {whose} allows a job", "Ask for fewer: --slurm cpus_per_task=… or --nodes."),
}
# a job that waits for one of these never starts, whatever else happens
HOPELESS = frozenset({
    "DependencyNeverSatisfied", "ReservationDeleted", "PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig",
    "BadConstraints", "InvalidAccount", "AccountNotAllowed", "InvalidQOS", "QOSNotAllowed",
})  # fmt: skip


def job_verdict(job: SlurmJob, log: str = "job.log", now_s: float | None = None) -> JobVerdict:
    """A job as a state of Corral, with its reason and remedy."""
    name = "LAUNCH_FAILED" if job.state == "FAILED" and job.reason == "JobLaunchFailure" else job.state
    name = "NO_ROOM" if name == "FAILED" and exit_of(job.exit_code) == (NO_ROOM, 0) else name
    state, reason, what, remedy = STATES.get(name, NOT_KNOWN)
    known = {
        "job": job.id,
        "log": log,
        "code": _exit_text(job.exit_code),
        "nodes": job.nodes or "its nodes",
        "by": f"by {job.cancelled_by}" if job.cancelled_by else "by `scancel`: by you or by an administrator",
    }
    text = f"job {job.id} {what.format_map(known)}"
    if state is State.QUEUED:
        why, help_ = _wait(job.reason)
        again = ", again," if job.restarts and job.state == "PENDING" else ""
        text = f"job {job.id}{again} {what}: {why}" + _expected(job.start_s, time.time() if now_s is None else now_s)
        remedy = help_ or remedy
        reason = Reason.CANNOT_START if is_hopeless(job.reason) else None
    if name not in STATES:
        text += f": {job.state}"
    remedy = remedy.format_map(known)
    ended = state in (State.FAILED, State.STOPPED)
    return JobVerdict(state, reason, text, remedy, ended, job.state in CAUSED or state is State.QUEUED)


def is_hopeless(reason: str) -> bool:
    """Whether a job that waits for this reason can never start."""
    return reason.partition(",")[0].strip() in HOPELESS or bool(PER_JOB.match(reason))


def _wait(reason: str) -> tuple[str, str]:
    if match := PER_JOB.match(reason):
        return _per_job(reason, match[1])
    names = [name for name in WAITS if reason.startswith(name) or (not reason and name == "None")]
    if not names:
        return f"SLURM says {reason}", ""
    why, remedy = WAITS[max(names, key=len)]
    return (f"{why} ({reason})" if reason else why), remedy


def _per_job(reason: str, whose: str) -> tuple[str, str]:
    owner = "account" if whose == "Assoc" else "quality of service"
    if f"{whose}Min" in reason:
        return (
            f"it asks for less than its quality of service wants ({reason})",
            "Ask for more, or correct --slurm qos=…",
        )
    limit = reason.replace("PerNode", "PerJob")  # of `MaxGRESPerNode`, the GPUs are what is limited
    for word, (what, remedy) in PER_JOB_LIMITS.items():
        if word in limit:
            return f"it asks for {what.format(whose=owner)} ({reason})", remedy
    return (
        f"it asks for more than its {owner} allows a job ({reason})",
        "`sacctmgr show qos` and `sshare` show limits.",
    )


def exit_of(code: str) -> tuple[int, int] | None:
    """(exit code, signal) of a batch script: `squeue` gives what wait(2) gave, `sacct` both."""
    first, colon, second = code.partition(":")
    if not first.isdigit() or not (second or "0").isdigit():
        return None
    return (int(first), int(second or 0)) if colon else (int(first) >> 8, int(first) & 0x7F)


def _exit_text(code: str) -> str:
    number, signal = exit_of(code) or (None, 0)
    if number is None:
        return "without an exit code"
    signal = signal or (number - 128 if number > 128 else 0)  # as a shell says it
    return f"because signal {signal} ended it" if signal else f"with exit code {number}"


def _expected(start_s: float | None, now_s: float) -> str:
    if start_s is None or start_s <= now_s:
        return ""
    form = "%H:%M" if start_s - now_s < 43200 else "%-d %b %H:%M"
    return f"; expected to start at {time.strftime(form, time.localtime(start_s))}"
