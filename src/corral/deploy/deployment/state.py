"""States of a deployment and reasons for them: the words that the agents on the nodes write.

How long a deployment's agents wait before they give up, and how often they try again: one value, from the command
line or a profile to the request, the launch spec and every rank's agent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from corral.node.states import ENDED, TRANSITIONS, Reason, State, may_follow

__all__ = ["ENDED", "TRANSITIONS", "Patience", "Reason", "State", "may_follow"]


NO_ROOM = 74  # the exit code of a runner beside a model that found its disk full: it can say so in no other way
LIMIT = 10.0  # times what is expected
LEAST_LIMIT_S = 900.0


@dataclass(frozen=True)
class Patience:
    """When to give up; every default is here."""

    stall_s: float | None = None  # a start that does not advance; None: as the plan asks for (`limit_s`)
    idle_s: float = 600.0  # a start in which nothing moves: no line, no processor time, no disk traffic
    hung_s: float = 300.0  # a running server that answers nothing and moves no token
    node_s: float = 10.0  # silence after which a node of several counts as lost
    grace_s: float = 20.0  # between asking an engine to end and ending it
    restarts: int = 0  # after a failure

    def limit_s(self, expected_s: float | None = None) -> float:
        """How long a phase of a start may go without an advance, when so much is expected for all of it."""
        return max(LEAST_LIMIT_S, LIMIT * (expected_s or 0.0)) if self.stall_s is None else self.stall_s

    def settled(self) -> Patience:
        """The same as its agents read it: a start that must advance soon must also move soon."""
        return self if self.stall_s is None else replace(self, idle_s=min(self.idle_s, self.stall_s))
