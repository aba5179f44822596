"""How vLLM exists on a node: the one seam between a rank's command and a process that runs it.

A runtime knows the words that start `vllm serve` and Python inside it, and turns a rank's job into a command for the
node. A new runtime is one new file and one row in `RUNTIMES`; its options are a dataclass of its own, read from the
profile's `[runtime]` table or from `--runtime-option`.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Protocol, Self, TypeVar, get_type_hints

from corral.base.errors import DataError, UsageError
from corral.base.record import from_json, nearest
from corral.engines.flags import FlagList

T = TypeVar("T")


@dataclass(frozen=True)
class NodeSide:
    """What a runtime must know of the nodes before it is made."""

    home: str  # Corral's home on the nodes
    flavour: str  # cpu | cuda
    version: str  # of vLLM, as pinned


@dataclass(frozen=True)
class EngineCommand:
    """One rank's command as it stands inside the runtime, and what it must find there."""

    deployment: str
    launch_id: str
    rank: int
    argv: tuple[str, ...]  # begins with the runtime's own `serve` or `python` words
    env: Mapping[str, str]
    cwd: str
    visible: tuple[str, ...] = ()  # folders that must be seen inside under the same path, read-only
    writable: tuple[str, ...] = ()  # the same, written to
    gpus: bool = False
    fabric: bool = False  # several nodes: RDMA devices and locked memory are needed where there are any


@dataclass(frozen=True)
class Wrapped:
    """A command for the node, and how its agent keeps hold of what the command starts elsewhere."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cleanup: tuple[tuple[str, ...], ...] = ()  # run by the agent after the engine ended, and when it sweeps
    pid_query: tuple[str, ...] = ()  # prints "PID ID" of a running container's first process, or nothing


class Runtime(Protocol):
    """What every runtime can do."""

    @property
    def name(self) -> str: ...

    @property
    def engine(self) -> str:
        """Which engine this is, for people: `cpu-0.32.0`, `docker vllm/vllm-openai:v0.32.0`."""
        ...

    @property
    def serve(self) -> tuple[str, ...]:
        """The words that start `vllm serve` inside the runtime."""
        ...

    @property
    def python(self) -> tuple[str, ...]:
        """The words that start Python, with vLLM importable, inside the runtime."""
        ...

    @property
    def carried(self) -> tuple[str, ...]:
        """Folders of this machine that must lie on every node before a start."""
        ...

    def flags(self) -> FlagList:
        """The flags its `vllm serve` accepts."""
        ...

    def stage(self, progress: Callable[[str], None]) -> Runtime:
        """Make ready what can be made ready on this machine; the runtime as it is then."""
        ...

    def moved(self, paths: Mapping[str, str]) -> Runtime:
        """The runtime with its carried folders where they lie on the nodes."""
        ...

    def wrap(self, job: EngineCommand) -> Wrapped:
        """The command that runs the job on a node. Pure."""
        ...

    def check(self) -> tuple[NodeCheck, ...]:
        """Commands for a node that tell whether this runtime can run there. Pure."""
        ...

    def outside(self, path: str) -> str:
        """Where the node has what a path names inside the runtime; empty for what only an image has."""
        ...

    def question(self, code: str) -> tuple[str, ...]:
        """A command for a node that runs a few lines of Python inside the runtime. Pure."""
        ...

    @property
    def image(self) -> str:
        """The image its vLLM is in, as published; empty where there is none."""
        ...

    @property
    def version(self) -> str:
        """Of its vLLM, as far as it can be told without asking a node; empty where it cannot."""
        ...


class OnTheNodes:
    """The part of a runtime whose vLLM is on the nodes, or fetched by them: nothing of this machine goes there."""

    @property
    def image(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def carried(self) -> tuple[str, ...]:
        return ()

    def outside(self, path: str) -> str:
        return path

    def stage(self, progress: Callable[[str], None]) -> Self:
        return self

    def moved(self, paths: Mapping[str, str]) -> Self:
        return self


@dataclass(frozen=True)
class NodeCheck:
    """One question to a node: a command that succeeds when all is well, and what to say when it does not."""

    what: str
    argv: tuple[str, ...]
    remedy: str
    reports: str = ""  # name under which its last line of output is compared between nodes: "vllm", "image", …
    timeout_s: float = 30
    details: Mapping[str, Any] = field(default_factory=dict)  # `makes`: what it asks for is made where it is lacking
    # the same question at little cost, for a queue's cheapest minute; empty: not asked there
    light: tuple[str, ...] = ()


RUNTIMES = {
    "managed": "corral.engines.runtimes.managed:ManagedRuntime",
    "venv": "corral.engines.runtimes.venv:VenvRuntime",
    "conda": "corral.engines.runtimes.conda:CondaRuntime",
    "module": "corral.engines.runtimes.module:ModuleRuntime",
    "docker": "corral.engines.runtimes.docker:DockerRuntime",
    "podman": "corral.engines.runtimes.podman:PodmanRuntime",
    "apptainer": "corral.engines.runtimes.apptainer:ApptainerRuntime",
}


def kept_caches(home: str, name: str) -> dict[str, str]:
    """Where compiled code is kept between starts, so that a second start loads it.

    Triton's own folder depends on whether the model was compiled in this start: a second start would not find the
    first one's sampling kernels.
    """
    cache = PurePath(home) / "cache" / name
    folders = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {variable: str(cache / folder) for variable, folder in folders.items()}


def read_options(kind: type[T], options: Mapping[str, object], runtime: str) -> T:
    """A runtime's options as its own dataclass, strictly; but one text may stand for a list of one."""
    hints = get_type_hints(kind)
    given = {
        key: [value] if hints.get(key) == tuple[str, ...] and isinstance(value, str) else value
        for key, value in options.items()
    }
    try:
        return from_json(kind, given, f"runtime {runtime}")
    except DataError as error:  # given by the user, so a matter of usage
        lacks = error.details.get("lacks")
        remedy = f"Give it: --runtime-option {lacks}=…" if lacks else error.remedy
        raise UsageError(error.message, remedy) from None


def parse_options(pairs: Iterable[str]) -> dict[str, object]:
    """`KEY=VALUE` texts as a table: values are TOML, or else plain text; `options.env=x` reaches into a table."""
    found: dict[str, object] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        parts = key.strip().split(".")
        if not separator or not all(re.fullmatch(r"[A-Za-z][\w-]*", part) for part in parts):
            raise UsageError(f"{pair!r} is not KEY=VALUE.", "Write it as image=vllm/vllm-openai:v0.32.0.")
        table: dict[str, object] = found
        for part in parts[:-1]:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                raise UsageError(f"{part!r} is given both as a value and as a table.", "Give it once.")
            table = inner
        if parts[-1] in table:
            raise UsageError(f"{key.strip()!r} is given twice.", 'Several values are a list: KEY=\'["a", "b"]\'.')
        table[parts[-1]] = _value(text)
    return found


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def make_runtime(name: str, options: Mapping[str, object], node: NodeSide) -> Runtime:
    """A runtime by name, with its options checked."""
    if name not in RUNTIMES:
        guess = nearest(name, list(RUNTIMES), 1)
        hint = f"Did you mean {guess[0]!r}? " if guess else ""
        raise UsageError(f"there is no runtime {name!r}.", f"{hint}Known: {', '.join(RUNTIMES)}.")
    module, _, attribute = RUNTIMES[name].partition(":")
    made: Runtime = getattr(importlib.import_module(module), attribute).from_options(options, node)
    return made
