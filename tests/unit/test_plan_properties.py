"""What must hold of every plan, whatever the model, the hardware and the goal."""

import json
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from corral.base.record import from_json, to_json
from corral.plan.candidate import broken_layout, broken_settings, replicas_on
from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Parallel, Plan
from corral.plan.hardware.inventory import GPUS, Inventory
from corral.plan.memory import measure
from corral.plan.models.catalogue import CATALOGUE
from corral.plan.models.facts import facts_from_config, facts_from_entry

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "phi3", "phi")


@st.composite
def models(draw):
    if draw(st.booleans()):
        return facts_from_entry(CATALOGUE[draw(st.sampled_from(sorted(CATALOGUE)))])
    kv = draw(st.sampled_from([1, 2, 3, 4, 8, 12]))
    heads = kv * draw(st.sampled_from([1, 2, 4, 7, 8]))
    family = draw(st.sampled_from(FAMILIES))
    config = {
        "model_type": family,
        "hidden_size": heads * draw(st.sampled_from([64, 128])),
        "intermediate_size": draw(st.sampled_from([1536, 4096, 14336, 18944])),
        "num_hidden_layers": draw(st.integers(1, 100)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": draw(st.sampled_from([32000, 49152, 128256, 151936])),
        "max_position_embeddings": draw(st.sampled_from([2048, 8192, 32768, 131072])),
        "sliding_window": draw(st.sampled_from([None, 512, 4096])),
    }
    if family == "mixtral":
        config |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    return facts_from_config(config, "drawn", "drawn", "folder")


@st.composite
def inventories(draw):
    gpu = GPUS[draw(st.sampled_from(sorted(GPUS)))]
    return Inventory(gpu.kind, draw(st.sampled_from([1, 2, 3, 4, 6, 8])), draw(st.integers(1, 4)), gpu.memory_bytes)


goals = st.builds(
    Goal,
    context=st.none() | st.integers(1, 200_000),
    concurrency=st.none() | st.integers(1, 2000),
    goal=st.sampled_from(["balanced", "latency", "throughput"]),
    price_per_gpu_hour=st.none() | st.floats(0.1, 20),
)
fixes = st.fixed_dictionaries(
    {},
    optional={
        "tensor": st.integers(1, 16),
        "pipeline": st.integers(1, 8),
        "data": st.integers(1, 8),
        "weights": st.sampled_from(["bf16", "fp16", "fp8", "int8", "int4"]),
        "kv": st.sampled_from(["auto", "fp8", "fp8_e5m2"]),
        "quantization": st.sampled_from(["fp8", "fp8_per_block", "int8_per_channel_weight_only", "awq"]),
        "max_model_len": st.integers(1, 200_000),
        "gpu_memory_utilization": st.floats(0.1, 1.0),
        "max_num_batched_tokens": st.integers(1, 70_000),
        "max_num_seqs": st.integers(1, 4000),
        "eager": st.booleans(),
    },
)
few = settings(max_examples=60)


@few
@given(models(), inventories(), goals, fixes)
def test_every_plan_obeys_vllm_and_round_trips(model, inventory, goal, fixed):
    if "max_model_len" in fixed:
        goal = replace(goal, context=None)
    plan = make_plan(model, inventory, goal, fixed)
    assert from_json(Plan, json.loads(json.dumps(to_json(plan)))) == plan
    for key, value in fixed.items():
        places: dict[str, object] = {"kv": plan.precision}
        places |= dict.fromkeys(("tensor", "pipeline", "data"), plan.parallel)
        if key not in ("max_model_len", "weights", "quantization"):
            assert getattr(places.get(key, plan.settings), key) == value
    if plan.fits:
        assert plan.precision.weights == fixed.get("weights", plan.precision.weights)
        assert plan.precision.method == fixed.get("quantization", plan.precision.method)
        fitting_plan_obeys(plan, inventory, fixed.get("max_model_len") or goal.context)
    else:
        assert plan.reason


def fitting_plan_obeys(plan: Plan, inventory: Inventory, asked: int | None) -> None:
    assert broken_layout(plan.model, plan.parallel) is None
    assert broken_settings(plan.model, plan.settings, plan.max_model_len) is None
    assert 1 <= plan.parallel.data <= replicas_on(inventory, plan.parallel.tensor, plan.parallel.pipeline)
    assert plan.parallel.replica_gpus * plan.parallel.data <= inventory.gpus
    assert plan.max_model_len == asked if asked else plan.max_model_len <= plan.model.max_context
    memory = plan.memory
    assert memory.kv_cache_tokens_per_replica >= plan.max_model_len
    assert memory.weights_bytes_per_gpu + memory.kv_cache_bytes_per_gpu <= memory.budget_bytes_per_gpu
    assert memory.budget_bytes_per_gpu <= inventory.memory_bytes_per_gpu
    assert (plan.speed.decode_tokens_per_s or 0) > 0
    assert {r.field for r in plan.reasons} >= {"precision.weights", "parallel.tensor", "max_model_len"}


@few
@given(models(), inventories(), goals, st.booleans())
def test_twice_the_gpus_never_reduce_kv_tokens(model, inventory, goal, inside):
    pinned = {"weights": model.weights}  # a step down in precision would change what is compared
    larger = replace(inventory, gpus_per_node=inventory.gpus_per_node * 2)
    if not inside:
        larger = replace(inventory, nodes=inventory.nodes * 2)
    fewer, more = (make_plan(model, hardware, goal, pinned) for hardware in (inventory, larger))
    assume(fewer.fits)
    assert more.fits
    assert more.memory.kv_cache_tokens >= fewer.memory.kv_cache_tokens * 0.999  # rounding to blocks and contexts


@few
@given(models(), inventories(), st.integers(2, 4), st.data())
def test_wider_layouts_never_hold_fewer_tokens(model, inventory, stages, data):
    """From two GPUs on: the first one alone pays no communication buffers."""
    assume(stages <= model.layers)
    widths = [width for width in (2, 4, 8, 16) if not broken_layout(model, Parallel(width, stages))]
    assume(widths)
    plan = make_plan(model, inventory)
    args = (plan.precision, plan.settings, 2048)
    narrow = measure(model, inventory, Parallel(1, stages), *args)
    widened = measure(model, inventory, Parallel(data.draw(st.sampled_from(widths)), stages), *args)
    assert widened.kv_cache_tokens_per_replica >= narrow.kv_cache_tokens_per_replica


@few
@given(models(), inventories(), st.integers(1, 100_000), st.integers(1, 100_000))
def test_longer_context_never_raises_concurrency(model, inventory, one, other):
    short, long = sorted((min(one, model.max_context), min(other, model.max_context)))
    pinned = {
        "tensor": 1,
        "pipeline": 1,
        "weights": model.weights,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    }
    a = make_plan(model, inventory, Goal(context=short), pinned)
    b = make_plan(model, inventory, Goal(context=long), pinned)
    assume(b.fits)
    assert a.fits
    assert b.memory.full_length_requests <= a.memory.full_length_requests


@given(st.integers(1, 300), st.integers(1, 64))
def test_partition_is_vllms(layers, stages):
    """`get_pp_indices`: equal shares, the rest to the last stages but one, never to the last."""
    sizes = Parallel(pipeline=stages).layers_by_stage(layers)
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == layers // stages
    if stages > 1 and layers % stages:
        assert sizes[-2] == layers // stages + 1


@few
@given(models(), inventories(), goals)
def test_nearest_fits_really_fit(model, inventory, goal):
    plan = make_plan(model, inventory, goal)
    assert not (plan.fits and plan.nearest)
    for near in plan.nearest:
        assert near.kv_cache_tokens > 0
        assert near.change
