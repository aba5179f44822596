"""Which hardware each of several trials at once has: nodes or GPUs to itself, or all GPUs of a machine in turns."""

from __future__ import annotations

from corral.base.errors import UsageError
from corral.deploy.lifecycle.bringup import Wish
from corral.deploy.targets.base import Queue, load_target
from corral.lab.tune.turns import MOST_IN_TURNS
from corral.plan.hardware.share import NodeShare


def shares_for(wish: Wish, places: int) -> tuple[tuple[NodeShare, ...], bool]:
    """A share for each place, and whether they are measured in turns.

    A job of a scheduler has nodes of its own; else GPUs of one machine are divided, or, where there are fewer than
    places, their memory is.
    """
    if places == 1:
        return (), False
    target = load_target(wish.target, wish.target_options)
    if isinstance(target, Queue):
        return (NodeShare(),) * places, False
    here = target.inventory()
    remedy = "Leave out --side-by-side, or tune on SLURM, where each server is a job of its own."
    if here.gpu is None:
        raise UsageError("on the same cores, servers side by side would measure each other.", remedy)
    if here.nodes > 1:
        raise UsageError(f"servers side by side need one machine; here: {here.nodes} nodes.", remedy)
    each = here.gpus_per_node // places
    if not each and places > MOST_IN_TURNS:
        held = f"{here.gpus_per_node} x {here.gpu} hold {MOST_IN_TURNS} servers side by side at most, not {places}."
        raise UsageError(held, f"Try --side-by-side {MOST_IN_TURNS}.")
    if not each:
        return (NodeShare(),) * places, True
    return tuple(NodeShare(gpus=tuple(range(at * each, (at + 1) * each))) for at in range(places)), False
