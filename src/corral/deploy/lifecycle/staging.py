"""What is done before a start: installing the engine, measuring the CPU, fetching the model.

The journal (`staging.jsonl`) has the form of an agent's, so that `corral status` and the console show from any
process what the `corral up` that does it shows: phases with what they usually take, and progress, one line for each
per cent and at most one in some seconds otherwise.

The CPU is measured once the engine is there, and before the plan is final: two seconds for each new set of shapes (a
model's) on each machine and engine. Later starts remember it, unless the machine was busy meanwhile: then the next
start measures again. Nodes elsewhere are not measured; unless they are of the same kind as this machine, their plans
go by the CPU's flags.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from corral.base.errors import CorralError, LaunchError
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import WORTH_KEEPING_S, Expected, Phase, remember_start, usual
from corral.deploy.lifecycle.decision import DeployDecision, fitting_plan
from corral.deploy.lifecycle.watching import Reporter
from corral.deploy.targets.base import NodeFiles
from corral.engines import environments as engines
from corral.engines.flags import values_of
from corral.plan.cpu import formats_to_measure, products
from corral.plan.hardware.cpu import measure_cpu_speed, recall_cpu_speed, remember_cpu_speed
from corral.plan.hardware.inventory import Inventory, read_cpu
from corral.plan.hardware.probe import cpu_facts
from corral.plan.measured import cpu_kind
from corral.plan.models import store as model_store
from corral.plan.models.facts import ModelFacts
from corral.plan.settings import read_fixed


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
    """Measure and remember; whether that worked. A failure does not stop the start: the CPU's flags say most."""
    kind, engine = cpu_kind(inventory), engines.find("cpu")
    if kind is None or engine is None:
        return False
    try:
        remember_cpu_speed(kind, measure_cpu_speed(engine.python, model.name, products(model), formats))
    except (CorralError, OSError) as error:
        note(f"this CPU's speed is not known, and the plan goes by its flags: {error}")
        return False
    return True


BEFORE = (Phase.INSTALLING, Phase.MEASURING, Phase.FETCHING)  # whether they are needed is known when they begin
LINE_EVERY_S = 5.0  # for progress of less than a per cent
LONGEST_TEXT = 200


class Staging:
    """Reports each phase with its usual length, and gives up once `corral down` asks for it."""

    def __init__(
        self,
        report: Reporter,
        folder: DeploymentFolder,
        planned: Mapping[str, Expected],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.report, self._folder, self._planned, self._clock = report, folder, planned, clock
        self._phase, self._kind = "", ""
        self._first_s = self._began_s = clock()
        self._told_s, self._told_share = 0.0, -1.0
        after = {name: expected for name, expected in planned.items() if name not in BEFORE}
        self._write("expected", expected=after)

    def phase(self, name: Phase, kind: str = "", needed: bool = True) -> None:
        """Begin the next phase; where nothing is `needed`, no length is expected."""
        self._check()
        took_s = self._clock() - self._began_s
        if self._kind and took_s > WORTH_KEEPING_S:
            remember_start(self._kind, {self._phase: took_s})
        self._phase, self._kind, self._began_s = name, kind, self._clock()
        self._told_s, self._told_share = self._began_s, -1.0
        expected = {**self._planned, **usual(kind)}.get(name) if needed else None
        self._write("phase", phase=name, **({"expected": {name: expected}} if expected else {}))
        self.report.phase(name, expected)

    def detail(self, text: str, done: int = 0, total: int = 0) -> None:
        self._check()
        share = done / total if total else 0.0
        grown = total > 0 and (share - self._told_share >= 0.01 or (done >= total and self._told_share < share))
        if grown or self._clock() - self._told_s >= LINE_EVERY_S:
            self._told_s, self._told_share = self._clock(), share
            line = text.rpartition("\r")[2].strip()[:LONGEST_TEXT]
            progress = {"done": done, "total": total} if total else {}
            self._write("phase", phase=self._phase, **({"text": line} if line else {}), **progress)
        self.report.detail(text, done, total)

    def _write(self, kind: str, **details: Any) -> None:
        """Write a line of the journal; a full disk or a deleted folder does not stop the start."""
        with contextlib.suppress(OSError):
            append_event(self._folder.staging, kind, elapsed_s=self._clock() - self._first_s, **details)

    def _check(self) -> None:
        if self._folder.stop.exists() or not self._folder.record.is_file():
            raise LaunchError(f"{self._folder.name!r} was stopped by `corral down` before it started.", "")


def measured(decision: DeployDecision, staging: Staging) -> DeployDecision:
    """The decision with what this CPU can do, measured now that there is an engine to measure with."""
    model, inventory = decision.plan.model, decision.inventory
    formats = unmeasured(model, inventory, decision.request.fixed)
    if not formats:
        return decision
    staging.phase(Phase.MEASURING)
    if not measure_cpu(model, inventory, formats, staging.report.note):
        return decision
    plan = fitting_plan(decision.source, inventory, decision.request, decision.engine_version)
    return replace(decision, plan=plan)


def bring_model(decision: DeployDecision, target: NodeFiles, staging: Staging) -> str:
    """The model's folder on the nodes. Where they can, the nodes fetch it from the hub themselves."""
    source, folder = decision.source, None
    if source.kind == "hub":  # what the nodes have is not copied to them once more
        folder = target.find_model(source, decision.least_bytes)
        if not folder and not model_store.already_here(source):
            folder = target.fetch_model(source, staging.detail)
    if folder:
        return folder
    dummy = "dummy" in values_of("--load-format", decision.request.extra_args)  # vLLM makes up the weights
    return target.place(model_store.fetch(source, staging.detail, weights=not dummy), staging.detail)
