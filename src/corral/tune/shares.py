"""Which hardware each of several trials at once has to itself."""

from __future__ import annotations

from corral.deployment.share import NodeShare
from corral.errors import UsageError
from corral.lifecycle.bringup import Wish
from corral.targets.base import Queue, load_target

__all__ = ["shares_for"]


def shares_for(wish: Wish, places: int) -> tuple[NodeShare, ...]:
    """A share for each place: a job of a scheduler has nodes of its own; else GPUs of one machine are divided."""
    if places == 1:
        return ()
    target = load_target(wish.target, wish.target_options)
    if isinstance(target, Queue):
        return (NodeShare(),) * places
    here = target.inventory()
    remedy = "Leave out --side-by-side, or tune on SLURM, where each server is a job of its own."
    if here.gpu is None:
        raise UsageError("on the same cores, servers side by side would measure each other.", remedy)
    each = here.gpus_per_node // places
    if here.nodes > 1 or not each:
        where = f"{here.nodes} nodes" if here.nodes > 1 else f"{here.gpus_per_node} x {here.gpu}"
        raise UsageError(
            f"{places} servers side by side need GPUs of their own on one machine; here: {where}.", remedy
        )
    return tuple(NodeShare(gpus=tuple(range(at * each, (at + 1) * each))) for at in range(places))
