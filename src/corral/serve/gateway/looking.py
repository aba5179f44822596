"""Looks after the members while requests run: their metrics, whether they advance, and what is done when they do not.

A member that hangs loses its requests: those without a first byte go to another, the others end with an error at
once. It gets none until it has answered one of the gateway's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from corral.base.errors import CorralError
from corral.client.client import Client
from corral.client.endpoint import HeldKeyEndpoint
from corral.client.errors import RequestError
from corral.client.metrics import Reading, parse
from corral.deploy.deployment.state import State
from corral.serve.fleet.record import Judgement
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.judging import judge, relative_speed
from corral.serve.gateway.serving import ServingMember

LOOK_S = 1.0
PAGE_S = 5.0  # for a page of metrics
PROBE_S = 20.0  # for one token
MODELS_S = 60.0
FEWEST_GAPS, PACE_S = 256, 10.0  # between tokens, and seconds, over which a member's pace is measured
PROBES: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/completions", {"prompt": "1", "max_tokens": 1, "temperature": 0}),
    ("/v1/embeddings", {"input": "1"}),
)
ANSWERING = (State.READY, State.DRAINING, State.UNKNOWN)
GONE_AFTER = 3  # looks in a row that found nobody


class Overseer:
    """One for each gateway; `run` until it is cancelled."""

    def __init__(self, gateway: Gateway, look_s: float = LOOK_S) -> None:
        self._gateway, self._look_s = gateway, look_s
        self._clients: dict[tuple[str, str, bytes], Client] = {}
        self._busy: dict[ServingMember, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._models_at_s: dict[ServingMember, float] = {}

    async def run(self) -> None:
        try:
            while True:
                self.look()
                await asyncio.sleep(self._look_s)
        finally:
            for task in self._busy.values():
                task.cancel()
            await asyncio.gather(*self._busy.values(), return_exceptions=True)
            for client in self._clients.values():
                await client.close()

    def look(self) -> None:
        """Judge everybody by what is known, and ask those who can answer for more."""
        members = self._gateway.members
        self._forget(members)
        for member in members:
            if member.state not in ANSWERING:  # nobody expects an answer of it yet, or any more
                member.unreachable = 0
            self._judge(member)
            if member.url and member.state in ANSWERING and member not in self._busy:
                self._busy[member] = asyncio.ensure_future(self._ask(member))

    def _forget(self, members: list[ServingMember]) -> None:
        for one, task in list(self._busy.items()):
            if one not in members:
                task.cancel()
            if task.done():
                del self._busy[one]
        for gone in [one for one in self._models_at_s if one not in members]:
            del self._models_at_s[gone]
        wanted = {_client_key(one) for one in members}
        for key in [key for key in self._clients if key not in wanted]:
            self._closing.add(task := asyncio.ensure_future(self._clients.pop(key).close()))
            task.add_done_callback(self._closing.discard)

    def _client(self, member: ServingMember) -> Client:
        key = _client_key(member)
        if key not in self._clients:
            held = member.authorization.removeprefix(b"authorization: Bearer ").strip().decode() or None
            self._clients[key] = Client(HeldKeyEndpoint(member.url, member.model, held))
        return self._clients[key]

    # judging

    def _judge(self, member: ServingMember) -> None:
        now = time.monotonic()
        others = [
            one.tokens_per_s for one in self._gateway.members if one is not member and one.model == member.model
        ]
        speed = max(0.05, relative_speed(member.tokens_per_s, others))
        found = judge(member.progress, now, speed, member.unreachable < GONE_AFTER)
        member.speed = speed if found is Judgement.SLOW else 1.0  # smaller differences come from the requests
        if found is member.judged:
            return
        before, member.judged = member.judged, found
        self._gateway.say(f"{member.name} is {_judged(found)} (was {_judged(before)})")
        if found is Judgement.HUNG:
            member.progress.hung = True
            for waiter in list(member.active):
                waiter.give_up(now + 1.0, "the server has stopped making progress")
        self._gateway.sort_out()

    # asking

    async def _ask(self, member: ServingMember) -> None:
        if member.judged is Judgement.HUNG:
            await self._probe(member)
            return
        client = self._client(member)
        try:
            page = await client.page("/metrics", timeout_s=PAGE_S)
        except (RequestError, CorralError, OSError, TimeoutError):
            member.unreachable += 1
            return
        member.unreachable = 0
        if page.status == 200:
            take_reading(member, parse(page.body, time.monotonic()))
        if time.monotonic() - self._models_at_s.get(member, float("-inf")) > MODELS_S and member.state is State.READY:
            await self._ask_models(member, client)

    async def _ask_models(self, member: ServingMember, client: Client) -> None:
        with contextlib.suppress(RequestError, CorralError, OSError, TimeoutError, ValueError, TypeError, KeyError):
            page = await client.page("/v1/models", timeout_s=PAGE_S)
            if page.status == 200:
                cards = [card for card in page.json()["data"] if isinstance(card.get("id"), str)]
                self._models_at_s[member] = time.monotonic()
                found = tuple(dict.fromkeys((member.model, *(card["id"] for card in cards))))
                member.cards, changed, member.models = tuple(cards), found != member.models, found
                if changed:
                    self._gateway.sort_out()

    async def _probe(self, member: ServingMember) -> None:
        """A real request, of one token: a server that answers works. One that only embeds refuses the first kind."""
        for path, body in PROBES:
            try:
                page = await self._client(member).page(path, {"model": member.model, **body}, timeout_s=PROBE_S)
            except (RequestError, CorralError, OSError, TimeoutError):
                break
            if page.status == 200:
                member.progress.hung = False
                member.progress.moved(time.monotonic())
                return
            if page.status >= 500:
                break
        await asyncio.sleep(1.0)


def take_reading(member: ServingMember, reading: Reading) -> None:
    """What a page of metrics says about a member: movement, speed, requests of others, the size of its cache."""
    before, member.reading = member.reading, reading
    if reading.running is not None:
        there = reading.running + (reading.waiting or 0)
        seen = max(0, there - member.width)
        member.outside, member.outside_seen = min(seen, member.outside_seen), seen  # once may be a matter of timing
    if reading.kv_tokens and member.holdings.capacity_tokens == float("inf"):
        member.holdings.capacity_tokens = float(reading.kv_tokens)
    if before is None:
        return
    if (reading.prompt_tokens or 0) < (before.prompt_tokens or 0):
        member.holdings.forget()  # it was started anew
        member.paced_since = None
        return
    grown = (reading.generated_tokens or 0) + (reading.prompt_tokens or 0)
    if grown > (before.generated_tokens or 0) + (before.prompt_tokens or 0):
        member.progress.moved(reading.at_s)
    take_pace(member, reading)


def take_pace(member: ServingMember, reading: Reading) -> None:
    """How fast a sequence runs there, by the engine's own times between tokens, once there are enough of them.

    Tokens in a second over requests that run would say little: of short answers, most of that second is prefill.
    """
    since = member.paced_since
    if reading.itl_count is None or reading.itl_sum_s is None:
        return
    if since is None or reading.itl_count < (since.itl_count or 0):
        member.paced_since = reading
        return
    gaps, spent_s = reading.itl_count - (since.itl_count or 0), reading.itl_sum_s - (since.itl_sum_s or 0)
    if gaps >= FEWEST_GAPS and reading.at_s - since.at_s >= PACE_S and spent_s > 0:
        member.tokens_per_s, member.paced_since = gaps / spent_s, reading


def _client_key(member: ServingMember) -> tuple[str, str, bytes]:
    return member.url, member.model, member.authorization


def _judged(found: Judgement) -> str:
    return {Judgement.OK: "well", Judgement.SLOW: "slow", Judgement.HUNG: "hung", Judgement.GONE: "out of reach"}[
        found
    ]
