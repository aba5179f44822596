"""Plans for a machine without a GPU: vLLM's CPU build, its number format, its speed, a KV cache that leaves room.

Number format: vLLM's CPU build multiplies through oneDNN. Where the CPU has no instructions for a 16-bit format,
oneDNN emulates it, or refuses it and torch's own loop takes over: several times slower than fp32 with several rows,
which is what prompts and batches are. fp32 reads twice the bytes, so that one stream with a short prompt may still be
quicker in bf16. A measurement decides, for the goal; without one, the CPU's flags do. What the user fixes stays
fixed.

Speed: one decode step multiplies every matrix with as many rows as requests run, reads their keys and values, and
pays for the small operations of each layer and for the engine's Python, which share the cores with the API server.
The rates are measured (`plan.hardware.cpu`). The costs between the products were calibrated on one machine
(docs/measurements/cpu-formats.md) and are scaled by how quick a core runs plain Python here. Without a measurement,
both are a guess from the number of cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from corral.engines.settings import DTYPES
from corral.plan.candidate import Candidate, Tuning
from corral.plan.contract import UTILISATION, EngineSettings, Goal, Memory, Parallel, Precision, Speed
from corral.plan.hardware.cpu import CpuSpeed, FormatSpeed, Product
from corral.plan.hardware.inventory import GIB, CpuFacts, Inventory
from corral.plan.lora import AdapterFolder, adapter_bytes, with_adapters
from corral.plan.memory import convert
from corral.plan.models.facts import ModelFacts
from corral.plan.models.quantisation import DTYPE_BYTES
from corral.plan.precision import Form
from corral.plan.settings import Fixed
from corral.plan.speed import READS_ONLY, significant

_GB_S_PER_CORE, _GB_S_MOST = 8.0, 200.0
_GFLOPS_PER_CORE = 40.0
ROUGH = "rough: this CPU was not measured"


@dataclass(frozen=True)
class CpuCosts:
    """What a step costs beside its products, on a core that runs `python_s`; sources in docs/measurements/cpu-
    formats.md.
    """

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
    running = max(1, min(goal.concurrency or _RUNNING[goal.goal], settings.max_num_seqs))
    chunk = settings.max_num_batched_tokens
    prefill = chunk / step.prefill(chunk, goal.prompt_tokens)
    alone = step.decode(1, goal.prompt_tokens + goal.output_tokens / 2)
    cycle = request_s(model, rates, goal, running, chunk)
    first = step.prefill(goal.prompt_tokens, goal.prompt_tokens) + costs.request_s * rates.scale
    load = read_bytes / ((goal.storage_gb_s or 1.0) * 1e9) + costs.start_s * rates.scale
    numbers = (1 / alone, prefill, running * goal.output_tokens / cycle, first, cycle / goal.output_tokens, load)
    one, prompt, together, ttft, tpot, loading = (significant(n, 3 if rates.measured else 2) for n in numbers)
    if not model.writes:
        return Speed(*(None,) * 5, loading, running, goal.prompt_tokens, goal.output_tokens, READS_ONLY)
    return Speed(
        one, prompt, together, ttft, tpot, loading, running, goal.prompt_tokens, goal.output_tokens, rates.basis
    )


_BLOCK = 128  # vLLM's CPU platform
_PROCESS_BYTES = int(1.5 * GIB)  # Python, torch and the compiled model, two processes; seen with SmolLM2
_CONTEXT = 8192  # longer prompts take minutes on a CPU
_KV_MOST = 4 * GIB
# vLLM's own default here; twice the tokens/s of 32 at once with SmolLM2 on two cores (docs/measurements/batches.md)
_SEQS = 128
_LATENCY_SEQS = 16
_RUNNING = {"latency": 1, "balanced": 1, "throughput": 16}  # requests at once, where the load names no number


def work_out_cpu(
    model: ModelFacts,
    inventory: Inventory,
    goal: Goal,
    fixed: Fixed,
    precision: Precision,
    rates: Rates,
    parallel: Parallel | None = None,
    folder: AdapterFolder | None = None,
) -> Candidate:
    """One CPU configuration: a rank per node, a context of at most 8192 unless asked, KV as the load asks."""
    parts = convert(model, precision)
    parallel = parallel or Parallel()
    here = -(-parts.total // parallel.replica_gpus)  # what of the weights lies on one node
    element = DTYPE_BYTES[precision.compute]
    asked = fixed.max_model_len or goal.context
    context = asked or min(model.max_context, _CONTEXT)
    seqs = fixed.max_num_seqs or max(goal.concurrency or 0, _LATENCY_SEQS if goal.goal == "latency" else _SEQS)
    batched = fixed.max_num_batched_tokens or max(2048, seqs)
    activation = int(batched * element * (3 * model.intermediate + 4 * model.hidden) + seqs * model.vocab * 8)
    settings = EngineSettings(
        fixed.gpu_memory_utilization or UTILISATION,
        batched,
        seqs,
        bool(fixed.eager),
        _BLOCK,
        1 if folder else fixed.api_servers or parallel.data,
        fixed.stream_interval or 1,
        async_scheduling=fixed.async_scheduling is not False,
    )
    settings = with_adapters(settings, fixed, folder)
    adapters = adapter_bytes(model, parallel, settings, element)
    whole_token = model.kv_bytes_per_token(1.0 if precision.kv.startswith("fp8") else element)
    states = (
        sum(one.layers * one.state_bytes * one.copies for one in model.caches) // context
    )  # of a full-length request, as if its tokens shared them
    per_token = max(1, -(-(whole_token + states) // parallel.replica_gpus))
    free = inventory.host_available_bytes - here - adapters - activation - _PROCESS_BYTES
    wanted = per_token * context * max(2, min(goal.concurrency or 8, 8))
    space = max(GIB, min(wanted, _KV_MOST, free * 3 // 4)) // GIB * GIB
    if asked and per_token * (context + _BLOCK) > space:
        space = -(-per_token * (context + _BLOCK) // GIB) * GIB
    blocks = space // (per_token * _BLOCK)
    tokens = 0 if model.encoder else int(blocks / -(-context // _BLOCK) * context)
    problem = ""
    if free < space:
        need = (here + adapters + activation + _PROCESS_BYTES + space) / GIB
        problem = f"it needs {need:.1f} GiB of memory and {inventory.host_available_bytes / GIB:.1f} GiB are free"
    elif context > model.max_context:
        problem = f"a context of {context} is beyond the model's {model.max_context}"
    elif tokens - _BLOCK < context and not model.encoder:
        if asked:
            problem = f"the KV cache would hold {tokens:,} tokens, fewer than a context of {context:,}"
        else:
            context = max(_BLOCK, (tokens - _BLOCK) // _BLOCK * _BLOCK)
    memory = Memory(
        weights_bytes=parts.total,
        nominal_weights_bytes=round(model.parameters * DTYPE_BYTES.get(precision.weights, 2.0)),
        weights_bytes_per_gpu=here,
        kv_bytes_per_token=whole_token,
        kv_bytes_per_token_per_gpu=per_token,
        kv_cache_bytes_per_gpu=space,
        kv_cache_tokens_per_replica=tokens,
        kv_cache_tokens=tokens,
        full_length_requests=round(tokens / context, 2),
        activation_bytes_per_gpu=activation,
        graph_bytes_per_gpu=0,
        overhead_bytes_per_gpu=_PROCESS_BYTES,
        budget_bytes_per_gpu=inventory.host_available_bytes,
        adapter_bytes_per_gpu=adapters,
    )
    read = parts.total - (0 if model.tied_embeddings else parts.embedding)
    speed = predict_cpu(model, rates, settings, goal, read)
    return Candidate(parallel, precision, settings, context, memory, speed, problem)


FORMATS = ("bf16", "fp32")
CRAWLS = 2.0  # times slower than the quickest format from which a fixed one gets a warning
# a measurement overrules the flags from here; for bf16 without bf16 instructions it must be clear, because that was
# seen to answer worse than fp32 (docs/measurements/cpu-formats.md)
_BETTER = {"fp32": 1.1, "bf16": 1.5}
_AT_ONCE = 8  # requests that a format is judged by, beside a single one, where none were asked for
_LONE = {"latency": 1.0, "balanced": 0.5, "throughput": 0.0}  # weight of the single request

# Seen without bf16 instructions, 32 rows against fp32: 4.1 × (AVX-512), 3.7 × (AVX2); docs/measurements/cpu-
# formats.md. On Neoverse-N1 a short answer took two minutes in fp16 and some three seconds in fp32.
_X86_SLOWER, _ARM_SLOWER = 4.0, 30.0
_SAFE = "fp32 is slow on none (`--set weights=bf16` where it has bf16 instructions)"


@dataclass(frozen=True)
class Quick:
    """What a CPU's flags say: the format it is quick in, and how many times slower the 16-bit ones are otherwise."""

    format: str
    because: str
    slower: float = 1.0


def quick_format(cpu: CpuFacts | None) -> Quick:
    """The format that the flags speak for."""
    if cpu is None:
        return Quick("fp32", f"nothing is known of this CPU, and {_SAFE}", _X86_SLOWER)
    if cpu.architecture == "x86_64":
        return _x86(cpu)
    if cpu.architecture == "aarch64":
        return _arm(cpu)
    return Quick(
        "fp32", f"Corral does not know which formats {cpu.architecture} is quick in, and {_SAFE}", _X86_SLOWER
    )


def _x86(cpu: CpuFacts) -> Quick:
    if cpu.has("amx_tile", "amx_bf16"):
        return Quick("bf16", f"{cpu.model} multiplies bf16 in AMX tiles")
    if cpu.has("avx512_bf16"):
        return Quick("bf16", f"{cpu.model} has bf16 instructions (AVX512-BF16)")
    widest = "AVX-512" if cpu.has("avx512f") else "AVX2" if cpu.has("avx2") else "SSE"
    return Quick("fp32", f"{cpu.model} has {widest} and no bf16 instructions", _X86_SLOWER)


def _arm(cpu: CpuFacts) -> Quick:
    if cpu.has("bf16"):
        return Quick("bf16", f"{cpu.model} has bf16 instructions{' and SVE' if cpu.has('sve') else ''}")
    return Quick("fp32", f"{cpu.model} has no bf16 instructions", _ARM_SLOWER)


def formats_to_measure(model: ModelFacts, fixed: Fixed) -> tuple[str, ...]:
    """The formats whose speeds decide something for this model."""
    more = [format_ for format_ in (pinned_format(fixed), model.dtype) if format_ == "fp16"]
    return tuple(dict.fromkeys([*FORMATS, *more]))


def cpu_forms(
    form: Form, inventory: Inventory, goal: Goal, fixed: Fixed, parallel: Parallel, tuning: Tuning
) -> list[tuple[Form, Candidate]]:
    """The formats to run in, worked out, best first; only one where it is fixed."""
    model, quick, pinned, measured = form.facts, quick_format(inventory.cpu), pinned_format(fixed), tuning.cpu
    rates = {name: _rates(name, model, inventory, measured, quick) for name in DTYPES}
    taken = [pinned] if pinned else ["fp32"] if model.dtype == "fp32" else _ranked(model, goal, quick, rates)
    found = []
    for name in taken:
        because = "" if model.dtype == "fp32" and not pinned else _because(name, quick, rates)
        made = replace(
            form, precision=_in(form.precision, name), because=because, warning=_warning(name, model, goal, rates)
        )
        candidate = work_out_cpu(
            model, inventory, goal, fixed, made.precision, rates[name], parallel, tuning.adapters
        )
        found.append((made, candidate))
    return found


def pinned_format(fixed: Fixed) -> str | None:
    """The format that the user fixed, as what is computed in or as the weights'."""
    return fixed.dtype or (fixed.weights if fixed.weights in DTYPES else None)


def _in(precision: Precision, format_: str) -> Precision:
    """The same precision computed in `format_`; weights that are not quantised are loaded in it too."""
    return replace(precision, compute=format_, weights=format_ if precision.weights in DTYPES else precision.weights)


def _rates(name: str, model: ModelFacts, inventory: Inventory, measured: CpuSpeed | None, quick: Quick) -> Rates:
    return rates_for(name, model, inventory, measured, quick.slower if name != "fp32" else 1.0)


def _ranked(model: ModelFacts, goal: Goal, quick: Quick, rates: dict[str, Rates]) -> list[str]:
    """The flags' choice first, unless a measurement speaks clearly against it."""
    other = next(name for name in FORMATS if name != quick.format)
    mine, theirs = (_work_s(model, goal, rates[name]) for name in (quick.format, other))
    measured = rates[quick.format].measured and rates[other].measured
    return [other, quick.format] if measured and mine > _BETTER[other] * theirs else [quick.format, other]


def _work_s(model: ModelFacts, goal: Goal, rates: Rates) -> float:
    """Seconds of a request in the goal's mixture of alone and among others."""
    lone = request_s(model, rates, goal, 1)
    among = request_s(model, rates, goal, goal.concurrency or _AT_ONCE)
    weight = _LONE[goal.goal]
    return float(lone**weight * among ** (1 - weight))


def _because(name: str, quick: Quick, rates: dict[str, Rates]) -> str:
    other = next(each for each in FORMATS if each != name)
    mine, theirs = rates[name], rates[other]
    if not (mine.measured and theirs.measured):
        return quick.because
    pairs = ", ".join(
        f"{_words(mine, rows)} GFLOP/s against {_words(theirs, rows)} in {other} with {words}"
        for rows, words in ((1, "one request"), (32, "32 at once"))
    )
    return f"{quick.because}; measured here: {pairs}"


def _words(rates: Rates, rows: int) -> str:
    """GFLOP/s; an emulated format may have less than one."""
    rate = rates.format.at(rows)
    return f"{rate:.0f}" if rate >= 9.95 else f"{rate:.1f}"


def _warning(name: str, model: ModelFacts, goal: Goal, rates: dict[str, Rates]) -> str:
    """A format that will be slow: by how much, and against which."""
    mine = rates[name]
    best = min(FORMATS, key=lambda each: _work_s(model, goal, rates[each]))
    times = _work_s(model, goal, mine) / _work_s(model, goal, rates[best])
    if times < CRAWLS:
        return ""
    how = "measured here" if mine.measured and rates[best].measured else "as seen on such CPUs, not measured here"
    return f"{name} will be slow on this CPU: about {times:.0f} times slower than {best} ({how})"
