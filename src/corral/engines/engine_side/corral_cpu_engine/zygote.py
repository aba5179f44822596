"""Forks the engine process before it is needed, so that server and engine share one import.

``fork_engine`` forks the calling process right after the imports that API
server and engine share.  The child goes on importing what only the engine needs
while the parent imports what only the server needs and reads the model's
configuration.  When vLLM then starts its ``EngineCore``, the pickled process
object (exactly what ``multiprocessing`` "spawn" would send) goes to the waiting
child instead of a new interpreter.

Why this fork is safe where others are not: it happens only while the kernel
counts a single thread in the process, so no lock can be held by a thread that
the child lacks, and before any OpenMP region of several threads has run.  The child
sets thread count and core list through vLLM's own ``OMPProcessManager`` before its
first region.  Intel's OpenMP runtime reads them anew after a fork; GNU's does not: it
has its core list since it was loaded (``openmp``), and ``_set_threads`` tells it the
count.

In every other case (another executor, changed ``TORCH*`` settings, file
descriptors to pass on, the child gone), vLLM's normal spawn is used.
"""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import context, popen_fork, reduction, util
from typing import Any

log = logging.getLogger("vllm.corral_cpu_engine")

_HEADER = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1
#: Read by torch at import time: a change after the fork would not be seen.
_EARLY_PREFIXES = ("TORCH", "PYTORCH", "LD_PRELOAD", "MKL_", "DNNL_", "ONEDNN_")


class Unsuitable(Exception):
    """The waiting child cannot take this process object; spawn instead."""


class Zygote:
    """Parent's view of the waiting child."""

    def __init__(self, pid: int, command: int, sentinel: int, env: dict[str, str]):
        self.pid = pid
        self.command = command  # write end: the process object goes here
        self.sentinel = sentinel  # read end: end of file once the child is gone
        self.env = env  # environment at the time of the fork

    def check(self, process: Any) -> None:
        """Raise ``Unsuitable`` unless the child may become `process`."""
        from vllm.v1.executor import UniProcExecutor

        kwargs = getattr(process, "_kwargs", {})
        executor = kwargs.get("executor_class")
        if not (isinstance(executor, type) and issubclass(executor, UniProcExecutor)):
            raise Unsuitable(f"executor is {getattr(executor, '__name__', executor)}")
        for name in {*self.env, *os.environ}:
            if name.startswith(_EARLY_PREFIXES) and self.env.get(name) != os.environ.get(name):
                raise Unsuitable(f"{name} changed after the fork")
        if os.waitpid(self.pid, os.WNOHANG)[0]:
            raise Unsuitable("the forked process is gone")

    def discard(self) -> None:
        """Let the child end: it sees end of file."""
        os.close(self.command)
        os.close(self.sentinel)


_zygote: Zygote | None = None
_while_engine_loads: Callable[[], None] | None = None


def thread_count() -> int:
    """Threads of this process as the kernel counts them."""
    return len(os.listdir("/proc/self/task"))


def fork_engine(prepare: Callable[[], None]) -> bool:
    """Fork the future engine process; `prepare` runs in it at once.

    Returns whether there is one now.
    """
    global _zygote
    if thread_count() != 1:
        log.info("corral_cpu_engine: %d threads after import, no early fork", thread_count())
        return False
    command_r, command_w = os.pipe()
    sentinel_r, sentinel_w = os.pipe()
    parent = os.getpid()
    gc.freeze()  # shared pages stay shared
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(command_w)
            os.close(sentinel_r)
            code = _child(parent, command_r, prepare)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(command_r)
    os.close(sentinel_w)
    _zygote = Zygote(pid, command_w, sentinel_r, dict(os.environ))
    return True


def _child(parent: int, command: int, prepare: Callable[[], None]) -> int:
    """Run the forked process; returns its exit code."""
    # End with the server: stock engines keep running when it is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    prepare()
    with os.fdopen(command, "rb", closefd=False) as f:
        head = f.read(_HEADER.size)
        if len(head) < _HEADER.size:
            return 0  # not needed, or the parent died
        data = f.read(_HEADER.unpack(head)[0])
    stream = io.BytesIO(data)
    env = pickle.load(stream)
    for name in [n for n in os.environ if n not in env]:
        del os.environ[name]
    os.environ.update(env)

    from vllm.utils.ompmultiprocessing import OMPProcessManager

    process = pickle.load(stream)
    config = process._kwargs["vllm_config"]
    with OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0):
        _set_threads()
        gc.enable()
        return process._bootstrap(parent_sentinel=command)


def _set_threads() -> None:
    """Bring torch's idea of the thread count in line with the environment."""
    import torch

    count = os.environ.get("OMP_NUM_THREADS", "")
    if count.isdigit() and torch.get_num_threads() != int(count):
        torch.set_num_threads(int(count))


class _Popen(popen_fork.Popen):
    """`multiprocessing`'s handle on a process that already exists."""

    method = "spawn"

    def __init__(self, process: Any, zygote: Zygote):
        self._zygote = zygote
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        raise Unsuitable("file descriptors to hand over")

    def _launch(self, process: Any) -> None:
        buffer = io.BytesIO()
        pickle.dump(dict(os.environ), buffer)
        context.set_spawning_popen(self)
        try:
            reduction.dump(process, buffer)
        finally:
            context.set_spawning_popen(None)
        data = buffer.getbuffer()
        try:
            with os.fdopen(self._zygote.command, "wb", closefd=False) as f:
                f.write(_HEADER.pack(len(data)))
                f.write(data)
        except BrokenPipeError as e:
            raise Unsuitable("the forked process is gone") from e
        self.pid = self._zygote.pid
        self.sentinel = self._zygote.sentinel
        self.finalizer = util.Finalize(self, util.close_fds, (self._zygote.command, self.sentinel))


class EngineProcess(context.SpawnProcess):
    """A spawn process that prefers the waiting child."""

    @staticmethod
    def _Popen(process: Any) -> Any:
        global _zygote
        zygote, _zygote = _zygote, None
        if zygote is not None:
            try:
                zygote.check(process)
                popen = _Popen(process, zygote)
                log.info("corral_cpu_engine: engine runs in the forked process %d", popen.pid)
                if _while_engine_loads is not None:
                    threading.Thread(target=_while_engine_loads, daemon=True).start()
                return popen
            except Unsuitable as e:
                log.info("corral_cpu_engine: engine is spawned, not forked: %s", e)
                zygote.discard()
        return _spawn(process)


def _spawn(process: Any) -> Any:
    """Stock spawn; the in-process worker still needs its OpenMP settings."""
    from vllm.utils.ompmultiprocessing import OMPProcessManager
    from vllm.v1.executor import UniProcExecutor

    kwargs = getattr(process, "_kwargs", {})
    executor, config = kwargs.get("executor_class"), kwargs.get("vllm_config")
    if config is None or not issubclass(executor, UniProcExecutor):
        return context.SpawnProcess._Popen(process)
    with OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0):
        return context.SpawnProcess._Popen(process)


class _EngineContext(context.SpawnContext):
    """Spawn context whose processes are ``EngineProcess``."""

    Process = EngineProcess


def install(while_engine_loads: Callable[[], None] | None = None) -> bool:
    """Make vLLM's engine manager use ``EngineProcess``; False if it looks unknown.

    `while_engine_loads` runs in a thread once the engine process is on its way.
    """
    global _while_engine_loads
    _while_engine_loads = while_engine_loads
    import vllm.v1.engine.utils as target

    if not hasattr(target, "get_mp_context") or not hasattr(target, "CoreEngineProcManager"):
        log.info("corral_cpu_engine: vllm.v1.engine.utils is unknown, engine is spawned")
        return False
    original = target.get_mp_context

    def get_mp_context() -> Any:
        stock = original()
        if stock.get_start_method() == "spawn" and multiprocessing.current_process().name == "MainProcess":
            return _EngineContext()
        return stock

    target.get_mp_context = get_mp_context
    return True
