"""Which cores the engine's threads are bound to.

vLLM's "auto" takes the first NUMA node and keeps one core of it free for an engine
process that polls.  Here the engine is the worker, so on a small machine that core is
better used; on a larger one it is left to the API server.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass

_SMALL = 4  # physical cores


@dataclass(frozen=True)
class Cpu:
    """One logical CPU: its number, its physical core (any name), its NUMA node."""

    number: int
    core: str
    node: int


def allowed() -> list[Cpu] | None:
    """The logical CPUs this process may use; None where the kernel does not say how they lie."""
    cpus = []
    for number in sorted(os.sched_getaffinity(0)):
        home = f"/sys/devices/system/cpu/cpu{number}"
        try:
            with open(home + "/topology/thread_siblings_list") as f:
                core = f.read().strip()
        except OSError:
            return None
        nodes = [int(os.path.basename(n)[4:]) for n in glob.glob(home + "/node[0-9]*")]
        cpus.append(Cpu(number, core, min(nodes, default=0)))
    return cpus


def small_machine(cpus: Iterable[Cpu] | None) -> str | None:
    """Core list for up to four physical cores on one NUMA node; None for a larger machine."""
    known = list(cpus or ())
    cores = {cpu.core: cpu.number for cpu in known}  # last thread of each core, as vLLM does
    if not cores or len(cores) > _SMALL or len({cpu.node for cpu in known}) > 1:
        return None
    return _listed(cores.values())


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
    return _listed(chosen[:-1] or chosen)


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in sorted(numbers))
