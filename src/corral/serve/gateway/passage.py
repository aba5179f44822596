"""One request's way through the gateway: it counts as work of a member, waits for its turn, and is learned from."""

from __future__ import annotations

import json
import time
from typing import Protocol

from corral.client.http1 import Headers
from corral.serve.gateway.asks import RoutedPrompt
from corral.serve.gateway.policies import OUTPUT_WEIGHT
from corral.serve.gateway.pool import ModelPool
from corral.serve.gateway.serving import ServingMember
from corral.serve.gateway.usage import TAIL_BYTES, find_usage
from corral.serve.gateway.users import KeyUser
from corral.serve.proxy.member import Member, Waiter
from corral.serve.proxy.request import OWN, Request

HIT, MISS = 0.8, 0.5  # of the tokens that were expected to be cached
_LEFT_OUT = OWN | {b"authorization", b"x-api-key"}
_now = time.monotonic


class Counter(Protocol):
    """Who is told of what went through."""

    def finished(self, passage: ForwardedRequest, status: int, whole: bool) -> None: ...


class ForwardedRequest:
    """The route of one request (see `corral.serve.proxy.route`)."""

    __slots__ = (
        "_age",
        "_asked",
        "_before",
        "_counter",
        "_expected",
        "_last",
        "_output",
        "_pieces",
        "_prefill",
        "_streams",
        "_turn",
        "_waiter",
        "arrived_s",
        "member",
        "output_tokens",
        "pool",
        "prompt",
        "prompt_tokens",
        "started",
        "user",
    )  # fmt: skip

    def __init__(self, counter: Counter, pool: ModelPool, user: KeyUser, prompt: RoutedPrompt) -> None:
        self._counter, self.pool, self.user, self.prompt = counter, pool, user, prompt
        self.member: ServingMember | None = None  # whose work it is, or was last
        self._asked: tuple[ServingMember, ...] = ()  # who had it and gave no answer: somebody else comes first
        self.arrived_s = _now()
        self.started = self._turn = self._streams = False
        self._waiter: Waiter | None = None
        self._prefill = self._output = self._expected = 0.0
        self._age: float | None = None
        self._before: list[bytes] = []
        self._last: list[bytes] = []
        self._pieces = 0
        self.prompt_tokens, self.output_tokens = prompt.tokens, 0.0

    # who takes it

    def choose(self, now_s: float) -> Member | None:
        pool = self.pool
        if pool.queue.count and not (self._turn or self.started):
            return None
        free = pool.free(now_s, self.prompt.width)
        if not free:
            return None
        if self._asked:
            free = [one for one in free if one not in self._asked] or free
        member = free[0] if len(free) == 1 else pool.policy.choose(free, self.prompt)
        self._give(member)
        return member

    def _give(self, member: ServingMember) -> None:
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

    def other(self, member: Member, now_s: float) -> bool:
        return any(one is not member and one.down_until_s <= now_s for one in self.pool.ready)

    def parts(self, request: Request, member: Member) -> list[bytes | bytearray]:
        """The client's key stays here; the member gets its own."""
        assert isinstance(member, ServingMember)
        return request.parts(member.host, _LEFT_OUT, member.authorization)

    # waiting

    def wait(self, waiter: Waiter) -> None:
        self._waiter = waiter
        add = self.pool.queue.put_back if self._turn or self.started else self.pool.queue.push
        add(self.user.name, self, self.prompt.tokens + self.prompt.output_tokens)
        self.pool.look_again()

    def forget(self, waiter: Waiter) -> None:
        if self._waiter is not None:
            self._waiter = None
            self.pool.queue.remove(self.user.name, self)

    def try_now(self) -> bool:
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            return True
        self._turn = True
        waiter.attempt()
        self._turn = False
        return self._waiter is None

    def crowded(self) -> bool:
        return self.pool.crowded()

    def standing(self) -> str:
        return self.pool.standing()

    def all_failed(self) -> str:
        return self.pool.all_failed()

    # its answer

    def answers(self, member: Member, status: int, headers: Headers) -> bytes:
        assert isinstance(member, ServingMember)
        now = _now()
        self.pool.ttft.add(now - self.arrived_s)
        member.work_tokens -= self._prefill
        self._prefill = 0.0
        member.progress.moved(now)
        for name, value in headers:
            if name == b"content-type":
                self._streams = value.startswith(b"text/event-stream")
        return member.label

    def moves(self, now_s: float, data: list[bytes]) -> None:
        self._before, self._last = self._last, data
        self._pieces += len(data)
        if self.member is not None:
            self.member.progress.moved(now_s)

    def leaves(self, member: Member) -> None:
        assert isinstance(member, ServingMember)
        member.gave(self.prompt.width, self._prefill + self._output)
        self._prefill = self._output = 0.0
        self._asked = (*self._asked, member)
        self.pool.pump_soon()

    def ends(self, status: int, whole: bool) -> None:
        if self.started:
            self._learn(status, whole)
            spent = self.prompt_tokens + self.output_tokens - self.prompt.tokens - self.prompt.output_tokens
            self.user.correct(spent)
            self.pool.queue.correct(self.user.name, spent)
        else:  # nobody worked for it: its tokens are the key's again
            self.user.correct(-self.prompt.tokens - self.prompt.output_tokens)
        self.pool.e2e.add(_now() - self.arrived_s)
        self._counter.finished(self, status, whole)
        self._before = self._last = []

    def _learn(self, status: int, whole: bool) -> None:
        """What the end of the answer says about its tokens; without that, a piece of a stream is about one."""
        usage = find_usage(b"".join((*self._before, *self._last))[-TAIL_BYTES:]) if whole and status == 200 else None
        if usage is None:
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

    def last_words(self, message: str) -> bytes:
        if not self._streams:
            return b""
        error = {"message": f"corral gateway: {message}", "type": "server_error", "param": None, "code": 502}
        return b"\n\ndata: %b\n\n" % json.dumps({"error": error}).encode()
