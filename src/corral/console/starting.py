"""The form that starts a deployment: its fields as arguments of `corral up`, and the plan that they make."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from corral.base.errors import AccessError, UsageError
from corral.base.ssh import asking_no_node
from corral.console.context import whole_number
from corral.console.plans import refuse_folder
from corral.deploy.deployment.folder import checked_name
from corral.deploy.lifecycle.decision import DeployRequest, Preview, sized
from corral.deploy.profile.merging import merged, use_hub_of
from corral.deploy.profile.profile import all_profiles, load_profile
from corral.deploy.targets.keys import TARGETS, Flag, target_class
from corral.engines.runtimes.base import RUNTIMES, parse_options
from corral.plan.contract import GOALS, Plan, token_count
from corral.plan.models import catalogue
from corral.plan.models.store import EMBEDDED
from corral.plan.settings import parse_assignments

LONGEST_FIELD = 2000


@dataclass(frozen=True)
class StartForm:
    """The fields of the form; Corral chooses where one is empty."""

    model: str = ""
    name: str = ""
    on: str = ""
    target: str = ""
    context: str = ""
    concurrency: str = ""
    goal: str = ""
    replicas: str = ""
    port: str = ""
    settings: str = ""  # KEY=VALUE …, fields of the plan
    runtime: str = ""
    runtime_options: str = ""  # KEY=VALUE …
    flags: str = ""  # of `vllm serve`
    options: dict[str, str] = field(default_factory=dict)  # of the target, by their flags


FIELDS = tuple(one.name for one in fields(StartForm) if one.name != "options")


def form_of(values: Mapping[str, Any]) -> StartForm:
    """The form from a request: known fields, text, one line each."""
    options = values.get("options", {})
    if unknown := values.keys() - {*FIELDS, "options"}:
        raise UsageError(f"the form has no field {sorted(unknown)[0]!r}.", f"Known: {', '.join(FIELDS)}.")
    if not isinstance(options, dict):
        raise UsageError("the target's options are not an object.", "Give them by their flags.")
    form = StartForm(**{name: _text(name, values.get(name, "")) for name in FIELDS},
                     options={str(flag): _text(str(flag), value) for flag, value in options.items()})  # fmt: skip
    _check(form)
    return form


def _text(name: str, value: object) -> str:
    text = str(value).strip() if isinstance(value, str | int) else ""
    if len(text) > LONGEST_FIELD or any(ord(character) < 32 for character in text):
        raise UsageError(f"{name} is too long, or has more than one line.", "Shorten it.")
    if text.startswith("-") and name != "flags":
        raise UsageError(f"{name} is {text[:40]!r}: a value does not begin with a dash.", "Correct it.")
    return text


def _words(name: str, text: str) -> tuple[str, ...]:
    """A field of several words, as a shell reads them."""
    try:
        words = tuple(shlex.split(text))
    except ValueError:
        raise UsageError(f"{name} has a quotation mark without its other.", "Close it.") from None
    if name != "flags" and any(word.startswith("-") for word in words):
        raise UsageError(f"{name} is {text[:40]!r}: a value does not begin with a dash.", "Correct it.")
    return words


def _check(form: StartForm) -> None:
    if form.name:
        checked_name(form.name)
    if form.goal and form.goal not in GOALS:
        raise UsageError(f"there is no goal {form.goal!r}.", f"Known: {', '.join(GOALS)}.")
    if form.target and form.target not in TARGETS:
        raise UsageError(f"there is no target {form.target!r}.", f"Known: {', '.join(TARGETS)}.")
    if form.context:
        token_count(form.context)
    whole_number({"concurrency": form.concurrency}, "concurrency", least=1)
    whole_number({"port": form.port}, "port", 1, 65535)
    if form.runtime and form.runtime not in RUNTIMES:
        raise UsageError(f"there is no runtime {form.runtime!r}.", f"Known: {', '.join(RUNTIMES)}.")
    parse_assignments(_words("settings", form.settings))
    parse_options(_words("runtime_options", form.runtime_options))
    _words("flags", form.flags)
    known = {flag.name for flag in _flags(form.target)}
    if unknown := [flag for flag in form.options if flag not in known]:
        raise UsageError(f"{form.target or 'this machine'} has no option {unknown[0]!r}.",
                         f"Known: {', '.join(sorted(known)) or 'none'}.")  # fmt: skip
    _options_of(form)


def _flags(target: str) -> list[Flag]:
    """Options of a target that take one value."""
    return [flag for flag in target_class(target).FLAGS if flag.option] if target else []


def _options_of(form: StartForm) -> dict[str, object]:
    """The target's options as values. A page names no file (`Flag.typed`): its reader may not be the owner."""
    options: dict[str, object] = {}
    for flag in _flags(form.target):
        if value := form.options.get(flag.name):
            number = whole_number(form.options, flag.name, flag.least) if flag.least is not None else None
            options[flag.option] = flag.read(value) if flag.read else value if number is None else number
    return options


def up_argv(form: StartForm) -> list[str]:
    """The arguments of `corral` for a form."""
    pairs = [("--name", form.name), ("--on", form.on), ("--context", form.context),
             ("--concurrency", form.concurrency), ("--goal", form.goal), ("--replicas", form.replicas),
             ("--port", form.port), ("--runtime", form.runtime)]  # fmt: skip
    pairs += [("--set", pair) for pair in _words("settings", form.settings)]
    pairs += [("--runtime-option", pair) for pair in _words("runtime_options", form.runtime_options)]
    pairs += [(flag.name, form.options.get(flag.name, "")) for flag in _flags(form.target)]
    model = [form.model] if form.model else []
    flags = _words("flags", form.flags)
    words = [word for flag, value in pairs if value for word in (flag, value)]
    return ["up", *model, *words, *(("--", *flags) if flags else ())]


def preview(form: StartForm, read_only: bool = False) -> dict[str, Any]:
    """The plan that the form makes, with every number's reason; raises what `corral up` would refuse.

    No node is asked: whoever sees the page would choose where this account connects. Flags, settings and a model may
    name files, and the answer tells which exist: a reader of `--read-only` gets no plan for them.
    """
    if read_only:
        if form.flags or form.settings or form.runtime_options:
            raise AccessError("this console only shows, and makes no plan of flags and settings.",
                              "Use the command line: corral plan.")  # fmt: skip
        if form.model:
            refuse_folder(form.model, repositories=False)  # a folder of that name would be read
    with asking_no_node():
        return _preview(form)


def _preview(form: StartForm) -> dict[str, Any]:
    profile = load_profile(form.on or None)
    flags: dict[str, Any] = {
        "model": form.model or None,
        "name": form.name or None,
        "context": token_count(form.context) if form.context else None,
        "concurrency": whole_number({"concurrency": form.concurrency}, "concurrency", least=1),
        "goal": form.goal or None,
        "target": form.target or None,
        "target_options": _options_of(form),
        "port": whole_number({"port": form.port}, "port", 1, 65535),
        "runtime": form.runtime or None,
        "runtime_options": parse_options(_words("runtime_options", form.runtime_options)) or None,
        "fixed": parse_assignments(_words("settings", form.settings)),
        "extra_args": _words("flags", form.flags),
    }
    use_hub_of(profile)
    request = DeployRequest.of(merged(profile, flags))
    named = profile.inventory() if request.target == profile.target and not request.target_options else None
    _, decision = sized(request, preview=Preview(named))
    return {"name": decision.name, "notes": decision.notes(), **_plan_facts(decision.plan)}


def _plan_facts(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.checkpoint,
        "weights": plan.precision.weights,
        "hardware": plan.inventory.gpu or "CPU",
        "context": plan.max_model_len,
        "reasons": [{"field": one.field, "value": one.value, "because": one.because} for one in plan.reasons],
    }


def choices() -> dict[str, Any]:
    """What the form offers."""
    profiles = [{"name": one.name, "problem": one.error.message if one.error else ""} for one in all_profiles()]
    targets = [
        {"name": name, "title": target_class(name).TITLE or name,
         "flags": [{"flag": one.name, "help": one.help, "metavar": one.metavar} for one in _flags(name)]}
        for name in TARGETS
    ]  # fmt: skip
    return {"models": [EMBEDDED, *catalogue.entries()], "profiles": profiles, "targets": targets, "goals": GOALS,
            "runtimes": list(RUNTIMES)}  # fmt: skip
