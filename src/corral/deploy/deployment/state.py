"""States of a deployment and reasons for them: the words that the agents on the nodes write."""

from corral.node.states import ENDED, TRANSITIONS, Reason, State, may_follow

__all__ = ["ENDED", "TRANSITIONS", "Reason", "State", "may_follow"]
