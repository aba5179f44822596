"""Which OpenMP library the engine runs on, how its threads are counted, and to which cores they are bound.

torch and vLLM's kernels must share one OpenMP library, loaded before either of them (``LD_PRELOAD``), or only one
core is used once threads are bound (vLLM issue 27369).  vLLM's wheel for x86-64 brings Intel's, the one for AArch64
brings none: there it is the GNU library inside torch's wheel.

The two differ where a process is forked after its imports, as ``zygote`` does.  Intel's reads thread count and core
list again in the child.  GNU's reads them once, when it is loaded: the core list (``GOMP_CPU_AFFINITY``) must be in
the environment before Python starts, and the number of threads is set by a call.  It binds the first thread at once,
so the server, which must not stay on one core, gets its cores back after the fork (``unbind``).  Neither library
works after a fork that follows a parallel region of several threads: until the fork there is one thread.

vLLM's "auto" binds to the first NUMA node and keeps one core of it free for an engine process that polls.  Here the
engine is the worker, so a small machine uses that core, too; on a larger one it is left to the API server.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: Overrides the choice, for tests and for comparing the two: ``intel`` or ``gnu``.
WANTED = "CORRAL_CPU_OPENMP"
#: The cores this process may use, kept across the binding at load.
_ALLOWED = "CORRAL_CPU_ALLOWED"
_SMALL = 4  # physical cores


@dataclass(frozen=True)
class OpenMP:
    """One OpenMP library of this environment."""

    kind: str  # intel | gnu
    path: str


@dataclass(frozen=True)
class Cpu:
    """One logical CPU: its number, its physical core (any name), its NUMA node."""

    number: int
    core: str
    node: int


def choose(machine: str, intel: str | None, gnu: str | None, wanted: str = "") -> OpenMP | str:
    """The library to run on, or why there is none; `intel` and `gnu` are the paths that were found."""
    found = {kind: path for kind, path in (("intel", intel), ("gnu", gnu)) if path}
    if wanted:
        if wanted not in ("intel", "gnu"):
            return f"{WANTED}={wanted}, which is neither intel nor gnu"
        return OpenMP(wanted, found[wanted]) if wanted in found else f"no {wanted} OpenMP library"
    if machine in ("x86_64", "AMD64"):
        return OpenMP("intel", found["intel"]) if "intel" in found else "no libiomp5.so (package intel-openmp)"
    if machine in ("aarch64", "arm64"):
        return OpenMP("gnu", found["gnu"]) if "gnu" in found else "no libgomp.so in torch's wheel"
    return f"not Linux on x86-64 or AArch64 ({machine})"


def find_intel(prefix: str) -> str | None:
    """Intel's OpenMP library of an environment (package intel-openmp)."""
    path = os.path.join(prefix, "lib", "libiomp5.so")
    return path if os.path.exists(path) else None


def find_gnu(site: str | None = None) -> str | None:
    """The GNU OpenMP library inside torch's wheel; wheels keep it in one of two places."""
    site = site or sysconfig.get_path("purelib")
    for folder in (os.path.join(site, "torch.libs"), os.path.join(site, "torch", "lib")):
        for path in sorted(glob.glob(os.path.join(folder, "libgomp*.so*"))):
            return path
    return None


def environment(library: OpenMP, env: Mapping[str, str], cores: str) -> dict[str, str]:
    """What must be set before Python starts so that the process may import, fork, and then use `cores`.

    `cores` is a core list as vLLM writes it ("0-3,8"), or "auto".
    """
    settings = {"OMP_NUM_THREADS": "1"}  # until the engine process sets its own number
    preload = env.get("LD_PRELOAD", "")
    if not any(name in preload for name in ("libiomp", "libomp", "libgomp")):  # two of them do not work together
        settings["LD_PRELOAD"] = ":".join(filter(None, [library.path, preload]))
    if library.kind == "gnu" and cores != "auto":
        settings["GOMP_CPU_AFFINITY"] = cores.replace(",", " ")
        settings[_ALLOWED] = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return settings


def unbind() -> None:
    """Give this process back the cores it had before the library bound it to the first of its list."""
    allowed = os.environ.pop(_ALLOWED, "")
    if allowed:
        os.environ.pop("GOMP_CPU_AFFINITY", None)
        os.sched_setaffinity(0, {int(core) for core in allowed.split(",")})


def allowed_cpus() -> list[Cpu] | None:
    """The logical CPUs that this process may use; None where the kernel does not tell their topology."""
    cpus = []
    for number in sorted(os.sched_getaffinity(0)):
        folder = f"/sys/devices/system/cpu/cpu{number}"
        try:
            with open(folder + "/topology/thread_siblings_list") as f:
                core = f.read().strip()
        except OSError:
            return None
        nodes = [int(os.path.basename(n)[4:]) for n in glob.glob(folder + "/node[0-9]*")]
        cpus.append(Cpu(number, core, min(nodes, default=0)))
    return cpus


def small_machine(cpus: Iterable[Cpu] | None) -> str | None:
    """Core list for up to four physical cores on one NUMA node; None for a larger machine."""
    known = list(cpus or ())
    cores = {cpu.core: cpu.number for cpu in known}  # last thread of each core, as vLLM does
    if not cores or len(cores) > _SMALL or len({cpu.node for cpu in known}) > 1:
        return None
    return _core_list(cores.values())


def first_node(cpus: Iterable[Cpu] | None) -> str | None:
    """Core list of the first NUMA node, one thread of each core, the last core left free: vLLM's "auto", spelled out.

    A library that reads its core list when it is loaded needs it before vLLM is there to work it out.
    """
    known = list(cpus or ())
    if not known:
        return None
    node = min(cpu.node for cpu in known)
    cores = {cpu.core: cpu.number for cpu in known if cpu.node == node}
    chosen = sorted(cores.values())
    return _core_list(chosen[:-1] or chosen)


def _core_list(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in sorted(numbers))
