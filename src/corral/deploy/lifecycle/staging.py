"""What is done before a start: the engine, the model, and how far each is; told, and written down for other eyes.

The journal of it (`staging.jsonl`) has the form of an agent's, so that `corral status` and the console see from any
process what the `corral up` that does it shows: phases with what they usually take, and progress, a line for each per
cent and not more than one in some seconds otherwise.

Measuring this machine's CPU once the engine is there, and before the plan is final.

Two seconds for each new set of shapes (a model's) on each machine and engine; later starts remember, unless others
kept the machine busy meanwhile: then the next start measures once more. Nodes elsewhere are not measured: unless they
are the same kind as this machine, their plans go by the flags.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from corral.base.errors import CorralError, LaunchError
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import WORTH_KEEPING_S, Expected, Phase, remember_start, usual
from corral.deploy.lifecycle.watching import Reporter
from corral.engines import environments as engines
from corral.plan.cpu import formats_to_measure, products
from corral.plan.hardware.cpu import measure_cpu_speed, recall_cpu_speed, remember_cpu_speed
from corral.plan.hardware.inventory import Inventory, read_cpu
from corral.plan.hardware.probe import cpu_facts
from corral.plan.measured import cpu_kind
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


BEFORE = (Phase.INSTALLING, Phase.MEASURING, Phase.FETCHING)  # whether they are needed is known when they begin
LINE_EVERY_S = 5.0  # of what gets on by less than a per cent
LONGEST_TEXT = 200


class Staging:
    """Passes on what is happening with how long it usually takes, and gives up when `corral down` asked for it."""

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
        """The next phase begins; where nothing is needed, its usual length says nothing."""
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
            words = text.rpartition("\r")[2].strip()[:LONGEST_TEXT]
            progress = {"done": done, "total": total} if total else {}
            self._write("phase", phase=self._phase, **({"text": words} if words else {}), **progress)
        self.report.detail(text, done, total)

    def _write(self, kind: str, **details: Any) -> None:
        """A line of the journal; a disk that is full, or a folder that was just deleted, stops nothing."""
        with contextlib.suppress(OSError):
            append_event(self._folder.staging, kind, elapsed_s=self._clock() - self._first_s, **details)

    def _check(self) -> None:
        if self._folder.stop.exists() or not self._folder.record.is_file():
            raise LaunchError(f"{self._folder.name!r} was stopped by `corral down` before it started.", "")
