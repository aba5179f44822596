"""A deployment's life: launch, watch, wait, stop. The state machine over what agents write and targets know.

State is computed, never trusted: the journal says what the agent last wrote, the target says whether the agent still
runs, and only both together make a state. A journal that ends in "ready" without a living agent is a failure, or,
after a reboot, "stopped: the machine restarted".
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from corral.base.errors import ConflictError, CorralError, DataError, LaunchError, UnreachableError, UsageError
from corral.base.files import write_atomic
from corral.base.home import deployments_dir
from corral.base.lock import exclusive_lock
from corral.base.processes import Identity
from corral.base.record import dump_json, from_json, load_json
from corral.base.untrusted import parse_json
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.events import Event, Follower, read_events
from corral.deploy.deployment.folder import DeploymentFolder, all_folders
from corral.deploy.deployment.start_times import Expected, Stretch, course_of, ends_at_s
from corral.deploy.deployment.state import ENDED, Patience, Reason, State
from corral.deploy.launch.render import LaunchSpec
from corral.deploy.lifecycle.status import traces_of, verdict
from corral.deploy.targets.base import AgentsStatus, Target, load_target
from corral.node.agent.processes import marked

if TYPE_CHECKING:  # the planner is not needed to look at a deployment
    from corral.plan.contract import Plan


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
    kind: str = ""  # what the lengths of its start are remembered under (see `starts`)
    words: tuple[str, ...] = ()  # of the `corral up` that made it


@dataclass(frozen=True)
class Timings:
    """Seconds since the launch at which things were reached; None when they were not."""

    loading_s: float | None = None
    ready_s: float | None = None
    ended_s: float | None = None


@dataclass(frozen=True)
class Status:
    """A deployment as it stands now."""

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
    phase_ends_s: float | None = None  # wall-clock time at which it should be over, by how far it is
    expected: Expected | None = None  # how long the phase usually takes
    restarts: int = 0
    observed: dict[str, Any] = field(default_factory=dict)


def claim(record: Record, on_wait: Callable[[str], None]) -> DeploymentFolder:
    """Take a name for a new deployment; refuse it while another holds it, and say who."""
    name = record.name
    folder = DeploymentFolder.of(name)
    with exclusive_lock(deployments_dir() / f".{folder.path.name}.lock", on_wait):
        if folder.record.is_file():
            _refuse_living(folder)
        folder.create()
        write_atomic(folder.record, dump_json(record))
    return folder


def _refuse_living(folder: DeploymentFolder) -> None:
    """Only an ended deployment gives its name away, and only when nothing of it is left."""
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
    write_atomic(folder.record, dump_json(replace(record, engine=spec.engine)))
    target.start(spec, folder)


def status(folder: DeploymentFolder) -> Status:
    """How a deployment stands, from its journal and its target."""
    record = load_json(Record, folder.record)
    target = target_of(record)
    target.refresh(folder)
    return _combine(folder, record, read_events(folder.rank(0).events), target.agents(folder))


def target_of(record: Record) -> Target:
    """The target a deployment was started on, with the same nodes."""
    return load_target(record.target, record.target_options)


def plan_of(folder: DeploymentFolder) -> Plan | None:
    """The plan a deployment was started with; None where there is none, or it is of another version."""
    from corral.plan.contract import Plan

    try:
        return load_json(Plan, folder.plan)
    except (CorralError, OSError):
        return None


def expected_of(folder: DeploymentFolder, staged: Sequence[Event] | None = None) -> dict[str, Expected]:
    """How long the phases of its start usually take, as known when it was `staged` (its journal, where the caller has
    read it) and when it was launched."""
    found: dict[str, Expected] = {}
    for event in read_events(folder.staging) if staged is None else staged:
        found |= _expectations(event.get("expected"))
    with contextlib.suppress(OSError, CorralError, KeyError, TypeError):
        found |= _expectations(parse_json(folder.launch.read_bytes(), str(folder.launch))["expected"])
    return found


def _expectations(told: Any) -> dict[str, Expected]:
    with contextlib.suppress(CorralError, TypeError, AttributeError):
        return {str(phase): from_json(Expected, one) for phase, one in told.items()}
    return {}


def statuses() -> list[Status]:
    """Every deployment of this home; one whose files cannot be read is shown as unknown, and hides no other."""
    found = []
    for folder in all_folders():
        try:
            found.append(status(folder))
        except (CorralError, OSError) as error:
            found.append(unreadable(folder, error))
    return found


def unreadable(folder: DeploymentFolder, error: Exception) -> Status:
    why = str(error)
    remedy = f"Delete {folder.path} if nothing of it runs."
    return Status(
        folder.name, State.UNKNOWN, None, why, remedy, "unknown", None, None, "-", "-", "-", 0.0, 0.0, None, Timings()
    )


def _combine(folder: DeploymentFolder, record: Record, events: list[Event], agents: AgentsStatus) -> Status:
    states = [event for event in events if event.kind == "state"]
    last = states[-1] if states else None
    since = last.time_s if last else record.created_s
    state, reason, text, remedy = verdict(folder, record.name, record.created_by, last, agents)
    told = read_events(folder.staging) if state is State.STAGING else events
    phases = [event for event in told if event.kind in ("phase", "state")]
    phase = phases[-1] if phases else None
    course = course_of(told)
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
        endpoint=_endpoint(folder, state),
        timings=_timings(states),
        phase_since_s=course[-1].since_s if course else since,
        phase_ends_s=ends_at_s(told),
        expected=_phase_expected(folder, state, course, told),
        restarts=sum(event.kind == "restart" for event in events),
        observed={key: value for event in events if event.kind == "observed" for key, value in event.details.items()},
    )


def _phase_expected(
    folder: DeploymentFolder, state: State, course: Sequence[Stretch], told: Sequence[Event]
) -> Expected | None:
    """What the phase that it is in usually takes; nothing is expected of one that serves or has ended."""
    if not course or state in ENDED or state in (State.READY, State.DRAINING):
        return None
    return expected_of(folder, told if state is State.STAGING else None).get(course[-1].phase)


def _endpoint(folder: DeploymentFolder, state: State) -> Endpoint | None:
    if state in ENDED or state is State.QUEUED or not folder.endpoint.is_file():
        return None
    return load_json(Endpoint, folder.endpoint)


STAGING_PATIENCE_S = 60.0


def _timings(states: list[Event]) -> Timings:
    reached: dict[str, float] = {}
    for event in states:
        name = "ended" if event.get("state") in ENDED else str(event.get("state"))
        reached[name] = event.elapsed_s
    return Timings(reached.get(State.LOADING), reached.get(State.READY), reached.get("ended"))


def watch(folder: DeploymentFolder, poll_s: float = 0.1) -> Iterator[Event | Status]:
    """Events as they come, and at the end (ready, or ended) the final status."""
    follower = Follower(folder.rank(0).events)
    checked, said = 0.0, ""
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
            if now.text and now.text != said:  # what only the target knows: a place in a queue
                said = now.text
                yield Event(time.time(), "standing", details={"state": now.state.value, "text": said})
        time.sleep(poll_s)


def stop(folder: DeploymentFolder) -> Status:
    """End a deployment and make sure that nothing of it is left."""
    try:
        record = load_json(Record, folder.record)
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
    folder.tunnel.unlink(missing_ok=True)  # whoever holds it sees that
    return status(folder)


def _stop_unreadable(folder: DeploymentFolder, error: Exception) -> Status:
    """End what carries the launch's id, where files of the deployment cannot be read."""
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
    found = marked(traces.launch_id, [str(rank.engine) for rank in folder.ranks()])
    where = ", ".join(traces.nodes) or "its nodes"
    by_hand = f"On {where}, end the processes with CORRAL_LAUNCH={traces.launch_id} in their environment."
    try:
        ended = target.stop(folder, traces.launch_id, Patience().grace_s)
    except UnreachableError as unreachable:
        raise UnreachableError(f"{why.text} {unreachable.message}", by_hand) from error
    elsewhere = f"; what ran on {where} was ended" if target.name != "local" else ""
    told = f"{why.text} Looked for its launch id {traces.launch_id}: {_counted(found)}{elsewhere}"
    if not ended:
        raise LaunchError(
            f"{told}; not all could be ended from here.", "Run `corral down` on the machine it runs on."
        )
    if traces.target and target.name != traces.target:
        raise LaunchError(
            f"{told}; but it was started with the target {traces.target}, whose machines are no longer known.",
            by_hand,
        )
    folder.tunnel.unlink(missing_ok=True)
    return replace(why, state=State.STOPPED, reason=Reason.REQUESTED, text=told, target=target.name)


def _counted(found: set[int]) -> str:
    if not found:
        return "no process of it was found on this machine"
    numbers = ", ".join(map(str, sorted(found)))
    return f"{'process' if len(found) == 1 else 'processes'} {numbers} of this machine ended"


def _grace_s(folder: DeploymentFolder) -> float:
    """How long its engines have to end by themselves."""
    with contextlib.suppress(OSError, CorralError, KeyError, TypeError, ValueError):  # not launched, or damaged
        return float(parse_json(folder.launch.read_bytes(), str(folder.launch))["patience"]["grace_s"])
    return Patience().grace_s


def _stop_staging(folder: DeploymentFolder, record: Record) -> Status:
    """Ask the command that is making it to give up, and wait until it has."""
    before = status(folder)
    folder.stop.touch(mode=0o600)
    deadline = time.monotonic() + STAGING_PATIENCE_S
    while time.monotonic() < deadline:
        if folder.rank(0).agent.exists() or folder.job.exists():  # it got past its last look: an ordinary stop, then
            return stop(folder)
        if not folder.record.is_file() or record.created_by.is_gone():
            return replace(before, state=State.STOPPED, reason=Reason.REQUESTED)
        time.sleep(0.1)
    raise LaunchError(
        f"{record.name!r} is still being made by process {record.created_by.pid}; it will give up before it starts.",
        f"To end it at once: kill {record.created_by.pid}",
    )
