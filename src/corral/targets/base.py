"""Who starts processes on which nodes: the seam between a LaunchSpec and running agents.

A target only knows how to place the agent and start it; the agent does the rest, the same everywhere. A new target
is one new file and one row in `TARGETS`. Targets never import each other.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from corral.errors import UsageError
from corral.folder import DeploymentFolder
from corral.launch import LaunchSpec

if TYPE_CHECKING:
    from corral.hardware import Inventory

__all__ = ["TARGETS", "ChosenPort", "Life", "Target", "load_target"]


@dataclass(frozen=True)
class ChosenPort:
    """A port that was free when asked, and a word when it is not the one wanted."""

    number: int
    note: str = ""


@dataclass(frozen=True)
class Life:
    """What a target knows of the agents of a deployment; `alive` is None when it cannot be known from here."""

    alive: bool | None
    machine_restarted: bool = False
    where: str = ""


class Target(Protocol):
    """What every target can do."""

    @property
    def name(self) -> str: ...

    def nodes(self) -> tuple[str, ...]:
        """The nodes, head first."""
        ...

    def inventory(self) -> Inventory:
        """The hardware of the nodes."""
        ...

    def choose_port(self, host: str, wanted: int | None) -> ChosenPort:
        """A port on the head node."""
        ...

    def start(self, spec: LaunchSpec, folder: DeploymentFolder) -> None:
        """Place the files and start one agent per node, such that they outlive this process."""
        ...

    def life(self, folder: DeploymentFolder) -> Life:
        """Whether the agents run."""
        ...

    def stop(self, folder: DeploymentFolder, launch_id: str, grace_s: float) -> bool:
        """Ask the agents to stop and wait; clean up behind agents that are gone. Whether nothing is left."""
        ...


TARGETS = {"local": "corral.targets.local:LocalTarget"}


def load_target(name: str) -> Target:
    """A target by name."""
    if name not in TARGETS:
        raise UsageError(f"there is no target {name!r}.", f"Known: {', '.join(TARGETS)}.")
    module, _, attribute = TARGETS[name].partition(":")
    found: Target = getattr(importlib.import_module(module), attribute)()
    return found
