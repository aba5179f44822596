"""``python -m corral_cpu_engine.launch ARGS``: ``vllm serve ARGS``, started quickly.

On Linux with one rank, on x86-64 (Intel's OpenMP) and AArch64 (the GNU OpenMP inside
torch's wheel; see ``openmp``), it

1. re-executes itself once with that library preloaded and single-threaded maths
   libraries (so that the process may be forked after its imports),
2. imports, with the garbage collector off, what server and engine share,
3. forks the engine process (``zygote``) and lets both sides import the rest,
4. runs engine and worker in one process (uniproc executor).

In every other case (several ranks, other system, unknown vLLM) it just runs the
stock server.  ``CORRAL_CPU_FORK=0`` forces that.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import platform
import sys
from importlib import metadata

from corral_cpu_engine import openmp, supported

#: Options that mean more than one rank, or another process layout.
_STOCK_OPTIONS = (
    "-tp",
    "--tensor-parallel-size",
    "-pp",
    "--pipeline-parallel-size",
    "-dp",
    "--data-parallel-size",
    "--nnodes",
    "-n",
    "--prefill-context-parallel-size",
    "-pcp",
)
_STOCK_PREFIXES = (
    "--data-parallel-",
    "--headless",
    "--numa-bind",
    "--grpc",
    "--config",
    "--distributed-executor-backend",
    "--api-server-count",
    "-asc",
    "--help",
    "-h",
)
_DONE = "CORRAL_CPU_LAUNCH"


def wants_stock(argv: list[str]) -> str | None:
    """Why the stock start is used, or None."""
    if os.environ.get("CORRAL_CPU_FORK", "1") == "0":
        return "CORRAL_CPU_FORK=0"
    if sys.platform != "linux":
        return "not Linux"
    if not supported(cpu_build()):
        return f"vLLM CPU build {cpu_build() or 'not found'}"
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn") != "spawn":
        return "VLLM_WORKER_MULTIPROC_METHOD is set"
    if os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        return "VLLM_CPU_OMP_THREADS_BIND=nobind"
    for i, arg in enumerate(argv):
        name, _, value = arg.replace("_", "-").partition("=")
        if name in _STOCK_OPTIONS:
            value = value or (argv[i + 1] if i + 1 < len(argv) else "")
            if value != "1":
                return f"{name} {value}"
        elif name.startswith(_STOCK_PREFIXES) and name != "--config-format":
            return name
    if any(sign in sys.prefix for sign in " :"):
        return "a space or colon in the environment's path, which LD_PRELOAD cannot hold"
    library = find_openmp()
    return library if isinstance(library, str) else None


def cpu_build() -> str:
    """Version of vLLM's CPU build in this environment, "" if there is none."""
    try:
        return metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        pass
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return ""
    return version if "+cpu" in version else ""


def find_openmp() -> openmp.OpenMP | str:
    """The OpenMP library of this environment, or why there is none to start with."""
    return openmp.choose(
        platform.machine(), openmp.find_intel(sys.prefix), openmp.find_gnu(), os.environ.get(openmp.WANTED, "")
    )


def bound_cores(library: openmp.OpenMP) -> str:
    """The core list for vLLM: the user's, all of a small machine, or "auto"."""
    wanted = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if wanted != "auto":
        return wanted
    cpus = openmp.allowed_cpus()
    large = openmp.first_node(cpus) if library.kind == "gnu" else None
    return openmp.small_machine(cpus) or large or "auto"


def fork_environment(library: openmp.OpenMP) -> dict[str, str]:
    """This process's environment, fit for importing and forking vLLM."""
    env = dict(os.environ)
    bound = bound_cores(library)
    env |= openmp.environment(library, env, bound)
    env["VLLM_CPU_OMP_THREADS_BIND"] = bound
    # What vLLM's CPU platform sets later in any case; torch reads it at import.
    env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    env["TORCHINDUCTOR_CPP_DYNAMIC_THREADS"] = "1"
    env.setdefault("OPENBLAS_NUM_THREADS", "1")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Worker inside the engine process.
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    env[_DONE] = str(os.getpid())
    return env


def import_shared() -> None:
    """What both the API server and the engine need."""
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core  # noqa: F401


def import_server() -> None:
    """What the API server needs once the engine is up (a thread runs this
    while the engine loads, when the server has nothing else to do)."""
    _import(
        "vllm.entrypoints.launchers.app",
        "vllm.entrypoints.generate.api_router",
        "vllm.entrypoints.openai.responses.api_router",
        "vllm.entrypoints.openai.chat_completion.batch_serving",
        "vllm.entrypoints.openai.completion.api_router",
        "vllm.entrypoints.openai.models.api_router",
        "vllm.entrypoints.anthropic.api_router",
        "vllm.entrypoints.cohere.api_router",
        "vllm.entrypoints.generate.structured_decisions.api_router",
        "vllm.entrypoints.generate.generative_scoring.api_router",
        "vllm.entrypoints.scale_out.factories",
        "vllm.entrypoints.scale_out.derender.api_router",
        "vllm.entrypoints.scale_out.render.api_router",
        "vllm.entrypoints.scale_out.token_in_token_out.api_router",
        "vllm.entrypoints.serve.instrumentator.metrics",
        "vllm.entrypoints.serve.instrumentator.offline_docs",
        "vllm.entrypoints.serve.lora.api_router",
        "vllm.entrypoints.serve.profile.api_router",
        "vllm.entrypoints.serve.tokenize.api_router",
        "vllm.entrypoints.serve.elastic_ep.api_router",
        "vllm.entrypoints.serve.utils.fingerprint",
        "model_hosting_container_standards.sagemaker",
        "model_hosting_container_standards.common.custom_code_ref_resolver",
        "uvicorn.protocols.http.auto",
        "uvicorn.protocols.websockets.auto",
        "uvicorn.lifespan.on",
    )


def prepare_engine(argv: list[str]) -> None:
    """What the engine process alone needs; it runs while the server reads the
    configuration.  Everything here would happen later anyway, so a failure costs
    time only."""
    _import(
        "vllm.v1.worker.cpu_worker",  # first: patches torch
        *model_modules(argv),
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.model_executor.model_loader.default_loader",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.utils.cpu_triton_utils",
        "vllm.distributed.elastic_ep.elastic_execute",
        "vllm.v1.core.sched.scheduler",
    )
    from corral_cpu_engine import warmup

    warmup.slim()
    if "--enforce-eager" not in argv:
        _import(
            "vllm.compilation.backends",
            "vllm.compilation.caching",
            "torch._inductor.compile_fx",
            "torch._inductor.codegen.memory_planning",
        )
        warmup.preload_inductor()


def _import(*names: str) -> None:
    """Import modules; those that are not there are left out."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            pass


def model_modules(argv: list[str]) -> list[str]:
    """vLLM module of the model class, read from the model folder; may be empty."""
    from vllm.model_executor.models import registry

    for arg in argv:
        path = os.path.join(arg.partition("=")[2] or arg, "config.json")
        if os.path.isfile(path):
            try:
                with open(path) as f:
                    names = json.load(f).get("architectures") or []
                table = getattr(registry, "_VLLM_MODELS", {})
                return ["vllm.model_executor.models." + table[n][0] for n in names if n in table]
            except (OSError, ValueError, TypeError, KeyError, IndexError):
                return []
    return []


def inspect_in_process() -> None:
    """Look at model classes here instead of in a fresh interpreter (7 s).

    vLLM does that once per model class, in a subprocess so as not to initialise
    CUDA; there is none here, and most of the modules are imported already.
    """
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda function: function()


def serve(argv: list[str]) -> None:
    """``vllm serve ARGV`` in this process, without the other subcommands."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    args = parser.parse_args(argv)
    configure_logging_from_args(args)
    command = ServeSubcommand()
    command.validate(args)
    gc.enable()
    command.cmd(args)


def _title_ready() -> None:
    """Let setproctitle find argv before the environment is changed: it cannot
    later, and the engine process would keep the server's name in ``ps``."""
    try:
        import setproctitle

        setproctitle.getproctitle()
    except ImportError:
        pass


def main() -> None:
    """Entry point of ``python -m corral_cpu_engine.launch``."""
    argv = sys.argv[1:]
    reason, library = wants_stock(argv), find_openmp()
    if isinstance(library, openmp.OpenMP) and reason is None and os.environ.get(_DONE) != str(os.getpid()):
        os.execve(sys.executable, sys.orig_argv, fork_environment(library))
    _title_ready()
    os.environ.pop(_DONE, None)
    gc.disable()
    if reason is None:
        from corral_cpu_engine import imports, zygote

        imports.remember()
        import_shared()
        inspect_in_process()
        if zygote.install(while_engine_loads=import_server):
            zygote.fork_engine(lambda: prepare_engine(argv))
            openmp.unbind()
        else:  # back to separate engine and worker processes
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
            os.environ.pop("OMP_NUM_THREADS", None)
            openmp.unbind()
        imports.save()
    else:
        print(f"corral_cpu_engine: stock start ({reason})", file=sys.stderr, flush=True)
    serve(argv)


if __name__ == "__main__":
    main()
