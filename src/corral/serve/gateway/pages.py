"""What a gateway tells about itself: models, status, and metrics under vLLM's names where the meaning is the same.

Each of vLLM's names is one set of series that can be added up: by model and member, and by key where a key's share is
known. What members count themselves (KV use, prefix cache, preemptions) is passed on as they last told it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from corral.serve.gateway.pool import ModelPool
from corral.serve.gateway.serving import ServingMember
from corral.serve.gateway.users import KeyUser

Series = tuple[dict[str, str], float]
_PASSED_ON = {
    "kv_cache_usage_perc": ("kv_use", "gauge", "Share of the KV cache in use."),
    "prefix_cache_queries_total": ("prefix_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits_total": ("prefix_hits", "counter", "Prompt tokens found in the prefix cache."),
    "num_preemptions_total": ("preemptions", "counter", "Preempted requests."),
}


def models(pools: Mapping[str, ModelPool], allowed: Callable[[str], bool]) -> dict[str, Any]:
    """The models of all members, each once, as a member shows it where one has told."""
    cards = []
    for model, pool in pools.items():
        if pool.members and allowed(model):
            own = [card for member in pool.members for card in member.cards if card.get("id") == model]
            cards.append(own[0] if own else {"id": model, "object": "model", "created": 0, "owned_by": "corral"})
    return {"object": "list", "data": cards}


def status(
    pools: Mapping[str, ModelPool], members: Sequence[ServingMember], users: Sequence[KeyUser]
) -> dict[str, Any]:
    """Members and keys, for people and programs."""
    return {
        "models": {
            name: {"waiting": len(pool.queue), "waiting_by_key": pool.queue.waiting(), "ready": len(pool.ready)}
            for name, pool in pools.items()
        },
        "members": [_member(one) for one in members],
        "keys": [_key(one) for one in users],
    }


def _member(one: ServingMember) -> dict[str, Any]:
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
        "seats": one.seats,
        "outstanding_tokens": round(one.work_tokens),
        "draining": one.declined or one.leaving,
        "text": one.text,
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


def metrics(pools: Mapping[str, ModelPool], members: Sequence[ServingMember], users: Sequence[KeyUser]) -> str:
    """The page that Prometheus reads."""
    lines: list[str] = []
    for name, kind, text, series in (*_of_requests(pools, members), *_of_keys(users), *_of_members(members)):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{_labels(labels)}}} {float(value)}" for labels, value in series]
    for attribute, name in (
        ("ttft", "vllm:time_to_first_token_seconds"),
        ("e2e", "vllm:e2e_request_latency_seconds"),
        ("queued", "vllm:request_queue_time_seconds"),
    ):
        for number, pool in enumerate(pools.values()):
            labels = _labels({"model_name": pool.model})
            lines += getattr(pool, attribute).lines(name, labels, headed=number == 0)
    return "\n".join(lines) + "\n"


Metric = tuple[str, str, str, list[Series]]


def _of_requests(pools: Mapping[str, ModelPool], members: Sequence[ServingMember]) -> Iterator[Metric]:
    running = [({"model_name": one.model, "member": one.name}, len(one.active)) for one in members]
    yield (
        "vllm:num_requests_running",
        "gauge",
        "Requests being processed by a member.",
        [(a, float(b)) for a, b in running],
    )
    waiting: list[Series] = []
    for pool in pools.values():
        by_key = pool.queue.waiting() or {"": 0}
        waiting += [({"model_name": pool.model, "key": key}, float(count)) for key, count in by_key.items()]
    yield "vllm:num_requests_waiting", "gauge", "Requests waiting in the gateway.", waiting


def _of_keys(users: Sequence[KeyUser]) -> Iterator[Metric]:
    rows = [
        ({"model_name": model, "member": member, "key": user.name}, counts)
        for user in users
        for (model, member), counts in user.served.items()
    ]
    for at, name, text in (
        (2, "vllm:prompt_tokens_total", "Prompt tokens."),
        (3, "vllm:generation_tokens_total", "Generated tokens."),
        (0, "vllm:request_success_total", "Requests answered."),
        (1, "corral:gateway_requests_failed_total", "Requests refused or cut off."),
    ):
        yield name, "counter", text, [(labels, counts[at]) for labels, counts in rows]
    limited = [({"key": user.name}, float(user.limited)) for user in users]
    yield "corral:gateway_requests_limited_total", "counter", "Requests refused because of a key's limit.", limited


def _of_members(members: Sequence[ServingMember]) -> Iterator[Metric]:
    known = [(one, {"model_name": one.model, "member": one.name}) for one in members]
    for name, (field, kind, text) in _PASSED_ON.items():
        values = [(labels, getattr(one.reading, field)) for one, labels in known if one.reading is not None]
        yield f"vllm:{name}", kind, text, [(labels, value) for labels, value in values if value is not None]
    tokens = [(labels, one.work_tokens) for one, labels in known]
    yield "corral:gateway_outstanding_tokens", "gauge", "Work assigned to a member, in prompt tokens.", tokens
    judged = [({**labels, "judged": one.judged.value, "state": one.state.value}, 1.0) for one, labels in known]
    yield "corral:gateway_member_info", "gauge", "State of a member, and how the gateway judges it.", judged


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
