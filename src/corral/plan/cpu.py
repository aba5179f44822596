"""Plans for a machine without a GPU: vLLM's CPU build, and a KV cache that leaves the machine room to breathe."""

from __future__ import annotations

from corral.plan.candidate import Candidate
from corral.plan.contract import UTILISATION, EngineSettings, Goal, Memory, Parallel, Precision
from corral.plan.cpu_speed import Rates, predict_cpu
from corral.plan.fixed import Fixed
from corral.plan.hardware.inventory import GIB, Inventory
from corral.plan.memory import convert
from corral.plan.models.architecture import DTYPE_BYTES
from corral.plan.models.facts import ModelFacts

_BLOCK = 128  # vLLM's CPU platform
_PROCESS_BYTES = int(1.5 * GIB)  # Python, torch and the compiled model, two processes; seen with SmolLM2
_CONTEXT = 8192  # longer prompts take minutes on a CPU
_KV_MOST = 4 * GIB
_SEQS = 128  # vLLM's own default here; twice the tokens/s of 32 at once with SmolLM2 on two cores (docs/log.md)
_LATENCY_SEQS = 16


def work_out_cpu(
    model: ModelFacts,
    inventory: Inventory,
    goal: Goal,
    fixed: Fixed,
    precision: Precision,
    rates: Rates,
    parallel: Parallel | None = None,
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
    whole_token = model.kv_bytes_per_token(1.0 if precision.kv.startswith("fp8") else element)
    per_token = -(-whole_token // parallel.replica_gpus)
    free = inventory.host_available_bytes - here - activation - _PROCESS_BYTES
    wanted = per_token * context * max(2, min(goal.concurrency or 8, 8))
    space = max(GIB, min(wanted, _KV_MOST, free * 3 // 4)) // GIB * GIB
    if asked and per_token * (context + _BLOCK) > space:
        space = -(-per_token * (context + _BLOCK) // GIB) * GIB
    blocks = space // (per_token * _BLOCK)
    tokens = int(blocks / -(-context // _BLOCK) * context)
    problem = ""
    if free < space:
        need = (here + activation + _PROCESS_BYTES + space) / GIB
        problem = f"it needs {need:.1f} GiB of memory and {inventory.host_available_bytes / GIB:.1f} GiB are free"
    elif context > model.max_context:
        problem = f"a context of {context} is beyond the model's {model.max_context}"
    elif tokens - _BLOCK < context:
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
    )
    settings = EngineSettings(
        fixed.gpu_memory_utilization or UTILISATION,
        batched,
        seqs,
        bool(fixed.eager),
        _BLOCK,
        fixed.api_servers or parallel.data,
        fixed.stream_interval or 1,
        async_scheduling=fixed.async_scheduling is not False,
    )
    read = parts.total - (0 if model.tied_embeddings else parts.embedding)
    speed = predict_cpu(model, rates, settings, goal, read)
    return Candidate(parallel, precision, settings, context, memory, speed, problem)
