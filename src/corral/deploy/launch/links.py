"""How the ranks of one replica find each other: nodes -> vLLM arguments and environment. Pure.

`single` is one node. `native` is vLLM's own multi-node mode: every node runs `vllm serve`, all but the first without
a server. `ray` starts a private Ray cluster first and `vllm serve` on its head once every node has joined. A new
link is one function and one row in `LINKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from corral.base.errors import UsageError
from corral.engines.flags import FlagList

RAY_SCRIPT = "ray_rank.py"


@dataclass(frozen=True)
class Node:
    """One node as the others see it."""

    name: str  # for people
    address: str = ""  # where the others reach it
    env: Mapping[str, str] = field(default_factory=dict)  # its network variables: NCCL_SOCKET_IFNAME, …


@dataclass(frozen=True)
class Ports:
    """Ports on the head node; 0: chosen on the node when the rank starts."""

    serve: int = 0
    master: int = 0  # the ranks' rendezvous (native), or Ray's own (ray)
    gang: int = 0  # the agents' heartbeats


@dataclass(frozen=True)
class LinkRequest:
    """What a link needs to know of the nodes and the plan."""

    nodes: tuple[Node, ...]  # head first
    ports: Ports
    ranks_per_node: int = 1  # GPUs of one replica on one node
    replicas: int = 1
    replica_ranks: int = 0  # of all nodes together; 0: not known
    node_files: str = ""  # folder on the nodes where Corral's own files lie
    cpu: bool = False


@dataclass(frozen=True)
class LinkedRank:
    """What the link adds to one rank's command."""

    rank: int
    node: Node
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    serves: bool = True  # whether this rank answers HTTP
    script: tuple[str, ...] = ()  # a Python file and its arguments that run before, and around, the engine
    engine: bool = True  # whether the rank's command holds `vllm serve` at all


def _single(request: LinkRequest) -> tuple[LinkedRank, ...]:
    if len(request.nodes) != 1:
        raise UsageError(
            f"the link 'single' joins one node, not {len(request.nodes)}.",
            "Use native or ray: --link of `corral up`, or [link] in a profile.",
        )
    return (LinkedRank(0, request.nodes[0]),)


def _native(request: LinkRequest) -> tuple[LinkedRank, ...]:
    head, count = request.nodes[0], len(request.nodes)
    ranks = []
    for rank, node in enumerate(request.nodes):
        if request.replicas > 1:  # whole replicas on each node: vLLM's data parallelism joins them
            here = request.replicas // count
            arguments = ["--data-parallel-size-local", str(here), "--data-parallel-address", head.address]
            arguments += ["--data-parallel-rpc-port", str(request.ports.master or "@MASTER_PORT@")]
            arguments += ["--data-parallel-start-rank", str(rank * here)] if rank else []
        else:
            arguments = ["--nnodes", str(count), "--node-rank", str(rank), "--master-addr", head.address]
            arguments += ["--master-port", str(request.ports.master or "@MASTER_PORT@")]
        arguments += ["--headless"] if rank else []
        env = {**node.env, "VLLM_HOST_IP": node.address}
        ranks.append(LinkedRank(rank, node, tuple(arguments), env, serves=rank == 0))
    return tuple(ranks)


def _ray(request: LinkRequest) -> tuple[LinkedRank, ...]:
    head, count = request.nodes[0], len(request.nodes)
    if request.replicas > 1:
        raise UsageError(
            f"Ray can run one replica, not {request.replicas}.",
            "Use --set data=1, or the link native: --link of `corral up`, or [link] in a profile.",
        )
    port = str(request.ports.master or "@MASTER_PORT@")
    ranks = []
    for rank, node in enumerate(request.nodes):
        script = [f"{request.node_files}/{RAY_SCRIPT}", "head" if rank == 0 else "worker"]
        script += ["--address", node.address, "--head", f"{head.address}:{port}", "--nodes", str(count)]
        script += ["--devices", str(request.ranks_per_node), *(["--cpu"] if request.cpu else [])]
        env = {**node.env, "VLLM_HOST_IP": node.address, "RAY_AUTH_MODE": "token"}
        arguments = ("--distributed-executor-backend", "ray")
        ranks.append(LinkedRank(rank, node, arguments, env, rank == 0, tuple(script), engine=rank == 0))
    return tuple(ranks)


LINKS: dict[str, Callable[[LinkRequest], tuple[LinkedRank, ...]]] = {
    "single": _single,
    "native": _native,
    "ray": _ray,
}


def link_ranks(link: str, request: LinkRequest) -> tuple[LinkedRank, ...]:
    """The ranks of a deployment over these nodes, head first."""
    if link not in LINKS:
        raise UsageError(f"there is no link {link!r}.", f"Known: {', '.join(LINKS)}.")
    _refuse_uneven(request)
    return LINKS[link](request)


def _refuse_uneven(request: LinkRequest) -> None:
    """Every node has the same number of ranks: otherwise they would wait for each other for ever."""
    count = len(request.nodes)
    if request.replicas > 1 and request.replicas % count:
        raise UsageError(
            f"{request.replicas} replicas cannot be spread evenly over {count} nodes.", "Change --set data=…"
        )
    if request.replicas == 1 and request.replica_ranks and request.replica_ranks % count:
        raise UsageError(
            f"{request.replica_ranks} ranks cannot be spread evenly over {count} nodes.", "Name fewer nodes."
        )


def choose_link(wanted: str, nodes: Sequence[object], flags: FlagList) -> tuple[str, str]:
    """The link, and why: one node needs none; vLLM's own mode unless this vLLM has none or the user says Ray."""
    if wanted != "auto":
        if wanted not in LINKS:
            raise UsageError(f"there is no link {wanted!r}.", f"Known: auto, {', '.join(LINKS)}.")
        if wanted != "single" and len(nodes) == 1:
            return "single", f"one node needs no link; {wanted} was asked for"
        return wanted, "asked for"
    if len(nodes) == 1:
        return "single", "one node"
    if "--nnodes" in flags.takes_value:
        return "native", f"{len(nodes)} nodes, and this vLLM joins them itself (--nnodes): no Ray to install or watch"
    return "ray", f"{len(nodes)} nodes, and this vLLM has no --nnodes of its own"
