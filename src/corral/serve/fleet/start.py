"""Starting a deployment under a name that no fleet or chain holds: alone, as a member, or as the first of a chain."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from corral.base.errors import ConflictError
from corral.base.files import make_private_dir, write_atomic
from corral.base.record import load_json, save_record
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle import bringup, deployments
from corral.deploy.lifecycle.bringup import ClaimHooks
from corral.deploy.lifecycle.decision import DeployDecision, DeployRequest
from corral.deploy.lifecycle.watching import Lines, Reporter
from corral.deploy.targets.keys import target_class
from corral.plan.hardware.inventory import NodeSlice
from corral.serve.fleet.chain import refuse_held_name
from corral.serve.fleet.record import Fleet, FleetFolder, FleetMember, fleet_lock, read_fleet, write_fleet


def bring_up(request: DeployRequest, report: Reporter, wait: bool = True) -> deployments.Status:
    """Start a deployment; returns once it is ready (or, without waiting, once it is on its way)."""
    return bringup.bring_up(request, report, wait, ClaimHooks(refuse_held_name))


def bring_up_chain(
    request: DeployRequest, max_jobs: int | None, report: Reporter, wait: bool = True
) -> deployments.Status:
    """Start the first job of a chain; each job submits the next one before its own end."""

    def prepare(folder: DeploymentFolder, decision: DeployDecision) -> None:
        create_chain(folder, replaceable(request, decision), max_jobs)

    return bringup.bring_up(request, report, wait, ClaimHooks(refuse_held_name, prepare))


def create_chain(folder: DeploymentFolder, request: DeployRequest, max_jobs: int | None) -> FleetFolder:
    """Make the deployment whose folder this is the first of a chain."""
    chain = FleetFolder(folder.path)
    make_private_dir(chain.gateways)
    api = replace(request.api, key_file=None)  # successors get the chain's own key
    save_record(chain.request, replace(request, name=folder.name, api=api))
    model = request.served_name or folder.name
    first = FleetMember(folder.name)
    write_fleet(
        chain,
        Fleet(folder.name, model, 1, 1, 1, time.time(), (first,), keep=True, chain=True, max_jobs=max_jobs),
    )
    return chain


def replaceable(request: DeployRequest, decision: DeployDecision) -> DeployRequest:
    """The request as a later member is made from it: whatever the first one chose, on a port of its own."""
    path = Path(request.model).expanduser() if request.model else None
    model = str(path.resolve()) if path and path.exists() else request.model or decision.source.name
    return replace(request, model=model, name=decision.name, served_name=decision.served_name, port=None)


def load_request(folder: FleetFolder) -> DeployRequest:
    """What a fleet's members are made from."""
    return load_json(DeployRequest, folder.request)


def narrowed(request: DeployRequest) -> DeployRequest:
    """The request with only the nodes of its share."""
    options = target_class(request.target).only_on(request.target_options, request.share.nodes)
    return replace(request, target_options=options) if request.share.nodes else request


def start_member(folder: FleetFolder, name: str, report: Reporter | None = None) -> deployments.Status | None:
    """Start one member, in the share that it has; returns as soon as it is on its way."""
    fleet = read_fleet(folder)
    member = fleet.member(name)
    share = member.share if member else NodeSlice()
    request = narrowed(replace(load_request(folder), name=name, share=share, port=None))  # each on its own port
    report = report or Lines(quiet=True)
    if fleet.chain:
        return _submit_successor(folder, request, report)
    return bringup.bring_up(request, report, wait=False, hooks=ClaimHooks(refuse_held_name))


def _submit_successor(chain: FleetFolder, request: DeployRequest, report: Reporter) -> deployments.Status | None:
    """Submit a job of a chain with the chain's key; None when the chain was closed meanwhile.

    The chain's lock is held until the job is known: whoever closes the chain then stops this job as well.
    """
    assert request.name is not None
    successor = DeploymentFolder.of(request.name)

    def prepare(folder: DeploymentFolder, _: DeployDecision) -> None:
        write_atomic(folder.key, chain.key.read_text(encoding="utf-8"))

    with fleet_lock(chain):
        if read_fleet(chain).closed:
            return None
        if successor.path.exists() and not successor.job.exists():  # begun by a keeper that is gone
            if successor.record.is_file() and deployments.job_of(successor):  # which had submitted it
                return deployments.status(successor)
            shutil.rmtree(successor.path)
        try:
            return bringup.bring_up(request, report, wait=False, hooks=ClaimHooks(refuse_held_name, prepare))
        except ConflictError:
            if not successor.job.exists():
                raise
            return deployments.status(successor)
