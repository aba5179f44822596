"""A profile and the options of one command as the keyword arguments of a request; an option that is given wins.

Also what follows from a profile for a plan: its hardware, where its models lie, and the measurements for the vLLM of
its runtime.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, UsageError
from corral.base.home import home_dir
from corral.base.wording import time_limit_s
from corral.deploy.profile.profile import Profile
from corral.deploy.targets.keys import is_placeholder, target_class
from corral.engines.settings import joined, read_back
from corral.plan.candidate import Tuning
from corral.plan.hardware.inventory import Inventory, parse_gpus, probe
from corral.plan.measured import tuning_for
from corral.plan.models.facts import ModelFacts

# options of a command that a profile does not have
PASSED_ON = ("name", "served_name", "also_served_as", "flavour", "recipe", "adapters")
GOAL = ("context", "concurrency", "goal")
API = ("tools", "allowed_origins", "store_responses", "key_file")  # of `ApiOptions`

# one setting with several names: a command's value replaces all that a profile sets
_SAME_SETTING = (("max_model_len", "context"), ("weights", "dtype", "quantization"))


@dataclass(frozen=True)
class PlanRequest:
    """What is requested of the plan: arguments of `Goal`, fixed fields, the link, and arguments left for vLLM."""

    goal: dict[str, Any]
    fixed: dict[str, object]
    link: str
    rest: tuple[str, ...]


def merged(profile: Profile, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `DeployRequest.of`, with `goal` and `patience` as those of `Goal` and `Patience`.

    `flags` has the request's own names, and those of the goal and the patience; None means: not given. Where neither
    sets a value, the request's default holds, so that there is one place for defaults.
    """
    from corral.deploy.deployment.state import Patience

    patience_names = [field.name for field in fields(Patience)]
    given = {name: value for name, value in flags.items() if value is not None}
    known = {*PASSED_ON, *GOAL, *API, *patience_names, *_settings_of(Profile()), "extra_args", "extra_env", "fixed"}
    if unknown := given.keys() - known:
        raise TypeError(f"a request has no {', '.join(sorted(unknown))}")
    base = _settings_of(profile)
    if given.get("target", profile.target) != profile.target:
        base["target_options"] = {}
    if given.get("runtime", profile.runtime) != profile.runtime:
        base["runtime_options"] = {}
    if "bind" in given or "expose" in given:  # one setting with two names: either replaces both
        base["bind"] = base["expose"] = None
    asked = plan_request(profile, given)
    result = {name: given.get(name, value) for name, value in base.items()}
    result["target_options"] = {**base["target_options"], **given.get("target_options", {})}
    result["runtime_options"] = {**base["runtime_options"], **given.get("runtime_options", {})}
    result |= {"goal": asked.goal, "fixed": asked.fixed, "link": asked.link, "extra_args": asked.rest}
    settings = profile.settings
    result["extra_env"] = {**settings.network.env, **settings.engine.env, **given.get("extra_env", {})}
    result |= {name: given[name] for name in PASSED_ON if name in given}
    defaults = settings.defaults
    own_patience = {"restarts": defaults.restart, "stall_s": defaults.stall}
    patience = {name: given.get(name, own_patience.get(name)) for name in patience_names}
    result["patience"] = {name: value for name, value in patience.items() if value is not None}
    result["api"] = {name: given[name] for name in API if name in given}
    result = {name: value for name, value in result.items() if value is not None}
    _refuse_unfinished(profile, result)
    _refuse_beyond_limits(profile, result)
    return result


def plan_request(profile: Profile, given: Mapping[str, Any]) -> PlanRequest:
    """What a profile and a command request of the plan; `given` as in `merged`."""
    defaults = profile.settings.defaults
    own, command = read_back(profile.settings.engine.args), read_back(given.get("extra_args", ()))
    fixed = joined(given.get("fixed", {}), command)
    set_here = {*fixed, *(name for name in GOAL if given.get(name) is not None)}
    hidden = {name for names in _SAME_SETTING if not set_here.isdisjoint(names) for name in names}
    kept = {name: value for name, value in joined(defaults.set, own).items() if name not in hidden}
    goal = {name: given.get(name, getattr(defaults, name)) for name in GOAL}
    if "max_model_len" in fixed:
        goal["context"] = given.get("context")
    goal = {name: value for name, value in goal.items() if value is not None}
    link = given.get("link") or command.link or own.link or profile.link
    return PlanRequest(
        goal, {**kept, **fixed}, link, (*own.rest, *command.rest)
    )  # vLLM takes the last of equal flags


def _settings_of(profile: Profile) -> dict[str, Any]:
    settings = profile.settings
    return {
        "model": settings.defaults.model,
        "target": profile.target,
        "target_options": profile.target_options,
        "runtime": profile.runtime,
        "runtime_options": profile.runtime_options,
        "link": profile.link,
        "bind": settings.endpoint.bind,
        "expose": settings.endpoint.expose,
        "port": settings.endpoint.port,
        "storage": storage_of(profile) or None,
    }


def storage_of(profile: Profile) -> dict[str, str]:
    """Where it says that models lie, as keyword arguments of `Storage`."""
    return {name: value for name, value in vars(profile.settings.storage).items() if isinstance(value, str)}


def _refuse_unfinished(profile: Profile, result: Mapping[str, Any]) -> None:
    """Refuse values that are still in <>, and keys that the profile's target needs."""
    asked = (result["target_options"], result["runtime_options"], result.get("model"), result.get("bind"))
    open_values = [value for value in _leaves(asked) if is_placeholder(value)]
    keys = [dotted for dotted, value, _ in profile.rows() if value in open_values]
    if result["target"] == profile.target:
        keys = [
            *(key for key in profile.missing() if not result["target_options"].get(key.rpartition(".")[2])),
            *keys,
        ]
    if not keys and not open_values:
        return
    files = [layer for layer in profile.layers if layer.kind != "environment"]
    named = keys or [str(value) for value in open_values]
    need = f"{', '.join(named)} {'needs a value' if len(named) == 1 else 'need values'}"
    if not files:
        raise UsageError(f"{need}.", "Replace the text in <> with your own value.", keys=named)
    remedy = f"Set {'it' if len(named) == 1 else 'them'} in {files[-1].label}, or on the command line."
    if files[-1].kind == "example":
        settings = "".join(" --hosts A,B,…" if key == "ssh.hosts" else f" --set {key}=…" for key in named)
        remedy = f"Make it your own: `corral profile init my-{profile.name} --from {profile.name}{settings}`."
    raise UsageError(f"{need} in the profile {profile.name!r}.", remedy, keys=named)


def _leaves(value: object) -> Iterator[object]:
    """Values inside tables and lists."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _refuse_beyond_limits(profile: Profile, result: Mapping[str, Any]) -> None:
    limits, size = profile.settings.limits, target_class(result["target"]).size(result["target_options"])
    for key, asked, most in (
        ("max_nodes", size.nodes, limits.max_nodes),
        ("max_gpus", size.nodes * size.gpus_per_node, limits.max_gpus),
        ("max_time", round(size.time_s), round(time_limit_s(limits.max_time or "0") or 0)),
    ):
        if most and asked and asked > most:
            what = {"max_nodes": "nodes", "max_gpus": "GPUs", "max_time": "seconds"}[key]
            raise UsageError(
                f"{asked:,} {what} exceed the {most:,} that the profile {profile.name!r} allows.",
                f"Ask for less, or change limits.{key} ({profile.origin(f'limits.{key}')}).",
            )


def hardware_of_plan(profile: Profile, gpus: str | None, nodes: int | None, link: str | None) -> Inventory:
    """`--gpus` before the profile, the profile before this machine."""
    if gpus is not None:
        return parse_gpus(gpus, nodes, link or "ib-ndr")
    if named := profile.inventory(nodes):
        return replace(named, link=link or named.link)
    if not target_class(profile.target).HERE:
        raise UsageError(
            f"the profile {profile.name!r} does not say what its nodes hold.",
            'Add [hardware] gpus = "8xH100" to it, or give --gpus.',
        )
    if nodes is not None and nodes != 1:
        raise UsageError("--nodes needs --gpus: what the other nodes hold is not known here.", "Add --gpus 8xH100.")
    return probe()


def use_hub_of(profile: Profile, environ: MutableMapping[str, str] | None = None) -> None:
    """Let the hub's library use the profile's Hugging Face home if this machine sees it and `HF_HOME` is not set."""
    environ, named = os.environ if environ is None else environ, profile.settings.storage.hf_home
    hub = Path(named).expanduser() if named else None
    if hub and hub.is_dir():
        environ.setdefault("HF_HOME", str(hub))


def tuning_of_plan(
    profile: Profile, facts: ModelFacts, inventory: Inventory, arguments: Sequence[str] = ()
) -> Tuning:
    """The measurements for the vLLM of the profile's runtime and for vLLM's arguments.

    A profile without a runtime has Corral's own, which `corral up` may replace: the version is then the last one seen
    on this hardware.
    """
    version = "" if profile.runtime == "managed" else engine_version(profile, inventory)
    return tuning_for(facts, inventory, version, arguments, profile.runtime == "managed")


def engine_version(profile: Profile, inventory: Inventory) -> str:
    """Of the vLLM of the profile's runtime; empty where that is not known."""
    from corral.engines import PINNED_VERSION
    from corral.engines.runtimes.base import NodeSide, make_runtime

    if profile.runtime == "managed":
        return PINNED_VERSION
    node = NodeSide(str(home_dir()), "cuda" if inventory.gpu else "cpu", PINNED_VERSION)
    with contextlib.suppress(CorralError):  # a start reports what is wrong with it
        return make_runtime(profile.runtime, profile.runtime_options, node).version
    return ""
