"""Plan × nodes -> LaunchSpec: for each rank its command, environment, files and port. Pure; touches nothing.

What `corral up --dry-run --json` prints is the very object that a target starts. No secret is in it: the key is
named by the path of its file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from corral.base.errors import UsageError
from corral.base.record import to_json
from corral.client.http1 import http_url
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import Expected
from corral.deploy.deployment.state import Patience
from corral.deploy.launch.links import RAY_SCRIPT, LinkedRank, LinkRequest, Node, Ports, link_ranks
from corral.engines.paths import named_paths
from corral.engines.runtimes.base import EngineCommand, Runtime

if TYPE_CHECKING:
    from corral.plan.contract import Plan


VERSION = 2
GUARD = "corral_guard.Guard"


@dataclass(frozen=True)
class PlacedFile:
    """A file of Corral that must lie beside the engine."""

    resource: str  # inside the corral package; a folder becomes one file
    name: str  # inside the deployment's `node` folder


@dataclass(frozen=True)
class Serve:
    """Where a rank answers HTTP."""

    host: str
    port: int
    model: str
    key_file: str
    task: str = "generate"


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
    cleanup: tuple[tuple[str, ...], ...] = ()
    pid_query: tuple[str, ...] = ()


@dataclass(frozen=True)
class GangSpec:
    """How the agents of several nodes watch each other: the others send heartbeats to the head."""

    names: tuple[str, ...]
    head: str  # address
    port: int
    token_file: str


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
    patience: Patience
    expected: dict[str, Expected]  # how long each phase of the start usually takes here, or about, by the plan
    weights_bytes: int = 0  # of the whole model
    gang: GangSpec | None = None
    adapters: str = ""  # the owner's folder of them, on the machine that launched it
    script: str = ""  # what the target itself runs to start the ranks: a batch script


@dataclass(frozen=True)
class Order:
    """What was decided before rendering: every input of `render` that is not the plan."""

    deployment: str
    launch_id: str
    folder: DeploymentFolder  # as the nodes see it
    model: str
    model_path: str  # on the nodes
    served_name: str
    target: str
    link: str
    nodes: tuple[Node, ...]
    host: str
    ports: Ports
    base_url: str
    also_served_as: tuple[str, ...] = ()
    files: tuple[PlacedFile, ...] = ()  # that the target needs on the nodes
    tool_args: tuple[str, ...] = ()  # that switch tool calls on, and say the task
    task: str = "generate"  # what readiness is asked for
    allowed_origins: tuple[str, ...] = ()
    store_responses: bool = False
    adapters: tuple[str, str] = ("", "")  # the folder of LoRA adapters: on the launching machine, on the nodes
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    patience: Patience = field(default_factory=Patience)


QUICK_START = "corral_quick_start"
FILES = (
    PlacedFile("node/agent", "agent.py"),
    PlacedFile("node/guard.py", "corral_guard.py"),
    PlacedFile("node/row_socket.py", "corral_row_socket.py"),
    PlacedFile("engines/engine_side/quick_start.py", f"{QUICK_START}.py"),
    PlacedFile("node/ray_rank.py", RAY_SCRIPT),
)
# variables of the user's shell that must not reach an engine: secrets, and switches that would open or bypass its
# lock
UNSET = (
    "HUGGING_FACE_HUB_TOKEN",
    "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE",
    "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS",
    "CUSTOM_FASTAPI_PING_HANDLER",
    "CUSTOM_FASTAPI_INVOCATION_HANDLER",
    "CUSTOM_PRE_PROCESS",
    "CUSTOM_POST_PROCESS",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",
    "VLLM_API_KEY",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_LORA_RESOLVER_CACHE_DIR",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST",
    "VLLM_USE_RUST_FRONTEND",
    "PYTHONHOME",
    "PYTHONPATH",
    "OPENAI_API_KEY",
    "HF_TOKEN",
    "PYTHONDONTWRITEBYTECODE",  # without bytecode every process compiles vLLM's sources at every start
)


_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_OWN = (
    "CORRAL_KEY_FILE",
    "CORRAL_DRAIN_FILE",
    "CORRAL_ROW_SOCKETS",
    "CORRAL_ALLOWED_ORIGINS",
    "CORRAL_STORE_RESPONSES",
    "CORRAL_ADAPTERS",
    "CORRAL_LAUNCH",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONDONTWRITEBYTECODE",
    "TMPDIR",
)


def render(plan: Plan, order: Order, runtime: Runtime) -> LaunchSpec:
    """The commands of every rank."""
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
        base_url=order.base_url,
        ranks=tuple(
            _rank(plan, order, runtime, linked) for linked in link_ranks(order.link, _link_request(plan, order))
        ),
        files=(*FILES, *order.files),
        patience=order.patience,
        expected={},
        weights_bytes=plan.memory.weights_bytes,
        gang=_gang_spec(order),
        adapters=order.adapters[0],
    )


def _link_request(plan: Plan, order: Order) -> LinkRequest:
    per_node = -(-plan.parallel.replica_gpus // len(order.nodes))
    return LinkRequest(
        order.nodes,
        order.ports,
        per_node,
        plan.parallel.data,
        plan.parallel.replica_gpus,
        str(order.folder.node_files),
        plan.inventory.gpu is None,
    )


def _gang_spec(order: Order) -> GangSpec | None:
    if len(order.nodes) == 1:
        return None
    names = tuple(node.name for node in order.nodes)
    return GangSpec(names, order.nodes[0].address, order.ports.gang, str(order.folder.token))


def _served_names(order: Order) -> list[str]:
    if order.also_served_as:
        return ["--served-model-name", order.served_name, *order.also_served_as]
    return [f"--served-model-name={order.served_name}"]  # one word: the name may begin with a dash


def _rank(plan: Plan, order: Order, runtime: Runtime, linked: LinkedRank) -> RankSpec:
    files = order.folder.rank(linked.rank)
    serve = None
    if linked.serves:
        serve = Serve(order.host, order.ports.serve, order.served_name, str(order.folder.key), order.task)
    quick = [*runtime.python, "-m", QUICK_START] if plan.inventory.gpu and len(order.nodes) == 1 else []
    engine = [
        *quick,
        *runtime.serve,
        order.model_path,
        *_served_names(order),
        *plan.engine_args,
        *(_serve_arguments(serve, order, runtime.flags().takes_value) if serve else ()),
        *linked.arguments,
        *order.extra_args,
    ]
    argv = engine if linked.engine else []
    if linked.script:
        argv = [*runtime.python, *linked.script, *(["--", *engine] if linked.engine else [])]
    env = {**_common_env(order, len(order.nodes)), **plan.engine_env, **linked.env, **order.extra_env}
    job = EngineCommand(
        deployment=order.deployment,
        launch_id=order.launch_id,
        rank=linked.rank,
        argv=tuple(argv),
        env=env,
        cwd=str(files.path),
        visible=_visible(order, runtime),
        writable=(str(files.path), *_named(order, runtime, written=True)),
        gpus=plan.inventory.gpu is not None,
        fabric=len(order.nodes) > 1,
    )
    wrapped = runtime.wrap(job)
    unset = tuple(name for name in UNSET if order.model_path.startswith("/") or name not in _HUB_TOKENS)
    return RankSpec(
        linked.rank, linked.node.name, wrapped.argv, wrapped.env, unset, str(files.path), serve, wrapped.cleanup,
        wrapped.pid_query,
    )  # fmt: skip


def _visible(order: Order, runtime: Runtime) -> tuple[str, ...]:
    files = (order.model_path, str(order.folder.node_files), *_secret_files(order), *filter(None, order.adapters[1:]))
    return (*files, *_named(order, runtime, written=False))


def _named(order: Order, runtime: Runtime, written: bool) -> list[str]:
    """The paths in the user's arguments that the node has under the same path, and the engine writes to or not."""
    named = [one.path for one in named_paths(order.extra_args) if one.written == written]
    return [path for path in named if runtime.outside(path) == path]


def _secret_files(order: Order) -> tuple[str, ...]:
    """The files that an engine reads its secrets from; it gets them in no other way."""
    return (str(order.folder.key), *([str(order.folder.token)] if len(order.nodes) > 1 else []))


def refuse_reserved(names: Iterable[str]) -> None:
    """Refuse variables that hold secrets, that Corral sets itself, or that decide who may use the endpoint."""
    for name in names:
        if name in _HUB_TOKENS:
            raise UsageError(
                f"{name} is not passed to an engine: it is a secret, and the model is on disk before it starts.",
                f"Leave it in your own environment (`export {name}=…`, or `hf auth login`): fetching uses it there.",
            )
        if name in ("OPENAI_API_KEY", "VLLM_API_KEY"):
            raise UsageError(
                f"{name} is not passed to an engine: it is a secret.", "Every deployment has a key file of its own."
            )
        if name in _OWN:
            raise UsageError(f"{name} is set by Corral itself.", "Leave it out.")
        if name in UNSET:
            raise UsageError(f"{name} is not passed to an engine.", "It would open or bypass the endpoint's lock.")


def server_url(host: str, port: int) -> str:
    """The address of a server that listens on `host`, as its own machine reaches it."""
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 - bound everywhere, reached here
        host = "127.0.0.1"
    return http_url(host, port) + "/v1"


_FOR_CLIENTS = (
    "--enable-prompt-tokens-details",  # the gateway reads them
    "--enable-request-id-headers",  # `_request_id` of OpenAI's SDK
    "--enable-tokenizer-info-endpoint",  # lm-eval reads the special tokens there
)


def _serve_arguments(serve: Serve, order: Order, known: Collection[str]) -> list[str]:
    port = str(serve.port or "@PORT@")  # 0: chosen on the node
    origins = json.dumps(list(order.allowed_origins))  # vLLM's own default is every page of every browser
    more = ["--disable-uvicorn-access-log", *(flag for flag in _FOR_CLIENTS if flag in known)]
    more += ["--allowed-origins", origins, *order.tool_args]
    return ["--host", serve.host, "--port", port, "--middleware", GUARD, *more]


def _common_env(order: Order, nodes: int) -> dict[str, str]:
    several = {
        "RAY_AUTH_TOKEN_PATH": str(order.folder.token),
        # a rank must not wait five minutes for a lost one; the agents report the loss earlier
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60",
    }
    return {
        **(several if nodes > 1 else {}),
        "CORRAL_KEY_FILE": str(order.folder.key),
        "CORRAL_DRAIN_FILE": str(order.folder.rank(0).drain),
        "CORRAL_ROW_SOCKETS": str(order.folder.rank(0).path),
        **({"CORRAL_ALLOWED_ORIGINS": json.dumps(list(order.allowed_origins))} if order.allowed_origins else {}),
        **({"CORRAL_STORE_RESPONSES": "1"} if order.store_responses else {}),
        **({"CORRAL_ADAPTERS": order.adapters[1]} if order.adapters[1] else {}),
        "PYTHONPATH": str(order.folder.node_files),
        "PYTHONUNBUFFERED": "1",
        # the model is on disk, and a start must not depend on the hub; only commands to paste have a hub id
        **({"HF_HUB_OFFLINE": "1"} if order.model_path.startswith("/") else {}),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # start-up is judged by progress (the agent's stall rule), so the engine's own deadline must not come first
        "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
    }


def agent_spec(spec: LaunchSpec, rank: RankSpec, folder: DeploymentFolder) -> dict[str, object]:
    """The spec that the agent of one rank reads; `folder` as the nodes see it."""
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
        "serve": to_json(serve),
        "events": str(files.events),
        "log": str(files.log),
        "load": str(files.load),
        "heartbeat": str(files.heartbeat),
        "agent_file": str(files.agent),
        "engine_file": str(files.engine),
        "stop_file": str(files.stop),
        "drain_file": str(files.drain),
        "patience": to_json(spec.patience.settled()),
        "expected": _expected(spec),
        "cleanup": [list(argv) for argv in rank.cleanup],
        "pid_query": list(rank.pid_query),
        "gang": to_json(spec.gang),
    }


def _expected(spec: LaunchSpec) -> dict[str, object]:
    """What an agent judges a start by: the usual length of its phases, and how long they may go without advance."""
    usual = {phase: expected.seconds for phase, expected in spec.expected.items()}
    return {
        "usual_s": usual,
        "limit_s": {phase: spec.patience.limit_s(seconds) for phase, seconds in usual.items()},
        "default_limit_s": spec.patience.limit_s(),
        "weights_bytes": spec.weights_bytes,
    }
