"""A member as the gateway uses it: its key, its seats, and the work that it has."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from urllib.parse import quote

from corral.client.metrics import Reading
from corral.deploy.deployment.state import State
from corral.serve.fleet.record import Judgement
from corral.serve.gateway.judging import MemberProgress
from corral.serve.gateway.prefixes import Holdings
from corral.serve.proxy.member import Member


@dataclass(frozen=True)
class ServerReading:
    """What is known of one server behind a gateway."""

    name: str
    state: State
    url: str = ""  # without /v1; empty when it has no address
    text: str = ""
    model: str = ""
    key: str = field(default="", repr=False)
    seats: int | None = None
    source: str = ""  # the fleet or deployment that it belongs to
    leaving: bool = False


@dataclass(eq=False)
class ServingMember(Member):
    """One server, with what the gateway has given it."""

    model: str = ""
    source: str = ""
    authorization: bytes = field(default=b"", repr=False)  # the header line with its own key
    seats: int | None = None
    leaving: bool = False
    width: int = 0  # sequences that it has of us
    outside: int = 0  # and of others, by its own count at two looks
    outside_seen: int = 0
    work_tokens: float = 0.0
    recent: float = 0.0  # see `policies`
    speed: float = 1.0  # relative to the others
    tokens_per_s: float = 0.0  # of one sequence
    paced_since: Reading | None = None  # where the next measure of that begins
    holdings: Holdings = field(default_factory=Holdings)
    progress: MemberProgress = field(default_factory=MemberProgress)
    judged: Judgement = Judgement.OK
    reading: Reading | None = None  # of its metrics
    models: tuple[str, ...] = ()  # what it serves: its model, adapters
    cards: tuple[dict[str, object], ...] = ()  # the same, as its /v1/models shows them
    unreachable: int = 0  # looks at its metrics in a row that found nobody

    @functools.cached_property
    def label(self) -> bytes:
        """The header line that tells a client who answered."""
        return b"x-corral-member: %b\r\n" % quote(self.name, safe=" +,=@~").encode()

    def take_over(self, reading: ServerReading) -> None:
        """What is known now."""
        if reading.state in (State.QUEUED, State.STARTING, State.LOADING):  # it lives again, with an empty cache
            self.declined = self.was_ready = False
            self.holdings.forget()
        self.state, self.text, self.leaving, self.seats = reading.state, reading.text, reading.leaving, reading.seats
        self.model, self.source = reading.model, reading.source
        self.was_ready = self.was_ready or reading.state is State.READY
        self.authorization = b"authorization: Bearer %b\r\n" % reading.key.encode() if reading.key else b""
        if not self.models:
            self.models = (reading.model,)

    def grade(self) -> int:
        """How gladly a new request is given to it: 2 ready, 1 perhaps, 0 not."""
        if self.leaving or self.judged in (Judgement.HUNG, Judgement.GONE):
            return 0
        return self.rank()

    def has_seats(self, width: int) -> bool:
        """Whether a request fits beside what it has; a wide one needs half of the seats, the engine queues the rest.

        Else one request for a thousand answers would keep everybody waiting until a server is empty.
        """
        taken = self.width + self.outside
        return self.seats is None or taken + min(width, -(-self.seats // 2)) <= self.seats or not taken

    def gave(self, width: int, work: float) -> None:
        """A request left it, whole or not."""
        self.width -= width
        self.work_tokens -= work
        if self.width <= 0:
            self.width, self.work_tokens = 0, 0.0
            self.progress.idle()
