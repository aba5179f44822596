"""One request on its way: given to a member, perhaps to another one, held while none is ready, its answer passed on.

Until the first byte of an answer has gone to the client nothing is lost: the request is kept and sent again when a
member refuses the connection, drops it, or says that it drains. From then on a failure ends the client's connection
before the announced end of the answer, which every client sees as an error. Who is asked is the route's decision.

A request that three servers dropped without a word is not given to a fourth: it may be what ends them. An engine that
dies answers with 500, or with an error as the first event of a stream, before its server ends: such an answer goes to
the client only if it is the second, or nobody else is ready.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Protocol

from corral.client.errors import StrangerError
from corral.client.http1 import LAST_CHUNK, Headers, chunk, response, status_line
from corral.deploy.deployment.state import State
from corral.serve.proxy.forwarding import forwarded
from corral.serve.proxy.host import Host
from corral.serve.proxy.member import Member
from corral.serve.proxy.request import Request
from corral.serve.proxy.route import MemberChooser
from corral.serve.proxy.upstream import Upstream

MOST_DROPS, MOST_ERRORS = 3, 1
_ASKED_AGAIN = frozenset((500, 502, 503, 504))
_ERROR_EVENT = b'data: {"error"'
LARGEST_DECLINE_BYTES = 1 << 16
DRAINING_HEADER = b"x-corral-state"  # what the guard of a draining server adds to its 503
_now = time.monotonic


class Downstream(Protocol):
    """Who asked: takes the bytes of an answer."""

    closing: bool  # no further request is read from it

    def write(self, data: bytes) -> None: ...

    def done(self) -> None: ...

    def cut(self) -> None: ...


class Relay:
    """The life of one request."""

    __slots__ = (
        "_answered_by", "_answering", "_began_s", "_chunked", "_client", "_deadline", "_decline", "_declines",
        "_drops", "_early", "_ended", "_headers", "_held_since_s", "_host", "_http_10", "_member", "_opening",
        "_over", "_request", "_route", "_stale", "_status", "_upstream", "method", "moved_s",
    )  # fmt: skip

    def __init__(self, host: Host, client: Downstream, request: Request, route: MemberChooser) -> None:
        self._host, self._client, self._route = host, client, route
        self._request: Request | None = request
        self.method = request.method
        self._http_10 = request.http_10
        self._member: Member | None = None
        self._answered_by: Member | None = None
        self._upstream: Upstream | None = None
        self._opening: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._held_since_s = 0.0
        self._drops = self._stale = self._declines = self._status = 0
        self._answering = self._chunked = self._over = False
        self._decline: list[bytes] | None = None  # a failure that may not be the last word
        self._headers: Headers = []
        self._ended = False  # the last chunk is written
        self._early = False  # the head is here, and kept until bytes of the body are: it says nothing yet
        self._began_s = self.moved_s = _now()

    def start(self) -> None:
        self._host.figures.began(self._began_s)
        self.attempt()

    # towards a member

    def attempt(self) -> None:
        """Give the request to who takes new ones, or wait for somebody."""
        if self._over or self._request is None:
            return
        member = self._route.choose(self._host.loop.time())
        if member is None:
            self._hold()
            return
        self._member = member
        member.active.add(self)
        while member.idle:
            upstream = member.idle.pop()
            if upstream.open:
                self._send(member, upstream)
                return
        self._opening = self._host.loop.create_task(self._open(member))

    async def _open(self, member: Member) -> None:
        try:
            async with asyncio.timeout(self._host.limits.connect_s):
                upstream = await self._connected(member)
        except (OSError, TimeoutError):
            self._opening = None
            self._host.figures.retried += 1
            self._leave(member, failed=True)
            self.attempt()
            return
        except StrangerError as error:
            self._opening = None
            self._leave(member, failed=True)
            if self._route.other(member, self._host.loop.time()):
                self.attempt()
            elif not self._over:
                self._fail(502, error.message)
            return
        self._opening = None
        if self._over or self._member is not member:
            upstream.drop()
        else:
            self._send(member, upstream)

    async def _connected(self, member: Member) -> Upstream:
        """A new connection, to whom the client's key may go."""
        transport, upstream = await self._host.loop.create_connection(lambda: Upstream(member), *member.address)
        try:
            await member.doorkeeper.check(transport)
        except BaseException:
            upstream.drop()
            raise
        return upstream

    def _send(self, member: Member, upstream: Upstream) -> None:
        assert self._request is not None
        self._end_hold()
        self._upstream = upstream
        self.moved_s = _now()
        upstream.send(self, self._route.parts(self._request, member))

    def _leave(self, member: Member, failed: bool = False) -> None:
        member.active.discard(self)
        self._member = self._upstream = None
        if failed:
            member.failed(self._host.loop.time())
        self._route.leaves(member)

    # holding

    def _hold(self) -> None:
        host = self._host
        assert self._request is not None
        if self._request.bare_path == b"/health":  # asked in order to know now
            self._fail(503, "not ready: " + self._route.standing())
            return
        if diagnosis := self._route.all_failed():  # nobody comes back by himself: waiting would only hide why
            self._end_hold()
            self._fail(503, diagnosis)
            return
        if not self._held_since_s:
            self._held_since_s = host.loop.time()
            host.figures.held += 1
            self._deadline = host.loop.call_later(host.limits.hold_s, self._too_long)
        self._route.wait(self)

    def _end_hold(self) -> None:
        if self._held_since_s:
            held = self._host.loop.time() - self._held_since_s
            self._host.figures.longest_hold_s = max(self._host.figures.longest_hold_s, held)
            self._held_since_s = 0.0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_long(self) -> None:
        if self._route.crowded():
            self._deadline = self._host.loop.call_later(self._host.limits.hold_s, self._too_long)
            return
        self._end_hold()
        if self._opening is not None:  # to a server that is said to be ready and does not accept
            self._opening.cancel()
        if self._member is not None:
            self._leave(self._member)
        held = f"no server was ready within {self._host.limits.hold_s:g} s"
        self._fail(503, f"{held}: {self._route.standing()}. Try again later.")

    # from the member

    def head(self, status: int, headers: Headers, measured: bool) -> None:
        """The head of an answer; it waits for the first bytes of the body, and a failure is looked at first.

        An engine sends the head of a stream when it takes the request, long before it has anything to say.
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
        figures = self._host.figures
        if now - self._began_s > figures.longest_wait_s:
            figures.longest_wait_s = now - self._began_s
        headers = self._headers
        self._answering = True
        self._forget_request()
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        if self._client.closing:
            framing += b"connection: close\r\n"
        if member := self._member or self._answered_by:
            framing += self._route.answers(member, self._status, headers)
        self._client.write(b"%b%b%b\r\n%b" % (status_line(self._status), forwarded(headers), framing, body))
        self._moved(now, first=True)

    def data(self, data: list[bytes], last: bool) -> None:
        """Bytes of the answer's body."""
        if self._decline is not None:
            self._decline += data
            if sum(map(len, self._decline)) > LARGEST_DECLINE_BYTES:
                self._accept_decline()
            return
        if self._early and data[0].startswith(_ERROR_EVENT) and self._elsewhere(data[0]):
            return
        now = _now()
        body = self._framed(data, last)
        if self._early:
            self._pass_head(body)
        else:
            self._moved(now)
            self._client.write(body)
        self._route.moves(now, data)

    def _elsewhere(self, event: bytes) -> bool:
        """Whether a stream that begins with an error of the server is asked of another one."""
        member, upstream, now = self._member, self._upstream, self._host.loop.time()
        if member is None or upstream is None or self._request is None or not _is_servers_fault(event):
            return False
        if self._declines >= MOST_ERRORS or not self._route.other(member, now):
            return False
        self._declines += 1
        self._early = False
        upstream.drop()
        self._host.figures.retried += 1
        self._leave(member, failed=True)
        self.attempt()
        return True

    def _framed(self, data: list[bytes], last: bool = False) -> bytes:
        """In chunks as they came: an event stays an event of its own."""
        if not self._chunked:
            return b"".join(data)
        parts = list(map(chunk, data))
        if last:
            parts.append(LAST_CHUNK)
            self._ended = True
        return b"".join(parts)

    def _moved(self, now: float, first: bool = False) -> None:
        figures = self._host.figures
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
        """The answer is whole: pass on what is left of it, or try elsewhere when it was a failure."""
        if self._decline is not None:
            if self._declined():
                return
            self._accept_decline()
        if self._early:
            self._pass_head()
        if self._chunked and not self._ended:
            self._client.write(LAST_CHUNK)
        self._finish(answered=True)

    def _declined(self) -> bool:
        """Whether the failure is one that another member, now or soon, can do better than; if so it is asked."""
        now, member = self._host.loop.time(), self._answered_by
        assert member is not None
        away = self._status == 503
        if away and ((DRAINING_HEADER, b"draining") in self._headers or member.state is State.DRAINING):
            member.declined = True
        elif self._route.other(member, now) and self._declines < (MOST_DROPS if away else MOST_ERRORS):
            self._declines += 1
            member.failed(now)
        else:
            return False
        self._decline = None
        self._host.figures.retried += 1
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
            self._say_last_words(f"{member.name} broke off: {how}")
            self._finish(answered=False)
            self._client.cut()
            return
        self._decline, self._early = None, False
        self._host.figures.retried += 1
        if stale and self._stale < 3:  # a kept connection that the server had closed says nothing about the server
            self._stale += 1
            self._leave(member)
        else:
            self._leave(member, failed=True)
            self._drops += 1
            if self._drops >= MOST_DROPS:
                self._fail(502, f"the server dropped the request {MOST_DROPS} times without an answer: {how}.")
                return
        self.attempt()

    def _say_last_words(self, message: str) -> None:
        """Tell the reader of a stream why it ends, where its form allows that."""
        if words := self._route.last_words(message):
            self._client.write(chunk(words) if self._chunked else words)

    def give_up(self, silent_since_s: float, why: str = "the server has ended") -> None:
        """An answer that has not moved since then will not move again."""
        if self._upstream is not None and self.moved_s < silent_since_s:
            self._upstream.drop()
            self.broke(why)

    # the end

    def abandon(self) -> None:
        """The client is gone: the member is told by closing the connection."""
        if self._over:
            return
        self._let_go()
        self._host.figures.left += 1
        self._close(whole=False)

    def cut_short(self) -> None:
        """The server that relays it ends: the client is told, as far as its answer allows that."""
        if self._over:
            return
        self._let_go()
        if not self._answering:
            self._fail(503, "it was shut down before there was an answer.")
            return
        self._say_last_words("it was shut down before the answer was whole")
        self._finish(answered=False)
        self._client.cut()

    def _let_go(self) -> None:
        """Whoever works for it need not go on."""
        member, upstream = self._member, self._upstream
        if member is not None:
            self._leave(member)
        if upstream is not None:
            upstream.drop()
        if self._opening is not None:
            self._opening.cancel()

    def pause(self, paused: bool) -> None:
        """The client reads slowly: so do we."""
        if self._upstream is not None:
            self._upstream.pause(paused)

    def _fail(self, status: int, message: str) -> None:
        kind = "service_unavailable_error" if status == 503 else "bad_gateway_error"
        error = {"message": f"{self._host.title}: {message}", "type": kind, "param": None, "code": status}
        extra = b"retry-after: 10\r\n" if status == 503 else b""
        self._client.write(response(status, json.dumps({"error": error}).encode(), extra=extra))
        self._finish(answered=False)
        self._client.done()

    def _finish(self, answered: bool) -> None:
        figures = self._host.figures
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
        self._host.figures.running -= 1
        self._route.forget(self)
        self._route.ends(self._status, whole)
        self._forget_request()
        if self._deadline is not None:
            self._deadline.cancel()

    def _forget_request(self) -> None:
        if self._request is not None:
            self._host.held_bytes -= len(self._request.body)
            self._request = None


def _is_servers_fault(event: bytes) -> bool:
    """Whether an error event speaks of the server's failure, not of the request."""
    try:
        code = json.loads(event.partition(b"\n")[0].removeprefix(b"data: "))["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(code, int) and code >= 500
