"""Flags of others that a run is compared with: each is one more setup of the race, measured like all the rest."""

from __future__ import annotations

from dataclasses import replace

from corral.lifecycle.bringup import Wish
from corral.plan import Plan
from corral.plan.contract import UTILISATION
from corral.plan.gains import vllm_defaults
from corral.plan.graphs import own_largest, sized_elsewhere
from corral.tune.setups import Knob, KnobKind

__all__ = ["BASELINES", "DIGITALOCEAN", "RANDOM", "baseline_knobs"]

RANDOM = "random"  # a search, not a setup (see `random_search`)
BASELINES = ("stock", "digitalocean")
# its documented deployment, without the split over nodes, which the plan decides
DIGITALOCEAN = (
    "--enforce-eager --dtype float16 --gpu-memory-utilization 0.99 --max-num-batched-tokens 65536"
    " --no-enable-chunked-prefill"
)


def baseline_knobs(plan: Plan, wish: Wish, wanted: tuple[str, ...]) -> tuple[Knob, ...]:
    """What was asked for, as knobs whose one value is a line of flags."""
    lines = {"stock": _stock(plan, sized_elsewhere(wish.extra_args)), "digitalocean": _digitalocean(wish)}
    return tuple(Knob(f"baseline {name}", (lines[name],), KnobKind.BASELINE) for name in dict.fromkeys(wanted))


def _stock(plan: Plan, own_graphs: bool) -> str:
    """What `vllm serve` takes where nothing is said, of all that the plan says; `own_graphs`: of them it is."""
    default = vllm_defaults(plan.inventory, plan.parallel.data)
    seats = replace(plan.settings, max_num_seqs=int(default["max_num_seqs"] or 0))
    size = default["max_graph_size"] or own_largest(seats)
    graphs = f" --max-cudagraph-capture-size {size}" if plan.inventory.gpu and not own_graphs else ""
    return (
        f"--max-num-seqs {default['max_num_seqs']} --max-num-batched-tokens {default['max_num_batched_tokens']}"
        f" --api-server-count {default['api_servers']} --stream-interval 1 --gpu-memory-utilization {UTILISATION}"
        f" --no-enforce-eager --async-scheduling{graphs}"
    )


def _digitalocean(wish: Wish) -> str:
    context = "" if wish.goal.context or "max_model_len" in wish.fixed else " --max-model-len 8192"
    return DIGITALOCEAN + context
