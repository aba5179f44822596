"""How many API server processes a deployment gets, and how many tokens they stream together.

One process streams 9,000 to 16,000 tokens a second, however quick the GPU behind it is: an H200 with an 8B model and
256 requests at once gave 9,203 with one process, 14,541 with four, 15,110 with eight (docs/log.md). Replicas of one
engine get one each, which is vLLM's own default; more of them were not measured.
"""

from __future__ import annotations

import math

from corral.plan.contract import Parallel
from corral.plan.hardware.inventory import Inventory

EASY_TOKENS_S = 2_500.0  # that each of several processes streams while nothing waits for it
ALONE_TOKENS_S = 4_000.0  # up to here one is enough: at 7,700 it costs 5% already
BURST = 4
_MOST = 8  # more were not measured
_MOST_UNSEEN = 4  # where nobody counted the cores


def api_servers(inventory: Inventory, parallel: Parallel, wanted_tokens_s: float | None) -> int:
    """Processes that stream what the GPUs give, as far as the cores allow; `wanted_tokens_s` None: not known."""
    if parallel.data > 1:
        return parallel.data
    if inventory.gpu is None or wanted_tokens_s is None or parallel.replica_gpus > inventory.gpus_per_node:
        return 1  # over nodes only the head has them, and no model that needs several streams so much
    busy = parallel.replica_gpus + 1  # a worker for each GPU, and the scheduler
    room = (inventory.cpu_cores - busy) // 2 if inventory.cpu_cores else _MOST_UNSEEN
    wanted = math.ceil(wanted_tokens_s / EASY_TOKENS_S) if wanted_tokens_s > ALONE_TOKENS_S else 1
    return max(1, min(wanted, room, _MOST))


def stream_interval(goal: str, wanted_tokens_s: float | None) -> int:
    """How many tokens are streamed together: several where throughput is the goal and streaming costs some of it.

    Fewer chunks gained 2% at 256 requests at once and 11% at 1,024 with four processes, 14 and 24% with one. Whoever
    reads along sees words come in bursts, so no other goal gets them; a first token is never held back.
    """
    return BURST if goal == "throughput" and wanted_tokens_s is not None and wanted_tokens_s > ALONE_TOKENS_S else 1


def streamed_tokens_s(processes: int, replicas: int, of_one: float, interval: int = 1, chunk_s: float = 0.0) -> float:
    """What the processes of one replica stream at most; `chunk_s` is what of a token's cost is its own chunk."""
    each_s = max(1e-9, 1 / of_one - chunk_s) + chunk_s / interval if of_one < math.inf else 0.0
    return max(1.0, processes / replicas) / each_s if each_s else math.inf
