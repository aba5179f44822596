"""Who belongs to a deployment: its ranks with their nodes and GPUs, who has joined, and the job that holds them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from corral.base.errors import CorralError
from corral.base.record import load_json
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle.deployments import Record, plan_of, target_of
from corral.deploy.lifecycle.status import traces_of
from corral.deploy.targets.base import Queue
from corral.node.files import read_json


@dataclass(frozen=True)
class RankMember:
    """One rank of a deployment."""

    rank: int
    node: str  # by its host name, once that is known
    gpus: int  # that it uses there
    joined: bool  # whether its agent runs, or ran


@dataclass(frozen=True)
class HeldJob:
    """The job of a scheduler that a deployment runs in."""

    id: str
    drains_s: float | None = None  # wall-clock time at which it begins to drain; None: not known yet
    submitted_s: float | None = None


def members(folder: DeploymentFolder) -> tuple[RankMember, ...]:
    """Its ranks, head first; empty before it is launched."""
    names = traces_of(folder).nodes
    met = read_json(str(folder.path / "rendezvous.json")).get("names")  # a scheduler's nodes are known once they met
    if isinstance(met, list) and len(met) == len(names):
        names = tuple(map(str, met))
    plan = plan_of(folder)
    gpus = (plan.gpus or 0) if plan else 0
    each = -(-gpus // len(names)) if names else 0
    return tuple(RankMember(rank, name, each, folder.rank(rank).agent.exists()) for rank, name in enumerate(names))


def held_job(folder: DeploymentFolder) -> HeldJob | None:
    """The job in the queue; None for a target without one. A scheduler that does not answer leaves its end open."""
    target = target_of(load_json(Record, folder.record))
    if not isinstance(target, Queue) or not (id := target.job_of(folder)):
        return None
    with contextlib.suppress(CorralError, OSError):
        lease = target.lease(folder)
        return HeldJob(id, lease.last_request_s, lease.submitted_s) if lease else HeldJob(id)
    return HeldJob(id)
