"""The plan of a model, on named hardware, of a profile, or here: what `corral plan` and `corral.plan` answer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from corral.base.errors import CorralError, UsageError
from corral.deploy.profile.merging import (
    PlanRequest,
    engine_version,
    hardware_of_plan,
    plan_request,
    storage_of,
    tuning_of_plan,
)
from corral.deploy.profile.profile import Profile, load_profile
from corral.engines.flags import check_arguments, shipped_flags
from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Plan, token_count
from corral.plan.hardware.inventory import GIB, Inventory
from corral.plan.models.facts import ModelFacts, facts_from_folder, read_facts
from corral.plan.models.hub import hub_is_off
from corral.plan.places import Storage, located, pulled
from corral.plan.settings import refuse_flags


class PlanInput(NamedTuple):
    """What is to be planned."""

    model: str
    goal: Goal
    asked: PlanRequest


def plan(
    model: str | None = None,
    *,
    on: str | None = None,
    gpus: str | None = None,
    nodes: int | None = None,
    network: str | None = None,
    context: int | str | None = None,
    concurrency: int | None = None,
    goal: str | None = None,
    input_len: int = 512,
    output_len: int = 256,
    price: float | None = None,
    storage: float | None = None,
    fixed: Mapping[str, object] | None = None,
    engine_args: Sequence[str] = (),
    weights_gib: float | None = None,
    offline: bool = False,
) -> Plan:
    """The plan of a model (a catalogue name, a Hugging Face id, a folder), as `corral plan --json` has it.

    `gpus` is hardware as in `8xH100`, `on` a profile; without both it is this machine's. A model that does not fit is
    no error: `fits` is false, `reason` says why, and `nearest` has what would.
    """
    profile = load_profile(on)
    tokens = token_count(context) if isinstance(context, str) else context
    given = {"context": tokens, "concurrency": concurrency, "goal": goal, "fixed": dict(fixed or {}), "price": price,
             "prompt_tokens": input_len, "output_tokens": output_len, "storage": storage}  # fmt: skip
    question = question_of(profile, model, given, tuple(engine_args))
    facts = facts_of(profile, question.model, offline, weights_gib)
    return plan_of(question, facts, hardware_of_plan(profile, gpus, nodes, network), profile)


def question_of(
    profile: Profile, model: str | None, given: Mapping[str, Any], engine_args: tuple[str, ...]
) -> PlanInput:
    """What a profile and a command ask for; None in `given` stands for what was not given."""
    model = profile.settings.defaults.model if model is None else model
    if model is None:
        raise UsageError("no model was named.", "For example: corral plan llama-3.1-8b --gpus 1xH100.")
    said = {name: value for name, value in given.items() if value is not None}
    asked = plan_request(profile, {**said, "extra_args": engine_args})
    if asked.rest and (flags := shipped_flags()):
        check_arguments(asked.rest, flags)
    goal = Goal(
        **asked.goal,
        prompt_tokens=given["prompt_tokens"],
        output_tokens=given["output_tokens"],
        price_per_gpu_hour=given["price"],
        storage_gb_s=given["storage"],
    )
    return PlanInput(model, goal, asked)


def facts_of(profile: Profile, model: str, offline: bool, weights_gib: float | None) -> ModelFacts:
    """Of the files that a start would serve, where a profile or an earlier pull has them; else as the name says."""
    storage, weights_bytes = Storage(**storage_of(profile)), int((weights_gib or 0) * GIB)
    with contextlib.suppress(CorralError):
        if any(vars(storage).values()) or pulled():
            source = located(model, storage)
            if source.path:
                facts = facts_from_folder(Path(source.path), source.name, weights_bytes)
                return replace(facts, notes=(*facts.notes, f"the files are in {source.path}"))
    return read_facts(model, offline or hub_is_off(), weights_bytes)


def plan_of(question: PlanInput, facts: ModelFacts, inventory: Inventory, profile: Profile) -> Plan:
    """One engine's plan; flags that vLLM would refuse with it are refused."""
    tuning = tuning_of_plan(profile, facts, inventory, question.asked.rest)
    made = make_plan(facts, inventory, question.goal, question.asked.fixed, tuning)
    if old := _older_engine(facts, inventory, profile):
        made = replace(made, warnings=(*made.warnings, old))
    refuse_planned_flags(question, made)
    return made


def refuse_planned_flags(question: PlanInput, made: Plan) -> None:
    if made.fits:
        refuse_flags(question.asked.rest, made.settings, made.max_model_len)


def _older_engine(facts: ModelFacts, inventory: Inventory, profile: Profile) -> str:
    """That the vLLM which would serve it is too old for the model."""
    from corral.engines.recipes import older_engine, recipe_for, tables

    recipe = recipe_for([facts.name.rpartition("/")[2]], "", tables()[0])
    if not recipe.least_vllm:  # the version, which is looked up in the environment, does not matter
        return ""
    return older_engine(facts.name, recipe, engine_version(profile, inventory))
