"""`python -m corral_quick_start COMMAND…`: vLLM's server on GPUs with one import of vLLM instead of three in a row.

COMMAND is the stock one, `… serve MODEL ARGUMENTS…`. Stock vLLM spawns its API servers and its engine core as fresh
interpreters that import torch and vLLM again, and the engine waits until the API servers have. Here all is imported
once, before CUDA is initialised, and the others are forked, as vLLM itself does outside of `vllm serve`. What this
file does not know is left to the stock command, which then replaces this process. `CORRAL_QUICK_START=0` forces that.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
from typing import Any

#: Several nodes, several engines, and settings that this file would have to read: the stock start.
STOCK_OPTIONS = (
    "--numa-bind", "--grpc", "--headless", "--nnodes", "--config", "--data-parallel", "-dp",
    "--distributed-executor-backend", "--help", "-h",
)  # fmt: skip
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
#: What the engine core and its workers import after they are started, and the API servers.
LATER = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.compilation.backends",
    "vllm.compilation.caching",
    "torch._inductor.compile_fx",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "uvicorn.lifespan.on",
)


def why_stock(arguments: list[str]) -> str:
    """Why vLLM is started by its own command; empty where it need not be."""
    if os.environ.get("CORRAL_QUICK_START") == "0":
        return "CORRAL_QUICK_START=0"
    if sys.platform != "linux":
        return "not Linux"
    if os.environ.get(METHOD, "fork") != "fork":
        return f"{METHOD}={os.environ[METHOD]}"
    names = [argument.replace("_", "-").partition("=")[0] for argument in arguments]
    return next((name for name in names if name.startswith(STOCK_OPTIONS)), "")


def model_modules(arguments: list[str]) -> list[str]:
    """vLLM's module of the model's class, by the model folder's config; empty where it cannot be told."""
    from vllm.model_executor.models import registry

    table: dict[str, Any] = getattr(registry, "_VLLM_MODELS", {})
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        with open(os.path.join(arguments[0], "config.json"), encoding="utf-8") as file:
            names = json.load(file)["architectures"]
        return ["vllm.model_executor.models." + table[name][0] for name in names if name in table]
    return []


def import_all(arguments: list[str]) -> None:
    """Import what the server, the engine core and the workers need, with the garbage collector off."""
    single = "OPENBLAS_NUM_THREADS"  # read when numpy is loaded: its threads would be lost in a fork
    given = os.environ.get(single)
    os.environ[single] = "1"
    gc.disable()
    import vllm.entrypoints.cli.main
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core  # noqa: F401

    for name in (*LATER, *model_modules(arguments)):
        with contextlib.suppress(ImportError):  # of another version, or for other hardware: imported where it is used
            importlib.import_module(name)
    if given is None:
        del os.environ[single]
    gc.freeze()
    gc.enable()


class _Forking:
    """The module `multiprocessing` as the API servers' manager sees it, whose "spawn" is a fork."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_context(self, method: str | None = None) -> Any:
        return self._real.get_context("fork" if method == "spawn" else method)


def share_metrics() -> None:
    """Let metrics of several API servers be added up: prometheus_client decides how it keeps them when imported."""
    from prometheus_client import values
    from vllm.entrypoints.cli import serve

    original = serve.setup_multiprocess_prometheus  # names the folder that they are kept in, before the servers start

    def set_up() -> None:
        original()
        values.ValueClass = values.get_value_class()

    serve.setup_multiprocess_prometheus = set_up


def fork_everywhere() -> str:
    """Make vLLM fork its processes; why it cannot, or empty."""
    import torch
    import vllm.v1.utils as manager
    from vllm.model_executor.models import registry

    if torch.cuda.is_initialized():
        return "CUDA was initialised by an import"
    if torch.version.hip:
        return "ROCm"
    if not hasattr(manager, "APIServerProcessManager") or not hasattr(manager, "multiprocessing"):
        return "vllm.v1.utils is unknown"
    os.environ[METHOD] = "fork"
    share_metrics()
    manager.multiprocessing = _Forking(manager.multiprocessing)
    if hasattr(registry, "_run_in_subprocess"):  # a fresh interpreter for each new model class; imported here anyway
        registry._run_in_subprocess = lambda function: function()
    return ""


def main() -> None:
    command, given = sys.argv[1:], dict(os.environ)
    arguments = command[command.index("serve") + 1 :] if "serve" in command else []
    reason = why_stock(arguments) if arguments else "no `serve` in the command"
    if not reason:
        try:
            import_all(arguments)
            reason = fork_everywhere()
        except Exception as error:  # whatever is wrong with this vLLM, its own command says it better
            reason = repr(error)
    if reason:
        sys.stderr.write(f"corral_quick_start: stock start ({reason})\n")
        sys.stderr.flush()
        os.execvpe(command[0], command, given)
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv = ["vllm", "serve", *arguments]
    vllm()


if __name__ == "__main__":
    main()
