"""What a gateway shows: figures, models, status, and metrics.

A metric whose meaning is that of one of vLLM's has its name, with a prefix of the gateway's own in place of `vllm:`:
both may be collected, and sums over engines have no request twice. Each is one set of series that can be added up: by
model and member, and by key where a key's share is known. What members count themselves (KV use, prefix cache,
preemptions) is passed on as last read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from corral.base.wording import counted
from corral.node.exposition import GATEWAY, metric_lines
from corral.serve.gateway.member import Member
from corral.serve.gateway.pool import ModelPool
from corral.serve.gateway.usage import KeyUser


@dataclass
class Figures:
    """What went through the gateway since it started: counts, and the longest waits. All times are monotonic."""

    requests: int = 0
    answered: int = 0  # whole answers passed on, whatever their status
    failed: int = 0  # no answer, or one that broke off; a whole answer of the server counts as such, also with 4xx
    refused: int = 0  # answered with a status of 400 or more, by the server or by the gateway
    left: int = 0  # the client went away first
    running: int = 0
    retried: int = 0  # sent again to another member, or on another connection, before the first byte
    held: int = 0  # waited because no member was ready
    switch_overs: int = 0
    longest_hold_s: float = 0.0
    longest_wait_s: float = 0.0  # from the last byte of a request to the first of its answer
    longest_stream_gap_s: float = 0.0  # between two arrivals of one answer
    longest_gap_s: float = 0.0  # in which requests ran and none got a byte
    _moved_s: float = 0.0

    def began(self, now_s: float) -> None:
        self.requests += 1
        self.running += 1
        if self.running == 1:
            self._moved_s = now_s

    def moved(self, now_s: float) -> None:
        """Bytes of some answer arrived."""
        gap = now_s - self._moved_s
        if gap > self.longest_gap_s:
            self.longest_gap_s = gap
        self._moved_s = now_s

    def to_json(self) -> dict[str, Any]:
        shown = [one.name for one in fields(self) if not one.name.startswith("_")]
        values = {name: getattr(self, name) for name in shown}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


def summary(figures: Figures) -> str:
    """The figures in two lines."""
    one = figures
    ended = f"{one.failed} failed, {one.refused} refused, {one.left} left by their clients"
    counts = f"{counted(one.requests, 'request')}, {ended}"
    held = f"{one.held} held (longest {one.longest_hold_s:.1f} s)"
    moves = f"{one.switch_overs} switch-overs, {one.retried} sent again, {held}"
    gaps = f"longest gap {one.longest_gap_s:.2f} s, within one answer {one.longest_stream_gap_s:.2f} s"
    return f"{counts}; {moves}\n{gaps}, to a first byte {one.longest_wait_s:.2f} s"


Series = tuple[dict[str, str], float]
_PASSED_ON = {
    "kv_cache_usage_perc": ("kv_use", "gauge", "Share of the KV cache in use."),
    "prefix_cache_queries_total": ("prefix_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits_total": ("prefix_hits", "counter", "Prompt tokens found in the prefix cache."),
    "num_preemptions_total": ("preemptions", "counter", "Preempted requests."),
}


def models(pools: Mapping[str, ModelPool], allowed: Callable[[str], bool]) -> dict[str, Any]:
    """The models of all members, each once, as a member lists it."""
    cards = []
    for model, pool in pools.items():
        if pool.members and allowed(model):
            own = [card for member in pool.members for card in member.cards if card.get("id") == model]
            cards.append(own[0] if own else {"id": model, "object": "model", "created": 0, "owned_by": "corral"})
    return {"object": "list", "data": cards}


def status(pools: Mapping[str, ModelPool], members: Sequence[Member], users: Sequence[KeyUser]) -> dict[str, Any]:
    """Members and keys, for people and programs."""
    return {
        "models": {
            name: {"waiting": len(pool.queue), "waiting_by_key": _waiting(pool, users), "ready": len(pool.ready)}
            for name, pool in pools.items()
        },
        "members": [member_status(one) for one in members],
        "keys": [_key(one) for one in users],
    }


def _waiting(pool: ModelPool, users: Sequence[KeyUser]) -> dict[str, int]:
    """How many requests of these keys wait; those of the others together, without a name."""
    shown = {one.name for one in users}
    found: dict[str, int] = {}
    for key, count in pool.queue.waiting().items():
        name = key if key in shown else ""
        found[name] = found.get(name, 0) + count
    return found


def member_status(one: Member) -> dict[str, Any]:
    return {
        "name": one.name,
        "of": one.source,
        "model": one.model,
        "state": one.state.value,
        "judged": one.judged.value,
        "url": one.url,
        "running": len(one.active),
        "sequences": one.width,
        "of_others": one.outside,
        "at_once": one.seats,
        "outstanding_tokens": round(one.work_tokens),
        "declined": one.declined,
        "draining": one.declined or one.leaving,
        "text": one.text or one.problem,
    }


def _key(user: KeyUser) -> dict[str, Any]:
    sums = [sum(values) for values in zip(*user.served.values(), strict=True)] or [0.0] * 4
    answered, failed, prompt, output = map(round, sums)
    return {
        "name": user.name,
        "answered": answered,
        "failed": failed,
        "limited": user.limited,
        "prompt_tokens": prompt,
        "output_tokens": output,
    }


def metrics(pools: Mapping[str, ModelPool], members: Sequence[Member], users: Sequence[KeyUser]) -> str:
    """The page that Prometheus reads."""
    lines: list[str] = []
    for name, kind, text, series in (*_of_requests(pools, members, users), *_of_keys(users), *_of_members(members)):
        lines += metric_lines(GATEWAY + name, kind, text, series)
    for attribute, name, text in (
        (
            "ttft",
            "time_to_first_token_seconds",
            "Time from a request to the first content of its stream.",
        ),
        ("e2e", "e2e_request_latency_seconds", "Time from a request to the end of its answer."),
        ("queued", "request_queue_time_seconds", "Time until a member got a request."),
    ):
        for number, pool in enumerate(pools.values()):
            help_text = "" if number else text
            lines += getattr(pool, attribute).lines(GATEWAY + name, {"model_name": pool.model}, help_text)
    return "\n".join(lines) + "\n"


Metric = tuple[str, str, str, list[Series]]


def _of_requests(
    pools: Mapping[str, ModelPool], members: Sequence[Member], users: Sequence[KeyUser]
) -> Iterator[Metric]:
    running = [({"model_name": one.model, "member": one.name}, len(one.active)) for one in members]
    yield (
        "num_requests_running",
        "gauge",
        "Requests being processed by a member.",
        [(a, float(b)) for a, b in running],
    )
    waiting: list[Series] = []
    for pool in pools.values():
        by_key = _waiting(pool, users) or {"": 0}
        waiting += [({"model_name": pool.model, "key": key}, float(count)) for key, count in by_key.items()]
    yield "num_requests_waiting", "gauge", "Requests waiting in the gateway.", waiting


def _of_keys(users: Sequence[KeyUser]) -> Iterator[Metric]:
    rows = [
        ({"model_name": model, "member": member, "key": user.name}, counts)
        for user in users
        for (model, member), counts in user.served.items()
    ]
    for at, name, text in (
        (2, "prompt_tokens_total", "Prompt tokens."),
        (3, "generation_tokens_total", "Generated tokens."),
        (0, "request_success_total", "Requests answered."),
        (1, "requests_failed_total", "Requests refused or cut off."),
    ):
        yield name, "counter", text, [(labels, counts[at]) for labels, counts in rows]
    limited = [({"key": user.name}, float(user.limited)) for user in users]
    yield "requests_limited_total", "counter", "Requests refused because of a key's limit.", limited


def _of_members(members: Sequence[Member]) -> Iterator[Metric]:
    known = [(one, {"model_name": one.model, "member": one.name}) for one in members]
    for name, (field, kind, text) in _PASSED_ON.items():
        values = [(labels, getattr(one.reading, field)) for one, labels in known if one.reading is not None]
        yield name, kind, text, [(labels, value) for labels, value in values if value is not None]
    tokens = [(labels, one.work_tokens) for one, labels in known]
    yield "outstanding_tokens", "gauge", "Work assigned to a member, in prompt tokens.", tokens
    judged = [({**labels, "judged": one.judged.value, "state": one.state.value}, 1.0) for one, labels in known]
    yield "member_info", "gauge", "State of a member, and how the gateway judges it.", judged
