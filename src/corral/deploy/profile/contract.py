"""The keys of a profile: a tree of frozen dataclasses, one per table, each key with its meaning and its check.

A table that belongs to a target is declared in that target's file. The tree is the only list of keys: reading,
`corral profile show` and docs/profiles.md follow it. None means: not set, and a later layer decides. What `[runtime]`
holds beside its name belongs to the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from corral.deploy.targets.keys import (
    TARGETS,
    HardwareKeys,
    LimitKeys,
    NetworkKeys,
    Shared,
    StorageKeys,
    at_least,
    key,
    one_of,
    one_word,
    target_class,
    target_tables,
    variables,
)
from corral.plan.contract import token_count

TOKENS = ('a number of tokens such as 32768 or "32k"', token_count)


@dataclass(frozen=True)
class RuntimeKeys:
    """[runtime]: how vLLM exists on a node; every other key is an option of that runtime."""

    name: str = key("`managed`, `venv`, `conda`, `module`, `docker`, `podman`, `apptainer`", "managed", one_word)
    options: Mapping[str, object] = field(
        default_factory=dict, metadata={"doc": "any other key: an option of the runtime", "check": None, "rest": True}
    )


@dataclass(frozen=True)
class LinkKeys:
    """[link]: how the ranks of one replica find each other."""

    name: str = key(
        "`auto`, `native` (vLLM's own), `ray`, `single`", "auto", one_of("auto", "native", "ray", "single")
    )


@dataclass(frozen=True)
class EngineKeys:
    """[engine]: what vLLM gets beside the plan."""

    env: Mapping[str, str] = key("environment variables of the engine", {}, variables, {"VLLM_LOGGING_LEVEL": "INFO"})
    args: tuple[str, ...] = key("arguments of `vllm serve`, as after `--`", (), sample=["--enforce-eager"])


@dataclass(frozen=True)
class DefaultsKeys:
    """[defaults]: what `corral up` and `corral plan` do unless told otherwise."""

    model: str | None = key("the model when none is named", sample="llama-3.1-8b-instruct")
    context: int | None = key("`--context`", None, at_least(1), 8192, TOKENS)
    concurrency: int | None = key("`--concurrency`", None, at_least(1), 32)
    goal: str | None = key("`--goal`", None, one_of("balanced", "latency", "throughput"), "balanced")
    set: Mapping[str, str | int | float | bool] = key(
        "`--set`: fields of the plan, as `{tensor = 16}`", {}, sample={"tensor": 8}
    )
    restart: int | None = key("`--restart`", None, at_least(0, 100), 0)
    stall: float | None = key("`--stall`, in seconds", None, at_least(10), 600.0)


@dataclass(frozen=True)
class EndpointKeys:
    """[endpoint]: where the server listens."""

    bind: str | None = key("`--bind`: the address to listen on", sample="127.0.0.1")
    expose: bool | None = key("`--expose`: listen on the cluster's network; the key is still needed", sample=False)
    port: int | None = key("`--port`", None, at_least(1, 65535), 8000)


def _known_target(value: str) -> str:
    return "" if value in TARGETS else "one of " + ", ".join(TARGETS)


@dataclass(frozen=True)
class ProfileSettings:
    """A whole profile; `targets` holds the tables that belong to one target each, by its name."""

    description: str = key("one line for `corral profile list`", "")
    target: str = key("who starts it: `local`, `ssh` or `slurm`", "local", _known_target)
    targets: Mapping[str, Any] = field(default_factory=dict, metadata={"targets": True})
    hardware: HardwareKeys = field(default_factory=HardwareKeys)
    runtime: RuntimeKeys = RuntimeKeys()
    link: LinkKeys = LinkKeys()
    network: NetworkKeys = field(default_factory=NetworkKeys)
    storage: StorageKeys = field(default_factory=StorageKeys)
    engine: EngineKeys = EngineKeys()
    defaults: DefaultsKeys = DefaultsKeys()
    endpoint: EndpointKeys = EndpointKeys()
    limits: LimitKeys = field(default_factory=LimitKeys)

    def table(self, name: str) -> Any:
        """A table by its name; the top level by the empty one."""
        tables = target_tables()
        if name in tables:
            return self.targets.get(name) or tables[name]()
        return getattr(self, name) if name else self

    @property
    def own(self) -> Any:
        """The table of its target; None where that has none."""
        table = target_class(self.target).TABLE
        return None if table is None else self.targets.get(self.target) or table()

    @property
    def shared(self) -> Shared:
        return Shared(self.hardware, self.network, self.storage, self.limits)


@dataclass(frozen=True)
class Key:
    """One key: its table ("" for the top), its name, what values it takes, what it means."""

    table: str
    name: str
    takes: str
    doc: str
    kind: Any
    sample: object = None  # the value that a draft shows

    @property
    def dotted(self) -> str:
        return f"{self.table}.{self.name}" if self.table else self.name


_TYPES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def takes(kind: Any) -> str:
    """A type as the docs name it: `text`, `a list of text`, `a table of text`."""
    if kind in _TYPES:
        return _TYPES[kind]
    arguments = get_args(kind)
    origin = getattr(kind, "__origin__", None)
    if origin is tuple:
        return "a list of text"
    if origin is not None and issubclass(origin, Mapping):
        return "a table of text" if arguments[1] is str else "a table"
    return " or ".join(takes(part) for part in arguments if part is not type(None))


def all_keys(kind: type = ProfileSettings, table: str = "") -> Iterator[Key]:
    """Every key there is, in the order of the tree."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        if entry.metadata.get("targets"):
            for name, keys in target_tables().items():
                yield from all_keys(keys, name)
        elif is_dataclass(hints[entry.name]):
            yield from all_keys(hints[entry.name], entry.name)
        else:
            read = entry.metadata.get("read")
            accepted = "anything" if entry.metadata.get("rest") else read[0] if read else takes(hints[entry.name])
            sample = entry.metadata.get("sample")
            yield Key(table, entry.name, accepted, entry.metadata["doc"], hints[entry.name], sample)
