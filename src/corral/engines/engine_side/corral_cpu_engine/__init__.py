"""Quick starts for vLLM on the CPU.

Stock vLLM 0.32 on two cores needs 100 s and more for every start: three
processes import vLLM one after the other (9 s each) and the compiled model is
saved but never loaded back.  This package fixes both, without changing vLLM's
files:

``plugin``  entry point ``vllm.general_plugins``; runs in every vLLM process.
            Makes saved AOT artefacts load, and repairs pipeline parallelism
            with ``--enforce-eager``.  Useful with any launcher.
``launch``  ``python -m corral_cpu_engine.launch ARGS`` takes the arguments of
            ``vllm serve``.  Imports once, forks the engine process while still
            single-threaded, and runs engine and worker in that one process.
``openmp``  the OpenMP library both use, Intel's or GNU's, its threads, and the cores they are bound to.
``zygote``  the fork, and the process object that vLLM sees in place of its own.
``imports`` remembers two slow directory scans between starts.
``warmup``  what the engine process does early, or not at all.
``worker``  the worker class used for pipeline stages with ``--enforce-eager``.
``ray_detect``, ``ray_platform``, ``communicator``
            entry point ``vllm.platform_plugins``; lets vLLM's Ray executor run
            on CPU nodes.  Chosen in processes that use Ray, and only there.

Every patch first checks what it patches; on another version it logs one line
and leaves vLLM as it is.
"""

__version__ = "0.1.0"

#: vLLM releases these patches were written for and tested with.
SUPPORTED_VLLM = ("0.32.",)


def supported(version: str) -> bool:
    """Whether this vLLM version is one the patches were written for."""
    return version.startswith(SUPPORTED_VLLM)
