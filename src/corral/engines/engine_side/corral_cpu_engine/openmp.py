"""Which OpenMP library the engine runs on, and how its threads are counted and bound.

torch and vLLM's kernels must share one OpenMP library, loaded before either of them (``LD_PRELOAD``), or only one
core is used once threads are bound (vLLM issue 27369).  vLLM's wheel for x86-64 brings Intel's, the one for AArch64
brings none: there it is the GNU library inside torch's wheel.

The two differ where a process is forked after its imports, as ``zygote`` does.  Intel's reads thread count and core
list anew in the child.  GNU's reads them once, when it is loaded: the core list (``GOMP_CPU_AFFINITY``) must be in
the environment before Python starts, and the number of threads is set by a call.  It binds the first thread at once,
so the server, which must not stay on one core, gets its cores back after the fork (``unbind``).  Neither survives a
fork after a parallel region of several threads: until then there is one.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass

#: Overrides the choice, for tests and for comparing the two: ``intel`` or ``gnu``.
WANTED = "CORRAL_CPU_OPENMP"
#: The cores this process may use, kept across the binding at load.
_ALLOWED = "CORRAL_CPU_ALLOWED"


@dataclass(frozen=True)
class OpenMP:
    """One OpenMP library of this environment."""

    kind: str  # intel | gnu
    path: str


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
    made = {"OMP_NUM_THREADS": "1"}  # until the engine process sets its own number
    preload = env.get("LD_PRELOAD", "")
    if not any(name in preload for name in ("libiomp", "libomp", "libgomp")):  # two of them would not go together
        made["LD_PRELOAD"] = ":".join(filter(None, [library.path, preload]))
    if library.kind == "gnu" and cores != "auto":
        made["GOMP_CPU_AFFINITY"] = cores.replace(",", " ")
        made[_ALLOWED] = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return made


def unbind() -> None:
    """Give this process back the cores it had before the library bound it to the first of its list."""
    allowed = os.environ.pop(_ALLOWED, "")
    if allowed:
        os.environ.pop("GOMP_CPU_AFFINITY", None)
        os.sched_setaffinity(0, {int(core) for core in allowed.split(",")})
