"""A small all-reduce with the engine's own torch: what every step of a model over several nodes will do.

Runs in the runtime's Python, one process per node, with what to do in the variable CORRAL_ALL_REDUCE as JSON: rank,
world, master, port, backend (gloo or nccl), mib, limit_s. Prints one JSON object as its last line: whether the sum
was right, the time of a small and of a large all-reduce, and with NCCL over what it went, read from its own log.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import threading
import time
from typing import Any, Dict

SMALL_ROUNDS = 20
LARGE_ROUNDS = 3


def measure(order: Dict[str, Any]) -> Dict[str, Any]:
    # the engine's; by name, because nothing else here may need more than the standard library
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    nccl = order["backend"] == "nccl"
    device = torch.device("cuda", 0) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=float(order["limit_s"]))
    where = "tcp://%s:%d" % (order["master"], order["port"])
    rank, world = int(order["rank"]), int(order["world"])
    dist.init_process_group(order["backend"], init_method=where, rank=rank, world_size=world, timeout=limit)

    def timed(count: int, rounds: int) -> float:
        values = torch.full((count,), float(rank + 1), device=device)
        dist.all_reduce(values.clone())  # the first one sets up connections
        if nccl:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(rounds):
            again = values.clone()
            dist.all_reduce(again)
        if nccl:
            torch.cuda.synchronize()
        took = (time.perf_counter() - began) / rounds
        expected = world * (world + 1) / 2
        if not bool(torch.all(again == expected)):
            raise ArithmeticError("the sum is wrong: %s, not %s" % (again[:1].tolist(), expected))
        return took

    small_s = timed(1024, SMALL_ROUNDS)
    count = int(order["mib"]) << 18  # of 4 bytes each
    large_s = timed(count, LARGE_ROUNDS)
    moved = 2 * (world - 1) / world * count * 4  # what a ring sends from each node
    found = {"ok": True, "small_s": small_s, "large_s": large_s, "bytes_per_s": moved / large_s}
    dist.destroy_process_group()
    return found


def main() -> None:
    order = json.loads(os.environ["CORRAL_ALL_REDUCE"])

    def late() -> None:  # a peer that never comes must not hold us
        tell({"ok": False, "error": "no answer from the other nodes within %g s" % order["limit_s"]})

    timer = threading.Timer(float(order["limit_s"]), late)
    timer.daemon = True
    timer.start()
    try:
        report = measure(order)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        report = {"ok": False, "error": "%s: %s" % (type(error).__name__, lines[0][:300])}
    timer.cancel()
    tell(report)


def tell(report: Dict[str, Any]) -> None:
    print("\n" + json.dumps(report))  # noqa: T201
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
