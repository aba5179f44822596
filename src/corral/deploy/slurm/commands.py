"""SLURM's own commands: submit, query, cancel.

One `squeue` call asks for all of the user's jobs, and its answer is kept for a moment. Answers are
read in the text forms that every version has; `squeue --json` of 22.05 ignores its filters and sends the whole
cluster's queue. Every call has a time limit, because clients hang when the controller is dead; a controller that does
not answer is an `UnreachableError`, never a failed job. Ended jobs are looked up in the accounting where there is
one, and in the job-completion log where there is none.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.base.errors import CorralError, DataError, UnreachableError, UsageError
from corral.base.shell import Completed, run, within_deadline
from corral.base.ssh import announced_wait
from corral.base.wording import time_limit_s

RESTORE = "Restore deployment.json and launch.json in its folder; `squeue --me` shows your jobs."
LOGIN_NODE = "Run Corral on a login node of the cluster, or set PATH to where SLURM's commands are."
PATIENCE_S = 15.0  # for one command; a living controller answers in well under a second
LOOK_S = 4.0  # for a query whose answer may be "unknown"; `squeue` itself gives up after about 11 s
FRESH_S = 2.0  # for which an answer is kept, at least
LAZY_S = 30.0  # and at most, while nothing changes
SILENCE_S = 10.0  # for which a controller that did not answer is not asked again
FIELDS = ("JobID", "State", "Reason", "StartTime", "EndTime", "TimeLeft", "NodeList", "RestartCnt", "exit_code",
          "Name")  # fmt: skip


@dataclass(frozen=True)
class SlurmJob:
    """One job as SLURM sees it."""

    id: str
    state: str  # as SLURM names it
    reason: str = ""
    start_s: float | None = None  # when it started, or is expected to
    end_s: float | None = None
    left_s: float | None = None  # until its time limit
    nodes: str = ""
    restarts: int = 0
    exit_code: str = ""
    cancelled_by: str = ""


def ask(argv: Sequence[str], timeout_s: float = PATIENCE_S) -> Completed:
    """Run one of SLURM's commands; a controller that does not answer raises `UnreachableError`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SACCT_", "SINFO_"))}
    try:
        with announced_wait(f"waiting for SLURM's controller (`{argv[0]}`)"):
            done = run(argv, timeout_s, {**env, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"})
    except UnreachableError:
        raise UnreachableError(
            f"SLURM's controller did not answer `{argv[0]}` within {timeout_s:g} s.", "Try again later."
        ) from None
    except CorralError:
        raise CorralError(
            f"there is no `{argv[0]}` on this machine: it is not a login node of a SLURM cluster.",
            LOGIN_NODE,
        ) from None
    if done.code and re.search(UNREACHABLE, done.stderr):
        raise UnreachableError(f"SLURM's controller does not answer: {_last_line(done)}", "Try again later.")
    return done


UNREACHABLE = (
    r"Unable to contact slurm controller|Connection refused|Socket timed out|Zero Bytes were transmitted"
    r"|Slurm backup controller in standby|Unable to establish controller|Resource temporarily unavailable"
    r"|slurm_persist_conn_open|Communication connection failure|Protocol authentication error|Unable to resolve"
)


def _last_line(done: Completed) -> str:
    return re.sub(r"^\w+: error: ", "", done.last_line) or "it said nothing"


# ------------------------------------------------------------------------------------------------------------ looking
@dataclass
class _CachedJobs:
    jobs: dict[str, SlurmJob]
    names: dict[str, str]  # of the jobs, by their numbers
    at_s: float
    same_since_s: float


_cache: dict[int, _CachedJobs] = {}  # by user
_asking = threading.Lock()  # deployments are read at once, and one answer is for all of them


def forget_answers(older_s: float = 0.0) -> None:
    """Let the next query ask SLURM, unless the answer is younger than this."""
    for cached in _cache.values():
        if time.monotonic() - cached.at_s >= older_s:
            cached.at_s = float("-inf")


def jobs(patience_s: float = LOOK_S, asked_since_s: float = float("-inf")) -> dict[str, SlurmJob]:
    """All of the user's jobs that the controller knows, ended ones included, by number.

    The answer is kept for two seconds, and longer (up to half a minute) while nothing changes. Whoever concludes from
    a job that is missing says since when (monotonic) SLURM must have been asked: a kept answer may be older than it.
    """
    with _asking:
        return _jobs(within_deadline(patience_s), asked_since_s)


def _jobs(patience_s: float, asked_since_s: float) -> dict[str, SlurmJob]:
    user, now = os.getuid(), time.monotonic()
    cached = _cache.get(user)
    if (
        cached
        and cached.at_s >= asked_since_s
        and now - cached.at_s < min(LAZY_S, max(FRESH_S, (cached.at_s - cached.same_since_s) / 20))
    ):
        return cached.jobs
    done = _ask_queue(user, patience_s)
    rows = [(job, name) for job, name in map(_job, done.stdout.splitlines()) if job]
    queue = {job.id: job for job, _ in rows}
    states = {id: (job.state, job.reason) for id, job in queue.items()}
    same = cached is not None and states == {id: (job.state, job.reason) for id, job in cached.jobs.items()}
    names = {job.id: name for job, name in rows}
    _cache[user] = _CachedJobs(queue, names, now, cached.same_since_s if same and cached else now)
    return queue


# when the controller last did not answer, and how long it was waited for
_silent: list[tuple[float, float, UnreachableError]] = []


def _ask_queue(user: int, patience_s: float) -> Completed:
    """The queue as text; a controller that just did not answer is not asked again for every deployment of a list."""
    if _silent and time.monotonic() - _silent[-1][0] < SILENCE_S and patience_s <= _silent[-1][1]:
        raise _silent[-1][2]
    fields = ",".join(f"{name}:|" for name in FIELDS)
    try:
        done = ask(["squeue", "--noheader", f"--user={user}", "--states=all", f"--Format={fields}"], patience_s)
    except UnreachableError as error:
        _silent[:] = [(time.monotonic(), patience_s, error)]
        raise
    _silent.clear()
    return done.or_raise("SLURM's queue could not be read")


def _job(line: str) -> tuple[SlurmJob | None, str]:
    """A line of the queue as a job and its name, which comes last because it may hold any character."""
    values = [value.strip() for value in line.split("|", len(FIELDS) - 1)]
    if len(values) < len(FIELDS) or not values[0]:
        return None, ""
    id, state, reason, start, end, left, nodes, restarts, code, name = values
    job = SlurmJob(
        id=id,
        state=state,
        reason="" if reason == "None" else reason,
        start_s=_moment(start),
        end_s=_moment(end),
        left_s=time_limit_s(left),
        nodes="" if nodes == "(null)" else nodes,
        restarts=int(restarts) if restarts.isdigit() else 0,
        exit_code=code,
    )
    return job, name.removesuffix("|")


def launch_in(name: str) -> str:
    """The launch id that a job's name carries; empty for a job of somebody else."""
    match = re.search(r"\.([0-9a-f]{16})$", name)
    return match[1] if match else ""


def jobs_of_launch(launch_id: str, since_s: float | None, patience_s: float = LOOK_S) -> list[str]:
    """The jobs that carry a launch id, oldest first. With `since_s`, the accounting is asked, too, if need be.

    A controller that does not answer is an error: a job may be there.
    """
    if not launch_id:
        raise DataError("the launch id of this deployment cannot be read, so its jobs cannot be found.", RESTORE)
    carried = launches_in_queue(patience_s, time.monotonic())
    found = sorted((id for id, launch in carried.items() if launch == launch_id and id.isdigit()), key=int)
    return found or ([] if since_s is None else _recorded_jobs(launch_id, since_s))


def launches_in_queue(patience_s: float = PATIENCE_S, asked_since_s: float = float("-inf")) -> dict[str, str]:
    """The launch ids that jobs of the queue carry, by the jobs' numbers."""
    jobs(patience_s, asked_since_s)
    return {id: carried for id, name in _cache[os.getuid()].names.items() if (carried := launch_in(name))}


def script_of(id: str) -> Path:
    """The path of the batch script that a job was submitted with."""
    done = ask(["squeue", "--noheader", f"--jobs={id}", "--states=all", "--Format=Command:|"])
    return Path(done.or_raise(f"the script of job {id} could not be asked for").stdout.strip().removesuffix("|"))


def _recorded_jobs(launch_id: str, since_s: float) -> list[str]:
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_s))
    for source in ([], ["-c"]):
        with contextlib.suppress(CorralError):  # the queue has answered: nothing of it runs
            done = ask(["sacct", *source, "-n", "-P", "-S", since, "-o", "JobID,JobName"], LOOK_S)
            rows = [line.partition("|") for line in done.stdout.splitlines()] if done.code == 0 else []
            if found := [id for id, _, name in rows if id.isdigit() and launch_in(name) == launch_id]:
                return sorted(set(found), key=int)
    return []


def find_job(id: str, patience_s: float = LOOK_S) -> SlurmJob | None:
    """A job by its id, also one that the controller has forgotten; None when no record of it is left."""
    began_s = time.monotonic()
    job = jobs(patience_s).get(id) or jobs(patience_s, began_s).get(id)
    if job is not None and job.state != "CANCELLED":
        return job
    recorded = _recorded(id)
    if job is None:
        return recorded
    return SlurmJob(**{**vars(job), "cancelled_by": recorded.cancelled_by if recorded else ""})


def _recorded(id: str) -> SlurmJob | None:
    """A job from the accounting, or from the job-completion log."""
    fields = "State,ExitCode,NodeList,Start,End"
    for source in ([], ["-c"]):
        with contextlib.suppress(CorralError):  # neither is needed to serve a model
            argv = ["sacct", *source, "-n", "-P", "-X", "-j", id, "-o", fields]
            done = ask([word for word in argv if not (source and word == "-X")], within_deadline(LOOK_S))
            lines = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 4]
            if done.code == 0 and lines:
                state, code, nodes, start, end = lines[-1]
                word, _, by = state.partition(" by ")
                return SlurmJob(
                    id, word.strip(), start_s=_moment(start), end_s=_moment(end), nodes=nodes, exit_code=code,
                    cancelled_by=_user(by.strip()),
                )  # fmt: skip
    return None


def _user(text: str) -> str:
    if text.isdigit():
        with contextlib.suppress(KeyError):
            return pwd.getpwuid(int(text)).pw_name
        return f"user {text}"
    return text


def _moment(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):  # N/A, NONE, Unknown
        return None


# ------------------------------------------------------------------------------------------------------------- acting
SECRET = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)


def refuse_unknown(script: str) -> None:
    """Raise what sbatch would refuse for good (a reservation, an account, an option), before anything is fetched."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        done = ask(["sbatch", "--test-only", file.name])
    if done.code and any(re.search(pattern, done.stderr) for pattern, _ in (*_FOR_GOOD, *_UNKNOWN_OPTIONS)):
        raise _refused(done)


def _option_of(variable: str) -> str:
    """The option that a variable of the user's shell sets: it would override the script."""
    if not variable.startswith("SBATCH_"):
        return "none"
    name = variable.removeprefix("SBATCH_").lower().replace("_", "-")
    return "--" + {"timelimit": "time", "mem-per-node": "mem"}.get(name, name)


def submit(script: Path, *options: str, launch_id: str = "") -> str:
    """Submit a batch script; the id of the job. The error of a refusal has sbatch's own message.

    The job's name carries the launch id, by which it is found when this process ends before sbatch answers; an error
    with `queued: False` says that there is no job. A job inherits the environment of `sbatch`, without secrets and
    without what an outer job set. An interrupt while sbatch runs cancels the job that it may have submitted.
    """
    text = script.read_text(encoding="utf-8") if script.is_file() else ""
    name = re.search(r'^#SBATCH -{2}job-name="?([^"\n]*)', text, re.MULTILINE)
    named = [f"--job-name={name[1] if name else 'corral'}.{launch_id}"] if launch_id else []
    done = _run_sbatch(["sbatch", "--parsable", *named, *options, str(script)], _inherited(text))
    if done.code and re.search(UNREACHABLE, done.stderr):
        certain = {"queued": False} if re.search(r"connect failure|Connection refused", done.stderr) else {}
        text = f"SLURM's controller does not answer: {_last_line(done)}"
        raise UnreachableError(text, "Try again later.", **certain)
    if done.code:
        raise _refused(done)
    forget_answers()
    return _number(done.stdout)


def _inherited(text: str) -> dict[str, str]:
    """The environment for a job: no secrets, nothing of an outer job, nothing that the script sets itself."""
    env = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    env = {name: value for name, value in env.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    return {name: value for name, value in env.items() if f"#SBATCH {_option_of(name)}" not in text}


def _run_sbatch(command: list[str], env: dict[str, str]) -> Completed:
    try:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            umask=0o077,  # which the job inherits
            start_new_session=True,  # Ctrl-C must not reach sbatch: its output has the job's id
        )  # fmt: skip
    except FileNotFoundError:
        remedy = "Run Corral on a login node."
        raise CorralError("there is no `sbatch` on this machine.", remedy, queued=False) from None
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise UnreachableError(
            "SLURM's controller did not answer `sbatch` within 60 s.",
            "`corral status` finds the job where it was queued all the same.",
        ) from None
    except BaseException:
        out, _ = process.communicate(timeout=60)
        if process.returncode == 0:
            cancel(_number(out.decode()))
        raise
    return Completed(
        tuple(command), process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
    )


def _number(text: str) -> str:
    """The id in `123` or `123;cluster`, perhaps after lines of a site's own."""
    for line in reversed(text.strip().splitlines()):
        if match := re.fullmatch(r"(\d+)(;\S+)?", line.strip()):
            return match[1]
    raise CorralError(f"sbatch did not print a job id: {text.strip()[-200:]!r}", "Look with `squeue --me`.")


_FOR_GOOD = (
    (r"[Ii]nvalid partition", "`corral slurm partitions` lists them; name one with --partition."),
    (r"[Ii]nvalid account|account/partition combination", "Name one of yours with --account; `sshare` lists them."),
    (r"[Ii]nvalid qos", "Correct --slurm qos=…"),
    (r"[Rr]eservation", "`scontrol show reservation` lists them; correct --slurm reservation=…, or leave it out."),
    (r"[Ii]nvalid feature", "`corral slurm partitions` shows what nodes have; correct --slurm constraint=…"),
    (r"[Ii]nvalid license", "`scontrol show licenses` lists them; correct --slurm licenses=…"),
)
_UNKNOWN_OPTIONS = (
    (r"unrecognized option", "What Corral does not know of `--slurm KEY=VALUE` goes to sbatch: check the name."),
    (r"doesn't allow an argument", "It is a flag: give it without a value, as in `--slurm hold`."),
    (r"requires an argument", "Give it a value: --slurm KEY=VALUE."),
)
_SUBMIT_LIMIT = (
    "Your account or its quality of service allows no more jobs in the queue: wait until one of yours has ended"
    " (`squeue --me`), or name another --account. `sacctmgr show assoc` and `sacctmgr show qos` show the limits."
)
_REFUSALS = (
    *_FOR_GOOD,
    *_UNKNOWN_OPTIONS,
    (r"MaxSubmit|submit limit", _SUBMIT_LIMIT),
    (r"[Nn]ode configuration|not available|count specification", "`corral slurm partitions` shows what nodes have."),
    (r"time limit", "Ask for less with --time: `corral slurm partitions` shows the limits."),
)


def _refused(done: Completed) -> CorralError:
    lines = [re.sub(r"^sbatch: (error: )?", "", line) for line in done.stderr.strip().splitlines()]
    message = "; ".join(line for line in lines if line and not line.startswith("Try ")) or "it said nothing"
    remedy = next((remedy for pattern, remedy in _REFUSALS if re.search(pattern, done.stderr)), "")
    remedy = remedy or "`man sbatch` explains its options."
    return UsageError(f"sbatch refused the job: {message}.", remedy, queued=False)


def cancel(id: str, signal: str = "", patience_s: float = PATIENCE_S) -> None:
    """End a job, or send a signal to the tasks of its steps; a job that has ended already is no error."""
    done = ask(["scancel", *([f"--signal={signal}"] if signal else []), id], patience_s)
    forget_answers()
    if done.code and not re.search(r"Invalid job id|already completed|Job/step", done.stderr):
        raise CorralError(f"job {id} could not be cancelled: {_last_line(done)}", f"Try `scancel {id}` by hand.")
