"""Measuring this machine's CPU once the engine is there, and before the plan is final.

Two seconds for each new set of shapes (a model's) on each machine and engine; later starts remember, unless others
kept the machine busy meanwhile: then the next start measures once more. Nodes elsewhere are not measured: unless they
are the same kind as this machine, their plans go by the flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from corral.base.errors import CorralError
from corral.engines import environments as engines
from corral.plan.cpu_format import formats_to_measure
from corral.plan.cpu_speed import products
from corral.plan.fixed import read_fixed
from corral.plan.hardware.cpu import read_cpu
from corral.plan.hardware.cpu_speed import measure_cpu_speed, recall_cpu_speed, remember_cpu_speed
from corral.plan.hardware.inventory import Inventory
from corral.plan.hardware.probe import cpu_facts
from corral.plan.models.facts import ModelFacts
from corral.plan.tuning import cpu_kind


def unmeasured(model: ModelFacts, inventory: Inventory, fixed: Mapping[str, object]) -> tuple[str, ...]:
    """The formats to measure here for this model; none where they are remembered, or where it runs on another CPU."""
    kind = cpu_kind(inventory)
    here = (inventory.cpu, inventory.cpu_cores) == (read_cpu(), cpu_facts()[0])
    if kind is None or not here or engines.find("cpu") is None:
        return ()
    wanted, known = formats_to_measure(model, read_fixed(fixed)), recall_cpu_speed(kind, products(model))
    if known is None or known.products != products(model) or known.disturbed:
        return wanted
    return wanted if any(known.of(name) is None for name in wanted) else ()


def measure_cpu(
    model: ModelFacts, inventory: Inventory, formats: tuple[str, ...], note: Callable[[str], None]
) -> bool:
    """Measure and remember; whether that worked. It never stops a start: the flags still tell most of it."""
    kind, engine = cpu_kind(inventory), engines.find("cpu")
    if kind is None or engine is None:
        return False
    try:
        remember_cpu_speed(kind, measure_cpu_speed(engine.python, model.name, products(model), formats))
    except (CorralError, OSError) as error:
        note(f"this CPU's speed is not known, and the plan goes by its flags: {error}")
        return False
    return True
