"""The planner: will it fit, how to split it, how fast, and why: `corral.plan("llama-3.1-8b", gpus="8xH100")`.

`make_plan` is pure: model facts, an inventory and a goal go in, a `Plan` comes out. It never raises because a model
does not fit; it returns a plan with `fits` false, the reason, and the nearest things that would.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import corral


class _CallableRoom(ModuleType):
    """`corral.plan` is a function of the public surface and this package: importing the package keeps it callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return corral.__getattr__("plan")(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableRoom
