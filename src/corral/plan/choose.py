"""The decision: try the ways to run a model, keep the best for the goal, say why, and why not the others.

Where none fits, the smallest changes that would are tried too: a shorter context, narrower numbers, more GPUs,
another kind of GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from corral.plan.candidate import (
    Candidate,
    Tuning,
    broken_layout,
    broken_settings,
    layouts,
    over_nodes,
    replicas_on,
    with_problem,
    work_out,
)
from corral.plan.contract import VERSION, Cost, Goal, Nearest, Parallel, Plan, Reason, Rejected
from corral.plan.hardware.inventory import GPUS, LINKS, Inventory
from corral.plan.judged import judge
from corral.plan.lora import broken_adapters
from corral.plan.models.facts import ModelFacts
from corral.plan.precision import Form, forms
from corral.plan.reasons import reasons_for, rejected_for
from corral.plan.settings import Fixed, cpu_environment, engine_args, read_fixed, refuse_two_contexts

Question = Callable[[Inventory, Goal, Fixed], Candidate | None]
_STEP = 256
_BIGGER_KINDS = ("H100-SXM", "H200", "B200", "MI300X")


def wider(inventory: Inventory, most_nodes: int = 32) -> Iterator[Inventory]:
    """Larger inventories of the same kind, smallest first: up to eight GPUs in a node, then more nodes."""
    for inside in (1, 2, 4, 8):
        if inside > inventory.gpus_per_node and inventory.nodes == 1:
            yield replace(inventory, gpus_per_node=inside)
    inside = max(inventory.gpus_per_node, 8 if inventory.nodes == 1 else 0)
    nodes = inventory.nodes + 1
    while nodes <= most_nodes:
        yield replace(inventory, gpus_per_node=inside, nodes=nodes)
        nodes = nodes + 1 if nodes < 4 else nodes * 2


def _options(inventory: Inventory) -> str:
    words = f"--gpus {inventory.gpus_per_node}x{inventory.gpu}"
    return words if inventory.nodes == 1 else f"{words} --nodes {inventory.nodes}"


def nearest_fits(
    ask: Question, inventory: Inventory, goal: Goal, fixed: Fixed, room_tokens: int, refused: Candidate
) -> list[Nearest]:
    """The smallest changes that make it run, each tried with the planner; no hardware where a rule is broken."""
    tries = [_shorter(ask, inventory, goal, fixed, room_tokens)]
    if inventory.gpu is not None:
        tries += _same_hardware(ask, inventory, goal, fixed)
    if inventory.gpu is not None and not refused.broken:
        tries += _more_hardware(ask, inventory, goal, _without_layout(fixed))
    return [found for found in tries if found is not None]


def _without_layout(fixed: Fixed) -> Fixed:
    return replace(fixed, tensor=None, pipeline=None, data=None, expert=None)


def _shorter(ask: Question, inventory: Inventory, goal: Goal, fixed: Fixed, room_tokens: int) -> Nearest | None:
    asked = fixed.max_model_len or goal.context
    if not asked or not 2 * _STEP <= room_tokens < asked:
        return None
    length = room_tokens // _STEP * _STEP
    found = ask(inventory, replace(goal, context=length), replace(fixed, max_model_len=None))
    return _found(found, f"a context of {length:,} on the same hardware", f"--context {length}")


def _same_hardware(ask: Question, inventory: Inventory, goal: Goal, fixed: Fixed) -> Iterator[Nearest | None]:
    if fixed.layout or fixed.data:
        found = ask(inventory, goal, _without_layout(fixed))
        if found:
            named = [name for name in ("tensor", "pipeline", "data") if getattr(fixed, name)]
            sizes = " ".join(f"--set {name}={getattr(found.parallel, name)}" for name in named)
            yield _found(found, f"{found.parallel} in {found.precision.weights} on the same hardware", sizes)
    gpu = inventory.kind
    for weights in (*(("fp16",) if gpu and gpu.half == "fp16" else ()), "fp8", "int4"):
        if fixed.weights != weights:
            found = ask(inventory, goal, replace(fixed, weights=weights, dtype=None, quantization=None))
            if found and found.precision.weights == weights:
                yield _found(found, f"{weights} weights on the same hardware", f"--set weights={weights}")
                break
    if (fixed.max_model_len or goal.context) and fixed.kv in (None, "auto"):
        yield _found(
            ask(inventory, goal, replace(fixed, kv="fp8")), "an fp8 KV cache on the same hardware", "--set kv=fp8"
        )


def _more_hardware(ask: Question, inventory: Inventory, goal: Goal, fixed: Fixed) -> Iterator[Nearest | None]:
    for larger in wider(inventory):
        found = ask(larger, goal, fixed)
        if found:
            yield _found(found, f"{larger.label} as {found.parallel}{_narrow(found)}", _options(larger))
            break
    for kind in _BIGGER_KINDS:
        memory = GPUS[kind].memory_bytes
        if kind == inventory.gpu or memory <= inventory.memory_bytes_per_gpu:
            continue
        other = replace(inventory, gpu=kind, memory_bytes_per_gpu=memory, note="")
        found = ask(other, goal, fixed)
        if found:
            yield _found(found, f"{other.label} as {found.parallel}{_narrow(found)}", _options(other))
            break


def _narrow(candidate: Candidate) -> str:
    return "" if candidate.precision.how == "native" else f" in {candidate.precision.weights}"


def _found(candidate: Candidate | None, what: str, change: str) -> Nearest | None:
    if candidate is None:
        return None
    memory, speed = candidate.memory, candidate.speed
    return Nearest(what, change, memory.kv_cache_tokens, candidate.max_model_len, speed.throughput_tokens_per_s)


@dataclass(frozen=True)
class Decision:
    """The chosen configuration and everything that was tried on the way."""

    form: Form
    chosen: Candidate
    tried: list[tuple[Form, Candidate]] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.chosen.problem


def make_plan(
    facts: ModelFacts,
    inventory: Inventory,
    goal: Goal | None = None,
    fixed: Mapping[str, object] | None = None,
    tuning: Tuning | None = None,
) -> Plan:
    """The best plan for the goal; `fits` is false, with reason and nearest, when there is none."""
    goal, tuning, pinned = goal or Goal(), tuning or Tuning(), read_fixed(fixed or {})
    refuse_two_contexts(goal, pinned)
    made = decide(facts, inventory, goal, pinned, tuning)
    nearest: list[Nearest] = []

    def ask(other: Inventory, wanted: Goal, pins: Fixed) -> Candidate | None:
        again = decide(facts, other, wanted, pins, tuning)
        return again.chosen if again.fits and not _lost(facts, again.chosen, wanted, pins) else None

    if not made.fits:
        room = max([c.memory.kv_cache_tokens_per_replica - c.settings.block_size for _, c in made.tried], default=0)
        nearest = nearest_fits(ask, inventory, goal, pinned, min(room, facts.max_context), made.chosen)
    lost = _lost(facts, made.chosen, goal, pinned) if made.fits else ""
    if lost:
        nearest = nearest_fits(ask, inventory, goal, pinned, 0, made.chosen)
    reasons = reasons_for(facts, made.form, made.chosen, inventory, goal, pinned, tuning)
    rejected = rejected_for(facts, made.chosen, made.tried, inventory, goal)
    judged = judge(made.form.facts, inventory, made.chosen, goal, tuning)
    doubt = tuning.draft.doubt if tuning.draft and inventory.gpu is not None else ""
    plan = replace(_plan(made, inventory, goal, reasons, rejected, nearest, doubt, pinned.passed_on), judged=judged)
    return replace(plan, verdict="barely fits", reason=f"{plan.reason}: {lost}") if lost else plan


_USABLE = 8192  # a shorter context than this, which nobody asked for, barely fits


def _lost(facts: ModelFacts, chosen: Candidate, goal: Goal, fixed: Fixed) -> str:
    """What is given up where memory cuts the context to less than most uses need; empty where nothing was."""
    memory, context = chosen.memory, chosen.max_model_len
    if facts.encoder or goal.context or fixed.max_model_len or context >= min(_USABLE, facts.max_context):
        return ""
    each = goal.prompt_tokens + goal.output_tokens
    return (
        f"the KV cache holds {memory.kv_cache_tokens:,} tokens, {memory.kv_cache_tokens / each:.1f} requests of"
        f" {goal.prompt_tokens} + {goal.output_tokens}, and the context is {context:,} of the model's"
        f" {facts.max_context:,}"
    )


def decide(facts: ModelFacts, inventory: Inventory, goal: Goal, fixed: Fixed, tuning: Tuning) -> Decision:
    """Try the forms in order of preference; the first with a configuration that runs is taken."""
    ways = forms(facts, inventory, fixed)
    if inventory.gpu is None:
        return _decide_cpu(ways[0], inventory, goal, fixed, tuning)
    tried: list[tuple[Form, Candidate]] = []
    for form in ways:
        tried += _candidates(form, inventory, goal, fixed, tuning)
        fitting = [pair for pair in tried if not pair[1].problem]
        if fitting:
            taken = _short_pipelines(_roomy(_wired(fitting, inventory, goal, fixed), goal), inventory, goal)
            form, chosen = max(taken, key=lambda pair: (pair[1].max_model_len, pair[1].score(goal.goal)))
            return Decision(form, chosen, tried)
        if tried and all(c.broken for _, c in tried):  # a rule that fewer bits do not mend
            return Decision(*tried[0], tried)
    if tried:
        return Decision(*max(_short_pipelines(tried, inventory, goal), key=_closeness), tried)
    return _unplaceable(ways[0], inventory, goal, fixed, tuning)


def _wired(
    fitting: list[tuple[Form, Candidate]], inventory: Inventory, goal: Goal, fixed: Fixed
) -> list[tuple[Form, Candidate]]:
    """Leave out tensor ranks on several nodes, unless set, or one stream comes first and the network is fast.

    Every layer then waits for the network twice, and how long was never measured with Corral. Where nothing else
    fits, they stay.
    """
    if fixed.tensor is not None or (goal.goal == "latency" and LINKS[inventory.link].fast):
        return fitting
    return [pair for pair in fitting if not over_nodes(pair[1].parallel, inventory)] or fitting


def _roomy(fitting: list[tuple[Form, Candidate]], goal: Goal) -> list[tuple[Form, Candidate]]:
    """Leave out splits that keep less than half the KV tokens the hardware could hold: copies of weights ate them.

    It also makes capacity grow with the hardware: twice the GPUs hold at least twice the most, so half of that is
    never less than before. Where one stream comes first, copies of a latent on tensor ranks are no reason: the room
    for the cache is compared instead.
    """

    def kept(pair: tuple[Form, Candidate]) -> int:
        c = pair[1]
        if goal.goal == "latency" and pair[0].facts.latent:
            return c.memory.kv_cache_bytes_per_gpu * c.parallel.replica_gpus * c.parallel.data
        return c.memory.kv_cache_tokens

    most = max(map(kept, fitting))
    return [pair for pair in fitting if 2 * kept(pair) >= most]


def _short_pipelines(
    fitting: list[tuple[Form, Candidate]], inventory: Inventory, goal: Goal
) -> list[tuple[Form, Candidate]]:
    """Of splits over equally many GPUs keep the one with the fewest stages, where NVLink carries the tensor ranks.

    A pipeline makes every request wait for all stages in turn; it pays between nodes, over PCIe, or for throughput.
    """
    gpu = inventory.kind
    if gpu is None or not gpu.nvlink or goal.goal == "throughput":
        return fitting
    inside = [pair for pair in fitting if not over_nodes(pair[1].parallel, inventory)]
    fewest: dict[int, int] = {}
    for _, c in inside:
        size = c.parallel.replica_gpus
        fewest[size] = min(fewest.get(size, c.parallel.pipeline), c.parallel.pipeline)
    kept = [pair for pair in inside if pair[1].parallel.pipeline == fewest[pair[1].parallel.replica_gpus]]
    return kept + [pair for pair in fitting if over_nodes(pair[1].parallel, inventory)]


def _closeness(pair: tuple[Form, Candidate]) -> tuple[int, int, int]:
    """How near a configuration came to running: the one to tell the user about."""
    _, c = pair
    return c.memory.kv_cache_tokens_per_replica, -c.memory.weights_bytes_per_gpu, -c.parallel.pipeline


def _decide_cpu(form: Form, inventory: Inventory, goal: Goal, fixed: Fixed, tuning: Tuning) -> Decision:
    """The quickest number format that fits; the others were tried."""
    from corral.plan.cpu import cpu_forms

    parallel = _cpu_layout(inventory, fixed)
    asked = fixed.max_model_len or goal.context or 0
    tried = cpu_forms(form, inventory, goal, fixed, parallel, tuning)
    why = form.problem
    if not why and parallel.replica_gpus * parallel.data != inventory.nodes:
        processes = "one process" if inventory.nodes == 1 else f"one process on each of {inventory.nodes} nodes"
        why = f"without a GPU Corral plans {processes}; {parallel} was asked for"
    why = why or broken_layout(form.facts, parallel) or broken_settings(form.facts, tried[0][1].settings, asked) or ""
    why = why or broken_adapters(fixed, tuning.adapters, form.facts.vocab)
    if why:
        tried = [(each, with_problem(candidate, why)) for each, candidate in tried]
    taken = next((pair for pair in tried if not pair[1].problem), tried[0])
    return Decision(*taken, tried)


def _cpu_layout(inventory: Inventory, fixed: Fixed) -> Parallel:
    """One rank per node: stages of a pipeline, because a CPU's network is slow, unless a split was asked for."""
    tensor, data = fixed.tensor or 1, fixed.data or 1
    return Parallel(tensor, fixed.pipeline or max(1, inventory.nodes // (tensor * data)), data)


def _candidates(
    form: Form, inventory: Inventory, goal: Goal, fixed: Fixed, tuning: Tuning
) -> list[tuple[Form, Candidate]]:
    made = []
    for parallel in layouts(form.facts, inventory, fixed):
        candidate = work_out(form.facts, inventory, parallel, form.precision, goal, fixed, tuning)
        made.append((form, with_problem(candidate, form.problem) if form.problem else candidate))
    return made


def _unplaceable(form: Form, inventory: Inventory, goal: Goal, fixed: Fixed, tuning: Tuning) -> Decision:
    """Nothing to try: what was fixed breaks a rule of vLLM's or does not fit into the nodes."""
    parallel = Parallel(fixed.tensor or 1, fixed.pipeline or 1, fixed.data or 1, bool(fixed.expert))
    broken = broken_layout(form.facts, parallel)
    why = broken or f"{parallel} cannot be placed on {inventory.label}"
    if broken is None and replicas_on(inventory, parallel.tensor, parallel.pipeline):
        why = f"{inventory.label} holds fewer than {parallel.data} replicas of {replace(parallel, data=1)}"
    candidate = work_out(
        form.facts, inventory, Parallel() if broken else parallel, form.precision, goal, fixed, tuning
    )
    return Decision(form, with_problem(replace(candidate, parallel=parallel), why, broken=broken is not None))


def compare(
    facts: ModelFacts, inventory: Inventory, goal: Goal, fixed: Mapping[str, object], tuning: Tuning | None = None
) -> list[tuple[Form, Candidate]]:
    """Every configuration of every precision once, those that run first, best first."""
    pinned, tuning = read_fixed(fixed), tuning or Tuning()
    refuse_two_contexts(goal, pinned)
    if inventory.gpu is None:
        return decide(facts, inventory, goal, pinned, tuning).tried
    seen: dict[tuple[str, str, Parallel], tuple[Form, Candidate]] = {}
    for weights in [None] if pinned.precision else [None, "fp8", "int4"]:
        for kv in [pinned.kv] if pinned.kv else ["auto", "fp8"]:
            pins = replace(pinned, weights=weights or pinned.weights, kv=kv)
            form = forms(facts, inventory, pins)[0]
            if weights is None or not form.problem:
                for row in _candidates(form, inventory, goal, pins, tuning):
                    seen.setdefault((row[1].precision.weights, kv, row[1].parallel), row)
    found = list(seen.values())
    found.sort(key=lambda pair: (bool(pair[1].problem), -pair[1].max_model_len, -pair[1].score(goal.goal)))
    return found


def _cost(chosen: Candidate, inventory: Inventory, goal: Goal) -> Cost:
    if goal.price_per_gpu_hour is None:
        return Cost()
    hour = goal.price_per_gpu_hour * inventory.gpus  # idle GPUs are paid for too
    speed = chosen.speed.throughput_tokens_per_s
    return Cost(round(hour, 2), round(hour / (speed * 3600) * 1e6, 3) if speed else None)


def _plan(
    made: Decision,
    inventory: Inventory,
    goal: Goal,
    reasons: tuple[Reason, ...],
    rejected: tuple[Rejected, ...],
    nearest: list[Nearest],
    doubt: str,
    passed_on: Mapping[str, object],
) -> Plan:
    form, chosen, cpu = made.form, made.chosen, inventory.gpu is None
    weights = chosen.precision.weights
    return Plan(
        version=VERSION,
        fits=made.fits,
        verdict="fits" if made.fits else "cannot run as asked" if chosen.broken else "does not fit",
        reason=chosen.problem or f"fits in {weights} as {chosen.parallel} with a context of {chosen.max_model_len:,}",
        model=form.facts,
        checkpoint=form.facts.location,
        inventory=inventory,
        goal=goal,
        precision=chosen.precision,
        parallel=chosen.parallel,
        max_model_len=chosen.max_model_len,
        settings=chosen.settings,
        memory=chosen.memory,
        speed=chosen.speed,
        cost=_cost(chosen, inventory, goal),
        engine_args=engine_args(
            form.facts, chosen.parallel, chosen.precision, chosen.settings, chosen.max_model_len, passed_on, cpu
        ),
        engine_env=cpu_environment(chosen.memory.kv_cache_bytes_per_gpu, chosen.settings.eager) if cpu else {},
        reasons=reasons,
        rejected=rejected,
        nearest=tuple(nearest),
        notes=(*form.facts.notes, *([inventory.note] if inventory.note else [])),
        warnings=tuple(said for said in (form.warning, doubt) if said),
    )
