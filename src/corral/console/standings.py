"""Every deployment as a row of the Fleet view, read as seldom as its files allow.

A look costs some stats. Only a deployment whose journals or records changed is read anew, or one that lives and was
last asked some seconds ago: its agent may have died without a word, its place in a queue may be another. Each is read
in a thread of its own turn, so that a host that does not answer holds up no other row. A row that did not change is
the same object as before.

Whether a file has changed since it was last looked at.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError
from corral.base.record import load_json, to_json
from corral.console.commands import line_of
from corral.console.phases import Start, phases_of, ready_at_s
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder, all_folders
from corral.deploy.deployment.state import ENDED
from corral.deploy.launch.paste import is_secret_name
from corral.deploy.lifecycle.deployments import Record, Status, expected_of, status, target_of, unreadable
from corral.deploy.lifecycle.members import HeldJob, RankMember, held_job, members
from corral.deploy.targets.base import Queue
from corral.serve.fleet.chain import chain_of
from corral.serve.fleet.record import FleetFolder, all_fleets
from corral.serve.fleet.status import fleet_status


def mark_of(path: str | Path) -> tuple[int, int]:
    """Its time and its size; zeros where there is none."""
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


class Standings:
    """What is known of all deployments and fleets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deployments: dict[str, _Seen] = {}
        self._fleets: dict[str, _Seen] = {}
        self._turns: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def look(self) -> dict[str, Row]:
        """The rows by their keys, in order; waits a moment for those that are read the first time."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._turns = loop, asyncio.Semaphore(AT_ONCE)
        folders, stamps = await asyncio.to_thread(_stamped)
        fleets = await asyncio.to_thread(all_fleets)
        named = {f"d:{one.name}": one for one in folders}
        first = [self._consider(self._deployments, key, stamps[key], one) for key, one in named.items()]
        kept = {f"f:{one.path.name}": one for one in fleets}
        first += [self._consider(self._fleets, key, (), one) for key, one in kept.items()]
        waited = [task for task in first if task is not None]
        if waited:
            await asyncio.wait(waited, timeout=0.9)
        for seen, known in ((self._deployments, named), (self._fleets, kept)):
            for key in [key for key in seen if key not in known]:
                del seen[key]
        return {
            key: table[key].row
            for table, order in ((self._fleets, kept), (self._deployments, named))
            for key in order
            if key in table
        }

    def _consider(
        self, table: dict[str, _Seen], key: str, stamp: Stamp, folder: DeploymentFolder | FleetFolder
    ) -> asyncio.Task[None] | None:
        """Begin to read a row anew where that is due."""
        now, seen = self._clock(), table.get(key)
        if seen is None:
            seen = table[key] = _Seen((), -1e9, {"key": key, "name": folder.name, "state": "unknown", "text": "…"})
        if seen.task is not None and not seen.task.done():
            return None
        patience_s = ENDED_S if seen.row.get("ended") else LIVING_S
        if seen.stamp == stamp and now - seen.at_s < patience_s:
            return None
        if seen.stamp != stamp or now - seen.whole_s > ENDED_S:
            seen.status, seen.whole_s = None, now
        seen.stamp, seen.at_s = stamp, now
        seen.task = asyncio.create_task(self._read(seen, key, folder))
        return seen.task

    async def _read(self, seen: _Seen, key: str, folder: DeploymentFolder | FleetFolder) -> None:
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
    """What changes whenever something happened here."""
    path = str(folder.path)
    head = ("rank0/events.jsonl", "rank0/agent.json")
    names = ("deployment.json", *head, "job.json", "endpoint.json", "staging.jsonl")
    return tuple(mark_of(f"{path}/{name}") for name in names)


def deployment_row(folder: DeploymentFolder, before: Status | None = None) -> tuple[Status | None, Row | None]:
    """One deployment with everything that its card shows: no key, and no path of one. None: it stands as before."""
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
    told = to_json(now)
    del told["endpoint"], told["timings"], told["expected"]
    words = restart_words(record) if record else None
    return {
        **told,
        "kind": "deployment",
        "ended": now.state in ENDED,
        "url": now.endpoint.base_url if now.endpoint else None,
        "ready_s": now.timings.ready_s,
        "phases": to_json(phases),
        "ready_at_s": ready_at_s(phases),
        "job": to_json(job),
        "nodes": to_json(nodes),
        "ranks": len(folder.ranks()),
        "stop": None if now.state in ENDED else line_of(["down", now.name]),
        "restart": line_of(words) if words else None,
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


def restart_words(record: Record) -> list[str] | None:
    """The words that start it again as it was; None where that is not known, or would show a secret."""
    words = list(record.words)
    if not words or words[0] != "up" or chain_of(record.name) != record.name:
        return None
    if any(is_secret_name(word.partition("=")[0]) for word in words if "=" in word):
        return None
    own = words[1 : words.index("--")] if "--" in words else words[1:]
    named = any(word == "--name" or word.startswith("--name=") for word in own)
    return words if named else ["up", "--name", record.name, *words[1:]]


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
        "stop": None if now.state in ENDED else line_of(["down", now.name]),
    }
