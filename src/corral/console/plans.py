"""The Plan view: a plan for what the page's sliders say, every number with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from corral.base.errors import NotFoundError, UsageError
from corral.base.wording import counted
from corral.console.context import ConsoleContext, answer, real_number, whole_number
from corral.deploy.profile.drafting import up_command, vllm_command
from corral.deploy.profile.merging import PlanRequest, hardware_of_plan, plan_request, tuning_of_plan
from corral.deploy.profile.profile import Profile, all_profiles, load_profile
from corral.engines.settings import KV, WEIGHTS
from corral.plan.candidate import Candidate, Tuning
from corral.plan.choose import compare, make_plan
from corral.plan.contract import GOALS, Goal, Plan
from corral.plan.hardware.inventory import GPUS, LINKS, Inventory, probe
from corral.plan.models.catalogue import entries, find
from corral.plan.models.facts import ModelFacts, read_facts
from corral.plan.models.hub import hub_is_off
from corral.plan.models.store import on_disk
from corral.plan.reasons import explain

FRESH_S = 60.0  # how long a model's facts and this machine's hardware are taken as read
_WHOLE = ("nodes", "context", "concurrency", "prompt", "output", "count")
_REAL = ("price", "storage")
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_TEXTS = ("model", "kind", "link", "goal", "weights", "kv", "profile")


@dataclass(frozen=True)
class PlanQuestion:
    """What is to be planned, ready for the planner."""

    model: str
    facts: ModelFacts
    inventory: Inventory
    goal: Goal
    asked: PlanRequest
    profile: Profile


class FactCache:
    """Facts of models and of this machine, read again when they are old."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[object, tuple[float, Any]] = {}

    def get(self, key: object, read: Callable[[], Any]) -> Any:
        found = self._kept.get(key)
        now = self._clock()
        if found is None or not 0 <= now - found[0] < FRESH_S:
            if len(self._kept) > 100:
                self._kept.clear()
            found = self._kept[key] = (now, read())
        return found[1]


def routes(context: ConsoleContext) -> list[BaseRoute]:
    facts_cache = FactCache(context.clock)

    async def choices(_: Request) -> Response:
        return answer(await run_in_threadpool(plan_choices, facts_cache))

    def question(request: Request) -> PlanQuestion:
        return read_question(dict(request.query_params), facts_cache, context.read_only)

    async def plan(request: Request) -> Response:
        return answer(await run_in_threadpool(lambda: plan_page(question(request))))

    async def others(request: Request) -> Response:
        return answer(await run_in_threadpool(lambda: {"rows": alternatives(question(request))}))

    return [
        Route("/api/plan/choices", choices, methods=["GET"]),
        Route("/api/plan", plan, methods=["GET"]),
        Route("/api/plan/alternatives", others, methods=["GET"]),
    ]


def plan_choices(facts_cache: FactCache) -> dict[str, Any]:
    """What the form offers."""
    here: Inventory = facts_cache.get("here", probe)
    models = dict.fromkeys([*(model.name for model in on_disk()), *entries()])
    profiles = [one.name for one in all_profiles()]
    return {
        "models": list(models),
        "kinds": [{"name": gpu.kind, "gib": gpu.memory_gib} for gpu in GPUS.values()],
        "links": [{"name": link.name, "note": link.note} for link in LINKS.values()],
        "goals": GOALS,
        "weights": WEIGHTS,
        "kv": KV,
        "profiles": profiles,
        "here": {"label": here.label, "gpu": here.gpu},
    }


def read_question(query: Mapping[str, str], facts_cache: FactCache, read_only: bool = False) -> PlanQuestion:
    """The question of the page's form; what is empty is left to the planner, or to the profile."""
    values = _checked(query)
    profile: Profile = load_profile(values["profile"])
    model = values["model"] or profile.settings.defaults.model
    if model is None:
        raise UsageError("no model was named.", "Choose one, or write a folder or a repository.")
    is_readers = read_only and values["model"] is not None
    if is_readers:
        refuse_folder(model)
    fixed = {name: values[name] for name in ("weights", "kv") if values[name]}
    goals = {name: values[name] for name in ("context", "concurrency", "goal") if values[name] is not None}
    asked = plan_request(profile, {**goals, "fixed": fixed, "extra_args": ()})
    lengths = {"prompt_tokens": values["prompt"], "output_tokens": values["output"]}
    goal = Goal(
        **asked.goal,
        **{name: value for name, value in lengths.items() if value is not None},
        price_per_gpu_hour=values["price"],
        storage_gb_s=values["storage"],
    )
    offline = hub_is_off()
    key = ("model", model, offline, is_readers)
    facts = facts_cache.get(key, lambda: read_facts(model, offline, folders=not is_readers))
    gpus = f"{values['count'] or 1}x{values['kind']}" if values["kind"] else None
    if gpus is None and not profile.name and (values["nodes"] or 1) == 1:
        inventory = facts_cache.get("here", probe)
    else:
        inventory = hardware_of_plan(profile, gpus, values["nodes"], values["link"])
    return PlanQuestion(model, facts, inventory, goal, asked, profile)


def refuse_folder(model: str, repositories: bool = True) -> None:
    """Refuse what can only be a folder, there or not: to a reader the answer would tell which folders exist."""
    is_repository = repositories and REPOSITORY.fullmatch(model)
    if not (is_repository or find(model) or model in (one.name for one in on_disk())):
        raise NotFoundError(
            f"no model is called {model[:80]!r}; this console runs with --read-only and plans no folder.",
            "Choose one of the list, or write a repository.",
        )


def _checked(query: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {name: query.get(name, "").strip() or None for name in _TEXTS}
    values |= {name: whole_number(query, name) for name in _WHOLE}
    return values | {name: real_number(query, name) for name in _REAL}


def plan_page(question: PlanQuestion) -> dict[str, Any]:
    """The plan as the page draws it."""
    facts, inventory = question.facts, question.inventory
    plan = make_plan(facts, inventory, question.goal, question.asked.fixed, _tuning(question))
    broken = plan.verdict == "cannot run as asked"
    return {
        "model": plan.model.name,
        "hardware": inventory.label,
        "fits": plan.fits,
        "verdict": plan.verdict,
        "reason": "" if plan.fits else plan.reason,
        "max_context": facts.max_context,
        "gpus": plan.gpus,
        "memory": None if broken else _memory(plan),
        "figures": [] if broken else _figures(plan),
        "reasons": plan.reasons,
        "rejected": plan.rejected,
        "nearest": plan.nearest,
        "notes": plan.notes,
        "warnings": plan.warnings,
        "arithmetic": [] if broken else explain(plan),
        "commands": _commands(plan, question) if plan.fits else None,
    }


def _tuning(question: PlanQuestion) -> Tuning:
    return tuning_of_plan(question.profile, question.facts, question.inventory, question.asked.rest)


def _commands(plan: Plan, question: PlanQuestion) -> dict[str, str]:
    return {
        "up": up_command(plan, question.model, question.asked, question.profile),
        "vllm": vllm_command(plan, question.asked.rest),
    }


def _memory(plan: Plan) -> dict[str, Any]:
    """One GPU's memory (or the machine's), part by part; what is over the edge is shown as such."""
    m = plan.memory
    because = {reason.field: reason.because for reason in plan.reasons}
    overhead = because.get("memory.overhead_bytes_per_gpu", "the engine's process and its libraries")  # on a CPU
    parts = [
        ("weights", m.weights_bytes_per_gpu, because.get("memory.weights_bytes_per_gpu", "")),
        ("draft", m.draft_bytes_per_gpu, because.get("memory.draft_bytes_per_gpu", "")),
        ("activations", m.activation_bytes_per_gpu, because.get("memory.activation_bytes_per_gpu", "")),
        ("CUDA graphs", m.graph_bytes_per_gpu, because.get("memory.graph_bytes_per_gpu", "")),
        ("overhead", m.overhead_bytes_per_gpu, overhead),
        ("learned", m.correction_bytes_per_gpu, "what earlier deployments needed beyond the arithmetic"),
        ("KV cache", max(0, m.kv_cache_bytes_per_gpu), because.get("memory.kv_cache_tokens", "")),
    ]
    total = plan.inventory.memory_bytes_per_gpu or m.budget_bytes_per_gpu
    return {
        "per_gpu": plan.inventory.gpu is not None,
        "total_bytes": max(total, m.budget_bytes_per_gpu),
        "budget_bytes": m.budget_bytes_per_gpu,
        "budget_because": because.get("gpu_memory_utilization", "what is free on this machine"),
        "parts": [{"name": name, "bytes": size, "because": why} for name, size, why in parts if size],
    }


def _figures(plan: Plan) -> list[dict[str, Any]]:
    """The numbers that people ask for first, each with its reason; `about` ones are predictions."""
    because = {reason.field: reason.because for reason in plan.reasons}
    m, s, cost = plan.memory, plan.speed, plan.cost
    hardware = f"{plan.gpus} × {plan.goal.price_per_gpu_hour:g} an hour" if plan.goal.price_per_gpu_hour else ""
    rate = s.throughput_tokens_per_s
    rows: list[tuple[str, Any, str, str]] = [
        ("weights", plan.precision.weights, "", because.get("precision.weights", "")),
        ("split", str(plan.parallel), "", _split_because(plan, because)),
        ("context", plan.max_model_len, "tokens", because.get("max_model_len", "")),
        ("KV cache", m.kv_cache_tokens, "tokens", because.get("memory.kv_cache_tokens", "")),
        ("requests at once", plan.seats, "", because.get("max_num_seqs", "")),
        ("one stream", s.decode_tokens_per_s, "tokens/s", because.get("speed.decode_tokens_per_s", s.basis)),
        ("together", rate, "tokens/s", because.get("speed.throughput_tokens_per_s", _together(plan))),
        ("first token", s.ttft_s, "s", f"{s.prompt_tokens} prompt tokens alone on the machine; "
         + because.get("speed.prefill_tokens_per_s", s.basis)),
        ("load", s.load_s, "s", because.get("speed.load_s", "weights read at the speed of the storage")),
        ("cost", cost.per_hour, "an hour", hardware),
        ("a million output tokens", cost.per_million_tokens, "", f"{hardware} at the rate together, all the time"),
    ]  # fmt: skip
    return [
        {"name": name, "value": value, "unit": unit, "because": why, "predicted": isinstance(value, float)}
        for name, value, unit, why in rows
        if value is not None
    ]


def _split_because(plan: Plan, because: Mapping[str, str]) -> str:
    names = [name for name in ("tensor", "pipeline", "data") if getattr(plan.parallel, name) > 1] or ["tensor"]
    return "; ".join(because[f"parallel.{name}"] for name in names if f"parallel.{name}" in because) or because.get(
        "parallel", ""
    )


def _together(plan: Plan) -> str:
    s = plan.speed
    return f"{counted(s.concurrency, 'request')} at once of {s.prompt_tokens} + {s.output_tokens} tokens; {s.basis}"


def alternatives(question: PlanQuestion) -> list[dict[str, Any]]:
    """Every way that was considered, best first; those that cannot run say why."""
    facts, inventory = question.facts, question.inventory
    rows = compare(facts, inventory, question.goal, question.asked.fixed, _tuning(question))
    return [_alternative(candidate) for _, candidate in rows]


def _alternative(one: Candidate) -> dict[str, Any]:
    return {
        "split": str(one.parallel),
        "weights": one.precision.weights,
        "kv": one.precision.kv,
        "context": one.max_model_len,
        "kv_tokens": one.memory.kv_cache_tokens,
        "one_stream": one.speed.decode_tokens_per_s,
        "together": one.speed.throughput_tokens_per_s,
        "weights_bytes_per_gpu": one.memory.weights_bytes_per_gpu,
        "problem": one.problem,
    }
