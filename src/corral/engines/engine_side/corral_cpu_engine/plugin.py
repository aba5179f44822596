"""vLLM general plugin: runs in every vLLM process before the engine is built.

Three repairs for vLLM 0.32 on the CPU:

* **AOT artefacts load back.**  vLLM saves the compiled model, but on the CPU
  (``DYNAMO_TRACE_ONCE`` + inductor) the function it loads is a plain one without
  ``finalize_loading``; vLLM calls that, fails, and compiles again at every start
  (60 s).  There is nothing to finalize in that case, so a no-op is supplied.
  Damaged or outdated artefacts still raise and are still compiled anew.
* **The core list is no part of the cache key.**  vLLM compiles anew when
  ``VLLM_CPU_OMP_THREADS_BIND`` differs, though CPU code takes its threads at run
  time (``cpp.dynamic_threads``).  Replicas on other cores now share one artefact.
* **Pipeline parallelism with ``--enforce-eager``.**  See ``worker``.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from corral_cpu_engine import supported

log = logging.getLogger("vllm.corral_cpu_engine")
_MARK = "_corral_cpu_engine"
#: Settings that do not change CPU code.
_NOT_IN_KEY = frozenset(
    {
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
        "VLLM_ENGINE_READY_TIMEOUT_S",
    }
)


def register() -> None:
    """Entry point ``vllm.general_plugins``.  Never raises."""
    try:
        import vllm
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        if not supported(vllm.__version__):
            log.info("corral_cpu_engine: vLLM %s is unknown, nothing patched", vllm.__version__)
            return
        _load_aot_artefacts()
        _stable_cache_key()
        _pipeline_eager_worker()
    except Exception as e:
        log.warning("corral_cpu_engine: not active: %r", e)


def _load_aot_artefacts() -> None:
    """Give loaded CPU functions the ``finalize_loading`` that vLLM asks for."""
    import torch

    original = getattr(torch.compiler, "load_compiled_function", None)
    if original is None:
        log.info("corral_cpu_engine: torch has no load_compiled_function, AOT repair skipped")
        return
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def load_compiled_function(*args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        inner = getattr(getattr(loaded, "_artifacts", None), "compiled_fn", None)
        if inner is not None and not hasattr(inner, "finalize_loading"):
            try:
                inner.finalize_loading = lambda vllm_config: None
            except AttributeError:  # slots: vLLM will say so and compile
                pass
        return loaded

    setattr(load_compiled_function, _MARK, True)
    torch.compiler.load_compiled_function = load_compiled_function


def _stable_cache_key() -> None:
    """Leave the core list out of the key of compiled code."""
    from vllm import envs

    original = getattr(envs, "compile_factors", None)
    if original is None:
        log.info("corral_cpu_engine: vllm.envs is unknown, cache key unchanged")
        return
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def compile_factors() -> dict[str, object]:
        return {k: v for k, v in original().items() if k not in _NOT_IN_KEY}

    setattr(compile_factors, _MARK, True)
    envs.compile_factors = compile_factors


def _pipeline_eager_worker() -> None:
    """Choose ``worker.CPUWorker`` for PP > 1 without compilation."""
    from vllm.platforms import current_platform

    name = "check_and_update_config"
    cls = next(c for c in type(current_platform).__mro__ if name in c.__dict__)  # ``ray_platform`` inherits it
    original = cls.__dict__.get(name)
    if not isinstance(original, classmethod) or getattr(original.__func__, _MARK, False):
        return
    function = original.__func__

    @functools.wraps(function)
    def check_and_update_config(platform: type, vllm_config: Any) -> None:
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        if (
            parallel.pipeline_parallel_size > 1
            and parallel.worker_cls == "auto"
            and model is not None
            and model.enforce_eager
        ):
            parallel.worker_cls = "corral_cpu_engine.worker.CPUWorker"
        return function(platform, vllm_config)

    setattr(check_and_update_config, _MARK, True)
    cls.check_and_update_config = classmethod(check_and_update_config)
