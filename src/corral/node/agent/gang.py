"""How the agents of several nodes act together, without the machine that started them.

The head's agent listens. Every other agent, a member, keeps a connection to it and reports its rank's status several
times a second, so that the end of one rank is known on all nodes within a second. The head answers with an order:
which attempt to run, or to stop, or that the launch is over and why. Silence for `node_s` on either side means that
the other is lost. The head then takes every rank down and names the lost node; a member that lost its head takes its
own rank down, because an engine without its head would run for ever.

`node_s` is ten seconds by default, and not less: vLLM itself survives a link that is down for eight, and the threads
here do little and touch no file, so that they answer in time on an overloaded machine or with a hanging file system.
The end of a process shows sooner: its kernel closes the connection (`CLOSED_S`), or refuses a new one to the head.

Both sides prove that they know the deployment's token, which itself is never sent, and sign their messages (see
`gang_connection`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from ..authentication import UnverifiedConnections
from ..network import link_is_down
from ..states import Reason, State
from .gang_connection import MOST_UNVERIFIED, GangConnection, read_order, read_status

Json = Dict[str, Any]
REPORT_EVERY_S = 0.3
JOIN_S = 60.0  # for agents that are started at the same moment
CLOSED_S = 1.5  # a connection that is closed and not reopened within this time: the other agent is gone
AT_ONCE = 0.7  # of `node_s`: when one member is lost, others silent for this long fell silent with it
NOTICE_S = 0.5  # within which an agent notices and reports that its engine ended


def _clock() -> str:
    return time.strftime("%H:%M:%S")


class Member:
    """What the head knows about one other agent."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.connected = False
        self.closed_at = 0.0  # monotonic; when its last connection ended
        self.connection: Any = None  # the newest `GangConnection`
        self.heard = 0.0  # monotonic; 0 before the first report
        self.heard_at = ""  # the same as a time of day
        self.status: Json = {}  # as last reported

    def status_text(self) -> str:
        """Its last status, for people."""
        status = self.status
        if status.get("state") in (State.READY, State.DRAINING):  # its phases, and their counts, are over
            return str(status["state"])
        phase = status.get("phase") or status.get("state") or "nothing"
        return "%s, %s of %s" % (phase, status["done"], status["total"]) if status.get("total") else str(phase)

    def ended(self, epoch: int) -> Optional[Json]:
        """How its rank ended in this attempt, if it has."""
        end = self.status.get("ended")
        return end if end and end.get("epoch") == epoch else None


class Head:
    """The head's side: waits for the members, gives orders, notices who is lost."""

    def __init__(
        self, gang: Json, node_s: float, own: Callable[[], Json], tick: Callable[[], None] = lambda: None
    ) -> None:
        with open(gang["token_file"], "rb") as file:
            self._token = file.read().strip()
        self._tick = tick  # called while it waits
        self.node_s = node_s
        self._name, self._address = gang["names"][0], gang["head"]
        self.members = [Member(rank, name) for rank, name in enumerate(gang["names"]) if rank]
        self._own = own  # returns this rank's own status, for the members
        self._order: Json = {"epoch": 0, "run": False, "end": None}
        self._lock = threading.Lock()
        self._sent: Dict[int, Json] = {}  # the last order that each rank received
        family = socket.AF_INET6 if ":" in gang["head"] else socket.AF_INET
        self._listener = socket.socket(family)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((gang["head"], int(gang["port"])))
        self._listener.listen(64)
        self._closed = False
        self._unverified = UnverifiedConnections(MOST_UNVERIFIED)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
                self._unverified.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (
                OSError,
                RuntimeError,
            ):  # no descriptor or thread left, or the caller is gone: the next may succeed
                time.sleep(0.05)

    def _serve(self, accepted: socket.socket) -> None:
        connection, member = None, None
        try:
            connection = GangConnection(accepted, self.node_s)
            member = self._identify(connection)
            self._unverified.remove(accepted)
            member.connection, member.connected = connection, True
            while True:
                status = read_status(connection.receive())
                with self._lock:
                    member.status, member.heard, member.heard_at = status, time.monotonic(), _clock()
                    order = dict(self._order, head=self._own())
                connection.send(order)
                self._sent[member.rank] = order
        except (OSError, ValueError, RecursionError):
            pass
        finally:
            if member is not None and member.connection is connection:  # it may have reconnected meanwhile
                member.connected, member.closed_at = False, time.monotonic()
            self._unverified.remove(accepted)
            accepted.close()

    def _identify(self, connection: GangConnection) -> Member:
        rank = connection.accept_member(self._token)
        member = next((member for member in self.members if member.rank == rank), None)
        if member is None:
            raise ValueError("there is no rank %d here" % rank)
        return member

    def gather(self, obstacle: Callable[[], str], wait_s: float = JOIN_S) -> Optional[Tuple[str, Json]]:
        """Wait until every member is connected and runs no rank; why that cannot be, or None."""
        until = time.monotonic() + wait_s
        while True:
            missing = [member for member in self.members if not self._idle(member)]
            if not missing:
                return None
            reason = obstacle()
            if reason:
                return reason, {}
            if time.monotonic() > until:
                names = ", ".join(member.name for member in missing)
                have = "has" if len(missing) == 1 else "have"
                text = "%s %s not joined within %d s" % (names, have, wait_s)
                return Reason.NODE_LOST, {"text": text, "nodes": [member.name for member in missing]}
            time.sleep(0.1)

    def _idle(self, member: Member) -> bool:
        return member.connected and bool(member.heard) and not member.status.get("running")

    def run(self, epoch: int) -> None:
        """Every member starts its rank."""
        with self._lock:
            self._order = {"epoch": epoch, "run": True, "end": None}

    def fault(self) -> Optional[Tuple[str, Json]]:
        """What is wrong with the members: a node that is lost, or a rank that ended."""
        for member in self.members:
            ended = member.ended(self._order["epoch"])
            if ended:
                return self._ended(member, ended)
            if self._is_lost(member):
                return self._lost(member)
        return None

    def _is_lost(self, member: Member) -> bool:
        now = time.monotonic()
        closed_s = 0.0 if member.connected else now - member.closed_at
        return now - member.heard > self.node_s or closed_s > min(CLOSED_S, self.node_s)

    def _ended(self, member: Member, ended: Json) -> Tuple[str, Json]:
        reason = str(ended.get("reason"))
        text = "rank %d on %s: %s" % (member.rank, member.name, ended.get("text") or reason)
        details = dict(ended.get("details") or {}, text=text, failed_rank=member.rank, node=member.name)
        return reason, details if reason != Reason.REQUESTED else {}

    def _lost(self, member: Member) -> Tuple[str, Json]:
        silent = [one for one in self.members if time.monotonic() - one.heard > AT_ONCE * self.node_s]
        if member in silent and self._is_alone(silent):
            names = ", ".join(one.name for one in silent)
            text = "the link of %s was cut: from %s on it heard nothing from %s" % (
                self._name,
                member.heard_at,
                names,
            )
            return Reason.NODE_LOST, {"text": text, "node": self._name, "failed_rank": 0}
        closed = member not in silent  # its connection ended and was not reopened: the node itself may be well
        text = "the agent on %s is gone; it was last heard at %s" if closed else "%s stopped answering at %s"
        text = (text + "; rank %d last said: %s") % (
            member.name,
            member.heard_at,
            member.rank,
            member.status_text(),
        )
        details = {"text": text, "node": member.name, "failed_rank": member.rank}
        return Reason.NODE_LOST, dict(details, closed=True) if closed else details

    def _is_alone(self, silent: List[Member]) -> bool:
        """Whether this node is the one that is cut off: all members fell silent at once, or its own link is down."""
        every = len(silent) == len(self.members)
        return every and (len(silent) > 1 or link_is_down(self._address))

    def root_cause(self, reason: str, details: Json, ended: float) -> Tuple[str, Json]:
        """The first cause of this rank's end at `ended`: an earlier end of another rank, or a lost node, if there is
        one.
        """
        until = time.monotonic() + self.node_s + 2
        while time.monotonic() < until:
            for member in self.members:
                end = member.ended(self._order["epoch"])
                if end and member.heard - float(end.get("ago_s", 0)) < ended:
                    return self._ended(member, end)
                if self._is_lost(member):
                    return self._lost(member)
            if all(member.heard > ended + NOTICE_S for member in self.members):
                break
            self._tick()
            time.sleep(0.1)
        return reason, details

    def least(self, name: str) -> float:
        """The least value that any member reports: seconds since its rank did something, or advanced."""
        return min([float(member.status.get(name, 1e9)) for member in self.members] or [1e9])

    def halt(self, wait_s: float) -> None:
        """Every member takes its rank down; waits for those that are not lost."""
        with self._lock:
            self._order = dict(self._order, run=False)
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            if not any(member.connected and member.status.get("running") for member in self.members):
                return
            self._tick()
            time.sleep(0.1)

    def end(self, reason: str, details: Json) -> None:
        """The launch is over; every connected member is told why."""
        with self._lock:
            self._order = dict(self._order, run=False, end=reason, text=details.get("text", ""))
        until = time.monotonic() + 5
        while time.monotonic() < until:
            if all(not member.connected or self._sent.get(member.rank, {}).get("end") for member in self.members):
                break
            time.sleep(0.05)
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        with contextlib.suppress(OSError):
            self._listener.close()


class Follower:
    """A member's side: reports its rank's status, and knows the last order."""

    def __init__(self, gang: Json, node_s: float, rank: int, own: Callable[[], Json]) -> None:
        with open(gang["token_file"], "rb") as file:
            self._token = file.read().strip()
        self.node_s = node_s
        self.head_name = gang["names"][0]
        self._address = (gang["head"], int(gang["port"]))
        self._rank, self._own = rank, own
        self.order: Json = {}
        self._heard = 0.0
        self._heard_at = ""
        self._began = time.monotonic()
        self._error = ""
        self._refused_at = 0.0  # since when the head's address refuses connections
        threading.Thread(target=self._stay_connected, daemon=True).start()

    def _stay_connected(self) -> None:
        while True:
            try:
                self._report()
            except (OSError, ValueError, RecursionError) as error:
                self._error = str(error)
                refused = isinstance(error, ConnectionRefusedError)
                self._refused_at = (self._refused_at or time.monotonic()) if refused else 0.0
            time.sleep(0.3)

    def _report(self) -> None:
        opened = socket.create_connection(self._address, timeout=min(5.0, self.node_s))
        connection = GangConnection(opened, self.node_s)
        try:
            if not connection.join_head(self._token, self._rank):
                raise ValueError("whoever answers on %s:%d is not the head of this deployment" % self._address)
            while True:
                connection.send(self._own())
                self.order = read_order(connection.receive())
                self._heard, self._heard_at, self._refused_at = time.monotonic(), _clock(), 0.0
                time.sleep(REPORT_EVERY_S)
        finally:
            connection.close()

    def lost(self, join_s: float = JOIN_S) -> Optional[str]:
        """Why the head counts as lost, or None."""
        if not self._heard:
            if time.monotonic() - self._began < join_s:
                return None
            return "the head %s never answered on %s:%d (%s)" % ((self.head_name, *self._address, self._error))
        if time.monotonic() - self._heard > self.node_s:
            return "the head %s stopped answering at %s" % (self.head_name, self._heard_at)
        if self._refused_at and time.monotonic() - self._refused_at > CLOSED_S:
            return "the agent of the head %s is gone; it was last heard at %s" % (self.head_name, self._heard_at)
        return None

    def silent_s(self) -> float:
        """Seconds since the head was last heard, or since the beginning."""
        return time.monotonic() - (self._heard or self._began)
