"""How fast on a CPU: products at the measured rate, and what the engine does between them.

One decode step multiplies every matrix with as many rows as requests run, reads their keys and values, and pays for
the small operations of each layer and for the engine's Python, which share the cores with the API server. The rates
are measured (`plan.hardware.cpu`), the costs between the products were calibrated on one machine (docs/log.md)
and are scaled by how quick a core runs plain Python here. Where nobody measured, both are a guess from the cores
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.plan.contract import EngineSettings, Goal, Speed
from corral.plan.hardware.cpu import CpuSpeed, FormatSpeed, Product
from corral.plan.hardware.inventory import Inventory
from corral.plan.models.architecture import DTYPE_BYTES
from corral.plan.models.facts import ModelFacts
from corral.plan.speed import significant

_GB_S_PER_CORE, _GB_S_MOST = 8.0, 200.0
_GFLOPS_PER_CORE = 40.0
ROUGH = "rough: this CPU was not measured"


@dataclass(frozen=True)
class CpuCosts:
    """What a step costs beside its products, on a core that runs `python_s`; sources in docs/log.md."""

    python_s: float = 2.4e-3
    step_s: float = 4e-3  # scheduling, sampling, passing tokens on
    layer_s: float = 0.35e-3  # norms, rotation, attention's own overhead, activation
    sequence_s: float = 1.2e-3  # per running request and step: sampling, detokenising, streaming
    request_s: float = 30e-3  # accepting and tokenising a request, and its first chunk
    start_s: float = 20.0  # imports, and compiled code read back


@dataclass(frozen=True)
class Rates:
    """The speeds that a prediction rests on."""

    format: FormatSpeed
    read_gb_s: float
    scale: float  # how much slower than the calibrated core this one runs Python
    basis: str

    @property
    def measured(self) -> bool:
        return self.basis != ROUGH


def products(model: ModelFacts) -> tuple[Product, ...]:
    """The matrices that a token is multiplied with: four kinds in each layer, and the head."""
    width, wide = model.heads * model.head_dim, model.intermediate * max(1, model.experts_per_token)
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    return (
        Product(qkv, model.hidden, model.layers),
        Product(model.hidden, width, model.layers),
        Product(2 * wide, model.hidden, model.layers),
        Product(model.hidden, wide, model.layers),
        Product(model.vocab, model.hidden, 1),
    )


def rates_for(
    format_: str, model: ModelFacts, inventory: Inventory, measured: CpuSpeed | None, slower: float
) -> Rates:
    """Measured rates where there are some, else a guess; `slower`: by how much the flags speak against the format."""
    found = measured.of(format_) if measured else None
    if measured is None or found is None:
        return _rough(format_, inventory, slower)
    scale = measured.python_s / CpuCosts().python_s
    same = measured.products == products(model)
    basis = "measured here" if same else f"measured here with the shapes of {measured.model}"
    return Rates(found, measured.read_gb_s, scale, basis)


def _rough(format_: str, inventory: Inventory, slower: float) -> Rates:
    cores = max(1, inventory.cpu_cores)
    read = min(cores * _GB_S_PER_CORE, _GB_S_MOST)
    rows = (1, 4, 32, 512)
    reading = [2 * n * read / DTYPE_BYTES.get(format_, 2.0) for n in rows]
    rates = tuple(min(rate, cores * _GFLOPS_PER_CORE / slower) for rate in reading)
    return Rates(FormatSpeed(format_, rows, rates), read, 1.0, ROUGH)


@dataclass(frozen=True)
class _Step:
    """Times of one pass through the model."""

    model: ModelFacts
    rates: Rates
    costs: CpuCosts
    kv_bytes_per_token: int

    def _multiply(self, parameters: int, rows: float) -> float:
        return 2 * parameters * rows / (self.rates.format.at(rows) * 1e9)

    def _layers(self) -> int:
        return sum(product.parameters for product in products(self.model)[:-1])

    def _between(self, rows: float) -> float:
        own = self.costs.step_s + self.model.layers * self.costs.layer_s + rows * self.costs.sequence_s
        return own * self.rates.scale

    def decode(self, running: float, length: float) -> float:
        """Seconds from one token to the next with `running` requests of `length` tokens."""
        head = products(self.model)[-1].parameters
        attended = running * length * self.kv_bytes_per_token / (self.rates.read_gb_s * 1e9)
        return self._multiply(self._layers() + head, running) + attended + self._between(running)

    def prefill(self, tokens: float, length: float) -> float:
        """Seconds of one pass over `tokens` of prompts `length` long."""
        attention = 2 * self.model.heads * self.model.head_dim * length * self.model.layers  # half of the square
        extra = tokens * attention / (self.rates.format.at(tokens) * 1e9)
        return self._multiply(self._layers(), tokens) + extra + self._between(1)


def request_s(model: ModelFacts, rates: Rates, goal: Goal, running: int, chunk: int = 2048) -> float:
    """Seconds of one request of the goal's lengths among `running` that come and go together."""
    costs = CpuCosts()
    step = _Step(model, rates, costs, model.kv_bytes_per_token(DTYPE_BYTES.get(rates.format.format, 2.0)))
    length = goal.prompt_tokens + goal.output_tokens / 2
    tokens = running * goal.prompt_tokens
    prefill = step.prefill(min(chunk, tokens), goal.prompt_tokens) * max(1.0, tokens / chunk)
    return prefill + goal.output_tokens * step.decode(running, length) + running * costs.request_s * rates.scale


def predict_cpu(model: ModelFacts, rates: Rates, settings: EngineSettings, goal: Goal, read_bytes: int) -> Speed:
    """Speeds of one plan on a CPU."""
    costs = CpuCosts()
    step = _Step(model, rates, costs, model.kv_bytes_per_token(DTYPE_BYTES.get(rates.format.format, 2.0)))
    running = max(1, min(goal.concurrency or 1, settings.max_num_seqs))
    chunk = settings.max_num_batched_tokens
    prefill = chunk / step.prefill(chunk, goal.prompt_tokens)
    alone = step.decode(1, goal.prompt_tokens + goal.output_tokens / 2)
    cycle = request_s(model, rates, goal, running, chunk)
    first = step.prefill(goal.prompt_tokens, goal.prompt_tokens) + costs.request_s * rates.scale
    load = read_bytes / ((goal.storage_gb_s or 1.0) * 1e9) + costs.start_s * rates.scale
    numbers = (1 / alone, prefill, running * goal.output_tokens / cycle, first, cycle / goal.output_tokens, load)
    one, prompt, together, ttft, tpot, loading = (significant(n, 3 if rates.measured else 2) for n in numbers)
    return Speed(
        one, prompt, together, ttft, tpot, loading, running, goal.prompt_tokens, goal.output_tokens, rates.basis
    )
