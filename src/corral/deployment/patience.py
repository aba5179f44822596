"""How long a deployment's agents wait before they give up, and how often they try again: one value, from the command
line or a profile to the wish, the launch spec and every rank's agent."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Patience"]


@dataclass(frozen=True)
class Patience:
    """When to give up; every default is here."""

    stall_s: float = 600.0  # a start without any progress
    hung_s: float = 300.0  # a running server that answers nothing and moves no token
    node_s: float = 10.0  # silence after which a node of several counts as lost; their agents speak every second
    grace_s: float = 20.0  # between asking an engine to end and ending it
    restarts: int = 0  # after a failure
