"""What `srun` starts on each node of a job: finds addresses and ports, fills in this rank's spec, becomes the agent.

    python3 -I slurm_start.py FOLDER      # in a job step with one task per node

The nodes of a job are known only when it runs. Each rank writes its addresses into the shared folder; the head waits
for all of them, chooses a network that joins them and free ports, and writes the rendezvous. Each rank then replaces
the tokens in its template with addresses and ports and becomes its agent. What an earlier attempt of the same job
left (SLURM put it back into the queue) is set aside first.

Standard library only, Python 3.8 or later, nothing of corral: the file is copied to where the agents run.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import sys
import time
from typing import Any, Dict, List, Optional

from .files import read_json, read_number, read_text, write_json
from .network import addresses, choose_adapters, default_interface, rdma_ports
from .sockets import free_ports

Json = Dict[str, Any]
WAIT_S = 600.0  # nodes of one job may be minutes apart: prologues, slow file systems
UP = ("up", "unknown")  # a driver that does not tell counts as up
MAY_BE_EMPTY = ("NCCL_IB_HCA", "NCCL_IB_DISABLE")
VIRTUAL = re.compile(r"^(lo|docker|virbr|veth|br-|cni|flannel|podman|tun|tap)")


# ---------------------------------------------------------------------------------------------------------- addresses
def interfaces() -> List[Json]:
    """The node's own IPv4 addresses that others may reach, fastest first."""
    found = []
    for name, rows in addresses().items():
        folder = "/sys/class/net/" + name
        up = int(read_text(folder + "/flags") or "0", 16) & 1 and read_text(folder + "/operstate") in UP
        ipv4 = [(address, prefix) for family, address, prefix in rows if family == socket.AF_INET]
        if VIRTUAL.match(name) or not up or not ipv4 or ipv4[0][0].startswith("169.254."):
            continue
        found.append(
            {
                "interface": name,
                "address": ipv4[0][0],
                "network": str(ipaddress.ip_network("%s/%d" % ipv4[0], strict=False)),
                "infiniband": read_number(folder + "/type") == 32,
                "speed": read_number(folder + "/speed"),
            }
        )
    return sorted(found, key=lambda one: (not one["infiniband"], -one["speed"]))


def named_address() -> str:
    """The address of this node's name; empty when others cannot use it."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        return "" if address.startswith("127.") else address
    return ""


def choose_network(ranks: List[Json], wanted: str = "") -> List[Json]:
    """The address of every rank: all on one network, the fastest of the head's that joins them."""
    for head in ranks[0]["candidates"]:
        if wanted and head["interface"] != wanted:
            continue
        joined = [_on_network(rank, head["network"], wanted) for rank in ranks]
        if all(joined) and _all_differ(joined):
            return [one for one in joined if one]
    routed = [_by_name(rank, wanted) for rank in ranks]  # a network per rack, with routing between them
    if all(routed) and _all_differ(routed):
        return [one for one in routed if one]
    addresses_text = "; ".join(
        "%s has %s"
        % (rank["name"], ", ".join("%(interface)s %(address)s" % one for one in rank["candidates"]) or "none")
        for rank in ranks
    )
    what = "interface %s joins" % wanted if wanted else "network joins"
    raise SystemExit("corral: no %s all nodes of this job: %s" % (what, addresses_text))


def _all_differ(found: List[Optional[Json]]) -> bool:
    return len({one["address"] for one in found if one}) == len(found)


def _by_name(rank: Json, interface: str) -> Optional[Json]:
    """The wanted interface, or the one with the address of the node's name."""
    for one in rank["candidates"]:
        if one["interface"] == interface if interface else one["address"] == rank["named"]:
            return dict(one)
    return None


def _on_network(rank: Json, wanted: str, interface: str) -> Optional[Json]:
    for one in rank["candidates"]:
        if one["network"] == wanted and (not interface or one["interface"] == interface):
            return dict(one)
    return None


# -------------------------------------------------------------------------------------------------------------- files
def set_aside(rank_folder: str, attempt: str) -> None:
    """Move what an earlier attempt of this job wrote to a folder of its own."""
    before = read_json(os.path.join(rank_folder, "address.json")).get("attempt")
    if before in (None, attempt):
        return
    aside = os.path.join(rank_folder, "attempt-" + str(before).replace("/", "-"))
    os.makedirs(aside, mode=0o700, exist_ok=True)
    for name in os.listdir(rank_folder):
        path = os.path.join(rank_folder, name)
        if name != "template.json" and os.path.isfile(path):
            os.replace(path, os.path.join(aside, name))


def refuse_other_launch(template: Json, folder: str) -> None:
    """End a job that was submitted for an earlier launch, whose folder another one has taken since."""
    job_name = os.environ.get("SLURM_JOB_NAME", "")
    carried = re.search(r"\.([0-9a-f]{16})$", job_name)
    launch_id = template.get("launch_id")
    if carried and carried[1] != launch_id:
        raise SystemExit("corral: %s is now of launch %s, not of job %s" % (folder, launch_id, job_name))


def wait_for_all(folder: str, count: int, attempt: str) -> List[Json]:
    """The addresses of every rank, once all have written theirs."""
    until = time.monotonic() + WAIT_S
    while True:
        ranks = [read_json(os.path.join(folder, "rank%d" % rank, "address.json")) for rank in range(count)]
        missing = [str(rank) for rank, one in enumerate(ranks) if one.get("attempt") != attempt]
        if not missing:
            return ranks
        if time.monotonic() > until:
            raise SystemExit("corral: rank %s did not write its address within %d s" % (", ".join(missing), WAIT_S))
        time.sleep(0.2)


def wait_for_rendezvous(path: str, attempt: str) -> Json:
    until = time.monotonic() + 2 * WAIT_S
    while time.monotonic() < until:
        meeting = read_json(path)
        if meeting.get("attempt") == attempt:
            return meeting
        time.sleep(0.2)
    raise SystemExit("corral: the head of this job never wrote the addresses")


# --------------------------------------------------------------------------------------------------------------- spec
def fill(value: Any, tokens: Dict[str, str]) -> Any:
    """The value with every token in its texts replaced."""
    if isinstance(value, dict):
        return {key: fill(one, tokens) for key, one in value.items()}
    if isinstance(value, list):
        return [fill(one, tokens) for one in value]
    if isinstance(value, str) and "@" in value:
        return re.sub(r"@[A-Z]+(?:_[A-Z]+)*\d*@", lambda match: tokens.get(match[0], match[0]), value)
    return value


def without_empty(value: Any) -> Any:
    """The value without empty variables of NCCL, which then chooses by itself."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if not (key in MAY_BE_EMPTY and one in ("", "="))}
        return {key: without_empty(one) for key, one in kept.items()}
    return [without_empty(one) for one in value] if isinstance(value, list) else value


def adapters(ranks: List[Json]) -> Json:
    """The RDMA adapters of all ranks, in NCCL's form; empty where NCCL chooses by itself."""
    nodes = []
    for rank in ranks:
        networks: Dict[str, List[str]] = {}
        for one in rank["candidates"]:
            networks.setdefault(one["interface"], []).append(one["network"])
        nodes.append({"name": rank["name"], "rdma": rank["rdma"], "networks": networks, "default": rank["default"]})
    ports, sockets_only, why = choose_adapters(nodes)
    if why:
        sys.stdout.write("corral: %s\n" % why)
    return {"hcas": [",".join(names) for names in ports], "sockets_only": sockets_only}


def complete(template: Json, meeting: Json) -> Json:
    """The spec of one rank: the template with this job's addresses, ports and names."""
    ports = meeting["ports"]
    tokens = {"@PORT@": str(ports["serve"]), "@MASTER_PORT@": str(ports["master"]), "@GANG_PORT@": str(ports["gang"])}
    tokens.update(("@ADDRESS%d@" % number, address) for number, address in enumerate(meeting["addresses"]))
    tokens.update(("@INTERFACE%d@" % number, name) for number, name in enumerate(meeting["interfaces"]))
    hcas = meeting["hcas"] or [""] * len(meeting["addresses"])
    tokens.update(("@HCA%d@" % number, adapters) for number, adapters in enumerate(hcas))
    tokens["@NO_RDMA@"] = "1" if meeting["sockets_only"] else ""
    spec: Json = without_empty(fill(template, tokens))
    if spec.get("serve") and not spec["serve"]["port"]:
        spec["serve"]["port"] = ports["serve"]
    if spec.get("gang"):
        spec["gang"].update(names=meeting["names"], head=meeting["addresses"][0])
        spec["gang"]["port"] = spec["gang"].get("port") or ports["gang"]
    return spec


def endpoint(spec: Json, own: Json) -> Json:
    """The endpoint for users: by the address of the node's name, where the server listens on that."""
    host, port = spec["serve"]["host"], spec["serve"]["port"]
    if host in ("", "0.0.0.0", "::"):  # noqa: S104
        addresses = [one["address"] for one in own["candidates"]]
        host = own["named"] if own["named"] in addresses or not addresses else addresses[0]
    url = "http://[%s]:%d/v1" % (host, port) if ":" in host else "http://%s:%d/v1" % (host, port)
    return {"base_url": url, "model": spec["serve"]["model"], "key_file": spec["serve"]["key_file"]}


def _three_ports() -> List[int]:
    ports = free_ports(3)
    if len(ports) < 3:
        raise SystemExit("corral: this node has no free ports")
    return ports


def main(folder: str) -> int:
    os.umask(0o077)
    rank, count = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    attempt = "%s.%s" % (os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0"))
    rank_folder = os.path.join(folder, "rank%d" % rank)
    template = read_json(os.path.join(rank_folder, "template.json"))
    if not template:
        raise SystemExit("corral: %s/template.json is missing: is this folder on a shared file system?" % rank_folder)
    refuse_other_launch(template, folder)
    set_aside(rank_folder, attempt)
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    own = {"attempt": attempt, "name": name, "named": named_address(), "candidates": interfaces()}
    own.update(rdma=rdma_ports(), default=default_interface())
    write_json(os.path.join(rank_folder, "address.json"), own)
    rendezvous = os.path.join(folder, "rendezvous.json")
    if rank == 0:
        ranks = wait_for_all(folder, count, attempt)
        wanted = template.get("interface", "")
        chosen = choose_network(ranks, wanted) if count > 1 else []
        serve, master, gang = _three_ports()
        meeting: Json = {
            "attempt": attempt,
            "names": [one["name"] for one in ranks],
            "addresses": [one["address"] for one in chosen] or [own["named"] or "127.0.0.1"],
            "interfaces": [one["interface"] for one in chosen],
            "ports": {"serve": serve, "master": master, "gang": gang},
        }
        meeting.update(adapters(ranks) if count > 1 else {"hcas": [], "sockets_only": False})
        write_json(rendezvous, meeting)
    else:
        meeting = wait_for_rendezvous(rendezvous, attempt)
    template.pop("interface", None)
    spec = complete(template, meeting)
    write_json(os.path.join(rank_folder, "spec.json"), spec)
    if spec.get("serve"):
        write_json(os.path.join(folder, "endpoint.json"), endpoint(spec, own))
    agent = os.path.join(folder, "node", "agent.py")
    os.execv(sys.executable, [sys.executable, "-I", agent, "run", os.path.join(rank_folder, "spec.json")])  # noqa: S606


def start() -> None:
    sys.exit(main(sys.argv[1]))


if __name__ == "__main__":
    start()
