"""What a plan for a profile rests on: lessons and measurements for the vLLM of the profile's runtime."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from corral.base.errors import CorralError
from corral.base.home import home_dir
from corral.deploy.profile.profile import Profile
from corral.engines.locks import PINNED_VERSION
from corral.engines.runtimes.base import NodeSide, make_runtime
from corral.plan.candidate import Tuning
from corral.plan.hardware.inventory import Inventory
from corral.plan.models.facts import ModelFacts
from corral.plan.tuning import tuning_for


def tuning_of_plan(
    profile: Profile, facts: ModelFacts, inventory: Inventory, arguments: Sequence[str] = ()
) -> Tuning:
    """The numbers for the version of vLLM that the profile's runtime has, and for what vLLM's arguments bring.

    Corral's own runtime is what a profile has that says nothing, and `corral up` may be told another: for it, the
    version is the last one seen on this hardware.
    """
    version = ""
    if profile.runtime != "managed":
        node = NodeSide(str(home_dir()), "cuda" if inventory.gpu else "cpu", PINNED_VERSION)
        with contextlib.suppress(CorralError):  # whoever starts it is told what is wrong with it
            version = make_runtime(profile.runtime, profile.runtime_options, node).version
    return tuning_for(facts, inventory, version, arguments, profile.runtime == "managed")
