"""After a deployment is ready: the plan against what vLLM reported.

`read_log` turns vLLM's own log lines into `Observed`; `reconcile` is pure. `corral.plan.calibration` stores the
result and lets the next plan for the same kind of GPU and engine version learn from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from corral.plan.contract import Plan
from corral.plan.hardware.inventory import GIB


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
    pairs = (
        ("weights_gib", (m.weights_bytes_per_gpu + m.draft_bytes_per_gpu) / GIB, observed.weights_gib),
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
