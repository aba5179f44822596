"""One server behind the gateway: its connections, its work, whether it makes progress and may have new requests.

A member that has requests and makes no progress for a while is hung. How long that while is depends on the member:
many times its longest usual pause, so that a slow machine is not called dead and a fast one is not waited for. A
member that runs at a fraction of the others' speed is slow: it still gets requests, as many as its speed allows.
Progress means bytes of answers or growing counters in its metrics; `/health` is never asked.
"""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol
from urllib.parse import quote, urlsplit

from corral.client.http1 import BadMessageError, Headers
from corral.client.metrics import Reading
from corral.client.peer_check import PeerCheck
from corral.client.wire import HttpConnection
from corral.deploy.deployment.state import State
from corral.serve.fleet.record import Judgement
from corral.serve.gateway.prompt import Holdings
from corral.serve.gateway.url_member import tls_of
from corral.serve.gateway.usage import KeyUser

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
LEAST_STALL_S, MOST_STALL_S, FIRST_STALL_S = 8.0, 180.0, 60.0
PAUSES = 10.0  # times its longest usual pause
FADE = 0.98  # of the longest pause, at every sign of progress
SLOW_SHARE = 0.25


class ActiveRequest(Protocol):
    """A request, as the member that works on it sees it."""

    def give_up(self, silent_since_s: float, reason: str = "the server has ended") -> None:
        """Give the member up for this request, unless its answer has advanced since then."""


@dataclass(frozen=True)
class MemberReading:
    """What the watcher knows of one server."""

    name: str
    state: State
    url: str = ""  # without /v1; empty when it has no address
    text: str = ""
    model: str = ""
    key: str = field(default="", repr=False)
    seats: int | None = None
    source: str = ""  # the fleet or deployment that it belongs to
    leaving: bool = False
    adapters: tuple[str, ...] = ()  # that its owner gave it
    named: tuple[str, ...] = ()  # of a server at a URL: the models that its user names


@dataclass(slots=True)
class MemberProgress:
    """When a member last made progress; times are monotonic."""

    moved_s: float = 0.0
    busy_since_s: float = 0.0  # when its current requests began to keep it busy; 0: it has none
    longest_pause_s: float = 0.0
    moves: int = 0
    hung: bool = False

    def busy(self, now_s: float) -> None:
        if not self.busy_since_s:
            self.busy_since_s = now_s

    def idle(self) -> None:
        self.busy_since_s = 0.0

    def moved(self, now_s: float) -> None:
        """Bytes of an answer arrived, or a counter has grown."""
        since = max(self.moved_s, self.busy_since_s)
        if self.busy_since_s and since:
            pause = now_s - since
            longest = self.longest_pause_s * FADE
            self.longest_pause_s = pause if pause > longest else longest
            self.moves += 1
        self.moved_s = now_s

    def excuse(self, away_s: float, now_s: float) -> None:
        """This gateway itself did not run for so long: what it did not see then is not held against the member."""
        self.moved_s = min(now_s, self.moved_s + away_s) if self.moved_s else 0.0
        self.busy_since_s = min(now_s, self.busy_since_s + away_s) if self.busy_since_s else 0.0

    def stall_s(self) -> float:
        """How long it may make no progress with work before it counts as hung."""
        if self.moves < 3:
            return FIRST_STALL_S
        return min(MOST_STALL_S, max(LEAST_STALL_S, PAUSES * self.longest_pause_s))


class Receiver(Protocol):
    """The request that a connection carries, as the connection sees it."""

    method: bytes

    def head(self, status: int, headers: Headers, measured: bool) -> None:
        """The head of the answer; `measured`: its headers say how long the body is, or there is none."""

    def data(self, data: list[bytes], last: bool) -> None:
        """Bytes of the answer's body that came together; `last`: nothing follows."""

    def read(self) -> None:
        """The whole answer was read: the connection is no longer the request's."""

    def complete(self) -> None:
        """The member has kept the connection, or it is closed."""

    def broke(self, how: str, stale: bool = False) -> None:
        """It ended before the answer was whole; `stale`: the server may have closed it while it was idle."""


class MemberConnection(HttpConnection):
    """A connection to a member; bytes of an answer go to the request that it carries, as they come."""

    __slots__ = ("_arrived", "_member", "_receiver")

    def __init__(self, member: Member) -> None:
        super().__init__()
        self._member = member
        self._receiver: Receiver | None = None
        self._arrived: list[bytes] = []

    @property
    def _busy(self) -> bool:
        return self._receiver is not None

    def _forget(self) -> None:
        self._receiver = None

    def send(self, receiver: Receiver, parts: Sequence[bytes | bytearray]) -> None:
        """Carry a request."""
        assert self.transport is not None
        self._receiver, self._arrived = receiver, []
        self._reader.expect(receiver.method)
        self.transport.writelines(parts)

    def pause(self, paused: bool) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading() if paused else self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:  # no request is under way
            self.drop()
            return
        try:
            self._reader.feed(data)
        except BadMessageError as error:
            self.drop()
            receiver.broke(f"its answer is not HTTP ({error})")
            return
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            receiver.data(arrived, self._reader.complete)
        if self._reader.complete and self._receiver is receiver:  # it may have been dropped meanwhile
            self._finish()

    def answer(self, status: int, headers: Headers) -> None:
        if self._receiver is not None:
            self._receiver.head(status, headers, not (self._reader.chunked or self._reader.until_eof))

    def body(self, data: bytes) -> None:
        self._arrived.append(data)

    def _finish(self) -> None:
        receiver, self._receiver = self._receiver, None
        assert receiver is not None
        receiver.read()
        if self._reader.keep and self.open and self._member.keep_connection(self):
            self.reused = True
            if self.transport is not None:
                self.transport.resume_reading()  # a slow client may have paused it with its last bytes
        elif self.transport is not None:
            self.transport.close()
        receiver.complete()

    def _break(self, how: str) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.broke(f"the connection {how}", stale=self.reused)

    def _unlist(self) -> None:
        self._member.connection_lost(self)


@dataclass(eq=False)
class Member:
    """One server: a deployment at one address, with what the gateway has sent to it."""

    name: str
    url: str
    state: State
    text: str = ""
    model: str = ""
    source: str = ""
    authorization: bytes = field(default=b"", repr=False)  # the header line with its own key
    seats: int | None = None
    leaving: bool = False
    declined: bool = False  # it answered that it drains
    was_ready: bool = False
    down_until_s: float = 0.0
    pause_s: float = 0.0
    idle: list[MemberConnection] = field(default_factory=list)
    active: set[ActiveRequest] = field(default_factory=set)
    width: int = 0  # sequences that it has from this gateway
    outside: int = 0  # sequences from elsewhere, by its own count in two readings
    outside_seen: int = 0
    work_tokens: float = 0.0
    recent: float = 0.0  # see `policies`
    speed: float = 1.0  # relative to the others
    tokens_per_s: float = 0.0  # of one sequence
    paced_since: Reading | None = None  # where the next measurement of that begins
    holdings: Holdings = field(default_factory=Holdings)
    progress: MemberProgress = field(default_factory=MemberProgress)
    judged: Judgement = Judgement.OK
    reading: Reading | None = None  # of its metrics
    adapters: tuple[str, ...] = ()  # that it may serve: what a server says of itself gives it no other's requests
    models: tuple[str, ...] = ()  # what it serves: its model, and those of its adapters that it lists
    listed: bool = False  # whether its list of models, as last read, has all of its adapters
    cards: tuple[dict[str, object], ...] = ()  # the same, as its /v1/models lists them
    named: tuple[str, ...] = ()  # of a server at a URL, which Corral did not start: the models that its user names
    has_metrics: bool = True
    problem: str = ""  # why its answers do not count
    unreachable: int = 0  # reads of its metrics in a row that failed

    @functools.cached_property
    def peer_check(self) -> PeerCheck:
        return PeerCheck(self.url)

    @functools.cached_property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    @functools.cached_property
    def tls(self) -> ssl.SSLContext | None:
        return tls_of(self.url)

    @functools.cached_property
    def prefix(self) -> bytes:
        """What paths are appended to; empty for all servers that Corral started."""
        return urlsplit(self.url).path.encode()

    @functools.cached_property
    def host(self) -> bytes:
        return urlsplit(self.url).netloc.encode()

    @functools.cached_property
    def label(self) -> bytes:
        """The header line that tells a client which member answered."""
        return b"x-corral-member: %b\r\n" % quote(self.name, safe=" +,=@~:/[]").encode()

    def update_from(self, reading: MemberReading) -> None:
        if reading.state in (State.QUEUED, State.STARTING, State.LOADING):  # it was started again: its cache is empty
            self.declined = self.was_ready = False
            self.holdings.forget()
        self.state, self.text, self.leaving, self.seats = reading.state, reading.text, reading.leaving, reading.seats
        if reading.adapters != self.adapters:  # what was removed gets no more requests; what was added is asked for
            self.models = tuple(one for one in self.models if one not in self.adapters or one in reading.adapters)
            self.listed = False
        self.model, self.source, self.adapters = reading.model, reading.source, reading.adapters
        self.named = reading.named
        self.was_ready = self.was_ready or reading.state is State.READY
        self.authorization = b"authorization: Bearer %b\r\n" % reading.key.encode() if reading.key else b""
        if reading.named or not self.models or self.models[0] != reading.model:
            self.models, self.cards = reading.named or (reading.model,), ()

    # new requests

    def is_open_to(self, user: KeyUser, model: str) -> bool:
        """Whether a key is good for a model on this server."""
        return user.may_use(model, self.source, self.model)

    def readiness(self) -> int:
        """Whether it may have new requests: 2 yes, 1 if no other can (its state is unknown), 0 no."""
        if self.leaving or self.declined or not self.url or self.judged in (Judgement.HUNG, Judgement.GONE):
            return 0
        if self.state is State.READY:
            return 2
        return 1 if self.state is State.UNKNOWN and self.was_ready else 0

    def has_seats(self, width: int) -> bool:
        """Whether a request fits beside what it has; a wide one needs half of the seats, the engine queues the rest.

        Otherwise one request for a thousand answers would keep all others waiting until a server is empty.
        """
        used = self.width + self.outside
        return self.seats is None or used + min(width, -(-self.seats // 2)) <= self.seats or not used

    def release(self, width: int, work: float) -> None:
        """A request left it, answered or not."""
        self.width -= width
        self.work_tokens -= work
        if self.width <= 0:
            self.width, self.work_tokens = 0, 0.0
            self.progress.idle()

    def failed(self, now_s: float) -> None:
        """Avoid it for a moment, longer each time."""
        if now_s >= self.down_until_s:  # several requests that meet one failure are one failure
            self.pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, self.pause_s * 2))
            self.down_until_s = now_s + self.pause_s

    def worked(self) -> None:
        self.pause_s = self.down_until_s = 0.0

    # connections

    def keep_connection(self, connection: MemberConnection) -> bool:
        """Keep a connection for the next request, if there may be one."""
        if not self.readiness():
            return False
        self.idle.append(connection)
        return True

    def connection_lost(self, connection: MemberConnection) -> None:
        with contextlib.suppress(ValueError):
            self.idle.remove(connection)

    def close_idle(self) -> None:
        for connection in self.idle:
            connection.drop()
        self.idle.clear()

    def status_text(self) -> str:
        if self.state is State.READY and self.judged is Judgement.HUNG:
            return f"{self.name} is hung"
        if self.state is State.READY and (self.declined or self.leaving):
            return f"{self.name} is draining"
        return f"{self.name} is {self.state}"


def failure_summary(members: Sequence[Member]) -> str:
    """Why each member failed, when all have; empty while one is left, or none is known yet."""
    if not members or any(one.state is not State.FAILED for one in members):
        return ""
    failures = "; ".join(f"{one.name} has failed ({one.text or 'no reason is known'})" for one in members)
    return f"no server is left: {failures}. Start it again with `corral up`."


def judge(progress: MemberProgress, now_s: float, speed: float = 1.0, reachable: bool = True) -> Judgement:
    """Judge a member now; `speed`: relative to the others, `reachable`: it answers requests for its metrics."""
    if progress.hung:  # until it has answered a request again
        return Judgement.HUNG
    if progress.busy_since_s:
        still_s = now_s - max(progress.moved_s, progress.busy_since_s)
        if still_s > (progress.stall_s() if reachable else LEAST_STALL_S):
            return Judgement.HUNG
    elif not reachable:
        return Judgement.GONE
    return Judgement.SLOW if speed < SLOW_SHARE else Judgement.OK


def relative_speed(own: float, others: Sequence[float]) -> float:
    """A member's tokens per second and sequence relative to the median of the others; 1 if unknown."""
    known = [one for one in others if one > 0]
    if own <= 0 or not known:
        return 1.0
    return min(1.0, own / median(known))
