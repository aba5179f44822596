"""The number format of an engine on the CPUs of a Ray cluster: there no plan is made, and vLLM's own choice is the
checkpoint's, which some CPUs cannot multiply in at all (bf16 on a Neoverse-N1 ends the engine).
"""

from __future__ import annotations

from typing import Any

from corral.plan.cpu_format import quick_format
from corral.plan.engine import VLLM_DTYPES
from corral.plan.hardware.cpu import CpuFacts, common_cpu, parse_cpuinfo

_ANSWER_S = 60


def cluster_cpu(ray: Any) -> CpuFacts | None:
    """What the CPUs of the cluster's nodes have in common; None where a node does not tell."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    def read() -> tuple[str, str]:  # inside, so that it travels whole: it runs on Ray's workers
        import pathlib
        import platform

        return pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"), platform.machine()

    task = ray.remote(num_cpus=0, max_retries=0)(read)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    asked = [task.options(scheduling_strategy=On(node, soft=False)).remote() for node in nodes]
    try:
        told = ray.get(asked, timeout=_ANSWER_S)
    except Exception:  # Ray's errors have no common root; the engine's own start will say what is wrong
        return None
    return common_cpu([parse_cpuinfo(*one) for one in told])


def format_on(cpu: CpuFacts | None, given: str | None) -> tuple[dict[str, str], str]:
    """The engine's `dtype`, none where vLLM's own choice is good, and a word on it; what is `given` stays."""
    quick, fp32 = quick_format(cpu), VLLM_DTYPES["fp32"]
    if quick.format != "fp32" or given == fp32:
        return {}, ""
    if given is not None:
        return {}, f"{given} may crawl or fail here: {quick.because}"
    return {"dtype": fp32}, f"the engine computes in fp32: {quick.because}"
