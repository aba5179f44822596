"""A rank through its attempts and restarts, alone or as the head or a member of a gang."""

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
# ends that are not the fault of the rank that reports them
NOT_OF_A_RANK = (Reason.REQUESTED, Reason.WALLTIME, Reason.NODE_LOST, Reason.STALLED, Reason.NOT_ADVANCING)
HALTED = "halted"  # a member's rank was taken down by order of the head, which knows the reason
# with restarts left, how long the nodes of a gang wait for one that was lost; then all of them give up
REJOIN_S = 300.0


class Worker(Rank):
    """Runs the engine once or, with restarts, several times; alone, or as the head or a member of a gang."""

    def __init__(self, spec: Json, journal: Journal) -> None:
        super().__init__(spec, journal)
        self.restarts = int(spec["patience"]["restarts"])
        self.head: Optional[Head] = None  # when this rank is the head of a gang
        self.follower: Optional[Follower] = None  # when it is a member of one
        self.reserved: Optional[socket.socket] = None  # the reservation of the server's port (see `sockets`)
        self.epoch = 0  # of the gang's attempt that this member runs
        self.beat_at = 0.0

    def run(self) -> int:
        gang, node_s = self.spec.get("gang"), self.patience["node_s"]
        if gang and self.spec["rank"]:
            self.follower = Follower(gang, node_s, self.spec["rank"], self._status)
            return self._follow(self.follower)
        if gang:
            try:
                self.head = Head(gang, node_s, self._status, self._beat_if_due)
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
            obstacle = self._gather(attempt)
            reason, details = obstacle or self._run_once(attempt)
            if self.head and reason == Reason.ENGINE_EXITED and details.get("failed_rank", 0) == 0:
                reason, details = self.head.root_cause(reason, details, self.ended_at)
            if attempt == attempts or reason in FINAL_REASONS or (obstacle and attempt > 1):
                self._end(reason, details)
                return 0
            self._halt_others()
            self.journal.write("restart", attempt=attempt, of=attempts - 1, reason=reason, **details)
            self._set_state(State.STARTING, restarting=True)
            if not self._pause(min(30.0, 2.0 ** (attempt - 1))):
                self._end(Reason.REQUESTED if self._stop_requested() else Reason.AGENT_KILLED, {})
                return 0
        return 0

    def _gather(self, attempt: int) -> Optional[Tuple[str, Json]]:
        """Wait for the other nodes, then let all start; why that cannot be, or None."""
        if not self.head:
            return None
        obstacle = self.head.gather(self._obstacle, *([REJOIN_S] if attempt > 1 else []))
        if obstacle is None:
            self.head.run(attempt)
        return obstacle

    def _obstacle(self) -> str:
        """The reason to stop waiting for others; empty while there is none."""
        self._beat_if_due()
        if self._stop_requested():
            return Reason.REQUESTED
        return Reason.AGENT_KILLED if os.getppid() != self.supervisor else ""

    def _follow(self, follower: Follower) -> int:
        """As a member: run by order of the head, stop by its order or when it is lost."""
        epoch = 0
        while True:
            order = follower.order
            lost = follower.lost()
            if order.get("end"):
                self._end(order["end"], {"text": order.get("text", "")})
                return 0
            if self._stop_requested() or os.getppid() != self.supervisor:
                reason: str = Reason.REQUESTED if self._stop_requested() else Reason.AGENT_KILLED
                self.ended = {"epoch": order.get("epoch", 0), "reason": reason, "text": "", "ago_s": 0}
                time.sleep(2 * NOTICE_S)  # so that the head hears of it
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
                self._set_state(State.STARTING, waiting_for=follower.head_name)
            time.sleep(TICK_S)
            self._beat_if_due()

    def _others(self) -> Optional[Tuple[str, Json]]:
        """Why this rank must end because of the rest of the gang, if it must."""
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
                self._set_state(State.READY)
        return None

    def _note_end(self, attempt: int, reason: str, details: Json) -> None:
        """Let the other ranks know at once, before this rank's processes have ended."""
        super()._note_end(attempt, reason, details)
        if self.follower and reason != HALTED:
            self.ended = {"epoch": attempt, "reason": reason, "text": details.get("text", ""), "details": details}
        if self.head and "failed_rank" not in details and reason not in NOT_OF_A_RANK:
            node, rank = self.spec["gang"]["names"][0], self.spec["rank"]
            details.update(failed_rank=rank, node=node, text="rank %d on %s: %s" % (rank, node, details.get("text")))

    def _quiet_s(self, now: float) -> float:
        """Seconds since anything moved on this node or, in a gang, on any; the head judges for its members."""
        if self.follower:
            return 0.0
        own = super()._quiet_s(now)
        return min(own, self.head.least("quiet_s")) if self.head else own

    def _still_s(self, now: float) -> float:
        """Seconds since the start last advanced, likewise."""
        if self.follower:
            return 0.0
        own = super()._still_s(now)
        return min(own, self.head.least("still_s")) if self.head else own

    def _status(self) -> Json:
        """This rank's status, for the other agents of the gang."""
        now = time.monotonic()
        ended = dict(self.ended, ago_s=round(now - self.ended_at, 2)) if self.ended else None
        status = {"state": self.state, "phase": self.phase, "running": self.running, "ended": ended}
        status["quiet_s"] = round(now - self.activity_at, 1)
        status["still_s"] = round(now - self.start_progress.advanced_at, 1)
        status.update(self.progress)
        return status

    def _beat_if_due(self) -> None:
        now = time.monotonic()
        if now - self.beat_at >= HEARTBEAT_S:
            self.beat_at = now
            self._beat()

    def _end(self, reason: str, details: Json) -> None:
        """Record the end: a failure at once, a requested end after the other ranks have ended."""
        requested = reason in (Reason.REQUESTED, Reason.WALLTIME)
        if not requested:
            self._set_state(State.FAILED, reason=reason, **details)
        if self.head:
            self._halt_others()
            self.head.end(reason, details)
        if requested:
            self._set_state(State.STOPPED, reason=reason, **details)

    def _halt_others(self) -> None:
        if self.head:
            self.head.halt(self.patience["grace_s"] + 15)

    def _pause(self, seconds: float) -> bool:
        """Wait before a restart; false when the restart is not wanted any more."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._stop_requested() or os.getppid() != self.supervisor:
                return False
            time.sleep(TICK_S)
            self._beat()
        return True
