"""The hardware that a plan is for: what was named, what the profile says, or this machine's own."""

from __future__ import annotations

from dataclasses import replace

from corral.base.errors import UsageError
from corral.deploy.profile.profile import Profile
from corral.plan.hardware.inventory import Inventory, parse_gpus, probe


def hardware_of_plan(profile: Profile, gpus: str | None, nodes: int | None, link: str | None) -> Inventory:
    """`--gpus` before the profile, the profile before this machine."""
    if gpus is not None:
        return parse_gpus(gpus, nodes, link or "ib-ndr")
    if named := profile.inventory(nodes):
        return replace(named, link=link or named.link)
    if profile.target != "local":
        raise UsageError(
            f"the profile {profile.name!r} does not say what its nodes hold.",
            'Add [hardware] gpus = "8xH100" to it, or give --gpus.',
        )
    if nodes is not None and nodes != 1:
        raise UsageError("--nodes needs --gpus: what the other nodes hold is not known here.", "Add --gpus 8xH100.")
    return probe()
