"""The arithmetic of a plan, line by line, from the plan alone."""

from __future__ import annotations

from collections.abc import Iterator

from corral.base.wording import counted
from corral.plan.contract import Judged, Plan
from corral.plan.hardware.inventory import GIB
from corral.plan.reasons import load_words
from corral.plan.settings import largest_graph
from corral.plan.speed import rounded


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
    lines += [*_sum(plan), "", "Speed", *_speed(plan), "", "Reasons"]
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
    experts = f" × {m.experts} experts" if m.experts else ""
    yield f"  embedding      {m.vocab:,} × {m.hidden:,} = {c.embedding:,} parameters, {_gib(s.embedding)}"
    head = "tied to the embedding" if m.tied_embeddings else f"{c.head:,} parameters, {_gib(s.head)}"
    yield f"  head           {head}"
    yield (
        f"  attention      {m.layers} layers × ({m.heads} query and {m.kv_heads} KV heads of {m.head_dim})"
        f" = {c.query_output + c.key_value:,} parameters, {_gib(s.query_output + s.key_value)}"
    )
    yield (
        f"  MLP            {m.layers} layers × width {m.intermediate:,}{experts}"
        f" = {c.mlp:,} parameters, {_gib(s.mlp)}"
    )
    yield f"  norms, others  {c.small:,} parameters, {_gib(s.small)}"
    loaded = f"{_gib(plan.memory.weights_bytes)} loaded in {plan.precision.weights}"
    yield f"  together       {m.parameters:,} parameters, {loaded}"


def _cache(plan: Plan) -> Iterator[str]:
    m, memory = plan.model, plan.memory
    element = memory.kv_bytes_per_token // max(1, 2 * m.layers * m.kv_heads * m.head_dim)
    yield (
        f"  one token      2 × {m.layers} layers × {m.kv_heads} KV heads × {m.head_dim} × {element} bytes"
        f" = {memory.kv_bytes_per_token:,} bytes"
    )
    full = memory.kv_bytes_per_token * plan.max_model_len
    yield f"  one request    × {plan.max_model_len:,} tokens = {_gib(full)}"
    if m.sliding_window:
        yield f"  sliding        {m.sliding_layers} layers keep only the last {m.sliding_window:,} tokens"
    documented = _gib(memory.kv_bytes_per_token * 128_000)
    yield f"  128,000 tokens {documented}: the length for which documents give a figure, and call it GB"


def _sum(plan: Plan) -> Iterator[str]:
    m, s = plan.memory, plan.settings
    graphs = largest_graph(s, plan.inventory.kind)
    rows = [
        ("weights", m.weights_bytes_per_gpu, f"{plan.parallel}"),
        ("draft", m.draft_bytes_per_gpu, "of speculative decoding"),
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
        if size or name not in ("CUDA graphs", "draft"):
            yield f"  − {name:<12} {_gib(size):>12}   {why}"
    yield (
        f"  = KV cache     {_gib(m.kv_cache_bytes_per_gpu):>12}   {m.kv_bytes_per_token_per_gpu:,} bytes per token:"
        f" {m.kv_cache_tokens_per_replica:,} tokens per replica"
    )


def _speed(plan: Plan) -> Iterator[str]:
    s = plan.speed
    if s.decode_tokens_per_s is None or s.prefill_tokens_per_s is None:
        yield "  unknown: nothing is known of this GPU's bandwidth"
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
