"""A small all-reduce with the engine's own torch, as every step of a model over several nodes does one.

Runs in the runtime's Python, one process per node. The variable CORRAL_ALL_REDUCE holds the request as JSON: rank,
world, master, port, backend (gloo or nccl), mib, limit_s. Prints one JSON object as its last line: whether the sum
was right, the times of a small and of a large all-reduce, or the error.
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


def measure(request: Dict[str, Any]) -> Dict[str, Any]:
    # the engine's; imported by name, because this file must load with the standard library alone
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    nccl = request["backend"] == "nccl"
    device = torch.device("cuda", 0) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=float(request["limit_s"]))
    where = "tcp://%s:%d" % (request["master"], request["port"])
    rank, world = int(request["rank"]), int(request["world"])
    dist.init_process_group(request["backend"], init_method=where, rank=rank, world_size=world, timeout=limit)

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
    count = int(request["mib"]) << 18  # of 4 bytes each
    large_s = timed(count, LARGE_ROUNDS)
    moved = 2 * (world - 1) / world * count * 4  # what a ring sends from each node
    report = {"ok": True, "small_s": small_s, "large_s": large_s, "bytes_per_s": moved / large_s}
    dist.destroy_process_group()
    return report


def main() -> None:
    request = json.loads(os.environ["CORRAL_ALL_REDUCE"])

    def late() -> None:  # a peer that never comes must not block this node
        finish({"ok": False, "error": "no answer from the other nodes within %g s" % request["limit_s"]})

    timer = threading.Timer(float(request["limit_s"]), late)
    timer.daemon = True
    timer.start()
    try:
        report = measure(request)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        report = {"ok": False, "error": "%s: %s" % (type(error).__name__, lines[0][:300])}
    timer.cancel()
    finish(report)


def finish(report: Dict[str, Any]) -> None:
    print("\n" + json.dumps(report))  # noqa: T201
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
