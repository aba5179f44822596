"""The process that keeps a fleet: it checks once a second, and does what is due (`steps`), with an event for each.

It can be killed and started again at any time: what it knows is in the fleet's files and in its members' folders. One
keeper at a time holds the fleet's keeper lock. Members are started and stopped in threads, so that one that takes
long holds up no other.

The keeper of a chain runs inside the chain's jobs, and wherever else `corral renew` was started: one of them holds
the lock, and the others wait to take its place.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from corral.base.errors import ConflictError, CorralError, UnreachableError
from corral.base.lock import FileLock
from corral.base.processes import Identity
from corral.base.record import load_json
from corral.client.fanout import backoff_s
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED, Reason, State
from corral.deploy.lifecycle import deployments
from corral.deploy.targets.base import Queue
from corral.serve.fleet.creation import place
from corral.serve.fleet.pace import Pacer
from corral.serve.fleet.processes import ensure_gateway
from corral.serve.fleet.record import (
    BEAT_S,
    SILENT_S,
    Fleet,
    FleetFolder,
    FleetMember,
    GatewayLoad,
    Judgement,
    change_fleet,
    is_over,
    read_fleet,
    read_loads,
)
from corral.serve.fleet.start import load_request, start_member
from corral.serve.fleet.status import MemberStatus, fleet_status, judgement_of, load_of, member_of, read_statuses
from corral.serve.fleet.steps import Act, FleetStep, MemberFacts, next_steps

INTERVAL_S = 1.0
CHAIN_INTERVAL_S, HANDOVER_INTERVAL_S = (
    15.0,
    5.0,
)  # each asks the scheduler; a hand-over is between two jobs that both run
STOPPED = "told to stop; the members keep running"
STANDBY_S = 5.0  # after which a keeper that waits for the end of another one checks again
REPLACE_PAUSES_S = 60.0, 1800.0  # after a hung or slow member was replaced; they double
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0  # before a member that failed is started again
SERVING = (State.READY, State.DRAINING)
REFUSED_PAUSE_S = 30.0  # before a job of a chain is submitted again
MOST_REFUSALS = 5  # after which a chain is closed
SETTLED_S = 60.0  # one that was ready for so long begins anew with its pauses
FINISH_S = 60.0  # for starts and stops under way when the keeper ends
CLOCK_STEP_S = 5.0  # the wall clock was set, or the machine was suspended
LEASE_S = 30.0  # how long what a scheduler says of a job's end is believed


def keep(
    folder: FleetFolder,
    say: Callable[[str], None],
    wanted: Callable[[], bool] = lambda: True,
    once: bool = False,
    stands_by: bool = False,
) -> str:
    """Keep a fleet until it is closed, or nobody wants that any more; why, in words. `once`: only what is due now.

    While another keeper works, this one ends, or waits to take its place (`stands_by`, and every keeper of a chain).
    """
    chain = read_fleet(folder).chain
    held = _stand_by(folder, say, wanted, once) if chain or stands_by else _refuse(folder, say, wanted)
    while True:
        try:
            with FileLock(folder.keeper, held, SILENT_S, BEAT_S, watched=True) as lock:
                keeper = Keeper(folder, say)
                try:
                    return _keep(keeper, lock, wanted, once)
                finally:
                    keeper.finish()
        except _NotNeededError as error:
            return str(error)
        except OSError as error:  # of the lock itself: whether another keeper works is unknown
            if once:
                raise
            if is_over(folder) and not folder.record.exists():
                return "its folder is gone"
            say(f"{error}; trying again")
            _pause(STANDBY_S, wanted)
            if not wanted():
                return STOPPED


def _keep(keeper: Keeper, lock: FileLock, wanted: Callable[[], bool], once: bool) -> str:
    while wanted():
        acted, pause_s = False, INTERVAL_S
        try:
            if not lock.is_held():
                return "another keeper has taken its place"
            fleet = read_fleet(keeper.folder)
            if fleet.closed:
                return fleet.closed
            acted = keeper.check(fleet)
            pause_s = keeper.pause_s(fleet, acted, once)
        except (CorralError, OSError) as error:  # a scheduler that does not answer, a disk that is full or silent
            if is_over(keeper.folder):
                return "its folder is gone"
            keeper.say(str(error))
        if once and not acted and not keeper.is_busy():
            return keeper.waiting or "nothing is due"
        _pause(pause_s, wanted)
    return STOPPED


def _pause(seconds: float, wanted: Callable[[], bool]) -> None:
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0 and wanted():
        time.sleep(min(INTERVAL_S, left_s))


class _NotNeededError(Exception):
    """Another keeper does the work of this one."""


def _refuse(
    folder: FleetFolder, say: Callable[[str], None], wanted: Callable[[], bool]
) -> Callable[[Identity], None]:
    """Refuse while another keeper works; one on another machine is watched until it gives a sign, or is dead."""
    seen: list[tuple[Identity, int]] = []

    def held(holder: Identity) -> None:
        if not holder.is_among_ours():
            seen.append((holder, folder.keeper.stat().st_mtime_ns))
            if len(seen) == 1:
                who = f"process {holder.pid} on {holder.host}"
                say(f"{who} is its keeper; taking its place if it is silent for {SILENT_S:.0f} s")
            if seen[-1] == seen[0]:
                with contextlib.suppress(CorralError, OSError):
                    ensure_gateway(folder, say, stands_by=True)
                _pause(INTERVAL_S, wanted)
                if wanted():
                    return
                raise _NotNeededError(STOPPED)
        raise ConflictError(
            f"the fleet {folder.name!r} already has a keeper: process {holder.pid} on {holder.host}.",
            f"There is nothing to do. To run the keeper here instead, stop that one first: kill {holder.pid}",
        )

    return held


def _stand_by(
    folder: FleetFolder, say: Callable[[str], None], wanted: Callable[[], bool], once: bool
) -> Callable[[Identity], None]:
    """Wait until the other keeper ends; a gateway that ran on this machine is kept up meanwhile."""

    def held(holder: Identity) -> None:
        if once:
            raise _NotNeededError(f"process {holder.pid} on {holder.host} keeps it")
        with contextlib.suppress(CorralError, OSError):  # what cannot be read now can be later
            fleet = read_fleet(folder)
            if fleet.closed:
                raise _NotNeededError(fleet.closed)
            if not fleet.chain and not holder.is_among_ours():
                ensure_gateway(folder, say, stands_by=True)
        _pause(STANDBY_S, wanted)
        if not wanted():
            raise _NotNeededError(STOPPED)

    return held


@dataclass
class _Memory:
    """What the keeper remembers of a member."""

    failures: int = 0
    retry_s: float = 0.0  # monotonic
    counted: tuple[str, float] = ("", 0.0)  # the end that was counted: its state and when
    lease: tuple[float, float | None] = (-math.inf, None)  # asked when, monotonic; the last request
    leaves_s: float | None = None  # monotonic: since when it leaves
    busy: threading.Thread | None = None
    judged: tuple[Judgement, float] = (Judgement.OK, 0.0)  # since when, monotonic
    refusals: int = 0  # in a row, of a scheduler that answers


def _wall_s(monotonic_s: float, now_s: float) -> float:
    """A time of the monotonic clock by the wall clock, which says `now_s`."""
    return now_s + monotonic_s - time.monotonic()


@dataclass
class Keeper:
    """Looks after one fleet; what it remembers can be found out again.

    Its pauses and its patience are measured by the monotonic clock: the wall clock may be set, a machine suspended.
    """

    folder: FleetFolder
    say: Callable[[str], None]
    memories: dict[str, _Memory] = field(default_factory=dict)
    strangers: set[str] = field(default_factory=set)  # deployments of others, with names of members to come
    facts: dict[str, MemberFacts] = field(default_factory=dict)  # as they were last seen
    waiting: str = ""  # what the next step of a chain waits for
    replaced: int = 0  # hung or slow members, one soon after the other
    rests_until_s: float = 0.0  # monotonic; no other one is replaced before
    offset_s: float = 0.0  # of the wall clock from the monotonic one
    pacer: Pacer = field(init=False)

    def __post_init__(self) -> None:
        self.pacer = Pacer(self.folder, _margin_s(self.folder))

    def check(self, fleet: Fleet) -> bool:
        """Check all members once, and do what is due; whether anything was."""
        now_s = time.time()
        self._note_clock(now_s)
        loads = read_loads(self.folder)
        living = [member for member in fleet.members if not member.ended]
        known = read_statuses(living)
        self.facts = {
            one.name: self._facts(fleet, member_of(one, known.get(one.name)), loads, now_s) for one in living
        }
        decided = self.pacer.decide(fleet, self.facts, time.monotonic())
        if decided is not None:
            fleet = change_fleet(self.folder, lambda one: replace(one, wanted=decided.wanted))
            self._tell("scale", text=decided.why, wanted=decided.wanted)
        fleet, rests = self._dated(fleet, now_s), time.monotonic() < self.rests_until_s
        steps = next_steps(fleet, self.facts, now_s, self.pacer.replacement_s, self.strangers, rests)
        for step in steps:
            self._act(fleet, step)
        if fleet.chain:
            self._tell_waiting(now_s)
        else:
            ensure_gateway(self.folder, self.say)
        return bool(steps)

    def pause_s(self, fleet: Fleet, acted: bool, once: bool) -> float:
        """How long nothing can be due; a job that was added to a chain is to be submitted at once."""
        if not fleet.chain or once:
            return INTERVAL_S
        if acted:
            return 0.0
        if len(self.facts) > 1:
            return HANDOVER_INTERVAL_S
        ends_s = [one.last_request_s for one in self.facts.values() if one.last_request_s is not None]
        left_s = min(ends_s) - self.pacer.replacement_s - time.time() if ends_s else CHAIN_INTERVAL_S
        return min(CHAIN_INTERVAL_S, max(INTERVAL_S, left_s))

    def is_busy(self) -> bool:
        """Whether members are being started or stopped."""
        return any(memory.busy is not None and memory.busy.is_alive() for memory in self.memories.values())

    def _tell_waiting(self, now_s: float) -> None:
        """Say what the newest job of a chain is doing, once for each of its states."""
        if not self.facts:
            return
        newest = list(self.facts.values())[-1]
        text = f"{newest.name} is {newest.state or 'to be submitted'}"
        if text == self.waiting:
            return
        self.waiting = text
        if newest.last_request_s is not None:
            queue_s, load_s = self.pacer.parts()
            parts = f"queue {queue_s:.0f} s, load {load_s:.0f} s"
            text += f" for {newest.last_request_s - now_s:.0f} s more"
            text += f"; a successor needs {self.pacer.replacement_s:.0f} s ({parts})"
        self.say(text)

    # what is known

    def _note_clock(self, now_s: float) -> None:
        """After a step of the wall clock, ask again when jobs end: that was said by the clock of before."""
        offset_s = now_s - time.monotonic()
        if abs(offset_s - self.offset_s) > CLOCK_STEP_S:
            for memory in self.memories.values():
                memory.lease = (-math.inf, memory.lease[1])
        self.offset_s = offset_s

    def _dated(self, fleet: Fleet, now_s: float) -> Fleet:
        """The fleet with the times since which members leave, by the wall clock as it is now."""

        def since_s(member: FleetMember) -> float:
            memory = self.memories.setdefault(member.name, _Memory())
            if memory.leaves_s is None:  # told by a keeper before this one
                memory.leaves_s = time.monotonic() - max(0.0, now_s - member.leaving_s)
            return _wall_s(memory.leaves_s, now_s)

        dated = (replace(one, leaving_s=since_s(one)) if one.leaving else one for one in fleet.members)
        return replace(fleet, members=tuple(dated))

    def _facts(
        self, fleet: Fleet, member: MemberStatus, loads: Mapping[str, GatewayLoad], now_s: float
    ) -> MemberFacts:
        memory = self.memories.setdefault(member.name, _Memory())
        busy = memory.busy is not None and memory.busy.is_alive()
        status = member.status
        known = load_of(loads, member.name)
        facts = MemberFacts(
            member.name,
            member.state,
            status.reason if status else None,
            status.text if status else "",
            status.since_s if status else 0.0,
            known.running if known else None,
            self._last_request_s(member.name, memory) if member.state in SERVING else None,
            _wall_s(memory.retry_s, now_s),
            busy,
            status.created_s if status else 0.0,
            status is not None and status.timings.ready_s is not None,
            *_judged(memory, judgement_of(loads, member.name)),
        )
        if fleet.chain and not busy and _is_half_made(fleet, member.name):
            return replace(facts, state=State.STOPPED, reason=Reason.INTERRUPTED)
        self._count(facts, memory, now_s)
        return replace(facts, retry_s=_wall_s(memory.retry_s, now_s))

    def _count(self, facts: MemberFacts, memory: _Memory, now_s: float) -> None:
        """Note an end that nobody asked for once, with a pause that grows."""
        if facts.state is State.READY and now_s - facts.since_s > SETTLED_S:
            memory.failures = 0
        if facts.state in ENDED and not facts.busy and memory.counted != (facts.state.value, facts.since_s):
            memory.counted = (facts.state.value, facts.since_s)
            self._failed(memory)

    def _failed(self, memory: _Memory) -> None:
        memory.retry_s = time.monotonic() + (
            backoff_s(memory.failures, FIRST_PAUSE_S, LONGEST_PAUSE_S) if memory.failures else 0
        )
        memory.failures += 1

    def _last_request_s(self, name: str, memory: _Memory) -> float | None:
        """When its job begins to drain; asked of the scheduler now and then."""
        asked_s, last_s = memory.lease
        if time.monotonic() - asked_s > LEASE_S:
            folder = DeploymentFolder.of(name)
            with contextlib.suppress(CorralError, OSError):
                target = deployments.target_of(load_json(deployments.Record, folder.record))
                lease = target.lease(folder) if isinstance(target, Queue) else None
                last_s = lease.last_request_s if lease else None
            memory.lease = (time.monotonic(), last_s)
        return last_s

    # what is done

    def _act(self, fleet: Fleet, step: FleetStep) -> None:
        self._tell(step.act.value, text=f"{step.member}: {step.why}", member=step.member)
        if step.act is Act.ADD:
            self._add(fleet, step.member)
        elif step.act is Act.EXPIRE:
            self._change(step.member, lambda one: replace(one, expiring=True))
        elif step.act in (Act.LEAVE, Act.REPLACE):
            self._rest(step.act)
            self.memories.setdefault(step.member, _Memory()).leaves_s = time.monotonic()
            self._change(step.member, lambda one: replace(one, leaving=True, leaving_s=time.time()))
        elif step.act is Act.FORGET:
            self._forget(fleet, step.member)
        elif step.act is Act.CLOSE:
            change_fleet(self.folder, lambda one: replace(one, closed=one.closed or step.why))
        elif step.act is Act.START:
            self._in_thread(step.member, lambda: self._start(step.member))
        else:
            self._in_thread(step.member, lambda: self._stop(step.member))

    def _rest(self, act: Act) -> None:
        """After one was replaced: what made it hang may be common to all."""
        if act is Act.REPLACE:
            first_s, longest_s = REPLACE_PAUSES_S
            now_s = time.monotonic()
            self.replaced = 0 if now_s > self.rests_until_s + longest_s else self.replaced
            self.rests_until_s = now_s + backoff_s(self.replaced, first_s, longest_s)
            self.replaced += 1

    def _add(self, fleet: Fleet, name: str) -> None:
        there = next((one.state for one in read_statuses([FleetMember(name)]).values()), None)
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
        if fleet.chain:  # its name and number stay taken
            never_ready = not self.facts[name].served
            self._change(name, lambda one: replace(one, ended=True, never_ready=never_ready))
            return
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
            self.memories.setdefault(name, _Memory()).refusals = 0
        except (CorralError, OSError) as error:
            self._failed_start(name, error)

    def _failed_start(self, name: str, error: CorralError | OSError) -> None:
        memory = self.memories.setdefault(name, _Memory())
        self._failed(memory)
        with contextlib.suppress(CorralError, OSError):  # the same end, as its folder tells it, counts once
            if (found := read_statuses([FleetMember(name)]).get(name)) and found.state in ENDED:
                memory.counted = (found.state.value, found.since_s)
        text = error.in_full if isinstance(error, CorralError) else str(error)
        self._tell("failed", text=f"{name}: {text}", member=name)
        with contextlib.suppress(CorralError, OSError):  # it is tried again in any case
            self._refused(memory, error)

    def _refused(self, memory: _Memory, error: CorralError | OSError) -> None:
        """Of a chain nobody else may be serving: try for as long as the scheduler is silent."""
        if read_fleet(self.folder).chain:
            memory.retry_s = time.monotonic() + REFUSED_PAUSE_S
            memory.refusals += not isinstance(error, UnreachableError)
            if memory.refusals >= MOST_REFUSALS:
                why = error.message if isinstance(error, CorralError) else str(error)
                change_fleet(self.folder, lambda one: replace(one, closed=one.closed or why))

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


def is_leaving(folder: FleetFolder, name: str) -> bool:
    """Whether a member has been told to leave, or has gone; a keeper in its job then makes room for another one."""
    with contextlib.suppress(CorralError, OSError):
        member = read_fleet(folder).member(name)
        return member is None or member.leaving
    return False


def is_served(folder: FleetFolder) -> bool:
    """Whether a member is ready, and the keeper in its job therefore stands by."""
    with contextlib.suppress(CorralError, OSError):
        return fleet_status(folder).ready > 0
    return False


def _is_half_made(fleet: Fleet, name: str) -> bool:
    """Whether a keeper that is gone began to submit it: whoever holds the keeper's lock is the only one."""
    folder = DeploymentFolder.of(name)
    return name != fleet.name and folder.record.is_file() and not folder.job.exists()


def _judged(memory: _Memory, now: Judgement) -> tuple[Judgement, float]:
    """What gateways hold of a member, and for how long they have."""
    before, since_s = memory.judged
    if now is not before:
        memory.judged = (now, since_s := time.monotonic())
    return now, time.monotonic() - since_s


def _margin_s(folder: FleetFolder) -> float | None:
    """How much earlier than measured a job is to be replaced, where that was set (`renew_margin_s`)."""
    with contextlib.suppress(CorralError, OSError, ValueError):
        margin = load_request(folder).target_options.get("renew_margin_s")
        return float(margin) if isinstance(margin, int | float | str) else None
    return None
