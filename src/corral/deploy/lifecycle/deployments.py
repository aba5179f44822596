"""A deployment from its launch to its end: claim a name, launch, watch, stop; its ranks and its job.

State is computed, never trusted: the journal says what the agent last wrote, the target says whether the agent still
runs, and only the two together make a state. A journal that ends in "ready" without a running agent is a failure, or,
after a reboot, "stopped: the machine restarted".
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from corral.base.errors import ConflictError, CorralError, DataError, LaunchError, UnreachableError, UsageError
from corral.base.files import write_atomic
from corral.base.home import deployments_dir
from corral.base.lock import exclusive_lock
from corral.base.processes import Identity
from corral.base.record import dump_json, load_json, save_record
from corral.base.shell import answering_soon
from corral.base.untrusted import parse_json
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.events import Event, Follower, read_events
from corral.deploy.deployment.folder import DeploymentFolder, all_folders
from corral.deploy.deployment.start_times import Expected, Stretch, course_of, ends_at_s, expected_of
from corral.deploy.deployment.state import ENDED, Patience, Reason, State
from corral.deploy.launch.render import LaunchSpec
from corral.deploy.lifecycle.status import heartbeat_age_s, traces_of, verdict
from corral.deploy.targets.base import AgentsStatus, Queue, Target, load_target
from corral.node.files import read_json
from corral.node.processes import marked

if TYPE_CHECKING:  # reading a deployment does not need the planner
    from corral.plan.contract import Plan


AT_ONCE = 16  # deployments whose status is asked for
STAGING_PATIENCE_S = 60.0  # for a command that is staging to give up


@dataclass(frozen=True)
class Record:
    """What was launched, as kept in the deployment's folder."""

    name: str
    launch_id: str
    model: str
    served_name: str
    target: str
    created_s: float
    created_by: Identity
    engine: str = ""  # known once staged
    target_options: dict[str, Any] = field(default_factory=dict)  # what makes the target again: hosts, a partition, …
    kind: str = ""  # the key under which the length of its start is remembered (see `start_times`)
    words: tuple[str, ...] = ()  # the arguments of the `corral up` that made it
    task: str = "generate"  # generate | embed | classify | rerank | transcribe


@dataclass(frozen=True)
class Timings:
    """Seconds from the launch to each state; None when it was not reached."""

    loading_s: float | None = None
    ready_s: float | None = None
    ended_s: float | None = None


@dataclass(frozen=True)
class Status:
    """A deployment as it is now."""

    name: str
    state: State
    reason: Reason | None
    text: str
    remedy: str
    phase: str
    done: int | None
    total: int | None
    model: str
    engine: str
    target: str
    created_s: float
    since_s: float  # wall-clock time of the last change of state
    endpoint: Endpoint | None
    timings: Timings
    phase_since_s: float = 0.0  # wall-clock time at which the phase began
    phase_ends_s: float | None = None  # wall-clock time at which it should end, by its progress
    expected: Expected | None = None  # how long the phase usually takes
    restarts: int = 0
    observed: dict[str, Any] = field(default_factory=dict)
    last_state: State | None = None  # of one that is unknown: as it was last read
    last_read_s: float | None = None  # wall-clock time of that reading
    task: str = "generate"


@dataclass(frozen=True)
class RankMember:
    """One rank of a deployment."""

    rank: int
    node: str  # by its host name, once that is known
    gpus: int  # that it uses there
    joined: bool  # whether its agent runs, or ran


@dataclass(frozen=True)
class HeldJob:
    """The job of a scheduler that a deployment runs in."""

    id: str
    drains_s: float | None = None  # wall-clock time at which it begins to drain; None: not known yet
    submitted_s: float | None = None


def claim(record: Record, on_wait: Callable[[str], None], key: str = "") -> DeploymentFolder:
    """Take a name for a new deployment, with this key or a new one; refuse it while another deployment holds it."""
    name = record.name
    folder = DeploymentFolder.of(name)
    with exclusive_lock(deployments_dir() / f".{folder.path.name}.lock", on_wait):
        if folder.record.is_file():
            _refuse_living(folder)
        folder.create(key)
        save_record(folder.record, record)
    return folder


def _refuse_living(folder: DeploymentFolder) -> None:
    """Only an ended deployment frees its name, and only when nothing of it is left."""
    current = status(folder)
    before = load_json(Record, folder.record)
    if current.state not in ENDED:
        who = f"process {before.created_by.pid} on {before.created_by.host}"
        name = shlex.quote(before.name)
        raise ConflictError(
            f"{before.name!r} is already {current.state}, started by {who}.",
            f"Use it (`corral status {name}`), end it (`corral down {name}`), or choose another name.",
            name=before.name,
            state=current.state.value,
            endpoint=current.endpoint.base_url if current.endpoint else None,
        )
    if not target_of(before).stop(folder, before.launch_id, 20):
        raise ConflictError(
            f"processes of the previous {before.name!r} are still running and cannot be stopped from here.",
            "Run `corral down` on the machine it ran on, or choose another name.",
        )


def launch(spec: LaunchSpec, plan: Plan, target: Target, record: Record, folder: DeploymentFolder) -> None:
    """Write down what will run, then start it."""
    write_atomic(folder.plan, dump_json(plan))
    write_atomic(folder.launch, dump_json(spec))
    if spec.base_url:  # otherwise the head writes it, once it knows its address
        write_atomic(folder.endpoint, dump_json(Endpoint(spec.base_url, spec.served_name, str(folder.key))))
    save_record(folder.record, replace(record, engine=spec.engine))
    target.start(spec, folder)


def status(folder: DeploymentFolder) -> Status:
    """The status of a deployment, from its journal and its target."""
    record = load_json(Record, folder.record)
    target = target_of(record)
    target.refresh(folder)
    return _combine(folder, record, read_events(folder.rank(0).events), target.agents(folder))


def target_of(record: Record) -> Target:
    """The target a deployment was started on, with the same nodes."""
    return load_target(record.target, record.target_options)


def plan_of(folder: DeploymentFolder) -> Plan | None:
    """The plan a deployment was started with; None where there is none, or it cannot be read."""
    from corral.plan.contract import Plan

    with contextlib.suppress(CorralError, OSError):
        return load_json(Plan, folder.plan)
    return None


def statuses(folders: Sequence[DeploymentFolder] | None = None) -> list[Status]:
    """These deployments, or all of this home, asked at once; one that cannot be read is unknown, and hides none."""

    def read(folder: DeploymentFolder) -> Status:
        try:
            return status(folder)
        except (CorralError, OSError) as error:
            return unreadable(folder, error)

    asked = all_folders() if folders is None else folders
    with ThreadPoolExecutor(AT_ONCE) as workers:  # a context each: they have the deadline of this command
        return [task.result() for task in [workers.submit(copy_context().run, read, folder) for folder in asked]]


def unreadable(folder: DeploymentFolder, error: Exception) -> Status:
    """The status of a deployment whose files cannot be read."""
    remedy = f"Delete {folder.path} if nothing of it runs."
    return Status(
        folder.name, State.UNKNOWN, None, str(error), remedy, "unknown", None, None, "-", "-", "-", 0.0, 0.0, None,
        Timings(),
    )  # fmt: skip


def _combine(folder: DeploymentFolder, record: Record, events: list[Event], agents: AgentsStatus) -> Status:
    states = [event for event in events if event.kind == "state"]
    last = states[-1] if states else None
    since = last.time_s if last else record.created_s
    state, reason, text, remedy = verdict(folder, record.name, record.launch_id, record.created_by, last, agents)
    journal = read_events(folder.staging) if state is State.STAGING else events
    phases = [event for event in journal if event.kind in ("phase", "state")]
    phase = phases[-1] if phases else None
    course = course_of(journal)
    return Status(
        name=record.name,
        state=state,
        reason=reason,
        text=text,
        remedy=remedy,
        phase=str(phase.get("phase") or phase.get("state")) if phase else state.value,
        done=phase.get("done") if phase else None,
        total=phase.get("total") if phase else None,
        model=record.served_name,
        engine=record.engine,
        target=record.target,
        created_s=record.created_s,
        since_s=since,
        endpoint=endpoint_of(folder, state),
        timings=_timings(states),
        phase_since_s=course[-1].since_s if course else since,
        phase_ends_s=ends_at_s(journal),
        expected=_phase_expected(folder, state, course, journal),
        restarts=sum(event.kind == "restart" for event in events),
        observed={key: value for event in events if event.kind == "observed" for key, value in event.details.items()},
        last_state=State(last.get("state")) if last and state is State.UNKNOWN else None,
        last_read_s=time.time() - heartbeat_age_s(folder) if last and state is State.UNKNOWN else None,
        task=record.task,
    )


def _phase_expected(
    folder: DeploymentFolder, state: State, course: Sequence[Stretch], journal: Sequence[Event]
) -> Expected | None:
    """How long the current phase usually takes; None for a deployment that serves or has ended."""
    if not course or state in ENDED or state in (State.READY, State.DRAINING):
        return None
    return expected_of(folder, journal if state is State.STAGING else None).get(course[-1].phase)


def endpoint_of(folder: DeploymentFolder, state: State) -> Endpoint | None:
    """Where a deployment in this state answers."""
    if state in ENDED or state is State.QUEUED or not folder.endpoint.is_file():
        return None
    return load_json(Endpoint, folder.endpoint)


def _timings(states: list[Event]) -> Timings:
    reached: dict[str, float] = {}
    for event in states:
        name = "ended" if event.get("state") in ENDED else str(event.get("state"))
        reached[name] = event.elapsed_s
    return Timings(reached.get(State.LOADING), reached.get(State.READY), reached.get("ended"))


def watch(folder: DeploymentFolder, poll_s: float = 0.1) -> Iterator[Event | Status]:
    """Yield events as they come, and at the end (ready, or ended) the final status."""
    follower = Follower(folder.rank(0).events)
    checked, text = 0.0, ""
    while True:
        settled = False
        for event in follower.new():
            yield event
            settled = event.kind == "state" and event.get("state") in (State.READY, *ENDED)
        if settled or time.monotonic() - checked > 2:
            checked = time.monotonic()
            now = status(folder)
            if now.state is State.READY or now.state in ENDED or now.reason is Reason.CANNOT_START:
                yield now
                return
            if now.text and now.text != text:  # what only the target knows: a place in a queue
                text = now.text
                yield Event(time.time(), "status", details={"state": now.state.value, "text": text})
        time.sleep(poll_s)


def stop(folder: DeploymentFolder) -> Status:
    """End a deployment and make sure that nothing of it is left."""
    try:
        record = load_json(Record, folder.record)
        with answering_soon():
            before = status(folder)
    except (DataError, UsageError, OSError) as error:
        return _stop_unreadable(folder, error)
    if before.state is State.STAGING:
        return _stop_staging(folder, record)
    if not target_of(record).stop(folder, record.launch_id, _grace_s(folder)):
        raise LaunchError(
            f"processes of {record.name!r} could not be ended from here.",
            "Run `corral down` on the machine it runs on, or ask its administrator.",
        )
    folder.tunnel.unlink(missing_ok=True)  # the process that holds it ends then
    return status(folder)


def _stop_unreadable(folder: DeploymentFolder, error: Exception) -> Status:
    """End the processes with the launch's id, where files of the deployment cannot be read."""
    why = unreadable(folder, error)
    traces = traces_of(folder)
    if not traces.launch_id:
        raise DataError(
            f"{why.text} No other file of {folder.name!r} records its launch id, so its processes cannot be found.",
            f"If its engine runs, end it by hand; then delete {folder.path}.",
        ) from error
    try:
        target = load_target(traces.target or "local", traces.target_options or traces.hosts)
    except CorralError:
        target = load_target("local")
    processes = marked(traces.launch_id, [str(rank.engine) for rank in folder.ranks()])
    where = ", ".join(traces.nodes) or "its nodes"
    by_hand = f"On {where}, end the processes with CORRAL_LAUNCH={traces.launch_id} in their environment."
    try:
        ended = target.stop(folder, traces.launch_id, Patience().grace_s)
    except UnreachableError as unreachable:
        raise UnreachableError(f"{why.text} {unreachable.message}", by_hand) from error
    elsewhere = f"; what ran on {where} was ended" if not target.HERE else ""
    text = f"{why.text} Looked for its launch id {traces.launch_id}: {_counted(processes)}{elsewhere}"
    if not ended:
        raise LaunchError(
            f"{text}; not all could be ended from here.", "Run `corral down` on the machine it runs on."
        )
    if traces.target and target.name != traces.target:
        raise LaunchError(
            f"{text}; but it was started with the target {traces.target}, whose machines are no longer known.",
            by_hand,
        )
    folder.tunnel.unlink(missing_ok=True)
    return replace(why, state=State.STOPPED, reason=Reason.REQUESTED, text=text, target=target.name)


def _counted(processes: set[int]) -> str:
    if not processes:
        return "no process of it was found on this machine"
    noun = "process" if len(processes) == 1 else "processes"
    return f"{noun} {', '.join(map(str, sorted(processes)))} of this machine ended"


def _grace_s(folder: DeploymentFolder) -> float:
    """How long its engines may take to end."""
    with contextlib.suppress(OSError, CorralError, KeyError, TypeError, ValueError):  # not launched, or damaged
        return float(parse_json(folder.launch.read_bytes(), str(folder.launch))["patience"]["grace_s"])
    return Patience().grace_s


def _stop_staging(folder: DeploymentFolder, record: Record) -> Status:
    """Ask the command that is staging it to give up, and wait until it has."""
    before = status(folder)
    folder.stop.touch(mode=0o600)
    deadline = time.monotonic() + STAGING_PATIENCE_S
    while time.monotonic() < deadline:
        if folder.rank(0).agent.exists() or folder.job.exists():  # it has started meanwhile: an ordinary stop
            return stop(folder)
        if not folder.record.is_file() or record.created_by.is_gone():
            if folder.started.exists():  # something of it may run
                return stop(folder)
            return replace(before, state=State.STOPPED, reason=Reason.REQUESTED)
        time.sleep(0.1)
    raise LaunchError(
        f"{record.name!r} is still being made by process {record.created_by.pid}; it will give up before it starts.",
        f"To end it at once: kill {record.created_by.pid}",
    )


def members(folder: DeploymentFolder) -> tuple[RankMember, ...]:
    """Its ranks, head first; empty before it is launched."""
    names = traces_of(folder).nodes
    hosts = read_json(str(folder.path / "rendezvous.json")).get("names")  # of a scheduler's nodes, once they run
    if isinstance(hosts, list) and len(hosts) == len(names):
        names = tuple(map(str, hosts))
    plan = plan_of(folder)
    gpus = (plan.gpus or 0) if plan else 0
    each = -(-gpus // len(names)) if names else 0
    return tuple(RankMember(rank, name, each, folder.rank(rank).agent.exists()) for rank, name in enumerate(names))


def job_of(folder: DeploymentFolder) -> str:
    """The id of its job; empty without one. Raises while a scheduler cannot be asked for one that may be there."""
    target = target_of(load_json(Record, folder.record))
    return target.job_of(folder) if isinstance(target, Queue) else ""


def adoptions(folder: DeploymentFolder) -> list[Event]:
    """What was found running of it without a record."""
    return [event for event in read_events(folder.staging) if event.kind == "adopted"]


def held_job(folder: DeploymentFolder) -> HeldJob | None:
    """The job in the queue; None for a target without one. A scheduler that does not answer leaves its end open."""
    target, id = target_of(load_json(Record, folder.record)), ""
    with contextlib.suppress(UnreachableError):
        id = job_of(folder)
    if not id or not isinstance(target, Queue):
        return None
    with contextlib.suppress(CorralError, OSError):
        lease = target.lease(folder)
        return HeldJob(id, lease.last_request_s, lease.submitted_s) if lease else HeldJob(id)
    return HeldJob(id)
