"""The gateway itself: one address for several servers of several models; the key says who asks, the body what for.

A client's key is checked here and goes no further: each member gets its own. Errors have OpenAI's form.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from corral.base.record import nearest
from corral.client.http1 import response
from corral.serve.gateway import pages
from corral.serve.gateway.asks import BadAskError, RoutedPrompt, TokenScale, read_prompt
from corral.serve.gateway.passage import ForwardedRequest
from corral.serve.gateway.policies import make_policy
from corral.serve.gateway.pool import ModelPool
from corral.serve.gateway.serving import ServerReading, ServingMember
from corral.serve.gateway.users import KeyGrant, KeyTable, KeyUser
from corral.serve.proxy.host import ProxyLimits
from corral.serve.proxy.relay_server import RelayServer
from corral.serve.proxy.request import Request
from corral.serve.proxy.route import MemberChooser

GATEWAY_LIMITS = ProxyLimits(connections=16_384)
MOST_WAITING = 50_000
_NO_SCALE = TokenScale()
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          429: "rate_limit_error", 503: "service_unavailable_error"}  # fmt: skip


class Gateway(RelayServer):
    """Everything inside one event loop."""

    title = "corral gateway"

    def __init__(
        self,
        route: str = "prefix",
        limits: ProxyLimits | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(limits or GATEWAY_LIMITS)
        make_policy(route)  # refuses an unknown one
        self.route_name, self.say = route, say
        self.members: list[ServingMember] = []
        self.pools: dict[str, ModelPool] = {}
        self.keys = KeyTable()
        self.unknown_keys = 0

    # what stands behind it

    def every_member(self) -> Iterable[ServingMember]:
        return self.members

    def update(self, readings: Sequence[ServerReading], grants: Sequence[KeyGrant]) -> None:
        """Take over what is known now; connections and work of a member at the same address stay."""
        before = {(one.name, one.url): one for one in self.members}
        found = []
        for reading in readings:
            member = before.pop((reading.name, reading.url), None)
            if member is None and not reading.url:  # ended: it has no address any more, but may have requests
                same = next((one for one in before.values() if one.name == reading.name), None)
                member = before.pop((same.name, same.url)) if same else None
            if member is None:
                member = ServingMember(reading.name, reading.url, reading.state)
            member.take_over(reading)
            found.append(member)
        for gone in before.values():  # another address, or no longer ours: its running requests go on
            gone.leaving = True
            gone.close_idle()
        self.members = [*(one for one in before.values() if one.active), *found]
        self.keys.update(grants, time.monotonic())
        self.sort_out()

    def sort_out(self) -> None:
        """Which members serve which model, and who gets requests."""
        serving: dict[str, list[ServingMember]] = {}
        for member in self.members:
            if not member.grade() and not member.active:
                member.close_idle()
            for model in member.models:
                serving.setdefault(model, []).append(member)
        for model, members in serving.items():
            pool = self.pools.get(model)
            if pool is None:
                pool = self.pools[model] = ModelPool(model, make_policy(self.route_name), self.loop)
            pool.members = members
        for model, pool in list(self.pools.items()):
            if model not in serving:
                if not pool.queue.count and any(one in self.members for one in pool.members):
                    del self.pools[model]  # its servers are there and have it no longer: an adapter was unloaded
                    continue
                pool.members = []
            pool.sort_out()

    # a request

    def take(self, request: Request, from_here: bool) -> MemberChooser | bytes:
        path = request.bare_path
        if path == b"/health":
            return self._health()
        user = self.keys.find(request.headers)
        if user is None:
            self.unknown_keys += 1
            extra = b"www-authenticate: Bearer\r\n"
            return self.refusal(401, "the key is missing or unknown: send 'Authorization: Bearer KEY'", extra=extra)
        if request.method in (b"GET", b"HEAD") and (page := self._page(path, user)) is not None:
            return page
        return self._passage(request, user)

    def _passage(self, request: Request, user: KeyUser) -> MemberChooser | bytes:
        try:
            prompt = self._prompt(request)
        except BadAskError as error:
            return self.refusal(400, f"the request body is not valid JSON: {error}")
        model = prompt.model or self._only_model(user)
        if model is None:
            return self.refusal(400, f"the request names no model. Known: {self._known(user)}.", param="model")
        pool = self.pools.get(model)
        if pool is None:
            guess = nearest(model, [one for one in self.pools if self.allowed(user, one)], 1)
            hint = f"Did you mean {guess[0]!r}?" if guess else f"Known: {self._known(user)}."
            return self.refusal(404, f"the model {model!r} is not served here. {hint}", param="model")
        if not self.allowed(user, model):
            return self.refusal(403, f"this key may not use the model {model!r}. It may use: {self._known(user)}.")
        return self._admit(pool, user, prompt)

    def _admit(self, pool: ModelPool, user: KeyUser, prompt: RoutedPrompt) -> MemberChooser | bytes:
        now, tokens = time.monotonic(), prompt.tokens + prompt.output_tokens
        wait, limit = user.wait_s(tokens, now)
        if wait:
            user.limited += 1
            text = f"the key {user.name!r} has reached its limit of {limit}. Try again in {wait:.0f} s."
            return self.refusal(429, text, code="rate_limit_exceeded", extra=b"retry-after: %d\r\n" % (wait + 1))
        if pool.queue.count >= MOST_WAITING:
            text = f"{pool.queue.count:,} requests are already waiting for {pool.model!r}. Try again later."
            return self.refusal(429, text, extra=b"retry-after: 10\r\n")
        user.take(tokens)
        pool.arrivals.note(now, tokens)
        return ForwardedRequest(self, pool, user, prompt)

    def _prompt(self, request: Request) -> RoutedPrompt:
        if request.body:
            try:
                return read_prompt(request.body, self._scale_of)
            except BadAskError:
                kind = dict(request.headers).get(b"content-type", b"application/json")
                if kind.startswith(b"application/json"):
                    raise
        return RoutedPrompt(None, [], 1.0, 0.0, 0, 1.0, 1, stream=False)

    def _scale_of(self, model: str | None) -> TokenScale:
        pool = self.pools.get(model) if model is not None else None
        return pool.scale if pool else _NO_SCALE

    def allowed(self, user: KeyUser, model: str) -> bool:
        """Whether a key is good for a model: by the served name, or by the fleet or deployment that serves it."""
        return user.may_use(model) or any(user.may_use(one.source) for one in self.pools[model].members)

    def _only_model(self, user: KeyUser) -> str | None:
        allowed = [model for model, pool in self.pools.items() if pool.members and self.allowed(user, model)]
        return allowed[0] if len(allowed) == 1 else None

    def _known(self, user: KeyUser) -> str:
        return ", ".join(sorted(model for model in self.pools if self.allowed(user, model))) or "none yet"

    def finished(self, passage: ForwardedRequest, status: int, whole: bool) -> None:
        """Counted for the key and the member."""
        member = passage.member.name if passage.member else ""
        tokens = (passage.prompt_tokens, passage.output_tokens) if passage.started else (0.0, 0.0)
        passage.user.count(passage.pool.model, member, *tokens, whole and status < 400)

    # its own pages

    def _health(self) -> bytes:
        if any(pool.ready for pool in self.pools.values()):
            return response(200, b"")
        standing = ", ".join(pool.standing() for pool in self.pools.values()) or "no server is known yet"
        return self.refusal(503, f"not ready: {standing}", extra=b"retry-after: 10\r\n")

    def _page(self, path: bytes, user: KeyUser) -> bytes | None:
        if path == b"/v1/models":
            return response(200, json.dumps(pages.models(self.pools, partial(self.allowed, user))).encode())
        if path == b"/metrics":
            text = pages.metrics(self.pools, self.members, self.keys.all()).encode()
            return response(200, text, b"text/plain; version=0.0.4; charset=utf-8")
        if path == b"/gateway/status":
            return response(200, json.dumps(self.status()).encode())
        return None

    def status(self) -> dict[str, Any]:
        """What `/gateway/status` shows."""
        found = pages.status(self.pools, self.members, self.keys.all())
        return {"route": self.route_name, **found, "figures": self.figures.to_json()}

    def refusal(
        self, status: int, message: str, param: str | None = None, code: str | None = None, extra: bytes = b""
    ) -> bytes:
        """An answer of the gateway's own, counted as refused."""
        self.figures.requests += 1
        self.figures.refused += 1
        error = {"message": f"{self.title}: {message}", "type": _KINDS.get(status, "server_error"), "param": param,
                 "code": code or status}  # fmt: skip
        return response(status, json.dumps({"error": error}).encode(), extra=extra)

    async def close(self, patience_s: float = 0.0) -> None:
        """Accept nobody any more; running requests have some time to end."""
        await super().close(patience_s)
        for pool in self.pools.values():
            pool.close()
