"""Plan × nodes -> LaunchSpec: for each rank its command, environment, files and port. Pure; touches nothing.

What `corral up --dry-run` prints is the very object that a target starts. No secret is in it: the key is named by
the path of its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from corral.folder import DeploymentFolder
from corral.links import link_ranks
from corral.runtimes.base import Runtime
from corral.shell import quote_command

if TYPE_CHECKING:
    from corral.plan import Plan

__all__ = ["LaunchSpec", "Order", "PlacedFile", "RankSpec", "Serve", "agent_spec", "as_shell", "render"]

VERSION = 1
GUARD = "corral_guard.Guard"


@dataclass(frozen=True)
class PlacedFile:
    """A file of Corral's that must lie beside the engine."""

    resource: str  # inside the corral package
    name: str  # inside the deployment's `node` folder


@dataclass(frozen=True)
class Serve:
    """Where a rank answers HTTP."""

    host: str
    port: int
    model: str
    key_file: str
    health_path: str = "/health"


@dataclass(frozen=True)
class RankSpec:
    """One engine process group on one node."""

    rank: int
    node: str
    argv: tuple[str, ...]
    env: dict[str, str]
    unset_env: tuple[str, ...]
    cwd: str
    serve: Serve | None


@dataclass(frozen=True)
class LaunchSpec:
    """Everything a target needs to start a deployment."""

    version: int
    deployment: str
    launch_id: str
    model: str
    model_path: str
    served_name: str
    engine: str
    target: str
    runtime: str
    link: str
    base_url: str
    ranks: tuple[RankSpec, ...]
    files: tuple[PlacedFile, ...]
    stall_s: float
    hung_s: float
    grace_s: float
    restarts: int


@dataclass(frozen=True)
class Order:
    """What was decided before rendering: every input of `render` that is not the plan."""

    deployment: str
    launch_id: str
    folder: DeploymentFolder
    model: str
    model_path: str
    served_name: str
    target: str
    link: str
    nodes: tuple[str, ...]
    host: str
    port: int
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    stall_s: float = 600.0
    hung_s: float = 300.0
    grace_s: float = 20.0
    restarts: int = 0


FILES = (PlacedFile("node/agent.py", "agent.py"), PlacedFile("node/guard.py", "corral_guard.py"))
# what in the user's own shell must not reach an engine: keys, and switches that would open or bypass its door
UNSET = (
    "VLLM_API_KEY",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_USE_RUST_FRONTEND",
    "PYTHONHOME",
    "PYTHONPATH",
    "OPENAI_API_KEY",
    "HF_TOKEN",
    "PYTHONDONTWRITEBYTECODE",  # without bytecode every process compiles vLLM's sources at every start
)


def render(plan: Plan, order: Order, runtime: Runtime) -> LaunchSpec:
    """The commands of every rank."""
    ranks = []
    for linked in link_ranks(order.link, order.nodes):
        key_file = str(order.folder.key)
        serve = Serve(order.host, order.port, order.served_name, key_file) if linked.serves else None
        arguments = [
            order.model_path,
            "--served-model-name",
            order.served_name,
            *plan.engine_args,
            *(_serve_arguments(serve) if serve else ()),
            *linked.arguments,
            *order.extra_args,
        ]
        env = {
            **_common_env(order),
            **plan.engine_env,
            **linked.env,
            **order.extra_env,
        }
        wrapped = runtime.wrap(arguments, env)
        cwd = str(order.folder.rank(linked.rank).path)
        ranks.append(RankSpec(linked.rank, linked.node, wrapped.argv, wrapped.env, UNSET, cwd, serve))
    return LaunchSpec(
        version=VERSION,
        deployment=order.deployment,
        launch_id=order.launch_id,
        model=order.model,
        model_path=order.model_path,
        served_name=order.served_name,
        engine=runtime.engine,
        target=order.target,
        runtime=runtime.name,
        link=order.link,
        base_url=f"http://{_url_host(order.host)}:{order.port}/v1",
        ranks=tuple(ranks),
        files=FILES,
        stall_s=order.stall_s,
        hung_s=order.hung_s,
        grace_s=order.grace_s,
        restarts=order.restarts,
    )


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", ""):  # noqa: S104 - bound everywhere, reached here
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _serve_arguments(serve: Serve) -> list[str]:
    return ["--host", serve.host, "--port", str(serve.port), "--middleware", GUARD, "--disable-uvicorn-access-log"]


def _common_env(order: Order) -> dict[str, str]:
    return {
        "CORRAL_KEY_FILE": str(order.folder.key),
        "PYTHONPATH": str(order.folder.node_files),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",  # the model is on disk; a start must not depend on the hub
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # start-up is judged by progress (the agent's stall rule), so the engine's own deadline must not come first
        "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
    }


def agent_spec(spec: LaunchSpec, rank: RankSpec, folder: DeploymentFolder) -> dict[str, object]:
    """What the agent of one rank reads."""
    files = folder.rank(rank.rank)
    serve = rank.serve
    return {
        "launch_id": spec.launch_id,
        "deployment": spec.deployment,
        "rank": rank.rank,
        "argv": list(rank.argv),
        "env": rank.env,
        "unset_env": list(rank.unset_env),
        "cwd": rank.cwd,
        "serve": {"host": serve.host, "port": serve.port, "model": serve.model, "key_file": serve.key_file}
        if serve
        else None,
        "events": str(files.events),
        "log": str(files.log),
        "heartbeat": str(files.heartbeat),
        "agent_file": str(files.agent),
        "stop_file": str(files.stop),
        "stall_s": spec.stall_s,
        "hung_s": spec.hung_s,
        "grace_s": spec.grace_s,
        "restarts": spec.restarts,
    }


def as_shell(spec: LaunchSpec) -> str:
    """The launch as commands a person can paste, one per rank."""
    lines = [f"# {spec.deployment}: {spec.model} with vLLM {spec.engine}"]
    key_files = {rank.serve.key_file for rank in spec.ranks if rank.serve}
    node = PurePath(spec.ranks[0].env["PYTHONPATH"])
    lines.append(quote_command(["mkdir", "-p", str(node), *(rank.cwd for rank in spec.ranks)]))
    for file in sorted(key_files):
        lines.append(f"(umask 077; {quote_command(['openssl', 'rand', '-hex', '24', '-out', file])})")
    lines.append(
        'guard=$(python3 -c "import corral.node.guard as g; print(g.__file__)")  # from Corral\'s environment'
    )
    lines.append(f'cp "$guard" {quote_command([str(node / "corral_guard.py")])}')
    for rank in spec.ranks:
        unset = [word for name in rank.unset_env for word in ("-u", name)]
        assignments = [f"{key}={value}" for key, value in sorted(rank.env.items())]
        lines.append(f"# rank {rank.rank} on {rank.node}")
        lines.append(quote_command(["env", "-C", rank.cwd, *unset, *assignments, *rank.argv]))
    return "\n".join(lines) + "\n"
