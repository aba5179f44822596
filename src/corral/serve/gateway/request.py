"""A request as it was read from a client, and its way to a member.

`ForwardedRequest` chooses the member, counts the request as that member's work, waits for its turn, and learns from
the answer: how many tokens it had, and how many of its prompt were cached.
"""

from __future__ import annotations

import functools
import json
import re
import time
from typing import NamedTuple, Protocol

from corral.client.errors import error_body
from corral.client.http1 import Headers
from corral.serve.gateway.form import FormReader, is_form
from corral.serve.gateway.large_json import LargeJsonReader
from corral.serve.gateway.member import Member, failure_summary
from corral.serve.gateway.policies import OUTPUT_WEIGHT
from corral.serve.gateway.pool import ModelPool
from corral.serve.gateway.prompt import TAIL_BYTES, RoutedPrompt, find_usage
from corral.serve.gateway.url_member import with_one_model
from corral.serve.gateway.usage import KeyUser

# headers of one connection, not of the message
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
# headers that the gateway writes itself: a client's key is not passed on, the member gets its own; nor are cookies,
# which a browser sends to every port of a machine
REPLACED = frozenset(
    (b"host", b"content-length", b"expect", b"authorization", b"x-api-key", b"api-key", b"openai-organization",
     b"openai-project", b"cookie")
)  # fmt: skip
_WITH_BODY = frozenset((b"POST", b"PUT", b"PATCH"))
HIT, MISS = 0.8, 0.5  # of the tokens that were expected to be cached
# an event of a stream with a text that is not empty: of chats, completions, responses or messages, and tool calls
_has_content = re.compile(
    rb'"(?:content|text|delta|reasoning|reasoning_content|arguments|thinking|partial_json)": ?"[^"]'
).search
_now = time.monotonic


@functools.lru_cache(16)
def _left_out(drop: frozenset[bytes]) -> frozenset[bytes]:
    return HOP_BY_HOP | drop


def forwarded_headers(headers: Headers, drop: frozenset[bytes] = frozenset()) -> bytes:
    """Header lines as they go to the other side: without those of this connection only, and those to drop."""
    left_out = _left_out(drop)
    for name, value in headers:
        if name == b"connection":
            left_out |= {token.strip().lower() for token in value.split(b",")}
    return b"".join([b"%b: %b\r\n" % pair for pair in headers if pair[0] not in left_out])


class Request(NamedTuple):
    """A whole request."""

    method: bytes
    path: bytes
    headers: Headers
    http_10: bool
    body: bytes | bytearray
    keep: bool  # another may follow on its connection
    user: KeyUser | None = None  # whose key it has
    form: FormReader | None = None  # of a body that is a form
    large: LargeJsonReader | None = None  # of a large one that is not

    @property
    def bare_path(self) -> bytes:
        return self.path.partition(b"?")[0]

    def message(self, member: Member, model: str) -> list[bytes | bytearray]:
        """The bytes that are sent to a member, with the header line of its key; `model`: that it is chosen for."""
        kept = forwarded_headers(self.headers, REPLACED) + member.authorization
        body = self.body
        if member.named and body and not self.large:  # a large body names one model
            kind = next((value for name, value in self.headers if name == b"content-type"), b"")
            body = body if is_form(kind) else with_one_model(body, model)
        size = len(body)
        length = b"content-length: %d\r\n" % size if size or self.method in _WITH_BODY else b""
        where = (self.method, member.prefix, self.path, member.host)
        head = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b%b\r\n" % (*where, kept, length)
        return [head, body] if size else [head]


class Attempt(Protocol):
    """What a waiting request does when its turn comes."""

    def attempt(self) -> None: ...


class ForwardedRequest:
    """One request for a model: its member, its turn, and what its answer says."""

    __slots__ = (
        "_age", "_before", "_expected", "_has_content", "_its_turn", "_last", "_output", "_pieces", "_prefill",
        "_relay", "_streams", "_to_urls", "_tried", "arrived_s", "member", "output_tokens", "pool", "prompt",
        "prompt_tokens", "started", "user",
    )  # fmt: skip

    def __init__(self, pool: ModelPool, user: KeyUser, prompt: RoutedPrompt, to_urls: bool = True) -> None:
        self.pool, self.user, self.prompt = pool, user, prompt
        self._to_urls = to_urls  # it may go to servers that Corral did not start
        self.member: Member | None = None  # whose work it is, or was last
        self._tried: tuple[Member, ...] = ()  # they had it and gave no answer: others come first
        self.arrived_s = _now()
        self.started = self._its_turn = self._streams = self._has_content = False
        self._relay: Attempt | None = None
        self._prefill = self._output = self._expected = 0.0
        self._age: float | None = None
        self._before: list[bytes] = []
        self._last: list[bytes] = []
        self._pieces = 0
        self.prompt_tokens, self.output_tokens = prompt.tokens, 0.0

    # its member

    def choose(self, now_s: float) -> Member | None:
        """The member that gets the request now; it counts as its work until `leave`."""
        pool = self.pool
        if pool.queue.count and not (self._its_turn or self.started):
            return None
        free = self._open(pool.free(now_s, self.prompt.width))
        if not free:
            return None
        if self._tried:
            free = [one for one in free if one not in self._tried] or free
        member = pool.choose(free, self.prompt)
        self._assign(member)
        return member

    def _assign(self, member: Member) -> None:
        prompt, holdings = self.prompt, member.holdings
        depth = holdings.depth(prompt.blocks)
        age = holdings.age(prompt.blocks[max(depth - 1, 0)]) if prompt.blocks else None
        self._age = age if age is not None and age > member.work_tokens else None  # it may be computing it just now
        self._expected = prompt.tokens_until(depth)
        computed = max(1.0, prompt.tokens - self._expected)
        holdings.hold(prompt.blocks, computed)
        self._prefill = computed / member.speed
        self._output = OUTPUT_WEIGHT * prompt.output_tokens / member.speed
        member.work_tokens += self._prefill + self._output
        member.width += prompt.width
        member.progress.busy(_now())
        self.member, self._streams = member, False
        if not self.started:
            self.started = True
            self.pool.queued.add(_now() - self.arrived_s)
            self.pool.queue.served(self.user.name, prompt.tokens + prompt.output_tokens)

    def another_ready(self, member: Member, now_s: float) -> bool:
        return any(one is not member and one.down_until_s <= now_s for one in self._open(self.pool.ready))

    @property
    def is_limited(self) -> bool:
        """Whether it cannot go to every server of its model."""
        return self.user.is_limited or not self._to_urls

    def _open(self, members: list[Member]) -> list[Member]:
        """Those that it may go to: servers of one name may belong to several deployments."""
        if not self.is_limited:
            return members
        allowed = [one for one in members if self._to_urls or not one.named]
        return [one for one in allowed if one.is_open_to(self.user, self.pool.model)]

    def failure_summary(self) -> str:
        """Why all servers that it could go to have failed, when they have."""
        return failure_summary(self._open(self.pool.members))

    def status_text(self) -> str:
        return self.pool.status_text(self._open(self.pool.members))

    # waiting

    def wait(self, relay: Attempt) -> None:
        """Queue the request; `relay.attempt` is called when its turn comes."""
        self._relay = relay
        add = self.pool.queue.put_back if self._its_turn or self.started else self.pool.queue.push
        add(self.user.name, self, self.prompt.tokens + self.prompt.output_tokens)
        self.pool.retry_later()

    def stop_waiting(self) -> None:
        if self._relay is not None:
            self._relay = None
            self.pool.queue.remove(self.user.name, self)

    def try_now(self) -> bool:
        """Its turn has come; whether a member got it."""
        relay, self._relay = self._relay, None
        if relay is None:
            return True
        self._its_turn = True
        relay.attempt()
        self._its_turn = False
        return self._relay is None

    # its answer

    def answer_began(self, member: Member, headers: Headers) -> bytes:
        """The head of an answer goes to the client; header lines to add."""
        now = _now()
        member.work_tokens -= self._prefill
        self._prefill = 0.0
        member.progress.moved(now)
        for name, value in headers:
            if name == b"content-type":
                self._streams = value.startswith(b"text/event-stream")
        return member.label

    def answer_advanced(self, now_s: float, data: list[bytes]) -> None:
        """Bytes of the answer's body arrived."""
        self._before, self._last = self._last, data
        self._pieces += len(data)
        if self._streams and not self._has_content and any(map(_has_content, data)):
            self._has_content = True
            self.pool.ttft.add(now_s - self.arrived_s)
        if self.member is not None:
            self.member.progress.moved(now_s)

    def leave(self, member: Member) -> None:
        """The request is no longer the member's: answered, or on its way to another."""
        member.release(self.prompt.width, self._prefill + self._output)
        self._prefill = self._output = 0.0
        self._tried = (*self._tried, member)
        self.pool.start_waiting_soon()

    def finish(self, status: int, whole: bool) -> None:
        """The request is over; `whole`: a whole answer was passed on."""
        if self.started:
            self._learn(status, whole)
            spent = self.prompt_tokens + self.output_tokens - self.prompt.tokens - self.prompt.output_tokens
            self.user.correct(spent)
            self.pool.queue.correct(self.user.name, spent)
        else:  # no member worked on it: its tokens are the key's again
            self.user.correct(-self.prompt.tokens - self.prompt.output_tokens)
        self.pool.e2e.add(_now() - self.arrived_s)
        self._count(status, whole)
        self._before = self._last = []

    def _learn(self, status: int, whole: bool) -> None:
        """Read its tokens from the end of the answer; without usage, a piece of a stream counts as one token."""
        usage = find_usage(b"".join((*self._before, *self._last))[-TAIL_BYTES:]) if whole and status == 200 else None
        if usage is None:
            if whole and 400 <= status < 500:  # refused before a token was computed
                self.prompt_tokens = 0.0
            self.output_tokens = float(self._pieces) if self._streams else 0.0
            return
        self.prompt_tokens, self.output_tokens = float(usage.prompt_tokens), float(usage.output_tokens)
        scale = self.pool.scale
        scale.learn(self.prompt.size_bytes, usage.prompt_tokens)
        scale.learn_output(usage.output_tokens / self.prompt.width)
        if self.member is None:
            return
        self.member.holdings.clock += usage.output_tokens
        if usage.cached_tokens is not None and self._age is not None:
            if usage.cached_tokens >= max(1.0, HIT * self._expected):
                self.member.holdings.learn(self._age, cached=True)
            elif usage.cached_tokens < MISS * self._expected:
                self.member.holdings.learn(self._age, cached=False)

    def _count(self, status: int, whole: bool) -> None:
        member = self.member.name if self.member else ""
        tokens = (self.prompt_tokens, self.output_tokens) if self.started else (0.0, 0.0)
        self.user.count(self.pool.model, member, *tokens, whole and status < 400)

    def closing_event(self, message: str) -> bytes:
        """A last event for a stream that breaks off; empty for other answers, which cannot hold one."""
        if not self._streams:
            return b""
        return b"\n\ndata: %b\n\n" % json.dumps(error_body(message, "server_error", 502)).encode()
