"""Writing profiles: a draft with every key, and single values set in a text that keeps its comments.

And the command line that starts a plan: made to be copied, and to start that plan and no other.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from corral.base.errors import UsageError
from corral.base.record import nearest
from corral.deploy.profile.contract import Key, ProfileSettings, all_keys
from corral.deploy.profile.merging import PlanRequest, plan_request
from corral.deploy.profile.profile import Profile
from corral.deploy.profile.reading import key_lines
from corral.deploy.targets.keys import is_placeholder, target_class, target_tables
from corral.plan.contract import Plan


def as_toml(value: object) -> str:
    """One value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key_word(str(k))} = {as_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)


def _key_word(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else as_toml(name)


def parse_value(text: str) -> Any:
    """A value from a command line: as TOML reads it, or the text itself."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def draft(values: Mapping[str, Any]) -> str:
    """A whole profile: what is known as values, every other key as a comment with its meaning."""
    target = values.get("target", "local")
    lines = ["# A profile of Corral: `corral up MODEL --on NAME`. Keys that begin with # are not set.", ""]
    table = ""
    for key in all_keys():
        commented = key.table in target_tables() and key.table != target
        if key.table != table:
            table = key.table
            lines += ["", f"# [{table}]" if commented else f"[{table}]"]
        lines.append(_line(key, values))
    return "\n".join(lines) + "\n"


def _line(key: Key, values: Mapping[str, Any]) -> str:
    inside = values.get(key.table, {}) if key.table else values
    if key.dotted == "runtime.options":
        others = [f"{_key_word(name)} = {as_toml(value)}" for name, value in inside.items() if name != "name"]
        return "\n".join(others) or f"# {key.doc}"
    if key.name in inside:
        return f"{key.name} = {as_toml(inside[key.name])}  # {key.doc}"
    shown = getattr(ProfileSettings().table(key.table), key.name) or "" if key.sample is None else key.sample
    return f"# {key.name} = {as_toml(shown)}  # {key.doc}"


def with_value(text: str, dotted: str, value: Any) -> str:
    """The text with one key set: on its own line where it has one, else at the head of its table."""
    table, _, name = dotted.rpartition(".")
    known = [key.dotted for key in all_keys()]
    if dotted not in known and table != "runtime":
        guess = nearest(dotted, known, 1)
        raise UsageError(f"a profile has no key {dotted!r}.", f"Did you mean {guess[0]}?" if guess else "")
    lines, where = text.splitlines(), key_lines(text)
    assignment = f"{name} = {as_toml(value)}"
    commented = _commented_line(lines, where.get(table, 0), name)
    if dotted in where:
        lines[where[dotted] - 1] = assignment
    elif commented is not None and (not table or table in where):
        lines[commented] = assignment
    elif table and table not in where:
        lines += ["", f"[{table}]", assignment]
    else:
        lines.insert(where[table] if table else 0, assignment)
    made = "\n".join(lines) + "\n"
    if _value_at(made, dotted) != value:
        raise UsageError(f"{dotted} spans several lines there and cannot be set.", "Edit the file by hand.")
    return made


def _commented_line(lines: list[str], begin: int, name: str) -> int | None:
    """The line of a table, which begins at line `begin`, that has the key as a comment."""
    for number, line in enumerate(lines[begin:], begin):
        if line.lstrip("# ").startswith("["):
            return None
        if re.match(rf"#\s*{re.escape(name)} = ", line):
            return number
    return None


def _value_at(text: str, dotted: str) -> Any:
    try:
        here: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    for part in dotted.split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    return here


def up_command(plan: Plan, model: str, asked: PlanRequest, profile: Profile | None = None, replicas: int = 1) -> str:
    """`corral up …`: the profile, its open values, and every value that differs from the profile's own.

    Without a profile, a layout for hardware elsewhere is pinned, so that it stays as planned.
    """
    profile = profile or Profile()
    own = plan_request(profile, {})
    argv = ["corral", "up", *([] if model == profile.settings.defaults.model else [model])]
    argv += ["--on", profile.name, *_open_values(plan, profile)] if profile.name else []
    argv += ["--replicas", str(replicas)] if replicas > 1 else []
    if plan.max_model_len != own.goal.get("context"):
        argv += ["--context", str(plan.max_model_len)]
    if plan.goal.concurrency and plan.goal.concurrency != own.goal.get("concurrency"):
        argv += ["--concurrency", str(plan.goal.concurrency)]
    if plan.goal.goal != own.goal.get("goal", "balanced"):
        argv += ["--goal", plan.goal.goal]
    for name, value in _pinned(plan, asked).items():
        if str(own.fixed.get(name)) != str(value):
            argv += ["--set", f"{name}={value}"]
    if asked.link != own.link:
        argv += ["--link", asked.link]
    rest = asked.rest[len(own.rest) :]  # the profile's arguments come first
    return shlex.join([*argv, *(["--", *rest] if rest else [])])


def _pinned(plan: Plan, asked: PlanRequest) -> dict[str, object]:
    pinned = {name: value for name, value in asked.fixed.items() if name != "max_model_len"}
    if plan.inventory.source == "named" and plan.inventory.gpu:
        p = plan.parallel
        pinned |= {"tensor": p.tensor, "pipeline": p.pipeline, "data": p.data}
        pinned |= {"expert": "true"} if p.expert else {}
        if plan.precision.how != "native":
            pinned.setdefault("weights", plan.precision.weights)
    return pinned


def _open_values(plan: Plan, profile: Profile) -> list[str]:
    """Options for the values that a profile leaves open, in capitals, and the nodes where they differ."""
    argv: list[str] = []
    target, options = target_class(profile.target), profile.target_options
    for flag in target.FLAGS:
        if flag.option in target.REQUIRED and flag.option not in options:
            argv += [flag.name, ",".join(f"HOST{number + 1}" for number in range(plan.inventory.nodes))]
        elif is_placeholder(options.get(flag.option)):
            argv += [flag.name, flag.option.upper()]
        elif flag.option == "nodes" and plan.inventory.nodes != profile.nodes:
            argv += [flag.name, str(plan.inventory.nodes)]
    return argv


def vllm_command(plan: Plan, more: Sequence[str] = ()) -> str:
    """The same launch by hand: `vllm serve` with everything the plan decides."""
    environment = [f"{name}={value}" for name, value in plan.engine_env.items()]
    return shlex.join([*environment, "vllm", "serve", plan.checkpoint, *plan.engine_args, *more])
