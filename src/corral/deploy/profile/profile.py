"""A profile: the layers of its files and the environment, resolved once.

Flag > environment > project's file > user's file > default. `merged` combines a profile and the options of a command.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, DataError
from corral.deploy.profile import folders
from corral.deploy.profile.contract import ProfileSettings, all_keys
from corral.deploy.profile.reading import Layer, all_wrong, build_settings, read_file
from corral.deploy.targets.keys import TARGETS, is_placeholder, target_class, target_tables
from corral.plan.hardware.inventory import GIB, Inventory, parse_gpus

# variable -> the key it sets; those of a target are declared in its file
_VARIABLES = {
    "CORRAL_MODEL": "defaults.model",
    "CORRAL_CONTEXT": "defaults.context",
    "CORRAL_CONCURRENCY": "defaults.concurrency",
    "CORRAL_GOAL": "defaults.goal",
    "CORRAL_RESTART": "defaults.restart",
    "CORRAL_STALL": "defaults.stall",
    "CORRAL_RUNTIME": "runtime.name",
    "CORRAL_LINK": "link.name",
    "CORRAL_BIND": "endpoint.bind",
    "CORRAL_PORT": "endpoint.port",
}


def environment() -> dict[str, str]:
    """Every variable and the key it sets; a key of another target than the profile's does not apply."""
    classes = {name: target_class(name) for name in TARGETS}
    own = {variable: f"{name}.{key}" for name, one in classes.items() for variable, key in one.VARIABLES.items()}
    return {**_VARIABLES, **own}


_OTHER_VARIABLES = ("CORRAL_HOME", "CORRAL_PROFILE", "CORRAL_PYTHON")  # that stand for no key


@dataclass(frozen=True)
class Profile:
    """Where and how to run, resolved; an empty one sets nothing."""

    name: str = ""
    settings: ProfileSettings = field(default_factory=ProfileSettings)
    layers: tuple[Layer, ...] = ()  # the strongest last

    @property
    def target(self) -> str:
        return self.settings.target

    @property
    def runtime(self) -> str:
        return self.settings.runtime.name

    @property
    def runtime_options(self) -> dict[str, object]:
        return dict(self.settings.runtime.options)

    @property
    def link(self) -> str:
        return self.settings.link.name

    @property
    def nodes(self) -> int:
        """How many nodes it names."""
        facts = self.settings.hardware
        named = parse_gpus(facts.gpus).nodes if facts.gpus else 1
        own = self.settings.own
        return (target_class(self.target).count_nodes(own) if own else None) or facts.nodes or named

    @property
    def target_options(self) -> dict[str, Any]:
        """The options of its target that it sets."""
        return target_class(self.target).from_profile(self.settings.own, self.settings.shared)

    def inventory(self, nodes: int | None = None) -> Inventory | None:
        """The hardware it names, or None when it names none."""
        facts = self.settings.hardware
        cores, host_bytes = facts.cpu_cores or 0, int((facts.memory_gib or 0) * GIB)
        if facts.gpus:
            one = parse_gpus(facts.gpus, None, facts.link or "ib-ndr")
            named = replace(one, nodes=nodes or self.nodes)
            return replace(named, cpu_cores=cores, host_memory_bytes=host_bytes, host_available_bytes=host_bytes)
        if cores and host_bytes:
            many = nodes or self.nodes
            return Inventory(None, 1, many, 0, cores, host_bytes, host_bytes, link=facts.link or "ib-ndr")
        return None

    def origin(self, dotted: str) -> str:
        """Where a value comes from: FILE:LINE, a variable, or `default`."""
        for layer in reversed(self.layers):
            if _has(layer.values, dotted):
                return layer.at(dotted)
        table, _, name = dotted.rpartition(".")
        source = target_class(table).DERIVED.get(name) if table in TARGETS else None
        return self.origin(f"{table}.{source}") if source else "default"

    def from_environment(self, dotted: str) -> bool:
        return any(layer.kind == "environment" and _has(layer.values, dotted) for layer in self.layers)

    def rows(self) -> list[tuple[str, object, str]]:
        """Every key with its value and where that comes from."""
        rows: list[tuple[str, object, str]] = []
        for key in all_keys():
            value = getattr(self.settings.table(key.table), key.name)
            prefix = key.table if key.dotted == "runtime.options" else key.dotted  # they are in [runtime] itself
            if isinstance(value, Mapping) and (value or prefix != key.dotted):
                rows += [(f"{prefix}.{name}", item, self.origin(f"{prefix}.{name}")) for name, item in value.items()]
            else:
                rows.append((key.dotted, value, self.origin(key.dotted)))
        return rows

    def placeholders(self) -> list[str]:
        """Keys whose value the user has not filled in yet."""
        return [dotted for dotted, value, _ in self.rows() if is_placeholder(value)]

    def missing(self) -> list[str]:
        """Keys that its target needs and that are not set."""
        target_options = self.target_options
        return [f"{self.target}.{name}" for name in target_class(self.target).REQUIRED if name not in target_options]

    def to_fill_in(self) -> list[str]:
        """All keys that must be set before it can run."""
        return [*self.missing(), *self.placeholders()]


@dataclass(frozen=True)
class Listed:
    """One name in the list of profiles: the profile, or what is wrong with it."""

    name: str
    kinds: tuple[str, ...]
    path: Path
    profile: Profile | None = None
    error: CorralError | None = None


def load_profile(name: str | None, environ: Mapping[str, str] | None = None) -> Profile:
    """The profile of a name under the environment's values; without a name, only those."""
    environ = os.environ if environ is None else environ
    if not name and not any(one.startswith("CORRAL_") and one not in _OTHER_VARIABLES for one in environ):
        return Profile()  # without loading every target for its variables
    files = folders.find(name) if name else []
    for file in files:
        folders.refuse_foreign(file)
    layers = [read_file(file.path, file.kind) for file in files]
    return assemble(name or "", layers, environ)


def all_profiles() -> list[Listed]:
    """Every profile there is, broken ones with their error."""
    listed = []
    for name in folders.known_names():
        files = folders.find(name)
        kinds, path = tuple(file.kind for file in reversed(files)), files[-1].path
        try:
            listed.append(Listed(name, kinds, path, load_profile(name, {})))
        except CorralError as error:
            listed.append(Listed(name, kinds, path, error=error))
    return listed


def assemble(name: str, layers: Iterable[Layer], environ: Mapping[str, str]) -> Profile:
    """Combine layers, the strongest last, and check the whole."""
    stack: list[Layer] = []
    for layer in layers:
        stack = [*(_yielding(below, layer) for below in stack), layer]
    target = next((layer.values["target"] for layer in reversed(stack) if "target" in layer.values), "local")
    if above := _environment_layer(environ, str(target)):
        build_settings(above.values, above)
        stack = [*(_yielding(below, above) for below in stack), above]
    values: dict[str, Any] = {}
    for layer in stack:
        values = _laid_over(values, layer.values)
    whole = Layer("", name or "the environment", values)
    profile = Profile(name, build_settings(values, whole), tuple(stack))
    profile = _completed(profile)
    _check_whole(profile)
    return profile


def _yielding(below: Layer, above: Layer) -> Layer:
    """A lower layer without the options of a runtime or target that a higher one replaces."""
    values = dict(below.values)
    chosen = above.values.get("runtime", {}).get("name")
    if chosen is not None and chosen != values.get("runtime", {}).get("name", "managed"):
        values.pop("runtime", None)
    if above.values.get("target", values.get("target")) != values.get("target"):
        for table in target_tables():
            values.pop(table, None)
    return replace(below, values=values)


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    laid = dict(below)
    for name, value in above.items():
        nested = isinstance(value, Mapping) and isinstance(below.get(name), Mapping)
        laid[name] = _laid_over(below[name], value) if nested else value
    return laid


def _environment_layer(environ: Mapping[str, str], target: str) -> Layer | None:
    kinds = {key.dotted: key.takes for key in all_keys()}
    values: dict[str, dict[str, object]] = {}
    origins = {}
    for variable, dotted in environment().items():
        table, _, name = dotted.partition(".")
        text = environ.get(variable, "").strip()
        if text and (table not in target_tables() or table == target):
            values.setdefault(table, {})[name] = _typed(text, kinds[dotted])
            origins[dotted] = variable
    return Layer("environment", "the environment", values, origins) if values else None


def _typed(text: str, takes: str) -> object:
    """Text of the environment as a TOML file would hold it; what is not a number stays text, and is refused later."""
    if takes.startswith("a list"):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return int(text) if takes == "a whole number" else float(text) if takes == "a number" else text
    except ValueError:
        return text


def _completed(profile: Profile) -> Profile:
    """With what the table of its target refers to: the hosts of a hosts file."""
    own, name = profile.settings.own, profile.target
    if own is None:
        return profile
    named = target_class(name).DERIVED.values()
    files = [layer for layer in profile.layers if any(_has(layer.values, f"{name}.{key}") for key in named)]
    folder = Path(files[-1].label).parent if files else Path()
    own_keys = [key for key in all_keys() if key.table == name]
    overruled = frozenset(key.name for key in own_keys if profile.from_environment(key.dotted))
    try:
        made = target_class(name).completed(own, folder, overruled)
    except CorralError as error:
        at = profile.origin(f"{name}.{error.details.get('key', '')}".rstrip("."))
        raise DataError(f"{at}: {error.message}", error.remedy) from None
    return replace(profile, settings=replace(profile.settings, targets={**profile.settings.targets, name: made}))


def _check_whole(profile: Profile) -> None:
    """Check what no single key shows: tables of another target, and values that contradict each other."""
    with all_wrong() as wrong:
        wrong.extend(_contradictions(profile))


def _contradictions(profile: Profile) -> Iterator[DataError]:
    settings, at = profile.settings, profile.origin
    for table in target_tables():
        if table != profile.target and any(table in layer.values for layer in profile.layers):
            where = next(layer.at(table) for layer in reversed(profile.layers) if table in layer.values)
            yield DataError(
                f"{where}: [{table}] is there, but the target is {profile.target!r}.",
                f'Say target = "{table}" at the top, or take [{table}] out.',
            )
    named = parse_gpus(settings.hardware.gpus) if settings.hardware.gpus else None
    if named and named.nodes > 1 and profile.nodes != named.nodes:
        yield _contradiction(
            at("hardware.gpus"), f"hardware.gpus says {named.nodes} nodes", f"{profile.nodes} are named"
        )
    if settings.own is not None:
        for name, one, other in target_class(profile.target).contradictions(settings.own, settings.shared):
            yield _contradiction(at(f"{profile.target}.{name}"), one, other)
    if settings.endpoint.bind is not None and settings.endpoint.expose is not None:
        yield _contradiction(at("endpoint.expose"), "[endpoint] says bind", "it says expose")


def _contradiction(where: str, one: str, other: str) -> DataError:
    return DataError(f"{where}: {one}, but {other}.", "Make them agree, or remove one of them.")


def _has(values: Mapping[str, Any], dotted: str) -> bool:
    here: Any = values
    for part in dotted.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return False
        here = here[part]
    return True
