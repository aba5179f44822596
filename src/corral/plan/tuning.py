"""What a plan for some hardware may rest on: lessons of deployments, what was measured of its CPU, a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from corral.base.home import home_dir
from corral.engines import environments as engines
from corral.plan.calibration import known_tuning
from corral.plan.candidate import Tuning
from corral.plan.cpu_speed import products
from corral.plan.draft_files import read_draft, tokens_from_text
from corral.plan.graphs import sized_elsewhere
from corral.plan.hardware.cpu_speed import CpuKind, recall_cpu_speed
from corral.plan.hardware.inventory import Inventory
from corral.plan.models.facts import ModelFacts


def cpu_kind(inventory: Inventory) -> CpuKind | None:
    """What a measurement of this inventory's CPU is remembered by; None where a GPU computes or nobody looked."""
    if inventory.gpu is not None or inventory.cpu is None:
        return None
    return CpuKind(inventory.cpu, inventory.cpu_cores, engines.expected("cpu").lock_sha256)


def tuning_for(
    facts: ModelFacts,
    inventory: Inventory,
    engine_version: str = "",
    arguments: Sequence[str] = (),
    managed: bool = True,
) -> Tuning:
    """The built-in numbers for a version of vLLM, corrected by what is known of this hardware.

    `arguments` are vLLM's: they may name a draft. Where the version is not known, it is taken to be the last one seen
    on this hardware, or the one Corral installs; but one that Corral does not install (not `managed`) is asked for
    nothing that an old one would refuse.
    """
    tuning = known_tuning(home_dir(), inventory.gpu or "CPU", facts.name, engine_version)
    own = sized_elsewhere(arguments) or not (managed or engine_version)
    ngram = tokens_from_text(arguments)
    tuning = replace(tuning, draft=read_draft(arguments, facts), ngram=ngram, own_graphs=own)
    kind = cpu_kind(inventory)
    return replace(tuning, cpu=recall_cpu_speed(kind, products(facts))) if kind else tuning
