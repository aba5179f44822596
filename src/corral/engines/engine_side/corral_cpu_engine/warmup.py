"""Shortens the engine process's start before its first request.

``preload_inductor`` does early, while the process waits for its configuration,
what loading compiled code does in any case: find out which vector instructions
compiler and CPU agree on, and hash torch's sources.  torch keeps both answers
for the life of the process.  The first question is answered by ten helper
processes that load a test library each (1.7 s); a library that loaded once on
this CPU is not tried again (marker file next to it in inductor's cache).  Loading
compiled code also precompiles a header for code that may yet have to be compiled
(10 s); torch keeps it where temporary files go, which is a folder of this start's
own, so it is kept in inductor's cache instead.

``slim`` leaves the sampler out of the start-up run.  That run exists to compile
the model and to measure memory; the sampler is not compiled on the CPU, and with
an explicit KV-cache size nothing is measured.  Sorting the vocabulary for a full
batch twice took 1 s.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from typing import Any

log = logging.getLogger("vllm.corral_cpu_engine")


def preload_inductor() -> None:
    """Fill torch's per-process caches; never raises."""
    try:
        from torch._inductor.codecache import torch_key
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        _remember_probes()
        _keep_headers()
        pick_vec_isa()
        torch_key()
    except Exception as e:
        log.debug("corral_cpu_engine: inductor not preloaded: %r", e)


#: Lines of /proc/cpuinfo that tell one CPU from another: x86-64, then AArch64.
_IDENTITY = (
    *("model name", "flags", "microcode"),
    *("Features", "CPU implementer", "CPU variant", "CPU part", "CPU revision"),
)


def _cpu_identity() -> str:
    """Hash of what decides whether a test library loads: CPU, torch, kernel."""
    import torch

    with open("/proc/cpuinfo") as f:
        wanted = sorted({l for l in f if l.startswith(_IDENTITY)})
    text = repr((wanted, torch.__version__, torch.__file__, os.uname().release))
    return hashlib.sha256(text.encode()).hexdigest()


def _remember_probes() -> None:
    """Let torch skip the load test of a library that passed it on this CPU."""
    from torch._inductor.cpu_vec_isa import VecISA

    original = VecISA.__dict__.get("_probe_load")
    if original is None or original.__code__.co_varnames[:2] != ("self", "output_path"):
        log.info("corral_cpu_engine: VecISA is unknown, its probes run every time")
        return
    identity = _cpu_identity()

    @functools.wraps(original)
    def _probe_load(self: Any, output_path: str) -> bool:
        marker = output_path + ".loads"
        try:
            stat = os.stat(output_path)
            seen = f"{identity} {stat.st_size} {stat.st_mtime_ns}"
            try:
                with open(marker) as f:
                    if f.read() == seen:
                        return True
            except OSError:
                pass
            if not original(self, output_path):
                return False
            with open(f"{marker}.{os.getpid()}", "w") as f:
                f.write(seen)
            os.replace(f.name, marker)
            return True
        except OSError:
            return original(self, output_path)

    VecISA._probe_load = _probe_load


def _keep_headers() -> None:
    """Precompiled headers outlive this start; torch names them by compiler, flags and contents."""
    from torch._inductor import codecache

    if not hasattr(codecache, "_HEADER_DIR") or not hasattr(codecache, "_HEADER_LOCK_DIR"):
        log.info("corral_cpu_engine: precompiled headers are unknown, made in every start")
        return
    codecache._HEADER_DIR = os.path.join(codecache.cache_dir(), "precompiled_headers")
    codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")


def slim() -> None:
    """Skip the dummy sampler run when its result is not used."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original = CPUModelRunner.__dict__.get("warming_up_model")
    if original is None or not hasattr(CPUModelRunner, "_dummy_sampler_run"):
        log.info("corral_cpu_engine: CPUModelRunner is unknown, full warm-up")
        return

    @functools.wraps(original)
    def warming_up_model(self: Any) -> None:
        if self.cache_config.kv_cache_memory_bytes is None or self.speculative_config:
            return original(self)
        self._dummy_sampler_run = lambda hidden_states: None
        try:
            return original(self)
        finally:
            del self._dummy_sampler_run

    CPUModelRunner.warming_up_model = warming_up_model
