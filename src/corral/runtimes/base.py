"""How vLLM exists on a node: the one seam between a rank's arguments and a process that runs them.

A runtime turns the arguments of `vllm serve` and an environment into a command. A new runtime is one new file and
one row in `RUNTIMES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from corral.engine_flags import FlagList
from corral.errors import UsageError

__all__ = ["RUNTIMES", "Runtime", "Wrapped", "load_runtime"]


@dataclass(frozen=True)
class Wrapped:
    """A command and the environment it needs beyond the node's own."""

    argv: tuple[str, ...]
    env: dict[str, str]


class Runtime(Protocol):
    """What every runtime can do."""

    @property
    def name(self) -> str: ...

    @property
    def engine(self) -> str:
        """Which engine this is, for people: `cpu-0.32.0`."""
        ...

    def flags(self) -> FlagList:
        """The flags its `vllm serve` accepts."""
        ...

    def wrap(self, arguments: Sequence[str], env: Mapping[str, str]) -> Wrapped:
        """The command that runs `vllm serve` with these arguments. Pure."""
        ...


RUNTIMES = {"managed": "corral.runtimes.managed:ManagedRuntime"}


def load_runtime(name: str) -> type:
    """The class of a runtime by name."""
    if name not in RUNTIMES:
        raise UsageError(f"there is no runtime {name!r}.", f"Known: {', '.join(RUNTIMES)}.")
    module, _, attribute = RUNTIMES[name].partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found
