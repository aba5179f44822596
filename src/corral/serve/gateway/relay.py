"""One request on its way: sent to a member, perhaps to another one, held while none is ready, its answer passed on.

Until the first byte of an answer has gone to the client nothing is lost: the request is kept and sent again when a
member refuses the connection, drops it, or says that it drains. After that a failure ends the client's connection
before the announced end of the answer, which every client sees as an error. `ForwardedRequest` chooses the member.

A request that three servers dropped without an answer is not sent to a fourth: it may be what ends them. An engine
that dies answers with 500, or with an error as the first event of a stream, before its server ends: such an answer
goes to the client only if it is the second one, or no other member is ready.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Protocol

from corral.client.errors import StrangerError, error_body
from corral.client.http1 import LAST_CHUNK, Headers, chunk, response, status_line
from corral.deploy.deployment.state import State
from corral.serve.connections import HeldBytes, ServerLimits
from corral.serve.gateway.member import Member, MemberConnection
from corral.serve.gateway.origins import OF_MEMBERS, AllowedOrigins
from corral.serve.gateway.pages import Figures
from corral.serve.gateway.request import ForwardedRequest, Request, forwarded_headers

MOST_DROPS, MOST_ERRORS = 3, 1
# a 401 is none of the client's, whose key is good: another server is where the member was, or its key has changed
_ASKED_AGAIN = frozenset((401, 500, 502, 503, 504))
_ERROR_EVENT = b'data: {"error"'
LARGEST_DECLINE_BYTES = 1 << 16
DRAINING_HEADER = b"x-corral-state"  # what the guard of a draining server adds to its 503
_now = time.monotonic


@dataclass(frozen=True, kw_only=True)
class GatewayLimits(ServerLimits):
    """How long requests may wait, and how much of them is kept, besides what every server limits."""

    connections: int = 16_384
    idle_s: float = 300.0
    hold_s: float = 120.0  # a request waits this long for a server to be ready
    connect_s: float = 5.0
    body_bytes: int = 256 << 20
    held_bytes: int = 2 << 30  # of all requests together that may have to be sent again
    held_bytes_of_key: int = 512 << 20


class RelayHost(Protocol):
    """The gateway, as one request sees it."""

    title: str  # begins every error message
    loop: asyncio.AbstractEventLoop
    limits: GatewayLimits
    origins: AllowedOrigins
    figures: Figures
    held: HeldBytes
    ending: bool

    def regroup(self) -> None:
        """The readiness of a member has changed."""


class AnswerWriter(Protocol):
    """The client's connection, as the request that it sent sees it."""

    closing: bool  # no further request is read from it

    def write(self, data: bytes) -> None: ...

    def done(self) -> None: ...

    def cut(self) -> None: ...


class Relay:
    """Carries one request to a member and its answer to the client."""

    __slots__ = (
        "_answered_by",
        "_answering",
        "_began_s",
        "_chunked",
        "_client",
        "_connection",
        "_deadline",
        "_decline",
        "_declines",
        "_drops",
        "_early",
        "_ended",
        "_for_browsers",
        "_forwarded",
        "_gateway",
        "_headers",
        "_held_since_s",
        "_http_10",
        "_member",
        "_opening",
        "_over",
        "_request",
        "_stale",
        "_status",
        "method",
        "moved_s",
    )  # fmt: skip

    def __init__(
        self, gateway: RelayHost, client: AnswerWriter, request: Request, forwarded: ForwardedRequest
    ) -> None:
        self._gateway, self._client, self._forwarded = gateway, client, forwarded
        self._request: Request | None = request
        self._for_browsers = gateway.origins.lines(request.headers)
        self.method = request.method
        self._http_10 = request.http_10
        self._member: Member | None = None
        self._answered_by: Member | None = None
        self._connection: MemberConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._held_since_s = 0.0
        self._drops = self._stale = self._declines = self._status = 0
        self._answering = self._chunked = self._over = False
        self._decline: list[bytes] | None = None  # a failure that another member may still make good
        self._headers: Headers = []
        self._ended = False  # the last chunk is written
        self._early = False  # the head is kept until bytes of the body arrive
        self._began_s = self.moved_s = _now()

    def start(self) -> None:
        self._gateway.figures.began(self._began_s)
        self.attempt()

    # towards a member

    def attempt(self) -> None:
        """Send the request to a member, or wait for one."""
        if self._over or self._request is None:
            return
        member = self._forwarded.choose(self._gateway.loop.time())
        if member is None:
            self._hold()
            return
        self._member = member
        member.active.add(self)
        while member.idle:
            connection = member.idle.pop()
            if connection.open:
                self._send(member, connection)
                return
        self._opening = self._gateway.loop.create_task(self._open(member))

    async def _open(self, member: Member) -> None:
        try:
            async with asyncio.timeout(self._gateway.limits.connect_s):
                connection = await self._connected(member)
        except (OSError, TimeoutError):
            self._opening = None
            self._gateway.figures.retried += 1
            self._leave(member, failed=True)
            self.attempt()
            return
        except StrangerError as error:
            self._opening = None
            self._leave(member, failed=True)
            if self._forwarded.another_ready(member, self._gateway.loop.time()):
                self.attempt()
            elif not self._over:
                self._fail(502, error.message)
            return
        self._opening = None
        if self._over or self._member is not member:
            connection.drop()
        else:
            self._send(member, connection)

    async def _connected(self, member: Member) -> MemberConnection:
        """A new connection to a server that may have a key of ours."""
        transport, connection = await self._gateway.loop.create_connection(
            lambda: MemberConnection(member), *member.address, ssl=member.tls
        )
        try:
            if member.tls is None:  # otherwise the certificate proves the peer
                await member.peer_check.check(transport)
        except BaseException:
            connection.drop()
            raise
        return connection

    def _send(self, member: Member, connection: MemberConnection) -> None:
        assert self._request is not None
        self._end_hold()
        self._connection = connection
        self.moved_s = _now()
        connection.send(self, self._request.message(member, self._forwarded.pool.model))

    def _leave(self, member: Member, failed: bool = False) -> None:
        member.active.discard(self)
        self._member = self._connection = None
        if failed:
            member.failed(self._gateway.loop.time())
        self._forwarded.leave(member)

    # holding

    def _hold(self) -> None:
        gateway = self._gateway
        if diagnosis := self._forwarded.failure_summary():  # none comes back by itself: waiting would only hide why
            self._end_hold()
            self._fail(503, diagnosis)
            return
        if not self._held_since_s:
            self._held_since_s = gateway.loop.time()
            gateway.figures.held += 1
            self._deadline = gateway.loop.call_later(gateway.limits.hold_s, self._too_long)
        self._forwarded.wait(self)

    def _end_hold(self) -> None:
        if self._held_since_s:
            held = self._gateway.loop.time() - self._held_since_s
            self._gateway.figures.longest_hold_s = max(self._gateway.figures.longest_hold_s, held)
            self._held_since_s = 0.0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_long(self) -> None:
        if self._forwarded.pool.only_full():
            self._deadline = self._gateway.loop.call_later(self._gateway.limits.hold_s, self._too_long)
            return
        self._end_hold()
        if self._opening is not None:  # to a server that counts as ready and does not accept
            self._opening.cancel()
        if self._member is not None:
            self._leave(self._member)
        held = f"no server was ready within {self._gateway.limits.hold_s:g} s"
        self._fail(503, f"{held}: {self._forwarded.status_text()}. Try again later.")

    # from the member

    def head(self, status: int, headers: Headers, measured: bool) -> None:
        """The head of an answer; it is kept until the first bytes of the body, and a failure is examined first.

        An engine sends the head of a stream when it accepts the request, long before the first token.
        """
        self._status = status
        self._chunked = not measured and not self._http_10
        self._headers = headers
        if status in _ASKED_AGAIN and self._request is not None:
            self._decline = []
            return
        if self._member is not None:
            self._member.worked()
        self._early = True

    def _pass_head(self, body: bytes = b"") -> None:
        """In one write with the first bytes of the body."""
        self._early = False
        now = _now()
        figures = self._gateway.figures
        if now - self._began_s > figures.longest_wait_s:
            figures.longest_wait_s = now - self._began_s
        headers = self._headers
        self._answering = True
        self._forget_request()
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        if self._client.closing:
            framing += b"connection: close\r\n"
        if member := self._member or self._answered_by:
            framing += self._forwarded.answer_began(member, headers)
        framing += self._for_browsers
        passed_on = forwarded_headers(headers, OF_MEMBERS)
        self._client.write(b"%b%b%b\r\n%b" % (status_line(self._status), passed_on, framing, body))
        self._moved(now, first=True)

    def data(self, data: list[bytes], last: bool) -> None:
        """Bytes of the answer's body."""
        if self._decline is not None:
            self._decline += data
            if sum(map(len, self._decline)) > LARGEST_DECLINE_BYTES:
                self._accept_decline()
            return
        if self._early and data[0].startswith(_ERROR_EVENT) and self._resend_elsewhere(data[0]):
            return
        now = _now()
        body = self._framed(data, last)
        if self._early:
            self._pass_head(body)
        else:
            self._moved(now)
            self._client.write(body)
        self._forwarded.answer_advanced(now, data)

    def _resend_elsewhere(self, event: bytes) -> bool:
        """Whether a stream that begins with an error of the server is sent to another member."""
        member, connection, now = self._member, self._connection, self._gateway.loop.time()
        if member is None or connection is None or self._request is None or not _is_servers_fault(event):
            return False
        if self._declines >= MOST_ERRORS or not self._forwarded.another_ready(member, now):
            return False
        self._declines += 1
        self._early = False
        connection.drop()
        self._gateway.figures.retried += 1
        self._leave(member, failed=True)
        self.attempt()
        return True

    def _framed(self, data: list[bytes], last: bool = False) -> bytes:
        """The body in chunks as they came: each event stays separate."""
        if not self._chunked:
            return b"".join(data)
        parts = list(map(chunk, data))
        if last:
            parts.append(LAST_CHUNK)
            self._ended = True
        return b"".join(parts)

    def _moved(self, now: float, first: bool = False) -> None:
        figures = self._gateway.figures
        gap = now - self.moved_s
        if not first and gap > figures.longest_stream_gap_s:
            figures.longest_stream_gap_s = gap
        self.moved_s = now
        figures.moved(now)

    def read(self) -> None:
        """The whole answer was read."""
        self._answered_by = member = self._member
        if member is not None:
            self._leave(member)

    def complete(self) -> None:
        """The answer is whole: pass on what is left of it, or try another member when it was a failure."""
        if self._decline is not None:
            if self._declined():
                return
            if self._status == 401 and self._answered_by is not None:
                self._decline = None
                self._fail(503, f"{self._answered_by.name} does not accept its key now. Try again later.")
                return
            self._accept_decline()
        if self._early:
            self._pass_head()
        if self._chunked and not self._ended:
            self._client.write(LAST_CHUNK)
        self._finish(answered=True)

    def _declined(self) -> bool:
        """Whether the failure is sent to another member, which may do better, now or soon."""
        now, member = self._gateway.loop.time(), self._answered_by
        assert member is not None
        away = self._status == 503
        if away and ((DRAINING_HEADER, b"draining") in self._headers or member.state is State.DRAINING):
            member.declined = True
            self._gateway.regroup()  # no pool chooses it again
        elif self._forwarded.another_ready(member, now) and self._declines < (MOST_DROPS if away else MOST_ERRORS):
            self._declines += 1
            member.failed(now)
        else:
            return False
        self._decline = None
        self._gateway.figures.retried += 1
        self.attempt()
        return True

    def _accept_decline(self) -> None:
        parts, self._decline = self._decline or [], None
        self._pass_head(self._framed(parts))

    def broke(self, how: str, stale: bool = False) -> None:
        """The connection to the member is gone before the answer was whole."""
        member = self._member
        if self._over or member is None:
            return
        if self._answering:
            self._leave(member, failed=True)
            self._write_closing_event(f"{member.name} broke off: {how}")
            self._finish(answered=False)
            self._client.cut()
            return
        self._decline, self._early = None, False
        self._gateway.figures.retried += 1
        if stale and self._stale < 3:  # the server had closed an idle connection: no sign of a failure
            self._stale += 1
            self._leave(member)
        else:
            self._leave(member, failed=True)
            self._drops += 1
            if self._drops >= MOST_DROPS:
                self._fail(502, f"the server dropped the request {MOST_DROPS} times without an answer: {how}.")
                return
        self.attempt()

    def _write_closing_event(self, message: str) -> None:
        """Tell the reader of a stream why it ends, in a last event."""
        if event := self._forwarded.closing_event(f"{self._gateway.title}: {message}"):
            self._client.write(chunk(event) if self._chunked else event)

    def give_up(self, silent_since_s: float, reason: str = "the server has ended") -> None:
        """Drop the connection to the member, unless the answer has advanced since then."""
        if self._connection is not None and self.moved_s < silent_since_s:
            self._connection.drop()
            self.broke(reason)

    # the end

    def abandon(self) -> None:
        """The client is gone: closing the connection tells the member."""
        if self._over:
            return
        self._abort()
        self._gateway.figures.left += 1
        self._close(whole=False)

    def cut_short(self) -> None:
        """The gateway ends: the client is told, as far as its answer allows that."""
        if self._over:
            return
        self._abort()
        if not self._answering:
            self._fail(503, "it was shut down before there was an answer.")
            return
        self._write_closing_event("it was shut down before the answer was whole")
        self._finish(answered=False)
        self._client.cut()

    def _abort(self) -> None:
        """Whichever member works on it need not go on."""
        member, connection = self._member, self._connection
        if member is not None:
            self._leave(member)
        if connection is not None:
            connection.drop()
        if self._opening is not None:
            self._opening.cancel()

    @property
    def is_answering(self) -> bool:
        """Whether some of an answer has gone to the client."""
        return self._answering

    def pause(self, paused: bool) -> None:
        """The client reads slowly: read from the member slowly as well."""
        if self._connection is not None:
            self._connection.pause(paused)

    def _fail(self, status: int, message: str) -> None:
        kind = "service_unavailable_error" if status == 503 else "bad_gateway_error"
        body = json.dumps(error_body(f"{self._gateway.title}: {message}", kind, status)).encode()
        extra = b"retry-after: 10\r\n" if status == 503 else b""
        self._client.write(response(status, body, extra=extra))
        self._finish(answered=False)
        self._client.done()

    def _finish(self, answered: bool) -> None:
        figures = self._gateway.figures
        if answered:
            figures.answered += 1
            figures.refused += self._status >= 400
        else:
            figures.failed += 1
        self._close(whole=answered)
        if answered:
            self._client.done()

    def _close(self, whole: bool) -> None:
        self._over = True
        self._gateway.figures.running -= 1
        self._forwarded.stop_waiting()
        self._forwarded.finish(self._status, whole)
        self._forget_request()
        if self._deadline is not None:
            self._deadline.cancel()

    def _forget_request(self) -> None:
        if self._request is not None:
            self._gateway.held.release(self._request.user, len(self._request.body))
            self._request = None


def _is_servers_fault(event: bytes) -> bool:
    """Whether an error event reports a failure of the server, not of the request."""
    try:
        code = json.loads(event.partition(b"\n")[0].removeprefix(b"data: "))["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(code, int) and code >= 500
