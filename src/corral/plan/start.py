"""How long a start will take by the plan alone, where no earlier start of its kind is remembered. Pure.

Rough on purpose, and on the long side: a first start compiles, and imports what no disk cache holds. Measured on two
cores with SmolLM2 and on one H200 with an 8B (docs/log.md).
"""

from __future__ import annotations

from corral.plan.contract import Plan
from corral.plan.speed import Efficiency

# seconds: the process starts and imports; configuration and processes; compiling; warming, graphs and a first answer
_CPU = {"starting": 40.0, "initialising": 30.0, "compiling": 100.0, "warming": 20.0}
_GPU = {"starting": 30.0, "initialising": 30.0, "compiling": 60.0, "warming": 45.0}
_INSTALL_CPU_S, _INSTALL_GPU_S = 150.0, 300.0
_MEASURE_S = 5.0
_FETCH_BYTES_S = 1e8
_CONVERT_S = 20.0
_LOAD_LEAST_S = 5.0


def planned_start(plan: Plan) -> dict[str, float]:
    """Seconds by phase."""
    fixed = dict(_GPU if plan.inventory.gpu else _CPU)
    if plan.settings.eager:
        fixed.pop("compiling")
    weights = plan.memory.weights_bytes
    storage_gb_s = plan.goal.storage_gb_s or Efficiency().storage_gb_s
    return {
        **_once(plan),
        **fixed,
        "loading": round(weights / (storage_gb_s * 1e9) + _LOAD_LEAST_S, 1),
    }


def planned_restart_s(plan: Plan) -> float:
    """Of a start for which engine and model are there: what every further one costs."""
    return sum(planned_start(plan).values()) - sum(_once(plan).values())


def _once(plan: Plan) -> dict[str, float]:
    """What only the first start here does."""
    return {
        "installing engine": _INSTALL_GPU_S if plan.inventory.gpu else _INSTALL_CPU_S,
        "measuring CPU": _MEASURE_S,
        "fetching model": round(plan.memory.weights_bytes / _FETCH_BYTES_S + _CONVERT_S, 1),
    }
