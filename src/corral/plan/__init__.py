"""The planner: will it fit, how to split it, how fast will it be, and why.

`make_plan` is pure: model facts, an inventory and a goal go in, a `Plan` comes out. It never raises because a model
does not fit; it returns a plan with `fits` false, the reason, and the nearest things that would.
"""

from corral.plan.choose import make_plan
from corral.plan.contract import (
    VERSION,
    Cost,
    EngineSettings,
    Goal,
    Judged,
    Memory,
    Nearest,
    Parallel,
    Plan,
    Precision,
    Reason,
    Rejected,
    Speed,
)

__all__ = [
    "VERSION",
    "Cost",
    "EngineSettings",
    "Goal",
    "Judged",
    "Memory",
    "Nearest",
    "Parallel",
    "Plan",
    "Precision",
    "Reason",
    "Rejected",
    "Speed",
    "make_plan",
]
