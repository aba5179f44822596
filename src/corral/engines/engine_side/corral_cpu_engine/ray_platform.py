"""vLLM's CPU platform for Ray, so that Ray deployments can be tested with the real engine on nodes without GPUs.

vLLM 0.32 on the CPU lacks three things that its Ray executors need:

* The platform names no resource that Ray could place (``ray_device_key``).  Here
  it is ``corral_cpu``; a node offers it with ``ray start --resources
  '{"corral_cpu": 1}'``.
* A worker asks Ray which devices it was given, and Ray answers for the
  accelerators it knows only.  It now answers for ``corral_cpu`` too.
* Ranks on different hosts believe that they share memory: see ``communicator``.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform

RESOURCE = "corral_cpu"
_MARK = "_corral_cpu_engine"


class RayCpuPlatform(CpuPlatform):
    """The CPU platform with a resource for Ray."""

    ray_device_key: str = RESOURCE

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "corral_cpu_engine.communicator.HostAwareCpuCommunicator"


def _answer_for_our_resource() -> None:
    """Let Ray's runtime context list ``corral_cpu`` among a worker's accelerators."""
    from ray.runtime_context import RuntimeContext

    original = RuntimeContext.get_accelerator_ids
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def get_accelerator_ids(self: Any) -> dict[str, list[str]]:
        return {RESOURCE: ["0"], **original(self)}

    setattr(get_accelerator_ids, _MARK, True)
    RuntimeContext.get_accelerator_ids = get_accelerator_ids


if "RAY_RAYLET_PID" in os.environ:  # only a worker of Ray asks
    _answer_for_our_resource()
