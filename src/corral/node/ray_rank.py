"""One node of a private Ray cluster; on the head also `vllm serve`, once every node has joined.

    python3 ray_rank.py head|worker --address A --head H:PORT --nodes N --devices D [--cpu] [-- SERVE ARGUMENTS...]

Runs inside the runtime, which has Ray. The cluster belongs to the deployment alone: its port was free a moment ago,
its folder is private and short, every node presents the deployment's token (`RAY_AUTH_TOKEN_PATH`), and no node joins
a cluster that happens to run there. The server starts only after all nodes have joined, because vLLM would otherwise
wait for a placement group that can never form. Ends when Ray or the server does; the agent then ends the rest.

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

JOIN_S = 600.0  # container images may be pulled first; the agents end a start without progress earlier
CPU_RESOURCE = "corral_cpu"


def say(text: str) -> None:
    sys.stdout.write("corral ray: %s\n" % text)
    sys.stdout.flush()


def ray_command(options: argparse.Namespace) -> List[str]:
    """`ray start` in the foreground, with ports and folders that no other cluster on this node has."""
    named = ["object-manager", "node-manager", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export"]
    listen, *ports = free_ports(1 + len(named) + 4 * options.devices + 16)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address", options.address, "--include-log-monitor", "false"]
    command += ["--temp-dir", os.path.join(tempfile.gettempdir(), "ray")]
    command += ["--dashboard-agent-listen-port", str(listen)]
    for name in named:
        command += ["--%s-port" % name, str(ports.pop())]
    if options.role == "head":
        command += ["--head", "--port", options.head.rpartition(":")[2], "--include-dashboard", "false"]
        command += ["--ray-client-server-port", str(ports.pop())]
    else:
        command += ["--address", options.head]
    command += ["--worker-port-list", ",".join(str(port) for port in ports)]
    if options.cpu:
        command += ["--num-cpus", str(options.devices), "--num-gpus", "0", "--object-store-memory", "100000000"]
        command += ["--resources", json.dumps({CPU_RESOURCE: options.devices})]
    else:
        command += ["--num-gpus", str(options.devices)]
    return command


def _ray() -> Any:
    """The runtime's Ray; imported by name, because this file must load with the standard library alone."""
    return importlib.import_module("ray")


def joined(options: argparse.Namespace) -> List[str]:
    """Addresses of the nodes that are in the cluster now."""
    ray = _ray()
    if not ray.is_initialized():
        ray.init(address=options.head, logging_level="ERROR", log_to_driver=False, _node_ip_address=options.address)
    return sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])


def wait_for_nodes(options: argparse.Namespace, cluster: "subprocess.Popen[bytes]") -> bool:
    """Wait until every node has joined; false when Ray ended or a node did not come in time."""
    ray = _ray()
    until, before = time.monotonic() + JOIN_S, -1
    while time.monotonic() < until and cluster.poll() is None:
        try:
            nodes = joined(options)
        except Exception as error:  # Ray raises many kinds while it starts
            nodes = []
            if before < 0:
                say("waiting for Ray itself (%s)" % str(error).splitlines()[0][:200])
        if len(nodes) != before:
            before = len(nodes)
            say("%d of %d nodes have joined: %s" % (len(nodes), options.nodes, ", ".join(nodes)))
        if len(nodes) >= options.nodes:
            ray.shutdown()
            return True
        time.sleep(0.5)
    return False


def main(argv: List[str]) -> int:
    options_text, _, serve = "\0".join(argv).partition("\0--\0")
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["head", "worker"])
    parser.add_argument("--address", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args(options_text.split("\0"))
    cluster = subprocess.Popen(ray_command(options), stdin=subprocess.DEVNULL)
    server: Optional["subprocess.Popen[bytes]"] = None

    def stop(*_: object) -> None:
        for process in (server, cluster):
            if process is not None and process.poll() is None:
                process.terminate()

    signal.signal(signal.SIGTERM, stop)
    if options.role == "head":
        if not wait_for_nodes(options, cluster):
            say("not every node joined" if cluster.poll() is None else "Ray ended with code %s" % cluster.poll())
            stop()
            return 1
        server = subprocess.Popen(serve.split("\0"), env=dict(os.environ, RAY_ADDRESS=options.head))
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
