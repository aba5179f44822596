"""Runs all parts of the survey at once, each in its own thread."""

import json
import os
import sys
import threading
import time
from typing import Any, Callable, Dict

from ..network import interfaces, rdma
from .machine import cores, cpu, hf_token, identity, limits, memory, readiness, tools
from .storage import disks, fingerprints, nonces, paths, read_speed, shm, written
from .usage import containers, gpus, launches, ports

Json = Dict[str, Any]
LIMIT_S = 20.0

PARTS: Dict[str, Callable[[Json], Json]] = {
    "identity": identity,
    "cores": cores,
    "cpu": cpu,
    "memory": memory,
    "limits": limits,
    "tools": tools,
    "hf_token": hf_token,
    "readiness": readiness,
    "interfaces": interfaces,
    "rdma": rdma,
    "ports": ports,
    "gpus": gpus,
    "launches": launches,
    "containers": containers,
    "disks": disks,
    "shm": shm,
    "paths": paths,
    "written": written,
    "nonces": nonces,
    "fingerprints": fingerprints,
    "read_speed": read_speed,
}


def survey(request: Json, limit_s: float) -> Json:
    report: Json = {"began_s": time.time(), "errors": {}}
    answers: Dict[str, Json] = {}
    errors: Dict[str, str] = {}

    def work(name: str) -> None:
        try:
            answers[name] = PARTS[name](request)
        except Exception as error:
            errors[name] = "%s: %s" % (type(error).__name__, error)

    threads = {name: threading.Thread(target=work, args=(name,), daemon=True) for name in PARTS}
    until = time.monotonic() + limit_s
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            errors.setdefault(name, "no answer within %g s" % limit_s)
    for name in PARTS:
        report.update(answers.get(name, {}))
    report["errors"] = dict(errors)
    report["ended_s"] = time.time()
    return report


def start() -> None:
    request = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    print(json.dumps(survey(request, float(request.get("limit_s", LIMIT_S)))))  # noqa: T201
    sys.stdout.flush()
    os._exit(0)  # a part that hangs must not keep the connection open


if __name__ == "__main__":
    start()
