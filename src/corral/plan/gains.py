"""What each of the plan's settings is worth at the stated load, against vLLM's own default of it alone. Pure."""

from __future__ import annotations

from dataclasses import replace

from corral.plan.candidate import Candidate, Tuning
from corral.plan.contract import EngineSettings, Goal
from corral.plan.hardware.inventory import GIB, Inventory
from corral.plan.models.facts import ModelFacts
from corral.plan.speed import predict


def vllm_defaults(inventory: Inventory, replicas: int) -> dict[str, int | bool | None]:
    """What `vllm serve` would take where nothing is said (0.32, `EngineArgs`)."""
    large = inventory.memory_bytes_per_gpu >= 70 * GIB and not (inventory.gpu or "").startswith("A100")
    return {
        "max_num_batched_tokens": 8192 if large else 2048,
        "max_num_seqs": 1024 if large else 256,
        "api_servers": replicas,
        "stream_interval": 1,
        "eager": False,
        "max_graph_size": None,
    }


def gains(model: ModelFacts, inventory: Inventory, chosen: Candidate, goal: Goal, tuning: Tuning) -> dict[str, float]:
    """The relative gain in throughput of each setting that is not vLLM's default."""
    now = chosen.speed.throughput_tokens_per_s
    if inventory.kind is None or not now or chosen.problem:
        return {}
    asked = goal.concurrency or chosen.speed.concurrency

    def speed(settings: EngineSettings) -> float:
        shape = (model, inventory, chosen.parallel, chosen.precision, settings, chosen.memory)
        return predict(*shape, goal, asked, tuning.speed).throughput_tokens_per_s or 0.0

    found = {}
    for field, default in vllm_defaults(inventory, chosen.parallel.data).items():
        if getattr(chosen.settings, field) != default:
            other = speed(replace(chosen.settings, **{field: default}))  # type: ignore[arg-type]
            if other:
                found[field] = round(now / other - 1, 3)
    return found
