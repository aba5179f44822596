"""Why each number of a plan is what it is, and why the alternatives were not taken.

`reasons_for` gives one reason per field, which the plan carries. `explain` shows the arithmetic line by line, from
the plan alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from corral.base.wording import counted
from corral.plan.candidate import Candidate, Tuning, broken_layout, over_nodes, refused_tensor
from corral.plan.contract import Goal, Judged, Memory, Parallel, Plan, Reason, Rejected, Speed
from corral.plan.hardware.inventory import GIB, LINKS, Inventory
from corral.plan.judged import AS_SET, Row, gains, gib, setting_reasons
from corral.plan.models.facts import ModelFacts
from corral.plan.precision import Form
from corral.plan.settings import Fixed, largest_graph
from corral.plan.speed import READS_ONLY, rounded

_MOST_REJECTED = 12


def reasons_for(
    asked: ModelFacts, form: Form, chosen: Candidate, inventory: Inventory, goal: Goal, fixed: Fixed, tuning: Tuning
) -> tuple[Reason, ...]:
    """One reason per field, in the order a person would ask."""
    rows = [
        *_precision(asked, form, chosen, inventory, fixed),
        *_layout(form.facts, chosen, inventory, fixed),
        _context(form.facts, chosen, goal, fixed),
        *setting_reasons(chosen, inventory, goal, fixed),
        *_memory(form.facts, chosen, inventory, tuning),
        *_speed(chosen, inventory, tuning),
    ]
    worth = gains(form.facts, inventory, chosen, goal, tuning)
    return tuple(
        Reason(field, str(value), because + _worth(worth.get(field), chosen), worth.get(field))
        for field, value, because in rows
    )


def _worth(gain: float | None, chosen: Candidate) -> str:
    if gain is None:
        return ""
    asked = chosen.speed.concurrency
    load = f"at {asked:,} requests at once" if asked > 1 else "for one request"
    return f"; {gain:+.0%} {load}" if abs(gain) >= 0.005 else f"; no difference {load} that the roofline knows of"


def _precision(asked: ModelFacts, form: Form, chosen: Candidate, inventory: Inventory, fixed: Fixed) -> list[Row]:
    precision = chosen.precision
    how = {
        "native": "as the checkpoint stores it",
        "checkpoint": f"from the quantised checkpoint {form.facts.location}",
        "online": "vLLM quantises the 16-bit checkpoint while loading",
    }[precision.how]
    if form.problem:
        how = form.problem
    elif precision.how == "native" and precision.weights != asked.weights:
        how = f"the checkpoint's {asked.weights}, converted while loading"
        if precision.weights == "fp16" and asked.weights == "bf16":
            how += "; as many bytes, but values above 65,504 overflow"
            gpu = inventory.kind
            how = f"{inventory.gpu} does not compute in bf16; {how}" if gpu and gpu.half == "fp16" else how
    how = form.because or how
    if fixed.precision:
        how = f"{AS_SET}; {how}"
    elif precision.how != "native":
        how = f"{asked.weights} ({gib(asked.weights_bytes)} of weights) does not fit {inventory.label}; {how}"
    own = f"the model's own {32 if precision.compute == 'fp32' else 16} bits"
    kv = own if precision.kv == "auto" else "half the bytes per token; attention loses a little"
    kv = f"{AS_SET}: {kv}" if fixed.kv else kv
    return [("precision.weights", precision.weights, how), ("precision.kv", precision.kv, kv)]


def _layout(model: ModelFacts, chosen: Candidate, inventory: Inventory, fixed: Fixed) -> list[Row]:
    p, memory = chosen.parallel, chosen.memory
    if inventory.gpu is None:
        return [("parallel", p, "one process on one machine without a GPU")]
    left, full = gib(memory.kv_cache_bytes_per_gpu), bool(chosen.problem)
    tensor = f"{gib(memory.weights_bytes_per_gpu)} of weights on each GPU leave {left} for KV"
    if full:
        usable = gib(memory.budget_bytes_per_gpu)
        tensor = f"{gib(memory.weights_bytes_per_gpu)} of weights for each GPU, which has {usable} to use"
    elif p.replica_gpus == 1:
        tensor = f"the model fits one GPU ({gib(memory.weights_bytes_per_gpu)} of weights); no all-reduces"
    if model.latent and p.tensor > 1:
        tensor += "; each of them keeps the latents of all tokens, which have no heads to divide"
    elif p.tensor > model.kv_heads:
        tensor += f"; the {model.kv_heads} KV heads are copied {p.tensor // model.kv_heads} times"
    if over_nodes(p, inventory):
        tensor += f"; over nodes every layer waits for the network ({inventory.link}) twice"
    pipeline = "one stage: nothing waits for another"
    if p.pipeline > 1:
        across = p.replica_gpus > inventory.gpus_per_node and not over_nodes(p, inventory)
        pipeline = "between nodes only hidden states travel, once per stage" if across else "stages share the layers"
    data = "one replica"
    if p.data > 1:
        data = "replicas answer independently, and their speeds add up; for small models that beats a wider TP"
        if model.experts:
            data = (
                f"ranks of one engine: each attends to its own requests, and the {model.experts} experts of a layer"
                f" are divided over all {p.expert_ranks} GPUs, so that all of them step together"
            )
    idle = inventory.gpus - p.replica_gpus * p.data
    if idle:
        data += f"; {idle} of {inventory.gpus} GPUs stay idle"
    rows = [("tensor", p.tensor, tensor), ("pipeline", p.pipeline, pipeline), ("data", p.data, data)]
    if model.experts and p.expert_ranks > 1:
        rows.append(("expert", str(p.expert).lower(), _experts(model, p)))  # type: ignore[arg-type]
    return [
        (f"parallel.{name}", value, f"{AS_SET}; {why}" if getattr(fixed, name) is not None else why)
        for name, value, why in rows
    ]


def _experts(model: ModelFacts, p: Parallel) -> str:
    if p.expert:
        cut = broken_layout(model, replace(p, expert=False))
        usual = "; vLLM's recipes run data-parallel ranks this way" if p.data > 1 else ""
        because = f"; {cut.partition(';')[0]}" if cut else usual
        return f"every GPU holds whole experts, {model.experts} on {p.expert_ranks} GPUs{because}"
    return f"every GPU holds a part of each expert, 1 / {p.expert_ranks} of its width"


def _context(model: ModelFacts, chosen: Candidate, goal: Goal, fixed: Fixed) -> Row:
    length = chosen.max_model_len
    if fixed.max_model_len or goal.context:
        why = AS_SET
    elif length == model.max_context:
        why = "the model's own longest"
    elif chosen.settings.block_size == 128:
        why = f"shortened from the model's {model.max_context:,}: longer prompts take minutes on a CPU"
    else:
        why = f"shortened from the model's {model.max_context:,}: the KV cache holds no more; --context sets another"
    if not chosen.problem and not model.encoder:
        room = rounded(chosen.memory.full_length_requests)
        why += f"; room for {room} request{'s' * (room != '1')} of that length at once"
    return "max_model_len", length, why


def _memory(model: ModelFacts, chosen: Candidate, inventory: Inventory, tuning: Tuning) -> list[Row]:
    m, s, p = chosen.memory, chosen.settings, chosen.parallel
    rows: list[Row] = [
        ("memory.weights_bytes_per_gpu", m.weights_bytes_per_gpu, _weights_words(model, m)),
        *_draft(m, tuning),
        *_adapters(chosen, tuning),
        (
            "memory.activation_bytes_per_gpu",
            m.activation_bytes_per_gpu,
            f"{gib(m.activation_bytes_per_gpu)} at the peak of one pass over {s.max_num_batched_tokens:,} tokens,"
            f" or of sampling {s.max_num_seqs:,} requests",
        ),
    ]
    if inventory.gpu is not None:
        measured = "measured on one H200" if p.replica_gpus == 1 else "the part for NCCL is not yet measured"
        rows += [
            ("memory.graph_bytes_per_gpu", m.graph_bytes_per_gpu, _graphs(m)),
            ("memory.overhead_bytes_per_gpu", m.overhead_bytes_per_gpu, f"what torch does not manage; {measured}"),
        ]
        rows.append(("prompt_logprobs", "", _logprobs(model, chosen, inventory)))
    budget = f"{gib(m.budget_bytes_per_gpu)} minus all of the above leaves {gib(m.kv_cache_bytes_per_gpu)}"
    if inventory.gpu is None:
        budget = f"{gib(m.kv_cache_bytes_per_gpu)} set aside of {gib(inventory.host_available_bytes)} free"
    if model.encoder:
        return [*rows, ("memory.kv_cache_tokens", 0, "none: it reads a text at once and keeps nothing of it")]
    tokens = f"{budget} at {m.kv_bytes_per_token_per_gpu:,} bytes per token, in blocks of {s.block_size}"
    if tuning.source != "built in":
        tokens += f"; corrected by {tuning.source}"
    rows.append(("memory.kv_cache_tokens", m.kv_cache_tokens, tokens))
    return rows


def _draft(m: Memory, tuning: Tuning) -> Iterator[Row]:
    """What a draft of speculative decoding takes; on a CPU it is not planned for."""
    draft = tuning.draft
    if draft is not None and m.draft_bytes_per_gpu:
        layers = f"{draft.kv_layers} more layer{'s' * (draft.kv_layers > 1)} in the KV cache"
        yield (
            "memory.draft_bytes_per_gpu",
            m.draft_bytes_per_gpu,
            f"weights of {draft.name}, on the last stage; beside them {layers}, and hidden states in the activations;"
            " not yet measured",
        )


def _adapters(chosen: Candidate, tuning: Tuning) -> Iterator[Row]:
    s, folder = chosen.settings, tuning.adapters
    if s.lora:
        largest = f"{counted(folder.count, 'adapter')}, the largest of rank {folder.rank}" if folder else ""
        slots = "in one step; requests for others wait for one of these to end"
        taken = "of all slots, in every linear layer, used or not; what adapters cost in speed is not predicted"
        yield "max_lora_rank", s.max_lora_rank or 0, largest or "vLLM's default"
        yield "max_loras", s.max_loras or 0, f"{counted(s.max_loras or 0, 'adapter')} {slots}"
        yield "memory.adapter_bytes_per_gpu", chosen.memory.adapter_bytes_per_gpu, taken


def _graphs(m: Memory) -> str:
    taken = "taken out of the KV cache" if m.graphs_counted else "this vLLM does not take them out of the KV cache"
    return f"the captured batch sizes; {taken}"


def _weights_words(model: ModelFacts, m: Memory) -> str:
    how = "from its safetensors headers" if model.bytes_by_dtype else "computed from its config"
    words = f"{m.weights_bytes / 1e9:.1f} GB in all, {how}"
    if m.nominal_weights_bytes < 0.97 * m.weights_bytes:
        words += f"; guides count {m.nominal_weights_bytes / 1e9:.0f} GB, as if every tensor were quantised"
    return words


def _logprobs(model: ModelFacts, chosen: Candidate, inventory: Inventory) -> str:
    """vLLM computes prompt_logprobs outside its profile: fp32 scores of a whole chunk over the vocabulary."""
    entry = model.vocab * 10  # bf16 scores, fp32 copy, fp32 log-softmax
    free = inventory.memory_bytes_per_gpu - chosen.memory.budget_bytes_per_gpu
    need, safe = chosen.settings.max_num_batched_tokens * entry, max(0, int(free * 0.8) // entry)
    words = f"a full chunk of prompt_logprobs takes {gib(need)} outside the budget, which has {gib(free)}"
    if need <= free * 0.8:
        return words
    return f"{words}: for long prompts with prompt_logprobs set max_num_batched_tokens={safe // 256 * 256 or safe}"


def _speed(chosen: Candidate, inventory: Inventory, tuning: Tuning) -> list[Row]:
    s, e = chosen.speed, tuning.speed
    if s.decode_tokens_per_s is None:
        known = s.basis if chosen.speed.basis == READS_ONLY else f"nothing is known of the speed of {inventory.gpu}"
        return [("speed", "", known)]
    if inventory.gpu is None:
        names = ("decode_tokens_per_s", "prefill_tokens_per_s")
        return [(f"speed.{name}", getattr(s, name), s.basis) for name in names]
    bound = f"weights and KV at {100 * e.bandwidth:.0f}% of the memory bandwidth, {1e6 * e.layer_s:.0f} µs per layer"
    if chosen.parallel.tensor > 1:
        bound += ", two all-reduces per layer (not yet measured)"
    return [
        ("speed.decode_tokens_per_s", s.decode_tokens_per_s, f"{bound}; {s.basis}"),
        ("speed.prefill_tokens_per_s", s.prefill_tokens_per_s, f"{100 * e.matrix:.0f}% of the dense bf16 rate"
         f" ({100 * e.matrix_fp8:.0f}% in FP8); {s.basis}"),
        ("speed.throughput_tokens_per_s", s.throughput_tokens_per_s, f"{counted(s.concurrency, 'request')} at once of"
         f" {s.prompt_tokens} + {s.output_tokens} tokens; {s.basis}"),
        ("speed.load_s", s.load_s, load_words(s, e.startup_s)),
    ]  # fmt: skip


def load_words(speed: Speed, startup_s: float | None = None) -> str:
    """How a load time comes about; what a shared file system may do to it, where its speed was only assumed."""
    words = (
        f"{gib(speed.read_bytes_per_node)} read on each node at {speed.storage_gb_s:g} GB/s ({speed.storage_basis})"
    )
    if speed.storage_basis.startswith("assumed"):
        words += "; shared file systems often give 0.1 to 1: set it with --storage, or measure it with `corral doctor"
        words += " FOLDER`"
    return words if startup_s is None else f"{words}, then about {startup_s:.0f} s of compiling"


def rejected_for(
    asked: ModelFacts, chosen: Candidate, tried: list[tuple[Form, Candidate]], inventory: Inventory, goal: Goal
) -> tuple[Rejected, ...]:
    """The alternatives, nearest rivals first, each with the reason it lost."""
    rivals = [c for _, c in tried if c is not chosen]
    rivals.sort(key=lambda c: (bool(c.problem), -c.max_model_len, -c.score(goal.goal)))
    rows: list[Rejected] = []
    for rival in rivals:
        what = str(rival.parallel)
        if rival.precision.weights != chosen.precision.weights:
            what += f" in {rival.precision.weights}"
        wide = not rival.problem and over_nodes(rival.parallel, inventory)
        because = rival.problem or _worse(rival, chosen)
        rows.insert(0 if wide else len(rows), Rejected(what, because + (_across(inventory, goal) if wide else "")))
    if inventory.gpu is not None:
        rows = rows[:_MOST_REJECTED] + refused_tensor(asked, inventory)
    return tuple(rows)


def _across(inventory: Inventory, goal: Goal) -> str:
    """Why tensor ranks on several nodes were not taken, beside what they would give."""
    link = LINKS[inventory.link]
    if not link.fast:
        return f"; its tensor ranks are on several nodes, and {link.name} is too slow for that ({link.note})"
    if goal.goal == "latency":
        return "; its tensor ranks are on several nodes"
    return "; its tensor ranks are on several nodes, which --goal latency considers (not measured with Corral)"


def _worse(rival: Candidate, chosen: Candidate) -> str:
    if rival.max_model_len < chosen.max_model_len:
        return f"holds a context of only {rival.max_model_len:,}"
    pairs = (
        ("one stream", rival.speed.decode_tokens_per_s, chosen.speed.decode_tokens_per_s),
        ("all together", rival.speed.throughput_tokens_per_s, chosen.speed.throughput_tokens_per_s),
    )
    words = [f"{name} {_times(mine, best)}" for name, mine, best in pairs if mine and best]
    later, sooner = rival.speed.ttft_s, chosen.speed.ttft_s
    if later and sooner and later > sooner and all(mine >= best for _, mine, best in pairs if mine and best):
        words.append(f"but the first token after {rounded(later, 2)} s, not {rounded(sooner, 2)} s")
    if rival.memory.kv_cache_tokens < 0.7 * chosen.memory.kv_cache_tokens:
        words.append(f"only {rival.memory.kv_cache_tokens:,} KV tokens")
    return ", ".join(words) or "no better in anything known"


def _times(mine: float, best: float) -> str:
    ratio = mine / best
    if abs(ratio - 1) < 0.005:
        return "the same"
    return f"{ratio:.1f}× as fast" if ratio >= 1.95 else f"{100 * (ratio - 1):+.0f}%"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def explain(plan: Plan) -> list[str]:
    """Sections of plain text: weights, KV, the sum per GPU, speed; then every reason and every rejection."""
    lines = [
        "Weights",
        *_weights(plan),
        "",
        "KV cache",
        *_cache(plan),
        "",
        "One GPU" if plan.inventory.gpu else "Memory",
    ]
    lines += [*_sum(plan), "", "Speed", *_predicted_speed(plan), "", "Reasons"]
    lines += [
        f"  {r.field} = {r.value}: {r.because}" if r.value else f"  {r.field}: {r.because}" for r in plan.reasons
    ]
    if plan.judged:
        lines += ["", "Judged for this load", *map(_judged, plan.judged)]
    if plan.rejected:
        lines += ["", "Not taken", *(f"  {r.what}: {r.because}" for r in plan.rejected)]
    if plan.warnings:
        lines += ["", "Warnings", *(f"  {warning}" for warning in plan.warnings)]
    if plan.notes:
        lines += ["", "Notes", *(f"  {note}" for note in plan.notes)]
    return lines


def _judged(one: Judged) -> str:
    return f"  {one.what} is {'on' if one.taken else 'off'}: {one.because}. It pays when {one.pays_when}."


def _weights(plan: Plan) -> Iterator[str]:
    m, c, s = plan.model, plan.model.counted, plan.model.stored
    yield f"  embedding      {m.vocab:,} × {m.hidden:,} = {c.embedding:,} parameters, {_gib(s.embedding)}"
    head = "tied to the embedding" if m.tied_embeddings else f"{c.head:,} parameters, {_gib(s.head)}"
    yield f"  head           {head}"
    yield (
        f"  attention      {m.layers} layers × ({m.heads} query and {m.kv_heads} KV heads of {m.head_dim})"
        f" = {c.query_output + c.key_value:,} parameters, {_gib(s.query_output + s.key_value)}"
    )
    width = f"{m.layers} layers × width {m.intermediate:,} = " if not m.experts else ""
    yield f"  MLP            {width}{c.mlp:,} parameters, {_gib(s.mlp)}"
    others = (
        ("experts", c.experts, s.experts, f"{m.experts_per_token} of {m.experts} for each token"),
        ("states", c.mixer, s.mixer, "linear attention and Mamba"),
        ("latents", c.copied, s.copied, "on every tensor rank"),
        ("towers", c.tower, s.tower, "images and sound"),
    )
    for name, parameters, size, words in others:
        if parameters:
            yield f"  {name:<14} {parameters:,} parameters, {_gib(size)}: {words}"
    yield f"  norms, others  {c.small:,} parameters, {_gib(s.small)}"
    loaded = f"{_gib(plan.memory.weights_bytes)} loaded in {plan.precision.weights}"
    yield f"  together       {m.parameters:,} parameters, {loaded}"


def _cache(plan: Plan) -> Iterator[str]:
    m, memory = plan.model, plan.memory
    if m.encoder:
        yield "  none           an encoder reads a text at once and keeps nothing"
        return
    plain = 2 * m.layers * m.kv_heads * m.head_dim
    numbers = sum(one.layers * one.heads * one.width for one in m.caches if one.width)
    if numbers == plain:
        yield (
            f"  one token      2 × {m.layers} layers × {m.kv_heads} KV heads × {m.head_dim} ×"
            f" {memory.kv_bytes_per_token // max(1, plain)} bytes = {memory.kv_bytes_per_token:,} bytes"
        )
    else:
        yield f"  one token      {memory.kv_bytes_per_token:,} bytes"
        for one in m.caches:
            yield f"    {one.kind:<12} {one.words}"
    full = m.kept_bytes(plan.max_model_len, plan.kv_element)
    yield f"  one request    × {plan.max_model_len:,} tokens = {_gib(full)}"
    if m.sliding_window:
        yield f"  sliding        {m.sliding_layers} layers keep only the last {m.sliding_window:,} tokens"
    documented = _gib(m.kept_bytes(128_000, plan.kv_element))
    yield f"  128,000 tokens {documented}: the length for which guides give a figure, and call it GB"


def _sum(plan: Plan) -> Iterator[str]:
    m, s = plan.memory, plan.settings
    graphs = largest_graph(s, plan.inventory.kind)
    rows = [
        ("weights", m.weights_bytes_per_gpu, f"{plan.parallel}"),
        ("draft", m.draft_bytes_per_gpu, "of speculative decoding"),
        ("adapters", m.adapter_bytes_per_gpu, f"{s.max_loras} slots of rank {s.max_lora_rank}"),
        (
            "activations",
            m.activation_bytes_per_gpu,
            f"{s.max_num_batched_tokens:,} tokens, {s.max_num_seqs:,} requests",
        ),
        ("CUDA graphs", m.counted_graph_bytes, "none: eager" if s.eager else f"sizes up to {graphs:,}"),
        ("overhead", m.overhead_bytes_per_gpu, "what torch does not manage"),
    ]
    if m.correction_bytes_per_gpu:
        rows.append(("learned", m.correction_bytes_per_gpu, "from earlier deployments"))
    share = f"{s.gpu_memory_utilization:g} of {_gib(plan.inventory.memory_bytes_per_gpu)}"
    yield f"  budget         {_gib(m.budget_bytes_per_gpu):>12}   {share if plan.inventory.gpu else 'free memory'}"
    for name, size, why in rows:
        if size or name not in ("CUDA graphs", "draft", "adapters"):
            yield f"  − {name:<12} {_gib(size):>12}   {why}"
    yield (
        f"  = KV cache     {_gib(m.kv_cache_bytes_per_gpu):>12}   {m.kv_bytes_per_token_per_gpu:,} bytes per token:"
        f" {m.kv_cache_tokens_per_replica:,} tokens per replica"
    )


def _predicted_speed(plan: Plan) -> Iterator[str]:
    s = plan.speed
    if s.decode_tokens_per_s is None or s.prefill_tokens_per_s is None:
        yield f"  {s.basis}" if s.basis == READS_ONLY else "  unknown: nothing is known of this GPU's bandwidth"
        return
    each_ms = rounded(1000 / s.decode_tokens_per_s)
    yield f"  one stream     {rounded(s.decode_tokens_per_s)} tokens/s, {each_ms} ms per token"
    yield f"  prefill        {rounded(s.prefill_tokens_per_s)} tokens/s per replica"
    together = rounded(s.throughput_tokens_per_s or 0)
    yield f"  together       {together} tokens/s at {counted(s.concurrency, 'request')}"
    yield f"  first token    {s.ttft_s:g} s after {s.prompt_tokens} prompt tokens, alone"
    yield f"  basis          {s.basis}"
    if s.load_s is not None:
        yield f"  load           {s.load_s:g} s" + (f": {load_words(s)}" if s.storage_gb_s else "")
