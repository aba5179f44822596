"""The process that keeps a fleet: it looks once a second, and does what is due (`steps`), with an event for each.

It can be killed and started again at any time: what it knows is in the fleet's files and in its members' folders. One
keeper at a time holds the fleet's keeper lock. Members are started and stopped in threads, so that one that takes
long holds up no other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from corral.base.errors import ConflictError, CorralError
from corral.base.lock import SILENT_S, FileLock
from corral.base.processes import Identity
from corral.base.record import load_json
from corral.client.fanout import backoff_s
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.fleet import (
    Fleet,
    FleetFolder,
    FleetMember,
    GatewayLoad,
    change_fleet,
    read_fleet,
    read_loads,
)
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle import deployments
from corral.deploy.targets.base import Queue
from corral.serve.fleet.background import ensure_gateway
from corral.serve.fleet.division import place
from corral.serve.fleet.making import start_member
from corral.serve.fleet.pace import Pacer
from corral.serve.fleet.standing import load_of, member_status
from corral.serve.fleet.steps import Act, FleetStep, MemberFacts, next_steps

LOOK_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0  # before a member that failed is started again
SETTLED_S = 60.0  # one that was ready for so long begins anew with its pauses
FINISH_S = 60.0  # for starts and stops under way when the keeper ends
LEASE_S = 30.0  # how long what a scheduler says of a job's end is believed


def keep(folder: FleetFolder, say: Callable[[str], None], wanted: Callable[[], bool] = lambda: True) -> str:
    """Keep a fleet until it is closed, or nobody wants that any more; why, in words."""
    with FileLock(folder.keeper, _refuse(folder), SILENT_S, beats=True):
        keeper = Keeper(folder, say)
        try:
            while wanted():
                fleet = read_fleet(folder)
                if fleet.closed:
                    return fleet.closed
                try:
                    keeper.look(fleet)
                except (CorralError, OSError) as error:  # a scheduler that does not answer, a disk that is full
                    say(str(error))
                time.sleep(LOOK_S)
            return "told to stop; the members keep running"
        finally:
            keeper.finish()


def _refuse(folder: FleetFolder) -> Callable[[Identity], None]:
    def held(holder: Identity) -> None:
        raise ConflictError(
            f"the fleet {folder.name!r} already has a keeper: process {holder.pid} on {holder.host}.",
            f"There is nothing to do. To run the keeper here instead, stop that one first: kill {holder.pid}",
        )

    return held


@dataclass
class _Memory:
    """What the keeper remembers of a member."""

    failures: int = 0
    retry_s: float = 0.0
    told: tuple[str, float] = ("", 0.0)  # the end that was counted: its state and when
    lease: tuple[float, float | None] = (0.0, None)  # looked when; the last request
    busy: threading.Thread | None = None


@dataclass
class Keeper:
    """One fleet, looked after."""

    folder: FleetFolder
    say: Callable[[str], None]
    memories: dict[str, _Memory] = field(default_factory=dict)
    strangers: set[str] = field(default_factory=set)  # deployments of others, with names of members to come
    pacer: Pacer = field(init=False)

    def __post_init__(self) -> None:
        self.pacer = Pacer(self.folder)

    def look(self, fleet: Fleet) -> None:
        """Look once, and do what is due."""
        now_s = time.time()
        loads = read_loads(self.folder)
        facts = {member.name: self._facts(member, loads, now_s) for member in fleet.members}
        decided = self.pacer.decide(fleet, facts, now_s)
        if decided is not None:
            fleet = change_fleet(self.folder, lambda one: replace(one, wanted=decided.wanted))
            self._tell("scale", text=decided.why, wanted=decided.wanted)
        for step in next_steps(fleet, facts, now_s, self.pacer.replacement_s, self.strangers):
            self._act(fleet, step)
        ensure_gateway(self.folder, self.say)

    # what is known

    def _facts(self, member: FleetMember, loads: Mapping[str, GatewayLoad], now_s: float) -> MemberFacts:
        memory = self.memories.setdefault(member.name, _Memory())
        busy = memory.busy is not None and memory.busy.is_alive()
        seen = member_status(member)
        status = seen.status
        known = load_of(loads, member.name)
        facts = MemberFacts(
            member.name,
            seen.state,
            status.reason if status else None,
            status.text if status else "",
            status.since_s if status else 0.0,
            known.running if known else None,
            self._last_request_s(member.name, memory, now_s) if seen.state is State.READY else None,
            memory.retry_s,
            busy,
            status.created_s if status else 0.0,
        )
        self._count(facts, memory, now_s)
        return replace(facts, retry_s=memory.retry_s)

    def _count(self, facts: MemberFacts, memory: _Memory, now_s: float) -> None:
        """Note an end that nobody asked for once, with a pause that grows."""
        if facts.state is State.READY and now_s - facts.since_s > SETTLED_S:
            memory.failures = 0
        if facts.state in ENDED and not facts.busy and memory.told != (facts.state.value, facts.since_s):
            memory.told = (facts.state.value, facts.since_s)
            self._failed(memory, now_s)

    def _failed(self, memory: _Memory, now_s: float) -> None:
        memory.retry_s = now_s + (
            backoff_s(memory.failures, FIRST_PAUSE_S, LONGEST_PAUSE_S) if memory.failures else 0
        )
        memory.failures += 1

    def _last_request_s(self, name: str, memory: _Memory, now_s: float) -> float | None:
        """When its job begins to drain; asked of the scheduler now and then."""
        looked_s, last_s = memory.lease
        if now_s - looked_s > LEASE_S:
            folder = DeploymentFolder.of(name)
            with contextlib.suppress(CorralError, OSError):
                target = deployments.target_of(load_json(deployments.Record, folder.record))
                lease = target.lease(folder) if isinstance(target, Queue) else None
                last_s = lease.last_request_s if lease else None
            memory.lease = (now_s, last_s)
        return last_s

    # what is done

    def _act(self, fleet: Fleet, step: FleetStep) -> None:
        self._tell(step.act.value, text=f"{step.member}: {step.why}", member=step.member)
        if step.act is Act.ADD:
            self._add(fleet, step.member)
        elif step.act is Act.LEAVE:
            self._change(step.member, lambda one: replace(one, leaving=True, leaving_s=time.time()))
        elif step.act is Act.FORGET:
            self._forget(fleet, step.member)
        elif step.act is Act.START:
            self._in_thread(step.member, lambda: self._start(step.member))
        else:
            self._in_thread(step.member, lambda: self._stop(step.member))

    def _add(self, fleet: Fleet, name: str) -> None:
        there = member_status(FleetMember(name)).state
        if there is not None and there not in ENDED:
            self.strangers.add(name)
            self._tell("refused", text=f"{name}: a deployment that is not of the fleet has that name, and is {there}")
            return

        def added(one: Fleet) -> Fleet:
            if one.member(name) or one.closed:
                return one
            most = max(one.most, one.wanted)
            share = place(one.nodes, [member.share for member in one.members], most)
            return replace(one, members=(*one.members, FleetMember(name, share=share, added_s=time.time())))

        try:
            change_fleet(self.folder, added)
        except ConflictError as error:  # no GPU is free: as many as there is room for
            self._tell("refused", text=error.in_full)
            change_fleet(self.folder, lambda one: replace(one, wanted=min(one.wanted, len(fleet.serving()))))

    def _forget(self, fleet: Fleet, name: str) -> None:
        member = fleet.member(name)
        gone = member is not None and not member.leaving and not fleet.keep  # its time is over, and nothing follows

        def without(one: Fleet) -> Fleet:
            rest = tuple(other for other in one.members if other.name != name)
            fewer = max(0, one.wanted - 1)
            if not gone:
                return replace(one, members=rest)
            closed = "" if rest else "the last of its jobs reached its time limit"
            return replace(one, members=rest, wanted=fewer, least=min(one.least, fewer), closed=closed)

        change_fleet(self.folder, without)
        self.memories.pop(name, None)

    def _change(self, name: str, change: Callable[[FleetMember], FleetMember]) -> None:
        change_fleet(
            self.folder,
            lambda one: replace(one, members=tuple(change(m) if m.name == name else m for m in one.members)),
        )

    def _start(self, name: str) -> None:
        try:
            start_member(self.folder, name)
        except (CorralError, OSError) as error:
            memory = self.memories.setdefault(name, _Memory())
            self._failed(memory, time.time())
            said = error.in_full if isinstance(error, CorralError) else str(error)
            self._tell("failed", text=f"{name}: {said}", member=name)

    def _stop(self, name: str) -> None:
        try:
            deployments.stop(DeploymentFolder.of(name))
        except (CorralError, OSError) as error:
            self._tell("failed", text=f"{name} could not be stopped: {error}", member=name)

    def _in_thread(self, name: str, do: Callable[[], None]) -> None:
        memory = self.memories.setdefault(name, _Memory())
        memory.busy = threading.Thread(target=do, name=f"corral-{name}", daemon=True)
        memory.busy.start()

    def finish(self) -> None:
        """Wait for what was begun: a job that was submitted must be known before this process ends."""
        for memory in self.memories.values():
            if memory.busy is not None:
                memory.busy.join(FINISH_S)

    def _tell(self, kind: str, **details: Any) -> None:
        self.say(str(details.get("text", kind)))
        with contextlib.suppress(OSError):
            append_event(self.folder.events, kind, **details)
