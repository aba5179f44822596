"""The gateway: one address for several servers of several models; the key says who asks, the body which model.

A client's key is checked here and not passed on: each member gets its own. Headers and bodies are never logged.
Errors have OpenAI's form. `corral proxy` is a gateway with one source and the policy `newest`.

Not covered: TLS, HTTP/2, changes of protocol (WebSocket).
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qs, unquote, unquote_to_bytes

from corral.base.record import nearest
from corral.client.errors import error_body
from corral.client.http1 import Headers, http_url, response
from corral.client.pool import open_files
from corral.deploy.deployment.state import ENDED, State
from corral.serve.connections import SWEEP_S, ConnectionTable, HeldBytes
from corral.serve.gateway import pages
from corral.serve.gateway.client_connection import ClientConnection
from corral.serve.gateway.form import BadFormError
from corral.serve.gateway.large_json import BadBodyError
from corral.serve.gateway.member import Member, MemberReading
from corral.serve.gateway.origins import AllowedOrigins
from corral.serve.gateway.policies import NEWEST, make_policy
from corral.serve.gateway.pool import ModelPool
from corral.serve.gateway.prompt import (
    LONGEST_MODEL,
    RoutedPrompt,
    TokenScale,
    checked_model,
    read_prompt,
)
from corral.serve.gateway.relay import GatewayLimits
from corral.serve.gateway.request import ForwardedRequest, Request
from corral.serve.gateway.url_member import INFERENCE
from corral.serve.gateway.usage import KeyGrant, KeyTable, KeyUser, offered_key

ENDED_SILENCE_S = 5.0  # a server that has ended sends nothing more: requests that still wait for it are given up
MOST_WAITING = 50_000
LARGEST_JSON_BYTES = 64 << 20
QUIET_S = 20.0  # after which a client that sent nothing is not expected to use its connection again
MODEL_PATH = b"/v1/models/"
_NO_SCALE = TokenScale()
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          429: "rate_limit_error", 503: "service_unavailable_error"}  # fmt: skip


class Gateway:
    """Everything inside one event loop: the members, the models that they serve, and the clients' connections."""

    def __init__(
        self,
        route: str = "prefix",
        limits: GatewayLimits | None = None,
        say: Callable[[str], None] = lambda _: None,
        title: str = "corral gateway",
        origins: Iterable[str] = (),
    ) -> None:
        make_policy(route)  # refuses an unknown one
        self.route_name, self.say, self.title = route, say, title  # the title begins every error message
        self.origins = AllowedOrigins(origins)
        self.loop = asyncio.get_running_loop()
        self.limits = limits or GatewayLimits()
        self.figures = pages.Figures()
        self.members: list[Member] = []
        self.current: Member | None = None  # with the policy `newest`: the member that gets new requests
        self.pools: dict[str, ModelPool] = {}
        self.keys = KeyTable()
        self.unknown_keys = 0
        self.unknown: tuple[str, ...] = ("its fleets and keys: not read yet",)  # what cannot be read now
        self.has_looked = asyncio.Event()  # at its fleets and keys, with or without success
        self.connections: ConnectionTable[ClientConnection] = ConnectionTable(self.limits)
        self.held = HeldBytes(self.limits.held_bytes, self.limits.held_bytes_of_key)
        self.ending = self.draining = False
        self.url = ""
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    # its life

    async def listen(self, host: str, port: int) -> None:
        """Accept clients; port 0 takes a free one."""
        await self.bind(host, port)
        await self.accept()

    async def bind(self, host: str, port: int, listener: socket.socket | None = None) -> None:
        """Hold the port, or another process's `listener` on it; clients are accepted from `accept` on."""
        where: dict[str, Any] = {"sock": listener} if listener else {"host": host, "port": port}
        self._server = await self.loop.create_server(
            lambda: ClientConnection(self), **where, backlog=1024, start_serving=False
        )
        number = self._server.sockets[0].getsockname()[1]
        self.url = http_url(host, number)

    async def accept(self) -> None:
        assert self._server is not None
        open_files(2 * self.limits.connections + 64)
        await self._server.start_serving()
        self._sweep()

    def _sweep(self) -> None:
        now = time.monotonic()
        away_s = self.connections.sweep(now)
        for member in self.members:
            if member.state in ENDED:
                for request in list(member.active):
                    request.give_up(now - ENDED_SILENCE_S - away_s)
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    @property
    def listener(self) -> int:
        """The descriptor of the socket that it listens on."""
        assert self._server is not None
        return self._server.sockets[0].fileno()

    async def drain(self) -> None:
        """Accept no one any more, because another process does; returns once those that are connected are quiet.

        Every answer from now on says that its connection closes, so that no client sends another request on it.
        """
        self.draining = True
        if self._server:
            self._server.close()
        busy_s = self.loop.time()
        while len(self.connections) and self.loop.time() - busy_s < QUIET_S:
            if self.figures.running:
                busy_s = self.loop.time()
            await asyncio.sleep(0.05)

    async def close(self, patience_s: float = 0.0) -> None:
        """Accept no one any more; running requests have some time to end, then their clients are told."""
        self.ending = True
        if self._server:
            self._server.close()
        until = self.loop.time() + patience_s
        while self.figures.running and self.loop.time() < until:
            await asyncio.sleep(0.05)
        if self._sweeper:
            self._sweeper.cancel()
        for connection in self.connections.all():
            connection.end()
        for member in self.members:
            member.close_idle()
        for pool in self.pools.values():
            pool.close()
        await asyncio.sleep(0)

    # the members

    def update(
        self, readings: Sequence[MemberReading], grants: Sequence[KeyGrant], unknown: Sequence[str] = ()
    ) -> None:
        """Update members and keys; connections and work of a member at the same address stay.

        `unknown` is what cannot be read now: of that, members and keys are as they were.
        """
        self.unknown = tuple(unknown)
        self.has_looked.set()
        before = {(one.name, one.url): one for one in self.members}
        members = []
        for reading in readings:
            member = before.pop((reading.name, reading.url), None)
            if member is None and not reading.url:  # ended: it has no address any more, but may have requests
                same = next((one for one in before.values() if one.name == reading.name), None)
                member = before.pop((same.name, same.url)) if same else None
            if member is None:
                member = Member(reading.name, reading.url, reading.state)
            member.update_from(reading)
            members.append(member)
        names = {one.name for one in members}
        for gone in before.values():  # no longer a member here: its running requests go on
            gone.leaving = True
            if gone.name in names:  # started again at another address: what does not advance never will
                gone.state = State.STOPPED
        self.members = [*(one for one in before.values() if one.active), *members]
        for gone in before.values():
            gone.close_idle()
        self.keys.update(grants, time.monotonic())
        self.regroup()

    def regroup(self) -> None:
        """Find out which members serve which model, and which of them get requests."""
        serving: dict[str, list[Member]] = {}
        for member in self.members:
            if not member.readiness():
                member.close_idle()
            for model in member.models:
                serving.setdefault(model, []).append(member)
        for model, members in serving.items():
            pool = self.pools.get(model)
            if pool is None:
                on_choice = self._note_choice if self.route_name == NEWEST else None
                pool = self.pools[model] = ModelPool(model, make_policy(self.route_name), self.loop, on_choice)
            pool.members = members
        for model, pool in list(self.pools.items()):
            if model not in serving:
                if not pool.queue.count and any(one in self.members for one in pool.members):
                    del self.pools[model]  # its servers are there and have it no longer: an adapter was unloaded
                    continue
                pool.members = []
            pool.regroup()

    def _note_choice(self, member: Member) -> None:
        before, self.current = self.current, member
        if before is not None and before is not member:
            self.figures.switch_overs += 1
            self.say(f"new requests go to {member.name}")

    # a request

    def handle(self, request: Request, is_local: bool) -> ForwardedRequest | bytes:
        """Accept a request, or answer it; `is_local`: it comes from this machine."""
        path = request.bare_path
        if path == b"/health":
            return self._health()
        if path == b"/proxy/status" and self.route_name == NEWEST:
            return self._proxy_status(is_local)
        if (answer := self.origins.preflight(request.method, request.headers)) is not None:
            return answer
        user = request.user
        if user is None or not self.keys.knows(user):
            return self.refuse_key(request.headers)
        if b"lora_adapter" in unquote_to_bytes(path):  # `load_` and `unload_`: servers refuse them too
            return self.refusal(403, "this path is closed: adapters are added by `corral adapter`")
        if request.method in (b"GET", b"HEAD") and (page := self._page(path, user)) is not None:
            return page
        return self._route(request, user)

    def refuse_key(self, headers: Headers, extra: bytes = b"") -> bytes:
        """The answer to a request without a key that is known: not for good while files cannot be read."""
        if self.unknown and offered_key(headers):
            return self._not_known("the key cannot be checked now", extra)
        self.unknown_keys += 1
        extra += b"www-authenticate: Bearer\r\n"
        return self.refusal(401, "the key is missing or unknown: send 'Authorization: Bearer KEY'", extra=extra)

    def _route(self, request: Request, user: KeyUser) -> ForwardedRequest | bytes:
        try:
            prompt = self._prompt(request)
        except BadBodyError as error:
            return self.refusal(400, f"the request body is not valid JSON: {error}")
        except BadFormError as error:
            return self.refusal(400, f"the form cannot be read: {error}", param="model")
        model = prompt.model or _model_in_query(request.path) or self._default_model(user)
        if model is None:
            text = f"the request names no model; a path without a body takes ?model=NAME. Known: {self._known(user)}."
            return self.refusal(400, text, param="model")
        pool = self.pools.get(model)
        if pool is None or not self.allowed(user, model):
            if self.unknown:
                return self._not_known(f"whether the model {model!r} is served here cannot be read now")
            return self._unknown_model(model, user)  # there or not: a key tells nobody what else is served
        to_urls = request.method == b"POST" and request.bare_path in INFERENCE and prompt.model is not None
        if not to_urls and pool.members and all(one.named for one in pool.members):
            path = request.bare_path.decode("latin-1")[:200]
            text = f"{path} is not passed on: the servers of {model!r} get only requests for inference that name it"
            return self.refusal(404, f"{text} in the body.")
        return self._admit(pool, user, prompt, to_urls)

    def _unknown_model(self, model: str, user: KeyUser) -> bytes:
        guess = nearest(model, [one for one in self.pools if self.allowed(user, one)], 1)
        hint = f"Did you mean {guess[0]!r}?" if guess else f"Known: {self._known(user)}."
        return self.refusal(404, f"the model {model!r} is not served here for this key. {hint}", param="model")

    def _not_known(self, what: str, extra: bytes = b"") -> bytes:
        """What is asked for may be here: files cannot be read now, so the client is to try again."""
        return self.refusal(503, f"{what}. Try again in a second.", extra=extra + b"retry-after: 1\r\n")

    def _admit(self, pool: ModelPool, user: KeyUser, prompt: RoutedPrompt, to_urls: bool) -> ForwardedRequest | bytes:
        now, tokens = time.monotonic(), prompt.tokens + prompt.output_tokens
        wait, limit = user.wait_s(tokens, now)
        if wait:
            user.limited += 1
            text = f"the key {user.name!r} has reached its limit of {limit}. Try again in {wait:.0f} s."
            return self.refusal(429, text, code="rate_limit_exceeded", extra=b"retry-after: %d\r\n" % (wait + 1))
        if pool.queue.count >= MOST_WAITING:
            text = f"{pool.queue.count:,} requests are already waiting for {pool.model!r}. Try again later."
            return self.refusal(429, text, extra=b"retry-after: 10\r\n")
        user.spend(tokens)
        pool.arrivals.note(now, tokens)
        return ForwardedRequest(pool, user, prompt, to_urls)

    def _prompt(self, request: Request) -> RoutedPrompt:
        """What routing needs of a body; one that cannot be read is refused: the server might find a model in it."""
        if request.body and request.form is None:
            if len(request.body) > LARGEST_JSON_BYTES:
                raise BadBodyError(f"it is longer than {LARGEST_JSON_BYTES:,} bytes; only forms may be")
            return read_prompt(request.body, self._scale_of, request.large)
        model = checked_model(request.form.model()) if request.form is not None and request.body else None
        return RoutedPrompt(model, [], 1.0, 0.0, 0, 1.0, 1, stream=False)

    def _scale_of(self, model: str | None) -> TokenScale:
        pool = self.pools.get(model) if model is not None else None
        return pool.scale if pool else _NO_SCALE

    def allowed(self, user: KeyUser, model: str) -> bool:
        """Whether a key is good for a model: for one of its servers, or for the name while it has none."""
        if not user.is_limited:
            return True
        members = self.pools[model].members
        return any(one.is_open_to(user, model) for one in members) if members else user.may_use_name(model)

    def _default_model(self, user: KeyUser) -> str | None:
        """The model of a request that names none: what its server takes then, which is never an adapter."""
        allowed = {model for model, pool in self.pools.items() if pool.members and self.allowed(user, model)}
        bases = {one.model for model in allowed for one in self.pools[model].members} & allowed
        return bases.pop() if len(bases) == 1 else None

    def _known(self, user: KeyUser) -> str:
        return ", ".join(sorted(model for model in self.pools if self.allowed(user, model))) or "none yet"

    def refusal(
        self, status: int, message: str, param: str | None = None, code: str | None = None, extra: bytes = b""
    ) -> bytes:
        """An answer of the gateway's own, counted as refused."""
        self.figures.requests += 1
        self.figures.refused += 1
        kind = _KINDS.get(status, "server_error")
        body = error_body(f"{self.title}: {message}", kind, code or status, param)
        return response(status, json.dumps(body).encode(), extra=extra)

    # its own pages

    def _health(self) -> bytes:
        if any(pool.ready for pool in self.pools.values()):
            return response(200, b"")
        states = ", ".join(pool.status_text() for pool in self.pools.values()) or "no server is known yet"
        return self.refusal(503, f"not ready: {states}", extra=b"retry-after: 10\r\n")

    def _page(self, path: bytes, user: KeyUser) -> bytes | None:
        if path == b"/v1/models":
            return response(200, json.dumps(pages.models(self.pools, partial(self.allowed, user))).encode())
        if path.startswith(MODEL_PATH):
            return self._model_page(path, user)
        if path == b"/metrics":
            text = pages.metrics(*self._shown(user)).encode()
            return response(200, text, b"text/plain; version=0.0.4; charset=utf-8")
        if path == b"/gateway/status":
            return response(200, json.dumps(self.status(user)).encode())
        return None

    def _model_page(self, path: bytes, user: KeyUser) -> bytes:
        name = unquote(path.removeprefix(MODEL_PATH).decode("latin-1"))[:LONGEST_MODEL]
        cards = pages.models(self.pools, lambda model: model == name and self.allowed(user, model))["data"]
        return response(200, json.dumps(cards[0]).encode()) if cards else self._unknown_model(name, user)

    def _shown(self, user: KeyUser | None) -> tuple[dict[str, ModelPool], list[Member], list[KeyUser]]:
        """What a key is shown: a fleet's or deployment's everything, a client's what it may use and itself."""
        if user is None or user.grant.source:
            return self.pools, self.members, self.keys.all()
        pools = {model: pool for model, pool in self.pools.items() if self.allowed(user, model)}
        return pools, [one for one in self.members if any(one.is_open_to(user, name) for name in one.models)], [user]

    def status(self, user: KeyUser | None = None) -> dict[str, Any]:
        """What `/gateway/status` shows to a key; None: all."""
        status = pages.status(*self._shown(user))
        unknown = list(self.unknown) if user is None or user.grant.source else []
        return {"route": self.route_name, "unknown": unknown, **status, "figures": self.figures.to_json()}

    def _proxy_status(self, is_local: bool) -> bytes:
        """What `/proxy/status` shows on this machine, without a key."""
        if not is_local:
            return self.refusal(403, "this path is for the proxy's own machine")
        members = [pages.member_status(one) for one in self.members]
        current = self.current.name if self.current else None
        status = {"current": current, "members": members, "figures": self.figures.to_json()}
        return response(200, json.dumps(status).encode())


def _model_in_query(target: bytes) -> str | None:
    names = parse_qs(target.partition(b"?")[2][:LONGEST_MODEL].decode("latin-1")).get("model")
    return names[0] if names else None


def calm_collector() -> None:
    """Collect cyclic garbage seldom: requests leave none, and a collection costs more the more streams are open."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
