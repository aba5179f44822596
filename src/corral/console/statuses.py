"""Deployments and fleets as rows of the Fleet view, each with its start as a line of phases.

Files are read as seldom as they allow. Asking once costs some stats: only a deployment whose journals or records
changed is read anew, or one that runs and was last read some seconds ago, because its agent may have died and its
place in a queue may have changed. Each is read in a thread of its own, so that a host that does not answer holds up
no other row. A row that did not change is the same object as before.

A start is shown as phases: when each began and ended, how long it usually takes, and when the server should be ready.
What happened before there was an agent comes from the command that made the deployment (`staging.jsonl`): the engine,
the model; then a queue, from when its job was submitted; then the agent's journal.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError
from corral.base.masking import masked_argv
from corral.base.record import load_json, to_json
from corral.console.commands import line_of
from corral.deploy.deployment.events import Event, read_events
from corral.deploy.deployment.folder import DeploymentFolder, all_folders
from corral.deploy.deployment.start_times import Expected, Phase, course_of, ends_at_s, expected_of
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle.deployments import (
    HeldJob,
    RankMember,
    Record,
    Status,
    held_job,
    members,
    plan_of,
    status,
    target_of,
    unreadable,
)
from corral.deploy.targets.base import Queue
from corral.serve.fleet.chain import chain_of
from corral.serve.fleet.record import FleetFolder, all_fleets
from corral.serve.fleet.status import fleet_status

ORDER = [str(phase.value) for phase in Phase]
STAGING, QUEUE = State.STAGING.value, State.QUEUED.value
BEFORE = (STAGING, Phase.INSTALLING, Phase.MEASURING, Phase.FETCHING)
SHORTEST_S = 1.0  # of what is done before: an engine that is there already is no phase


@dataclass(frozen=True)
class Start:
    """Everything that is known about a start."""

    state: State
    events: Sequence[Event]  # of its agent
    expected: Mapping[str, Expected]
    created_s: float
    submitted_s: float | None = None  # to a queue
    staged: Sequence[Event] = ()  # of the command that made it
    queues: bool = False  # whether a queue comes between the two

    @property
    def latest(self) -> Sequence[Event]:
        """The journal with the current phase."""
        return self.events or self.staged


@dataclass(frozen=True)
class ShownPhase:
    """One piece of the line; `until_s` is None while it lasts, both times are None of what is still to come."""

    phase: str
    since_s: float | None
    until_s: float | None
    expected_s: float | None = None
    remembered: bool = False
    done: int | None = None
    total: int | None = None
    ends_s: float | None = None  # when it should be over, by how far it is
    text: str = ""  # what of it is being done


def phases_of(start: Start) -> tuple[ShownPhase, ...]:
    """Past phases, the current one, and while it starts those to come."""
    begins = _begins(start)
    shown = [_past(start, name, since, until) for (name, since), (_, until) in itertools.pairwise(begins)]
    last, since = begins[-1]
    if start.state in ENDED and last not in [one.value for one in ENDED]:
        final = max((event.time_s for event in start.latest), default=since)
        shown.append(_past(start, last, since, final))
    else:
        shown.append(_now(start, last, since))
    if start.state not in (State.READY, State.DRAINING, *ENDED) and last != State.READY:
        shown += [_past(start, name, None, None) for name in _to_come(last, start)]
    return tuple(one for one in shown if not _is_nothing(one))


def _begins(start: Start) -> list[tuple[str, float]]:
    """Each phase and when it began."""
    begins: list[tuple[str, float]] = [(STAGING, start.created_s)]
    silent = not start.events and start.submitted_s is None  # its agent has written nothing yet
    before = (*BEFORE, Phase.STARTING) if silent else BEFORE
    begins += [(one.phase, one.since_s) for one in course_of(start.staged) if one.phase in before]
    if start.submitted_s is not None:
        begins.append((QUEUE, max(start.submitted_s, start.created_s)))
    course = [one for one in course_of(start.events) if one.phase not in (State.QUEUED, State.STAGING)]
    return begins + [(one.phase, one.since_s) for one in course]


def _is_nothing(one: ShownPhase) -> bool:
    if one.phase not in BEFORE or one.since_s is None or one.until_s is None:
        return False
    return one.until_s - one.since_s <= SHORTEST_S


def _past(start: Start, name: str, since: float | None, until: float | None) -> ShownPhase:
    usual = start.expected.get(name)
    return ShownPhase(name, since, until, usual.seconds if usual else None, bool(usual and usual.remembered))


def _now(start: Start, name: str, since: float) -> ShownPhase:
    """The current phase and its progress."""
    reported = [
        one for one in start.latest if one.kind == "phase" and one.get("phase") == name and one.time_s >= since
    ]
    counted = [one for one in reported if one.get("total")]
    done, total = (counted[-1].get("done"), counted[-1].get("total")) if counted else (None, None)
    text = str(reported[-1].get("text", "")) if reported else ""
    past = _past(start, name, since, None)
    ends_s = ends_at_s(start.latest) if counted else None
    return ShownPhase(name, since, None, past.expected_s, past.remembered, done, total, ends_s, text)


def _to_come(now: str, start: Start) -> list[str]:
    """The phases expected after this one, in order; the last is ready."""
    at = ORDER.index(now) if now in ORDER else ORDER.index(Phase.FETCHING)
    queue = [QUEUE] if start.queues and now in BEFORE else []
    return [*queue, *(name for name in ORDER[at + 1 :] if name in start.expected or name == Phase.READY)]


def ready_at_s(phases: Sequence[ShownPhase]) -> float | None:
    """When it should be ready, by usual times and its progress; None where that is not known.

    How long a queue is, is not known; nor, before the engine is installed, whether the model has to be fetched.
    """
    now = next((one for one in phases if one.until_s is None and one.since_s is not None), None)
    to_come = [one for one in phases if one.since_s is None and one.phase != Phase.READY]
    unknown = (Phase.READY, QUEUE, STAGING, Phase.INSTALLING, Phase.MEASURING)
    if now is None or now.since_s is None or now.phase in unknown:
        return None
    if any(one.expected_s is None for one in to_come):
        return None
    usual_s = now.since_s + now.expected_s if now.expected_s is not None else None
    ends_s = now.ends_s if now.ends_s is not None else usual_s
    return None if ends_s is None else ends_s + sum(one.expected_s or 0.0 for one in to_come)


def file_stamp(path: str | Path) -> tuple[int, int]:
    """The time and size of a file, which show whether it changed; zeros where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - hundreds a second, most of them by plain text
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)


LIVING_S = 5.0  # after which a living deployment is asked again
ENDED_S = 60.0
AT_ONCE = 8
Row = dict[str, Any]
Stamp = tuple[Any, ...]


@dataclass
class _Seen:
    stamp: Stamp
    at_s: float
    row: Row
    task: asyncio.Task[None] | None = None
    status: Status | None = None  # that the row was made from
    whole_s: float = -1e9  # when all of it was read


class DeploymentRows:
    """The rows of all deployments and fleets, kept up to date."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deployments: dict[str, _Seen] = {}
        self._fleets: dict[str, _Seen] = {}
        self._turns: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def read(self) -> dict[str, Row]:
        """The rows by their keys, in order; waits up to a second for those that are read the first time."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._turns = loop, asyncio.Semaphore(AT_ONCE)
        folders, stamps = await asyncio.to_thread(_stamped)
        fleets = await asyncio.to_thread(all_fleets)
        deployments = {f"d:{one.name}": one for one in folders}
        first = [self._consider(self._deployments, key, stamps[key], one) for key, one in deployments.items()]
        fleets_by_key = {f"f:{one.path.name}": one for one in fleets}
        first += [self._consider(self._fleets, key, (), one) for key, one in fleets_by_key.items()]
        waited = [task for task in first if task is not None]
        if waited:
            await asyncio.wait(waited, timeout=0.9)
        for seen, known in ((self._deployments, deployments), (self._fleets, fleets_by_key)):
            for key in [key for key in seen if key not in known]:
                del seen[key]
        return {
            key: table[key].row
            for table, order in ((self._fleets, fleets_by_key), (self._deployments, deployments))
            for key in order
            if key in table
        }

    def _consider(
        self, table: dict[str, _Seen], key: str, stamp: Stamp, folder: DeploymentFolder | FleetFolder
    ) -> asyncio.Task[None] | None:
        """Begin to read a row again where that is due."""
        now, seen = self._clock(), table.get(key)
        if seen is None:
            kind = "fleet" if isinstance(folder, FleetFolder) else "deployment"
            row = {"key": key, "kind": kind, "name": folder.name, "state": "unknown", "text": "…", "ended": False}
            seen = table[key] = _Seen((), -1e9, {**row, "phases": [], "nodes": [], "members": [], "ranks": 1})
        if seen.task is not None and not seen.task.done():
            return None
        patience_s = ENDED_S if seen.row.get("ended") else LIVING_S
        if seen.stamp == stamp and now - seen.at_s < patience_s:
            return None
        if seen.stamp != stamp or now - seen.whole_s > ENDED_S:
            seen.status, seen.whole_s = None, now
        seen.stamp, seen.at_s = stamp, now
        seen.task = asyncio.create_task(self._read_row(seen, key, folder))
        return seen.task

    async def _read_row(self, seen: _Seen, key: str, folder: DeploymentFolder | FleetFolder) -> None:
        assert self._turns is not None
        async with self._turns:
            if isinstance(folder, FleetFolder):
                row: Row | None = await asyncio.to_thread(fleet_row, folder)
            else:
                seen.status, row = await asyncio.to_thread(deployment_row, folder, seen.status)
        if row is not None and {"key": key, **row} != seen.row:
            seen.row = {"key": key, **row}


def _stamped() -> tuple[list[DeploymentFolder], dict[str, Stamp]]:
    folders = all_folders()
    return folders, {f"d:{one.name}": _stamp(one) for one in folders}


def _stamp(folder: DeploymentFolder) -> Stamp:
    """A value that changes whenever something happened to a deployment."""
    path = str(folder.path)
    head = ("rank0/events.jsonl", "rank0/agent.json")
    names = ("deployment.json", *head, "job.json", "endpoint.json", "staging.jsonl")
    return tuple(file_stamp(f"{path}/{name}") for name in names)


def deployment_row(folder: DeploymentFolder, before: Status | None = None) -> tuple[Status | None, Row | None]:
    """One deployment with everything that its card shows, without its key; no row where it did not change."""
    try:
        now = status(folder)
        if now == before:
            return now, None
        record = load_json(Record, folder.record)
        job, nodes = held_job(folder), members(folder)
    except (CorralError, OSError) as error:
        return None, _row(unreadable(folder, error), None, None, (), folder)
    return now, _row(now, record, job, nodes, folder)


def _row(
    now: Status, record: Record | None, job: HeldJob | None, nodes: tuple[RankMember, ...], folder: DeploymentFolder
) -> Row:
    phases = phases_of(_start(now, record, job, folder)) if record else ()
    document = to_json(now)
    del document["endpoint"], document["timings"], document["expected"]
    argv = restart_argv(record) if record else None
    return {
        **document,
        "kind": "deployment",
        "ended": now.state in ENDED,
        "url": now.endpoint.base_url if now.endpoint else None,
        "ready_s": now.timings.ready_s,
        "phases": to_json(phases),
        "ready_at_s": ready_at_s(phases),
        "job": to_json(job),
        "nodes": to_json(nodes),
        "memory": _memory(folder),
        "ranks": len(folder.ranks()),
        "stop": None if now.state in ENDED else line_of(["down", now.name]),
        "restart": line_of(argv) if argv else None,
    }


def _memory(folder: DeploymentFolder) -> dict[str, Any] | None:
    """What the plan gives it on each GPU, or on the machine where there is none."""
    plan = plan_of(folder)
    if plan is None:
        return None
    planned = plan.memory
    return {
        "gpu": plan.inventory.gpu,
        "weights_bytes": planned.weights_bytes_per_gpu,
        "kv_bytes": max(0, planned.kv_cache_bytes_per_gpu),
        "budget_bytes": planned.budget_bytes_per_gpu,
        "total_bytes": plan.inventory.memory_bytes_per_gpu or plan.inventory.host_memory_bytes,
    }


def _start(now: Status, record: Record, job: HeldJob | None, folder: DeploymentFolder) -> Start:
    staged = read_events(folder.staging)
    return Start(
        state=now.state,
        events=read_events(folder.rank(0).events),
        expected=expected_of(folder, staged),
        created_s=now.created_s,
        submitted_s=job.submitted_s if job else None,
        staged=staged,
        queues=isinstance(target_of(record), Queue),
    )


def restart_argv(record: Record) -> list[str] | None:
    """The arguments that start it again as it was; None where they are not known, or would show a secret."""
    argv = list(record.words)
    if not argv or argv[0] != "up" or chain_of(record.name) != record.name:
        return None
    if list(masked_argv(argv)) != argv:
        return None
    own = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    deployments = any(word == "--name" or word.startswith("--name=") for word in own)
    return argv if deployments else ["up", "--name", record.name, *argv[1:]]


def fleet_row(folder: FleetFolder) -> Row:
    """A fleet, and the names of its members."""
    try:
        now = fleet_status(folder)
    except (CorralError, OSError) as error:
        text = str(error)
        return {"kind": "fleet", "name": folder.name, "state": "unknown", "text": text, "ended": False, "members": []}
    loads = {one.name: to_json(one.load) for one in now.members}
    return {
        "kind": "fleet",
        "name": now.name,
        "state": now.state.value,
        "ended": now.state in ENDED,
        "text": now.text,
        "warning": now.warning or None,
        "model": now.model,
        "least": now.least,
        "most": now.most,
        "wanted": now.wanted,
        "ready": now.ready,
        "running": now.running,
        "waiting": now.waiting,
        "created_s": now.created_s,
        "url": now.endpoint.base_url if now.endpoint else None,
        "members": [{"name": one.name, "leaving": one.leaving, "load": loads[one.name]} for one in now.members],
        "at_urls": [f"{one.name} ({one.load.judged.value})" for one in now.at_urls if one.load],
        "scale": line_of(["scale", now.name]),
        "stop": None if now.state in ENDED else line_of(["down", now.name]),
    }
