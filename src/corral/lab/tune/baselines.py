"""Flags of others that a run is compared with: each is one more setup of the race, measured like all the rest."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import replace

from corral.base.errors import DoesNotFitError
from corral.deploy.lifecycle.decision import DeployRequest, sized
from corral.engines.planned import read_back
from corral.lab.tune.knobs import Knob, KnobKind
from corral.plan.contract import UTILISATION, Plan
from corral.plan.judged import vllm_defaults
from corral.plan.settings import own_largest

RANDOM = "random"  # a search, not a setup (see `random_search`)
BASELINES = ("stock", "digitalocean")
# its documented deployment, without the split over nodes, which the plan decides
DIGITALOCEAN = (
    "--enforce-eager --dtype float16 --gpu-memory-utilization 0.99 --max-num-batched-tokens 65536"
    " --no-enable-chunked-prefill"
)


def baseline_knobs(plan: Plan, request: DeployRequest, wanted: tuple[str, ...]) -> tuple[Knob, ...]:
    """What was asked for, as knobs whose one value is a line of flags."""
    lines = {"stock": _stock, "digitalocean": _digitalocean}
    named = dict.fromkeys(wanted)
    return tuple(Knob(f"baseline {name}", (lines[name](plan, request),), KnobKind.BASELINE) for name in named)


def _stock(plan: Plan, request: DeployRequest) -> str:
    """What `vllm serve` takes where nothing is said, of all that the plan says."""
    default = vllm_defaults(plan.inventory, plan.parallel.data)
    line = (
        f"--max-num-seqs {default['max_num_seqs']} --max-num-batched-tokens {default['max_num_batched_tokens']}"
        f" --api-server-count {default['api_servers']} --stream-interval 1 --gpu-memory-utilization {UTILISATION}"
        " --no-enforce-eager --async-scheduling"
    )
    with contextlib.suppress(DoesNotFitError):
        settings = sized(replace(request, fixed={**request.fixed, **read_back(shlex.split(line)).fields}))[
            1
        ].plan.settings
        if settings.max_graph_size:  # otherwise vLLM is told nothing, and an old one does not know the flag
            line += f" --max-cudagraph-capture-size {own_largest(settings, plan.inventory.kind)}"
    return line


def _digitalocean(_: Plan, request: DeployRequest) -> str:
    context = "" if request.goal.context or "max_model_len" in request.fixed else " --max-model-len 8192"
    return DIGITALOCEAN + context
