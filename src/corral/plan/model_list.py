"""Models by size: those of the catalogue with whether they fit the hardware, and what lies on this machine's disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from corral.plan.candidate import Tuning
from corral.plan.choose import decide
from corral.plan.contract import Goal
from corral.plan.hardware.inventory import Inventory
from corral.plan.models import catalogue
from corral.plan.models.facts import ModelFacts, facts_from_entry
from corral.plan.models.store import ShelvedModel, is_whole
from corral.plan.settings import Fixed

_FOR_OLD_FIGURES = "llama-3.1-405b-first-upload"  # not for serving


@dataclass(frozen=True)
class ListedModel:
    """One model as it is stored; of one that only the disk has, no more than its name and size are known."""

    name: str
    family: str
    repository: str = ""
    task: str = ""
    parameters: int = 0
    active_parameters: int = 0
    weights: str = ""
    bytes: int = 0
    fits: str = ""  # `yes`, `context 24,576` when not at full length, `no`, or empty: not known
    gated: bool = False
    images: bool = False  # reads pictures beside text
    path: str = ""  # on disk
    whole: bool = False  # whether all of it is on disk


def known_models(inventory: Inventory) -> list[ListedModel]:
    """Models of the catalogue by size; of one family those stored as they were trained first."""
    entries = (one for one in catalogue.entries().values() if not one.name.startswith(_FOR_OLD_FIGURES))
    rows = [_listed(entry, inventory) for entry in entries]
    return sorted(rows, key=lambda row: (row.parameters, row.family, -row.bytes, row.name))


def with_disk(
    known: Iterable[ListedModel],
    stored: Iterable[ShelvedModel],
    whole: Callable[[ShelvedModel], bool] = is_whole,
) -> list[ListedModel]:
    """The models with their paths, and after them what else is on disk."""
    shelf = {model.name: model for model in stored}
    rows = [
        replace(row, path=found.path, whole=whole(found)) if (found := shelf.pop(row.name, None)) else row
        for row in known
    ]
    others = [ListedModel(one.name, one.name, bytes=one.stored_bytes, path=one.path, whole=whole(one))
              for one in shelf.values()]  # fmt: skip
    return rows + others


def found_by(words: str, rows: Sequence[ListedModel]) -> list[ListedModel]:
    """Those whose name, repository or task has every one of the words."""
    wanted = words.lower().split()
    return [row for row in rows if all(word in f"{row.name} {row.repository} {row.task}".lower() for word in wanted)]


def _listed(entry: catalogue.Entry, inventory: Inventory) -> ListedModel:
    facts = facts_from_entry(entry)
    return ListedModel(
        name=entry.name,
        family=entry.family,
        repository=entry.repo,
        task=entry.task,
        parameters=facts.parameters,
        active_parameters=facts.active_parameters,
        weights=facts.weights,
        bytes=facts.weights_bytes,
        fits=_fits(facts, inventory),
        gated=entry.gated,
        images=facts.images,
    )


def _fits(facts: ModelFacts, inventory: Inventory) -> str:
    """How it would run as it is stored."""
    if inventory.gpu and facts.weights_bytes > inventory.gpus * inventory.memory_bytes_per_gpu:
        return "no"
    made = decide(facts, inventory, Goal(), Fixed(weights=facts.weights if inventory.gpu else None), Tuning())
    if not made.fits:
        return "no"
    length = made.chosen.max_model_len
    return "yes" if length >= facts.max_context else f"context {length:,}"
