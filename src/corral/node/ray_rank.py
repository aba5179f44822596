"""One node's part of a private Ray cluster, and on the head `vllm serve` once every node has joined.

    python3 ray_rank.py head|worker --address A --head H:PORT --nodes N --devices D [--cpu] [-- SERVE ARGUMENTS...]

Runs inside the runtime, where Ray is. The cluster is the deployment's own: its port was free a moment ago, its
folder is private and short, every node shows the deployment's token (`RAY_AUTH_TOKEN_PATH`), and no node ever joins a
cluster that happens to run there. The server is not started before all nodes are counted in, because vLLM would wait
for a placement group that can never form. Ends when Ray or the server does; the agent then ends the rest.

Standard library and Ray only, Python 3.8 or later, nothing of corral.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, List, Optional

from .sockets import free_ports

JOIN_S = 600.0  # containers may be pulled first; the agents' own rules end a hopeless wait earlier
CPU_RESOURCE = "corral_cpu"


def say(text: str) -> None:
    sys.stdout.write("corral ray: %s\n" % text)
    sys.stdout.flush()


def ray_command(order: argparse.Namespace) -> List[str]:
    """`ray start` in the foreground, with ports and folders that no other cluster on this node has."""
    own = ["object-manager", "node-manager", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export"]
    listen, *ports = free_ports(1 + len(own) + 4 * order.devices + 16)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address", order.address, "--include-log-monitor", "false"]
    command += ["--temp-dir", os.path.join(tempfile.gettempdir(), "ray")]
    command += ["--dashboard-agent-listen-port", str(listen)]
    for name in own:
        command += ["--%s-port" % name, str(ports.pop())]
    if order.role == "head":
        command += ["--head", "--port", order.head.rpartition(":")[2], "--include-dashboard", "false"]
        command += ["--ray-client-server-port", str(ports.pop())]
    else:
        command += ["--address", order.head]
    command += ["--worker-port-list", ",".join(str(port) for port in ports)]
    if order.cpu:
        command += ["--num-cpus", str(order.devices), "--num-gpus", "0", "--object-store-memory", "100000000"]
        command += ["--resources", json.dumps({CPU_RESOURCE: order.devices})]
    else:
        command += ["--num-gpus", str(order.devices)]
    return command


def _ray() -> Any:
    """The runtime's; by name, because nothing else here may need more than the standard library."""
    return importlib.import_module("ray")


def joined(order: argparse.Namespace) -> List[str]:
    """Addresses of the nodes that are in the cluster now."""
    ray = _ray()
    if not ray.is_initialized():
        ray.init(address=order.head, logging_level="ERROR", log_to_driver=False, _node_ip_address=order.address)
    return sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])


def count_in(order: argparse.Namespace, cluster: "subprocess.Popen[bytes]") -> bool:
    """Wait until every node has joined; false when Ray ended or they never come."""
    ray = _ray()
    until, before = time.monotonic() + JOIN_S, -1
    while time.monotonic() < until and cluster.poll() is None:
        try:
            here = joined(order)
        except Exception as error:  # Ray raises many kinds while it starts
            here = []
            if before < 0:
                say("waiting for Ray itself (%s)" % str(error).splitlines()[0][:200])
        if len(here) != before:
            before = len(here)
            say("%d of %d nodes have joined: %s" % (len(here), order.nodes, ", ".join(here)))
        if len(here) >= order.nodes:
            ray.shutdown()
            return True
        time.sleep(0.5)
    return False


def main(argv: List[str]) -> int:
    own, _, serve = "\0".join(argv).partition("\0--\0")
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["head", "worker"])
    parser.add_argument("--address", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--cpu", action="store_true")
    order = parser.parse_args(own.split("\0"))
    cluster = subprocess.Popen(ray_command(order), stdin=subprocess.DEVNULL)
    server: Optional["subprocess.Popen[bytes]"] = None

    def stop(*_: object) -> None:
        for process in (server, cluster):
            if process is not None and process.poll() is None:
                process.terminate()

    signal.signal(signal.SIGTERM, stop)
    if order.role == "head":
        if not count_in(order, cluster):
            say("not every node joined" if cluster.poll() is None else "Ray ended with code %s" % cluster.poll())
            stop()
            return 1
        server = subprocess.Popen(serve.split("\0"), env=dict(os.environ, RAY_ADDRESS=order.head))
    while cluster.poll() is None and (server is None or server.poll() is None):
        time.sleep(0.3)
    if server is not None and server.poll() is not None:
        say("the server ended with code %s" % server.poll())
    else:
        say("Ray ended with code %s" % cluster.poll())
    stop()
    return int(server.wait(30)) if server is not None else int(cluster.wait(30))


def start() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    start()
