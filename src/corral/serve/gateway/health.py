"""Watches the members while requests run: reads their metrics, judges their progress, and acts when there is none.

A hung member loses its requests: those without a first byte go to another, the others end with an error at once. It
gets none until it has answered one of the gateway's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from corral.base.errors import CorralError
from corral.client.client import Client
from corral.client.endpoint import HeldKeyEndpoint
from corral.client.errors import RequestError
from corral.client.metrics import Reading, parse
from corral.deploy.deployment.state import State
from corral.serve.connections import TimeAway
from corral.serve.fleet.record import Judgement
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.member import Member, judge, relative_speed

CHECK_S = 1.0
PAGE_S = 5.0  # for a page of metrics
PROBE_S = 20.0  # for one token
MODELS_S = 60.0
LARGEST_LIST_BYTES = 1 << 20  # of models
FEWEST_GAPS, PACE_S = 256, 10.0  # between tokens, and seconds, over which a member's pace is measured
PROBES: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/completions", {"prompt": "1", "max_tokens": 1, "temperature": 0}),
    ("/v1/embeddings", {"input": "1"}),
)
ANSWERING = (State.READY, State.DRAINING, State.UNKNOWN)
WITHOUT_METRICS = 10  # checks are this much rarer
GONE_AFTER = 3  # failed reads of its metrics in a row
_JUDGED = {Judgement.OK: "well", Judgement.SLOW: "slow", Judgement.HUNG: "hung", Judgement.GONE: "out of reach"}


class HealthMonitor:
    """Runs beside a gateway until it is cancelled."""

    def __init__(
        self, gateway: Gateway, interval_s: float = CHECK_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gateway, self._interval_s, self._clock = gateway, interval_s, clock
        self._away = TimeAway(max(interval_s, CHECK_S))
        self._clients: dict[tuple[str, str, bytes], Client] = {}
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._models_at_s: dict[Member, float] = {}

    async def run(self) -> None:
        try:
            while True:
                self.check()
                await asyncio.sleep(self._interval_s)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            for client in self._clients.values():
                await client.close()

    def check(self) -> None:
        """Judge every member by what is known, and ask those that can answer for more."""
        members, now = self._gateway.members, self._clock()
        away_s = self._away.since_last(now)
        self._forget(members)
        for member in members:
            member.progress.excuse(away_s, now)
            if member.state not in ANSWERING:  # it cannot answer yet, or any more
                member.unreachable = 0
            self._judge(member, now)
            if member.url and member.state in ANSWERING and member not in self._tasks:
                self._tasks[member] = asyncio.ensure_future(self._read_metrics(member))

    def _forget(self, members: list[Member]) -> None:
        for one, task in list(self._tasks.items()):
            if one not in members:
                task.cancel()
            if task.done():
                del self._tasks[one]
        for gone in [one for one in self._models_at_s if one not in members]:
            del self._models_at_s[gone]
        wanted = {_client_key(one) for one in members}
        for key in [key for key in self._clients if key not in wanted]:
            self._closing.add(task := asyncio.ensure_future(self._clients.pop(key).close()))
            task.add_done_callback(self._closing.discard)

    def _client(self, member: Member) -> Client:
        key = _client_key(member)
        if key not in self._clients:
            held = member.authorization.removeprefix(b"authorization: Bearer ").strip().decode() or None
            self._clients[key] = Client(HeldKeyEndpoint(member.url, member.model, held))
        return self._clients[key]

    # judging

    def _judge(self, member: Member, now: float) -> None:
        own = [one for one in self._gateway.members if one.model == member.model and not one.named]
        others = [one.tokens_per_s for one in own if one is not member]
        speed = max(0.05, relative_speed(member.tokens_per_s, others))
        reachable = member.unreachable < GONE_AFTER
        if member.has_metrics:
            verdict = judge(member.progress, now, speed, reachable)
        else:  # a silent answer may be on its way: nothing tells
            verdict = Judgement.OK if reachable else Judgement.GONE
        member.speed = speed if verdict is Judgement.SLOW else 1.0  # smaller differences come from the requests
        if verdict is member.judged:
            return
        before, member.judged = member.judged, verdict
        why = f": {member.problem}" if member.problem else ""
        self._gateway.say(f"{member.name} is {_JUDGED[verdict]} (was {_JUDGED[before]}){why}")
        if verdict is Judgement.HUNG:
            member.progress.hung = True
            for request in list(member.active):
                request.give_up(now + 1.0, "the server has stopped making progress")
        self._gateway.regroup()

    # asking

    async def _read_metrics(self, member: Member) -> None:
        if member.judged is Judgement.HUNG:
            await self._probe(member)
            return
        if not member.has_metrics:
            await self._ask_for_models(member)
            return
        client = self._client(member)
        try:
            page = await client.page("/metrics", timeout_s=PAGE_S)
        except (RequestError, CorralError, OSError, TimeoutError) as error:
            member.unreachable += 1
            member.problem = str(error)
            return
        member.unreachable, member.problem = 0, ""
        reading = parse(page.body, time.monotonic()) if page.status == 200 else None
        if member.named:
            member.has_metrics = reading is not None and reading.known
        if reading is not None:
            update_from_metrics(member, reading)
        due = time.monotonic() - self._models_at_s.get(member, float("-inf")) > MODELS_S
        if (due or not member.listed) and member.state is State.READY and not member.named:
            await self._read_models(member, client)

    async def _ask_for_models(self, member: Member) -> None:
        """Whether a server without metrics answers and accepts its key; which models it lists does not matter."""
        try:
            status = (await self._client(member).page("/v1/models", timeout_s=PAGE_S)).status
            refusal = f"it answers {status}" if status >= 500 or status in (401, 403) else ""
        except (RequestError, CorralError, OSError, TimeoutError) as error:
            refusal = str(error)
        member.problem, member.unreachable = refusal, member.unreachable + 1 if refusal else 0
        await asyncio.sleep(self._interval_s * (1 if refusal else WITHOUT_METRICS))

    async def _read_models(self, member: Member, client: Client) -> None:
        with contextlib.suppress(RequestError, CorralError, OSError, TimeoutError, ValueError, TypeError, KeyError):
            page = await client.page("/v1/models", timeout_s=PAGE_S)
            if page.status == 200 and len(page.body) <= LARGEST_LIST_BYTES:
                own = (member.model, *member.adapters)
                cards = [card for card in page.json()["data"] if card.get("id") in own]
                self._models_at_s[member] = time.monotonic()
                models = tuple(dict.fromkeys((member.model, *(card["id"] for card in cards))))
                member.cards, changed, member.models = tuple(cards), models != member.models, models
                member.listed = set(own) <= set(models)  # the server may see a new folder later
                if changed:
                    self._gateway.regroup()

    async def _probe(self, member: Member) -> None:
        """Send a request of one token; a server that answers works. One that only embeds refuses the first kind."""
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


def update_from_metrics(member: Member, reading: Reading) -> None:
    """Update a member from a page of its metrics: progress, speed, requests of others, the size of its cache."""
    before, member.reading = member.reading, reading
    if reading.running is not None:
        requests = reading.running + (reading.waiting or 0)
        seen = max(0, requests - member.width)
        member.outside, member.outside_seen = (
            min(seen, member.outside_seen),
            seen,
        )  # one reading alone may be a matter of timing
    if reading.kv_tokens and member.holdings.capacity_tokens == float("inf"):
        member.holdings.capacity_tokens = float(reading.kv_tokens)
    if before is None:
        return
    if (reading.prompt_tokens or 0) < (before.prompt_tokens or 0):
        member.holdings.forget()  # it was started again
        member.paced_since = None
        return
    grown = (reading.generated_tokens or 0) + (reading.prompt_tokens or 0)
    if grown > (before.generated_tokens or 0) + (before.prompt_tokens or 0):
        member.progress.moved(reading.at_s)
    update_speed(member, reading)


def update_speed(member: Member, reading: Reading) -> None:
    """Measure how fast a sequence runs there, by the engine's own times between tokens, once there are enough.

    Tokens per second over running requests would say little: with short answers, most of a second is prefill.
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


def _client_key(member: Member) -> tuple[str, str, bytes]:
    return member.url, member.model, member.authorization
