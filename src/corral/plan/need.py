"""What a model needs: the smallest inventories that serve it, tables of memory, and how several replicas run. Pure.

`needs` and `memory_table` put two figures side by side: what guides compute (parameters × bits and one request,
over the size on the box), and what really runs (some tensors stay in 16 bits, vLLM needs room for activations and
graphs, TP must divide the heads, pipelines split whole layers).

`advise` chooses between one engine with data parallelism and several servers. Replicas of a dense model exchange
nothing, so servers of their own lose nothing against one engine, and one that fails takes no other with it; vLLM's
external load balancer refuses dense models. Of a mixture of experts, one engine spreads the experts over all its
ranks instead of holding them once in each replica. Several servers on one GPU are never advised: two on an H200 made
0.78 and 0.95 of the tokens of one (docs/measurements/gpu-settings.md).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from corral.base.errors import UsageError
from corral.plan.candidate import Candidate, Tuning, broken_layout
from corral.plan.choose import Decision, decide, make_plan
from corral.plan.contract import Goal, Parallel, Plan
from corral.plan.hardware.inventory import GIB, GPUS, Gpu, Inventory
from corral.plan.memory import convert
from corral.plan.models.facts import ModelFacts
from corral.plan.models.quantisation import DTYPE_BYTES
from corral.plan.precision import Form, forms
from corral.plan.settings import Fixed
from corral.plan.speed import rounded

# GPUs of a node and nodes, fewest GPUs first: one node of any size, then nodes of four and of eight
_SIZES = tuple(
    sorted(
        [(inside, 1) for inside in range(1, 9)] + [(4, n) for n in (3, 5, 7)] + [(8, n) for n in (2, 3, 4, 6, 8, 16)],
        key=lambda size: size[0] * size[1],
    )
)


@dataclass(frozen=True)
class Need:
    """One kind of GPU and one precision; `gpus_per_node` is 0 when 128 GPUs are not enough."""

    gpu: str
    weights: str
    by_arithmetic: int  # GPUs for weights and one request, by the size on the box
    gpus_per_node: int
    nodes: int
    layout: str
    context: int
    kv_cache_tokens: int
    decode_tokens_per_s: float | None = None  # one stream
    note: str = ""  # what a few more GPUs would change

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes


def by_arithmetic(model: ModelFacts, gigabytes: float, context: int = 0, weights: str = "") -> int:
    """GPUs as guides count them: parameters × bits, plus the KV of one request in GiB taken as GB."""
    stored = model.parameters * DTYPE_BYTES.get(weights or model.weights, 2.0) / 1e9
    cache = model.kept_bytes(context) / (1 << 30)
    return max(1, ceil((stored + cache) / gigabytes))


def needs(model: ModelFacts, goal: Goal, kinds: tuple[str, ...] = (), tuning: Tuning | None = None) -> list[Need]:
    """For each kind and precision the first inventory, from one GPU up, that holds the asked context."""
    context = goal.context or model.max_context
    rows = []
    for kind in kinds or tuple(GPUS):
        gpu = GPUS[kind]
        if not kinds and (gpu.half != "bf16" or not gpu.common):
            continue  # old kinds, and variants, only when asked for
        for weights in dict.fromkeys((model.weights, "fp8", "int4")):
            found = _smallest(model, gpu, weights, replace(goal, context=context), tuning or Tuning())
            if found is not None:
                rows.append(found)
    return rows


def _smallest(model: ModelFacts, gpu: Gpu, weights: str, goal: Goal, tuning: Tuning) -> Need | None:
    fixed = Fixed(weights=None if weights == model.weights else weights)
    one = Inventory(gpu.kind, 1, 1, gpu.memory_bytes)
    form = forms(model, one, fixed)[0]
    if form.problem and (model.quantisation or weights != "int4"):
        return None
    if form.problem:  # no checkpoint in INT4 is known, but somebody may make one
        model = replace(model, weights="int4", stored=convert(model, form.precision), notes=())
        form = Form(model, form.precision)
    context = goal.context or model.max_context
    least = by_arithmetic(model, gpu.box_gb, context, weights)
    pinned = replace(fixed, weights=form.precision.weights)
    stored = convert(form.facts, form.precision).total
    found: list[tuple[Inventory, Candidate]] = []
    shorter = ""
    for inside, nodes in _SIZES:
        if inside * nodes * gpu.memory_bytes < stored or (found and nodes > 1):
            continue
        larger = replace(one, gpus_per_node=inside, nodes=nodes)
        made = decide(model, larger, goal, pinned, tuning)
        if made.fits:
            found.append((larger, made.chosen))
            if made.chosen.parallel.pipeline == 1 or nodes > 1:
                break
        elif larger.gpus >= least:
            shorter = _shorter(larger, decide(model, larger, replace(goal, context=None), pinned, tuning)) or shorter
    if not found:
        return Need(gpu.kind, weights, least, 0, 0, "", context, 0)
    (least_of, c), note = found[0], _worth_more(model, found) or shorter
    return Need(
        gpu.kind, weights, least, least_of.gpus_per_node, least_of.nodes, str(c.parallel), context,
        c.memory.kv_cache_tokens, c.speed.decode_tokens_per_s, note,
    )  # fmt: skip


def _shorter(inventory: Inventory, made: Decision) -> str:
    if not made.fits:
        return ""
    c = made.chosen
    return f"{inventory.label} can hold it in {c.precision.weights} with a context of {c.max_model_len:,}"


def _worth_more(model: ModelFacts, found: list[tuple[Inventory, Candidate]]) -> str:
    """What the next size gives that needs no pipeline inside a node, where the smallest does."""
    (small, first), (large, last) = found[0], found[-1]
    if small.nodes > 1 or first.parallel.pipeline == 1 or last.parallel.pipeline > 1:
        return ""
    why = broken_layout(model, Parallel(small.gpus)) or "TP alone leaves too little room"
    slow, fast = first.speed.decode_tokens_per_s, last.speed.decode_tokens_per_s
    speeds = (
        f": one stream about {rounded(slow, 2)} tokens/s, and {rounded(fast, 2)} on {large.gpus}"
        if slow and fast
        else ""
    )
    return f"{small.gpus} × {small.gpu} run it only as a pipeline ({why}){speeds}"


DOCUMENTED_CONTEXT = 128_000  # tokens for which guides give the KV cache of one request
WIDTHS = ("bf16", "fp8", "int4")


@dataclass(frozen=True)
class Cell:
    """One model in one precision on one kind of GPU; `gpus` is 0 where nobody publishes it, or 128 do not hold it."""

    weights: str
    nominal_gb: float
    boxes: float  # GPUs as guides divide: weights and one request over the size on the box
    gpus: int
    layout: str


@dataclass(frozen=True)
class TableRow:
    """One model."""

    model: str
    parameters: int
    kv_heads: int
    kv_gib: float  # of one request of `context` tokens, in 16 bits
    context: int
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


def memory_table(models: list[ModelFacts], gpu: Gpu, context: int | None = None) -> list[TableRow]:
    """One row per model; the context is that of guides, or the model's own where that is shorter."""
    return [_row(model, gpu, min(context or DOCUMENTED_CONTEXT, model.max_context)) for model in models]


def _row(model: ModelFacts, gpu: Gpu, context: int) -> TableRow:
    kv_gib = model.kept_bytes(context) / GIB
    runs = {need.weights: need for need in needs(model, Goal(context=context), (gpu.kind,), Tuning())}
    cells = []
    for weights in WIDTHS:
        nominal = model.parameters * DTYPE_BYTES[weights] / 1e9
        need = runs.get(weights)
        boxes = (nominal + kv_gib) / gpu.box_gb
        cells.append(Cell(weights, nominal, boxes, need.gpus if need else 0, need.layout if need else ""))
    notes = (*(need.note for need in runs.values() if need.note), *model.notes)
    named = tuple(f"{model.name}: {note}" for note in notes)
    return TableRow(model.name, model.parameters, model.kv_heads, kv_gib, context, tuple(cells), named)


class ReplicaForm(enum.StrEnum):
    """How several replicas run."""

    SERVERS = "servers"  # each by itself, behind a gateway
    ENGINE = "engine"  # in one engine, with data parallelism


@dataclass(frozen=True)
class ReplicaAdvice:
    """Which of the two is taken, and the plan of a server, or of the engine."""

    replicas: int
    form: ReplicaForm
    because: str
    plan: Plan


def divided(inventory: Inventory, replicas: int) -> Inventory:
    """What one of several servers has of the hardware: whole nodes, or some GPUs or cores of one."""
    if replicas <= inventory.nodes:
        return replace(inventory, nodes=inventory.nodes // replicas)
    parts = -(-replicas // inventory.nodes)
    if inventory.gpu is None:
        return replace(
            inventory,
            nodes=1,
            cpu_cores=max(1, inventory.cpu_cores // parts),
            host_memory_bytes=inventory.host_memory_bytes // parts,
            host_available_bytes=inventory.host_available_bytes // parts,
        )
    if inventory.gpus_per_node < parts:
        raise UsageError(
            f"{inventory.label} cannot be divided among {replicas} replicas: a GPU belongs to one server.",
            f"Ask for at most {inventory.gpus}.",
        )
    return replace(inventory, nodes=1, gpus_per_node=inventory.gpus_per_node // parts)


def advise(
    model: ModelFacts,
    inventory: Inventory,
    goal: Goal,
    fixed: Mapping[str, object],
    tuning: Tuning | None,
    replicas: int,
) -> ReplicaAdvice:
    """One engine or several servers, with the plan of what would run."""
    each_goal = replace(goal, concurrency=-(-goal.concurrency // replicas)) if goal.concurrency else goal
    each = make_plan(model, divided(inventory, replicas), each_goal, {**fixed, "data": 1}, tuning)
    if model.experts and inventory.gpu is not None:
        whole = make_plan(model, inventory, goal, {**fixed, "data": replicas}, tuning)
        if whole.fits:
            return ReplicaAdvice(replicas, ReplicaForm.ENGINE, _why_engine(model, each), whole)
    return ReplicaAdvice(replicas, ReplicaForm.SERVERS, _why_servers(model, replicas), each)


def _why_engine(model: ModelFacts, each: Plan) -> str:
    alone = "" if each.fits else "; a server of its own would not fit"
    return (
        f"it has {model.experts} experts in a layer, which one engine spreads over all its GPUs instead of holding"
        f" all of them in each replica{alone}. One failure ends all replicas, though"
    )


def _why_servers(model: ModelFacts, replicas: int) -> str:
    if model.experts:
        return "one engine with data parallelism does not fit"
    return (
        "it is a dense model: its replicas exchange nothing, so servers of their own lose nothing against one engine"
        f" with DP {replicas}, and one that fails takes no other with it; vLLM's external load balancer refuses"
        " dense models"
    )
