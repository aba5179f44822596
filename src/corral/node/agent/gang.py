"""How the agents of several nodes hold together, without the machine that started them.

The head's agent listens; every other agent keeps a connection to it and says several times a second how its rank
stands, so that an end on one node is known on all of them within a second.
The head answers with an order: which attempt to run, or to stop, or that it is over and why. Silence for `node_s`
on either side means that the other is lost: the head then takes every rank down and says which node it was; a member
that lost its head takes its own rank down, because a headless engine would live on for ever.

`node_s` is ten seconds unless the user says otherwise, and not less: vLLM itself survives a link that is gone for
eight, and what speaks here are threads that do next to nothing and touch no file, so that they are heard in time on a
machine with ten times the work it can do, or with a file system that hangs. A process that ends needs no such
patience: its kernel closes the connection (`CLOSED_S`), or refuses a new one where the head was.

Both sides prove that they know the deployment's token, which itself never travels, and sign what they say: see
`gang_line`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

from ..network import link_is_down
from ..states import Reason, State
from .gang_connection import Line, Strangers, read_order, read_standing

Json = Dict[str, Any]
SAY_EVERY_S = 0.3
JOIN_S = 60.0  # for agents that are started at the same moment
CLOSED_S = 1.5  # a closed connection that is not opened anew within this time: whoever was there is gone
AT_ONCE = 0.7  # of the patience: when one is lost, others that were silent for so long fell silent with it
NOTICE_S = 0.5  # within which an agent knows and has said that its engine ended


def _clock() -> str:
    return time.strftime("%H:%M:%S")


class Member:
    """What the head knows of one other agent."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.connected = False
        self.closed_at = 0.0  # monotonic; when its last connection ended
        self.line: Any = None  # the newest connection
        self.heard = 0.0  # monotonic; 0 before the first word
        self.heard_at = ""  # the same as people say it
        self.said: Json = {}

    def words(self) -> str:
        """What it said last, for people."""
        said = self.said
        if said.get("state") in (State.READY, State.DRAINING):  # its phases, and what was counted in them, are over
            return str(said["state"])
        phase = said.get("phase") or said.get("state") or "nothing"
        return "%s, %s of %s" % (phase, said["done"], said["total"]) if said.get("total") else str(phase)

    def ended(self, epoch: int) -> Optional[Json]:
        """How its rank ended in this attempt, if it has."""
        found = self.said.get("ended")
        return found if found and found.get("epoch") == epoch else None


class Head:
    """The head's side: counts members in, gives orders, notices who is lost."""

    def __init__(self, gang: Json, node_s: float, own: Any, tick: Any = lambda: None) -> None:
        with open(gang["token_file"], "rb") as file:
            self._token = file.read().strip()
        self._tick = tick  # called while it waits for others
        self.node_s = node_s
        self._name, self._address = gang["names"][0], gang["head"]
        self.members = [Member(rank, name) for rank, name in enumerate(gang["names"]) if rank]
        self._own = own  # returns this rank's own state, for the members
        self._order: Json = {"epoch": 0, "run": False, "end": None}
        self._lock = threading.Lock()
        self._told: Dict[int, Json] = {}
        self._began = time.monotonic()
        family = socket.AF_INET6 if ":" in gang["head"] else socket.AF_INET
        self._listener = socket.socket(family)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((gang["head"], int(gang["port"])))
        self._listener.listen(64)
        self._closed = False
        self._strangers = Strangers()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
                self._strangers.admit(connection)
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no descriptor or thread left, a caller who hung up: the next may come
                time.sleep(0.05)

    def _talk(self, connection: socket.socket) -> None:
        line, member = None, None
        try:
            line = Line(connection, self.node_s)
            member = self._greet(line)
            self._strangers.known(connection)
            member.line, member.connected = line, True
            while True:
                said = read_standing(line.receive())
                with self._lock:
                    member.said, member.heard, member.heard_at = said, time.monotonic(), _clock()
                    order = dict(self._order, head=self._own())
                line.send(order)
                self._told[member.rank] = order
        except (OSError, ValueError, RecursionError):
            pass
        finally:
            if member is not None and member.line is line:  # it may have come back on another one meanwhile
                member.connected, member.closed_at = False, time.monotonic()
            self._strangers.known(connection)
            connection.close()

    def _greet(self, line: Line) -> Member:
        rank = line.greet_member(self._token)
        member = next((member for member in self.members if member.rank == rank), None)
        if member is None:
            raise ValueError("there is no rank %d here" % rank)
        return member

    def gather(self, stop_asked: Any, wait_s: float = JOIN_S) -> Optional[Tuple[str, Json]]:
        """Wait until every member is there with no rank running; what hinders, or None."""
        until = time.monotonic() + wait_s
        while True:
            missing = [member for member in self.members if not self._idle(member)]
            if not missing:
                return None
            hindrance = stop_asked()
            if hindrance:
                return hindrance, {}
            if time.monotonic() > until:
                names = ", ".join(member.name for member in missing)
                heard = "has" if len(missing) == 1 else "have"
                text = "%s %s not joined within %d s" % (names, heard, wait_s)
                return Reason.NODE_LOST, {"text": text, "nodes": [member.name for member in missing]}
            time.sleep(0.1)

    def _idle(self, member: Member) -> bool:
        return member.connected and bool(member.heard) and not member.said.get("running")

    def run(self, epoch: int) -> None:
        """Every member starts its rank."""
        with self._lock:
            self._order = {"epoch": epoch, "run": True, "end": None}

    def fault(self) -> Optional[Tuple[str, Json]]:
        """What is wrong with the others: a node that is lost, or a rank that ended."""
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
            words = "the link of %s was cut: from %s on it heard nothing of %s" % (self._name, member.heard_at, names)
            return Reason.NODE_LOST, {"text": words, "node": self._name, "failed_rank": 0}
        closed = (
            member not in silent
        )  # its connection ended, and nobody has opened another: the node itself may be well
        text = "the agent on %s is gone; it was last heard at %s" if closed else "%s stopped answering at %s"
        words = (text + "; rank %d last said: %s") % (member.name, member.heard_at, member.rank, member.words())
        found = {"text": words, "node": member.name, "failed_rank": member.rank}
        return Reason.NODE_LOST, dict(found, closed=True) if closed else found

    def _is_alone(self, silent: List[Member]) -> bool:
        """Whether it is this node that is cut off: several others fell silent at once, or its own link is down."""
        every = len(silent) == len(self.members)
        return every and (len(silent) > 1 or link_is_down(self._address))

    def root_cause(self, reason: str, details: Json, ended: float) -> Tuple[str, Json]:
        """This rank ended at `ended`: because another had? Whoever was first is the cause, so all are heard."""
        until = time.monotonic() + self.node_s + 2
        while time.monotonic() < until:
            for member in self.members:
                theirs = member.ended(self._order["epoch"])
                if theirs and member.heard - float(theirs.get("ago_s", 0)) < ended:
                    return self._ended(member, theirs)
                if self._is_lost(member):
                    return self._lost(member)
            if all(member.heard > ended + NOTICE_S for member in self.members):
                break
            self._tick()
            time.sleep(0.1)
        return reason, details

    def least(self, name: str) -> float:
        """The least of what the members say: seconds since any of them saw its rank do something, or advance."""
        return min([float(member.said.get(name, 1e9)) for member in self.members] or [1e9])

    def halt(self, wait_s: float) -> None:
        """Every member takes its rank down; waited for, but not for those that are lost."""
        with self._lock:
            self._order = dict(self._order, run=False)
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            if not any(member.connected and member.said.get("running") for member in self.members):
                return
            self._tick()
            time.sleep(0.1)

    def end(self, reason: str, details: Json) -> None:
        """It is over; every member that is there hears why."""
        with self._lock:
            self._order = dict(self._order, run=False, end=reason, text=details.get("text", ""))
        until = time.monotonic() + 5
        while time.monotonic() < until:
            if all(not member.connected or self._told.get(member.rank, {}).get("end") for member in self.members):
                break
            time.sleep(0.05)
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
        with contextlib.suppress(OSError):
            self._listener.close()


class Follower:
    """A member's side: says how its rank stands, and knows the last order."""

    def __init__(self, gang: Json, node_s: float, rank: int, own: Any) -> None:
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
        self._refused_at = 0.0  # since when nobody listens where the head was
        threading.Thread(target=self._keep_talking, daemon=True).start()

    def _keep_talking(self) -> None:
        while True:
            try:
                self._talk()
            except (OSError, ValueError, RecursionError) as error:
                self._error = str(error)
                refused = isinstance(error, ConnectionRefusedError)
                self._refused_at = (self._refused_at or time.monotonic()) if refused else 0.0
            time.sleep(0.3)

    def _talk(self) -> None:
        connection = socket.create_connection(self._address, timeout=min(5.0, self.node_s))
        line = Line(connection, self.node_s)
        try:
            if not line.greet_head(self._token, self._rank):
                raise ValueError("whoever answers on %s:%d is not the head of this deployment" % self._address)
            while True:
                line.send(self._own())
                self.order = read_order(line.receive())
                self._heard, self._heard_at, self._refused_at = time.monotonic(), _clock(), 0.0
                time.sleep(SAY_EVERY_S)
        finally:
            line.close()

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
