"""The line that starts a plan: made to be copied, and to start that plan and no other."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from corral.deploy.profile.merging import AskedValues, asked_of_plan
from corral.deploy.profile.profile import Profile
from corral.deploy.targets.base import target_class
from corral.deploy.targets.keys import is_placeholder
from corral.plan.contract import Plan


def up_command(plan: Plan, model: str, asked: AskedValues, profile: Profile | None = None, replicas: int = 1) -> str:
    """`corral up …`: the profile, its open values, and every value that differs from what it says by itself.

    Without a profile, a layout for hardware elsewhere is pinned, so that it stays as planned.
    """
    profile = profile or Profile()
    own = asked_of_plan(profile, {})
    words = ["corral", "up", *([] if model == profile.settings.defaults.model else [model])]
    words += ["--on", profile.name, *_open_values(plan, profile)] if profile.name else []
    words += ["--replicas", str(replicas)] if replicas > 1 else []
    if plan.max_model_len != own.goal.get("context"):
        words += ["--context", str(plan.max_model_len)]
    if plan.goal.concurrency and plan.goal.concurrency != own.goal.get("concurrency"):
        words += ["--concurrency", str(plan.goal.concurrency)]
    if plan.goal.goal != own.goal.get("goal", "balanced"):
        words += ["--goal", plan.goal.goal]
    for name, value in _pinned(plan, asked).items():
        if str(own.fixed.get(name)) != str(value):
            words += ["--set", f"{name}={value}"]
    if asked.link != own.link:
        words += ["--link", asked.link]
    rest = asked.rest[len(own.rest) :]  # what the profile says comes first
    return shlex.join([*words, *(["--", *rest] if rest else [])])


def _pinned(plan: Plan, asked: AskedValues) -> dict[str, object]:
    pinned = {name: value for name, value in asked.fixed.items() if name != "max_model_len"}
    if plan.inventory.source == "named" and plan.inventory.gpu:
        p = plan.parallel
        pinned |= {"tensor": p.tensor, "pipeline": p.pipeline, "data": p.data}
        if plan.precision.how != "native":
            pinned.setdefault("weights", plan.precision.weights)
    return pinned


def _open_values(plan: Plan, profile: Profile) -> list[str]:
    """Options for what a profile leaves to its user, in capitals, and the nodes where they differ."""
    words: list[str] = []
    declared, said = target_class(profile.target), profile.target_options
    for flag in declared.FLAGS:
        if flag.option in declared.REQUIRED and flag.option not in said:
            words += [flag.name, ",".join(f"HOST{number + 1}" for number in range(plan.inventory.nodes))]
        elif is_placeholder(said.get(flag.option)):
            words += [flag.name, flag.option.upper()]
        elif flag.option == "nodes" and plan.inventory.nodes != profile.nodes:
            words += [flag.name, str(plan.inventory.nodes)]
    return words


def vllm_command(plan: Plan, more: Sequence[str] = ()) -> str:
    """The same by hand: `vllm serve` with everything the plan decides."""
    environment = [f"{name}={value}" for name, value in plan.engine_env.items()]
    return shlex.join([*environment, "vllm", "serve", plan.checkpoint, *plan.engine_args, *more])
