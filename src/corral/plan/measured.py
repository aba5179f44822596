"""What was measured on this hardware, and what a plan rests on because of it.

A deployment that is ready is held against its plan: `read_log` turns vLLM's own log lines into `Observed`,
`reconcile` (pure) makes `Differences` of a plan and an observation, `append_lesson` keeps them in
`<home>/calibration.jsonl`. The next plan for the same kind of GPU and the same engine version takes the median of
what was missing (of the same model, where it was deployed before) out of the KV cache. The median speed at which
weights were read, of any version, takes the place of the assumed one; before a first start, what `corral doctor`
measured does (`<home>/storage.json`).

`tuning_for` gathers all of that for one plan, with what was measured of the CPU and the draft that vLLM's arguments
name. `speed_at` predicts a plan's speed for another load than its own.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from corral.base.errors import CorralError, DataError
from corral.base.files import make_dir, make_private_dir, write_atomic
from corral.base.home import home_dir
from corral.base.record import dump_json, from_json, to_json
from corral.plan.candidate import Tuning
from corral.plan.contract import Goal, Plan, Speed
from corral.plan.draft import read_draft, tokens_from_text
from corral.plan.hardware.inventory import GIB, Inventory
from corral.plan.memory import Coefficients
from corral.plan.models.facts import ModelFacts
from corral.plan.settings import sized_elsewhere
from corral.plan.speed import Efficiency, predict

if TYPE_CHECKING:
    from corral.plan.hardware.cpu import CpuKind


@dataclass(frozen=True)
class Observed:
    """What the engine said of one rank; None where it said nothing."""

    weights_gib: float | None = None
    kv_tokens: int | None = None
    graph_gib: float | None = None
    activation_gib: float | None = None
    non_torch_gib: float | None = None
    load_s: float | None = None  # reading the weights
    init_s: float | None = None  # profiling, compiling, capturing
    decode_tokens_per_s: float | None = None
    engine_version: str = ""
    kv_given_gib: float | None = None  # the size of its KV cache, where it was told one


_LINES = {
    "weights_gib": re.compile(r"Model loading took ([\d.]+) GiB"),
    "load_s": re.compile(r"Model loading took [\d.]+ GiB (?:memory )?and ([\d.]+) s"),
    "kv_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
    "kv_given_gib": re.compile(r"reserved ([\d.]+) GiB memory for KV Cache as specified"),
    "graph_gib": re.compile(r"Graph capturing finished in .*?took ([\d.]+) GiB"),
    "activation_gib": re.compile(r"([\d.]+) GiB for peak activation"),
    "non_torch_gib": re.compile(r"([\d.]+) GiB for non-torch"),
    "init_s": re.compile(r"init engine \(.*?\) took ([\d.]+) s"),
    "engine_version": re.compile(r"LLM engine \(v([\w.+]+)\)"),
}


def read_log(lines: Iterable[str]) -> Observed:
    """The last value of each number in vLLM's log (0.26 to 0.32)."""
    seen: dict[str, str] = {}
    for line in lines:
        for name, pattern in _LINES.items():
            found = pattern.search(line)
            if found:
                seen[name] = found[1].replace(",", "")
    numbers = {k: float(v) for k, v in seen.items() if k not in ("engine_version", "kv_tokens")}
    tokens = int(seen["kv_tokens"]) if "kv_tokens" in seen else None
    return Observed(kv_tokens=tokens, engine_version=seen.get("engine_version", ""), **numbers)


@dataclass(frozen=True)
class Difference:
    """One number: as planned, as observed, and by how many percent the plan was off."""

    name: str
    predicted: float
    observed: float
    percent: float


@dataclass(frozen=True)
class Differences:
    """A plan held against one deployment."""

    gpu: str
    engine_version: str
    model: str
    weights: str
    parallel: str
    rows: tuple[Difference, ...]
    missing_gib: float | None  # more used per GPU than planned, corrections of the plan taken out
    storage_gb_s: float | None  # how fast weights were read
    graphs_counted: bool = True  # by the plan

    def gap_gib(self, counting: bool) -> float | None:
        """What was missing, for a plan that counts graphs or does not: this one may have done otherwise."""
        if self.missing_gib is None or self.graphs_counted == counting:
            return self.missing_gib
        graphs = next((row.predicted for row in self.rows if row.name == "graph_gib"), 0.0)
        return round(self.missing_gib + (-graphs if counting else graphs), 3)


def reconcile(plan: Plan, observed: Observed) -> Differences:
    """Compare, number by number, what both sides know.

    A KV cache of a given size says nothing of the memory that is left for one, and who gives a size may share the GPU
    with others that load at the same time.
    """
    m, s = plan.memory, plan.speed
    alone = observed.kv_given_gib is None
    loaded = m.weights_bytes_per_gpu + m.draft_bytes_per_gpu + m.adapter_bytes_per_gpu
    pairs = (
        ("weights_gib", loaded / GIB, observed.weights_gib),
        ("activation_gib", m.activation_bytes_per_gpu / GIB, observed.activation_gib),
        ("graph_gib", m.graph_bytes_per_gpu / GIB, observed.graph_gib),
        ("non_torch_gib", m.overhead_bytes_per_gpu / GIB, observed.non_torch_gib),
        ("kv_tokens", m.kv_cache_tokens_per_replica, observed.kv_tokens if alone else None),
        ("decode_tokens_per_s", s.decode_tokens_per_s, observed.decode_tokens_per_s),
        ("load_s", s.load_s, _sum(observed.load_s, observed.init_s)),
    )
    rows = tuple(
        Difference(name, round(guess, 3), round(real, 3), round(100 * (guess - real) / real, 1))
        for name, guess, real in pairs
        if guess is not None and real
    )
    missing = None
    if alone and observed.kv_tokens is not None and plan.inventory.gpu is not None:
        tokens = m.kv_cache_tokens_per_replica - observed.kv_tokens
        missing = round((tokens * m.kv_bytes_per_token_per_gpu + m.correction_bytes_per_gpu) / GIB, 3)
    read = s.read_bytes_per_node or m.weights_bytes
    speed = read / observed.load_s / 1e9 if alone and observed.load_s else None
    return Differences(
        gpu=plan.inventory.gpu or "CPU",
        engine_version=observed.engine_version,
        model=plan.model.name,
        weights=plan.precision.weights,
        parallel=str(plan.parallel),
        rows=rows,
        missing_gib=missing,
        storage_gb_s=round(speed, 3) if speed else None,
        graphs_counted=m.graphs_counted,
    )


def _sum(*values: float | None) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


@dataclass(frozen=True)
class StorageReading:
    """One measurement, on the slowest of the nodes that were looked at."""

    gb_s: float
    file: str
    at_s: float

    @property
    def basis(self) -> str:
        return f"measured by `corral doctor` on {time.strftime('%Y-%m-%d', time.localtime(self.at_s))}"


def _all(home: Path) -> dict[str, StorageReading]:
    try:
        body = json.loads((home / "storage.json").read_text(encoding="utf-8"))
        return {str(kind): from_json(StorageReading, row, strict=False) for kind, row in body.items()}
    except (OSError, ValueError, AttributeError, CorralError):  # none yet, or of another version
        return {}


def remember_storage_speed(home: Path, gpu: str, reading: StorageReading) -> None:
    """Keep the latest measurement for nodes with this kind of GPU (or `CPU`)."""
    make_private_dir(home)
    write_atomic(home / "storage.json", dump_json({**_all(home), gpu: reading}))


def recall_storage_speed(home: Path, gpu: str) -> StorageReading | None:
    return _all(home).get(gpu)


_MOST_GIB = 16.0  # a larger difference is a mistake, not a lesson


def calibration_path(home: Path) -> Path:
    return home / "calibration.jsonl"


def append_lesson(home: Path, differences: Differences) -> None:
    """Add one lesson, durably; a crash can only cut the last line."""
    make_dir(home)
    line = json.dumps(to_json(differences), ensure_ascii=False) + "\n"
    try:
        handle = os.open(calibration_path(home), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, line.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise DataError(f"{calibration_path(home)} cannot be written: {error.strerror}.", "Free space.") from error


def read_lessons(home: Path) -> list[Differences]:
    """All lessons; lines that cannot be read (cut off, of another version) are left out."""
    try:
        lines = calibration_path(home).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    lessons = []
    for line in lines:
        try:
            lessons.append(from_json(Differences, json.loads(line), strict=False))
        except (ValueError, CorralError):
            continue
    return lessons


def learn_tuning(lessons: list[Differences], gpu: str, model: str = "", engine_version: str = "") -> Tuning:
    """The built-in numbers, corrected by the lessons for this kind and version (the last one seen when not named)."""
    mine = [lesson for lesson in lessons if lesson.gpu == gpu]
    wanted = _public(engine_version or (mine[-1].engine_version if mine else ""))
    mine = [lesson for lesson in mine if _public(lesson.engine_version) == wanted]
    built_in = Tuning(Coefficients.of_version(wanted))
    if not mine:
        return built_in
    same = [lesson for lesson in mine if lesson.model == model]
    found = [lesson.gap_gib(built_in.memory.counts_graphs) for lesson in same or mine]
    gaps = [gap for gap in found if gap is not None and abs(gap) <= _MOST_GIB]
    memory = replace(built_in.memory, correction_gib=_median(gaps)) if gaps else built_in.memory
    whose = f"of {model}" if same else f"on {gpu}"
    number = len(same or mine)
    return Tuning(
        memory, built_in.speed, f"{number} earlier deployment{'s' * (number > 1)} {whose} with vLLM {wanted}"
    )


def _median(values: list[float]) -> float:
    from statistics import median  # its import is slow, and a home without lessons needs none

    return median(values)


def _public(version: str) -> str:
    """Without the mark of a build: `0.26.0+cu130` and `0.26.0` are one version."""
    return version.partition("+")[0]


def known_tuning(home: Path, gpu: str, model: str, engine_version: str = "") -> Tuning:
    """Everything that was learned here about nodes with this kind of GPU (or `CPU`), and about the model on them."""
    lessons = read_lessons(home)
    tuning = learn_tuning(lessons, gpu, model, engine_version)
    speeds = [lesson.storage_gb_s for lesson in lessons if lesson.gpu == gpu and lesson.storage_gb_s]
    reading = recall_storage_speed(home, gpu)
    if speeds:
        starts = f"{len(speeds)} earlier start{'s' * (len(speeds) > 1)}"
        speed = replace(
            tuning.speed, storage_gb_s=round(_median(speeds), 2), storage_basis=f"measured at {starts} on {gpu}"
        )
    elif reading is not None:
        speed = replace(tuning.speed, storage_gb_s=round(reading.gb_s, 2), storage_basis=reading.basis)
    else:
        return tuning
    return replace(tuning, speed=speed)


def cpu_kind(inventory: Inventory) -> CpuKind | None:
    """What a measurement of this inventory's CPU is remembered by; None where a GPU computes or nobody looked."""
    if inventory.gpu is not None or inventory.cpu is None:
        return None
    from corral.engines.environments import expected
    from corral.plan.hardware.cpu import CpuKind

    return CpuKind(inventory.cpu, inventory.cpu_cores, expected("cpu").lock_sha256)


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
    if kind is None:
        return tuning
    from corral.plan.cpu import products
    from corral.plan.hardware.cpu import recall_cpu_speed

    return replace(tuning, cpu=recall_cpu_speed(kind, products(facts)))


def speed_at(
    plan: Plan,
    prompt: int,
    output: int,
    running: int,
    api_servers: int | None = None,
    rates: Efficiency | None = None,
) -> Speed:
    """Speeds with `running` requests of these lengths at once; with the plan's own API servers, or so many."""
    goal = replace(plan.goal, prompt_tokens=prompt, output_tokens=output, concurrency=running)
    if plan.inventory.gpu is None:
        return _speed_on_cpu(plan, goal)
    settings = replace(plan.settings, api_servers=api_servers or plan.settings.api_servers)
    parts = (plan.model, plan.inventory, plan.parallel, plan.precision, settings, plan.memory)
    return predict(*parts, goal, running, rates)


def _speed_on_cpu(plan: Plan, goal: Goal) -> Speed:
    """By what was measured of the CPU, as the planner does.

    Where no measurement is remembered (the plan comes from another machine), by the plan's own two rates: a step
    takes as long as one of a lone request, or as the arithmetic of all that run.
    """
    from corral.plan.cpu import predict_cpu, products, rates_for
    from corral.plan.hardware.cpu import recall_cpu_speed

    kind, format_ = cpu_kind(plan.inventory), plan.precision.compute
    measured = recall_cpu_speed(kind, products(plan.model)) if kind else None
    if measured is None or measured.of(format_) is None:
        return _by_two_rates(plan.speed, goal)
    rates = rates_for(format_, plan.model, plan.inventory, measured, 1.0)
    return predict_cpu(plan.model, rates, plan.settings, goal, plan.memory.weights_bytes)


def _by_two_rates(speed: Speed, goal: Goal) -> Speed:
    decode, prefill, running = speed.decode_tokens_per_s, speed.prefill_tokens_per_s, goal.concurrency or 1
    if not decode or not prefill:
        return speed
    first_s = goal.prompt_tokens / prefill
    step_s = max(1 / decode, running / prefill)
    cycle_s = running * first_s + goal.output_tokens * step_s
    return replace(
        speed,
        throughput_tokens_per_s=running * goal.output_tokens / cycle_s,
        ttft_s=first_s,
        tpot_s=cycle_s / goal.output_tokens,
        concurrency=running,
        prompt_tokens=goal.prompt_tokens,
        output_tokens=goal.output_tokens,
    )
