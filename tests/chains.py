"""Chains of deployments, written as the command that starts them and earlier versions write them."""

from __future__ import annotations

import json

from corral.deploy.deployment.folder import DeploymentFolder
from corral.serve.fleet.record import Fleet, FleetFolder, FleetMember, write_fleet


def write_chain(name: str, *successors: str, max_jobs: int | None = None, closed: str = "") -> FleetFolder:
    """Make a deployment the first of a chain."""
    folder = FleetFolder(DeploymentFolder.of(name).path)
    jobs = tuple(map(FleetMember, (name, *successors)))
    fleet = Fleet(name, "m", 1, 1, 1, 0.0, jobs, keep=True, closed=closed, chain=True, max_jobs=max_jobs)
    write_fleet(folder, fleet)
    return folder


def write_old_chain(name: str, *successors: str) -> DeploymentFolder:
    """Make a deployment the first of a chain as versions before 0.2 did."""
    folder = DeploymentFolder.of(name)
    (folder.path / "successors.json").write_text(json.dumps({"successors": successors, "max_jobs": 3, "closed": ""}))
    old_request = {"model": "m", "name": name, "renew": True, "max_jobs": 3, "follows": "", "port": 8000}
    (folder.path / "wish.json").write_text(json.dumps(old_request))
    return folder
