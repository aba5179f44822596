"""A rank's course through attempts, restarts and, over several nodes, what the gang means for it."""

from __future__ import annotations

import os
import socket
import time
from typing import Any, Dict, Optional, Tuple

from ..sockets import reserve
from ..states import Reason, State
from .gang import NOTICE_S, Follower, Head
from .journal import Journal
from .rank import HEARTBEAT_S, TICK_S, Rank

Json = Dict[str, Any]
# a restart would change nothing
FINAL_REASONS = (Reason.REQUESTED, Reason.WALLTIME, Reason.AGENT_KILLED, Reason.NOT_GUARDED, Reason.PORT_TAKEN,
                 Reason.NOT_ADVANCING)  # fmt: skip
# ends that are no fault of the rank that tells them
NOT_OF_A_RANK = (Reason.REQUESTED, Reason.WALLTIME, Reason.NODE_LOST, Reason.STALLED, Reason.NOT_ADVANCING)
HALTED = "halted"  # a member's rank was taken down because the head said so: the head knows the reason
# with restarts left, how long the nodes of a gang wait for one that was lost; then all of them give up
REJOIN_S = 300.0


class Worker(Rank):
    """Runs the engine once or, with restarts, several times; alone, or as the head or a member of a gang."""

    def __init__(self, spec: Json, journal: Journal) -> None:
        super().__init__(spec, journal)
        self.restarts = int(spec["patience"]["restarts"])
        self.head: Optional[Head] = None  # of a gang, when this rank leads it
        self.follower: Optional[Follower] = None  # of a gang, when another does
        self.reserved: Optional[socket.socket] = None  # the server's port, among Corral's own (see `ports`)
        self.epoch = 0  # of the gang's attempt that this member runs
        self.beaten = 0.0

    def run(self) -> int:
        gang, node_s = self.spec.get("gang"), self.patience["node_s"]
        if gang and self.spec["rank"]:
            self.follower = Follower(gang, node_s, self.spec["rank"], self._standing)
            return self._follow(self.follower)
        if gang:
            try:
                self.head = Head(gang, node_s, self._standing, self._beat_sometimes)
            except OSError as error:
                text = "the head cannot listen on %s:%s for the other nodes: %s" % (gang["head"], gang["port"], error)
                self._end(Reason.NETWORK, {"text": text})
                return 0
        serve = self.spec.get("serve")
        self.reserved = reserve(int(serve["port"])) if serve else None
        if serve and not self.reserved:
            self._end(Reason.PORT_TAKEN, {"text": "another deployment has port %d, and was first" % serve["port"]})
            return 0
        return self._lead()

    def _lead(self) -> int:
        attempts = 1 + self.restarts
        for attempt in range(1, attempts + 1):
            hindered = self._gather(attempt)
            reason, details = hindered or self._run_once(attempt)
            if self.head and reason == Reason.ENGINE_EXITED and details.get("failed_rank", 0) == 0:
                reason, details = self.head.root_cause(reason, details, self.ended_at)
            if attempt == attempts or reason in FINAL_REASONS or (hindered and attempt > 1):
                self._end(reason, details)
                return 0
            self._halt_others()
            self.journal.write("restart", attempt=attempt, of=attempts - 1, reason=reason, **details)
            self._tell_state(State.STARTING, restarting=True)
            if not self._pause(min(30.0, 2.0 ** (attempt - 1))):
                self._end(Reason.REQUESTED if self._stop_asked() else Reason.AGENT_KILLED, {})
                return 0
        return 0

    def _gather(self, attempt: int) -> Optional[Tuple[str, Json]]:
        """Count the other nodes in, then let all start; what hinders, or None."""
        if not self.head:
            return None
        hindrance = self.head.gather(self._hindrance, *([REJOIN_S] if attempt > 1 else []))
        if hindrance is None:
            self.head.run(attempt)
        return hindrance

    def _hindrance(self) -> str:
        """Why there is no point in waiting any longer; empty while there is."""
        self._beat_sometimes()
        if self._stop_asked():
            return Reason.REQUESTED
        return Reason.AGENT_KILLED if os.getppid() != self.supervisor else ""

    def _follow(self, follower: Follower) -> int:
        """A member's life: run when the head says so, stop when it says so or is lost."""
        epoch = 0
        while True:
            order = follower.order
            lost = follower.lost()
            if order.get("end"):
                self._end(order["end"], {"text": order.get("text", "")})
                return 0
            if self._stop_asked() or os.getppid() != self.supervisor:
                reason: str = Reason.REQUESTED if self._stop_asked() else Reason.AGENT_KILLED
                self.ended = {"epoch": order.get("epoch", 0), "reason": reason, "text": "", "ago_s": 0}
                time.sleep(2 * NOTICE_S)  # the head hears it
                self._end(reason, {})
                return 0
            if lost and not (epoch and self.restarts and follower.silent_s() < REJOIN_S):
                self._end(Reason.NODE_LOST, {"text": lost, "node": follower.head_name})
                return 0
            if order.get("run") and not lost and order["epoch"] > epoch:
                self.epoch = epoch = order["epoch"]
                reason, details = self._run_once(epoch)
                if reason != HALTED:
                    self.journal.write("rank_ended", reason=reason, **details)
                self._tell_state(State.STARTING, waiting_for=follower.head_name)
            time.sleep(TICK_S)
            self._beat_sometimes()

    def _others(self) -> Optional[Tuple[str, Json]]:
        """What the rest of the gang means for this rank, if it must end."""
        if self.head:
            return self.head.fault()
        if self.follower:
            order = self.follower.order
            lost = self.follower.lost()
            if lost:
                return Reason.NODE_LOST, {"text": lost, "node": self.follower.head_name}
            if order and (order.get("end") or not order.get("run") or order["epoch"] != self.epoch):
                return HALTED, {}
            if self.state is not State.READY and order.get("head", {}).get("state") == State.READY:
                self._tell_state(State.READY)
        return None

    def _note_end(self, attempt: int, reason: str, details: Json) -> None:
        """The others hear of it at once: how long this rank takes to go is no reason to wait."""
        super()._note_end(attempt, reason, details)
        if self.follower and reason != HALTED:
            self.ended = {"epoch": attempt, "reason": reason, "text": details.get("text", ""), "details": details}
        if self.head and "failed_rank" not in details and reason not in NOT_OF_A_RANK:
            node, rank = self.spec["gang"]["names"][0], self.spec["rank"]
            details.update(failed_rank=rank, node=node, text="rank %d on %s: %s" % (rank, node, details.get("text")))

    def _quiet_s(self, now: float) -> float:
        """Seconds since anything moved on this node or, in a gang, on any; its head judges a member."""
        if self.follower:
            return 0.0
        own = super()._quiet_s(now)
        return min(own, self.head.least("quiet_s")) if self.head else own

    def _still_s(self, now: float) -> float:
        """The same of an advance."""
        if self.follower:
            return 0.0
        own = super()._still_s(now)
        return min(own, self.head.least("still_s")) if self.head else own

    def _standing(self) -> Json:
        """How this rank stands, for the other agents of the gang."""
        now = time.monotonic()
        ended = dict(self.ended, ago_s=round(now - self.ended_at, 2)) if self.ended else None
        found = {"state": self.state, "phase": self.phase, "running": self.running, "ended": ended}
        found["quiet_s"] = round(now - self.activity_at, 1)
        found["still_s"] = round(now - self.advance.at, 1)
        found.update(self.progress)
        return found

    def _beat_sometimes(self) -> None:
        now = time.monotonic()
        if now - self.beaten >= HEARTBEAT_S:
            self.beaten = now
            self._beat()

    def _end(self, reason: str, details: Json) -> None:
        """A failure is told at once: how long the others take to go is no reason to wait."""
        wanted = reason in (Reason.REQUESTED, Reason.WALLTIME)
        if not wanted:
            self._tell_state(State.FAILED, reason=reason, **details)
        if self.head:
            self._halt_others()
            self.head.end(reason, details)
        if wanted:
            self._tell_state(State.STOPPED, reason=reason, **details)

    def _halt_others(self) -> None:
        if self.head:
            self.head.halt(self.patience["grace_s"] + 15)

    def _pause(self, seconds: float) -> bool:
        """Wait before a restart; false when it is not wanted any more."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._stop_asked() or os.getppid() != self.supervisor:
                return False
            time.sleep(TICK_S)
            self._beat()
        return True
