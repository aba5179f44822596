"""How vLLM exists on a node: the one seam between a rank's command and a process that runs it.

A runtime knows the words that start `vllm serve` and Python inside it, and turns a rank's job into a command for the
node. A new runtime is one new file and one row in `RUNTIMES`; its options are a dataclass of its own, read from the
profile's `[runtime]` table or from `--runtime-option`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from corral.engine_flags import FlagList
from corral.errors import UsageError

__all__ = ["RUNTIMES", "Job", "NodeSide", "Runtime", "Wrapped", "make_runtime"]


@dataclass(frozen=True)
class NodeSide:
    """What a runtime must know of the nodes before it is made."""

    home: str  # Corral's home on the nodes
    flavour: str  # cpu | cuda
    version: str  # of vLLM, as pinned


@dataclass(frozen=True)
class Job:
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
    pid_query: tuple[str, ...] = ()  # prints the process number of a container's first process


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

    def moved(self, places: Mapping[str, str]) -> Runtime:
        """The runtime with its carried folders where they lie on the nodes."""
        ...

    def wrap(self, job: Job) -> Wrapped:
        """The command that runs the job on a node. Pure."""
        ...

    def check(self) -> tuple[NodeCheck, ...]:
        """Commands for a node that tell whether this runtime can run there. Pure."""
        ...


@dataclass(frozen=True)
class NodeCheck:
    """One question to a node: a command that succeeds when all is well, and what to say when it does not."""

    what: str
    argv: tuple[str, ...]
    remedy: str
    reports: str = ""  # name under which its last line of output is compared between nodes: "vllm", "image", …
    timeout_s: float = 30
    details: Mapping[str, Any] = field(default_factory=dict)


RUNTIMES = {
    "managed": "corral.runtimes.managed:ManagedRuntime",
}


def make_runtime(name: str, options: Mapping[str, object], node: NodeSide) -> Runtime:
    """A runtime by name, with its options checked."""
    if name not in RUNTIMES:
        raise UsageError(f"there is no runtime {name!r}.", f"Known: {', '.join(RUNTIMES)}.")
    module, _, attribute = RUNTIMES[name].partition(":")
    made: Runtime = getattr(importlib.import_module(module), attribute).from_options(options, node)
    return made
